"""Several keys in several slots need tokens on one level. The suite detects mistakes in that
algorithm.

Each mutant is the cluster's algorithm with one mistake, and the test that detects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

import pytest_taskguard.lock_contract as contract
from pytest_taskguard.lock_contract.server import granted, take
from support.lock_servers import LockServer
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.base import Granted, Held, Hold, LockProvider
from taskguard.locks.redis.cluster import RedisClusterLocks
from taskguard.model.lease import Owner, new_owner
from taskguard_sandbox.clusters import Cluster

pytestmark = [pytest.mark.once, pytest.mark.parametrize("server", ["cluster"], indirect=True)]

AHEAD = 9 * 10**15  # above every clock, and still exact in Lua
KEYS = ("a", "b", "c")


def test_each_key_remembers_the_highest_token(
    server: LockServer, locks: LockProvider, cluster: Cluster
) -> None:
    """If one node's token is far ahead of the other clocks, the next token of each key is
    above it."""
    assert len({cluster.master_of(f"taskguard:{{{key}}}") for key in KEYS}) > 1
    for key in KEYS:
        for node in cluster.nodes:
            if cluster.is_master(node):
                cluster.ask(node, "FLUSHALL")
        name = f"taskguard:{{{key}}}:fence"
        cluster.ask(cluster.master_of(name), "SET", name, AHEAD)
        owner = new_owner("m")
        token = granted(locks, KEYS, owner, with_fence=True).fence
        assert token > AHEAD
        assert granted(locks, KEYS, owner, with_fence=True).fence == token
        locks.release(KEYS, owner)
        for each in KEYS:
            assert granted(locks, (each,), new_owner("n"), with_fence=True).fence > token


class GivesNothingBack(RedisClusterLocks):
    def _give_back(self, keys: Sequence[str], owner: Owner) -> None:
        pass


class GivesBackWhatItHad(RedisClusterLocks):
    def _take(self, key: str, owner: Owner, taken: list[str], **wish: Any) -> int | Held:
        answer = super()._take(key, owner, taken, **wish)
        if not isinstance(answer, Held) and key not in taken:
            taken.append(key)
        return answer


class WritesNoTokenBack(RedisClusterLocks):
    def _take_each(
        self, keys: tuple[str, ...], owner: Owner, taken: list[str], *, ttl_s: float, **wish: Any
    ) -> Granted | Held:
        tokens = []
        for key in keys:
            answer = self._take(key, owner, taken, least=0, ttl_s=ttl_s, **wish)
            if isinstance(answer, Held):
                return answer
            tokens.append(answer)
        return Granted(max(tokens), ttl_s)


class TakesWhatItGets(RedisClusterLocks):
    def _take_each(
        self, keys: tuple[str, ...], owner: Owner, taken: list[str], *, ttl_s: float, **wish: Any
    ) -> Granted | Held:
        answers = [self._take(k, owner, taken, least=0, ttl_s=ttl_s, **wish) for k in keys]
        tokens = [answer for answer in answers if not isinstance(answer, Held)]
        held = [answer for answer in answers if isinstance(answer, Held)]
        return Granted(max(tokens), ttl_s) if tokens else held[0]


class PassesNothingOn(RedisClusterLocks):
    def _leave_lines(self, keys: tuple[str, ...], owner: Owner) -> None:
        pass


class ReleasesTheFirst(RedisClusterLocks):
    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        return super().release(keys[:1], owner)


class RenewsByOneKey(RedisClusterLocks):
    def renew(self, holds: Sequence[Hold]) -> list[str]:
        return super().renew([Hold(hold.keys[:1], hold.owner, hold.ttl_s) for hold in holds])


class EscapesNothing(RedisClusterLocks):
    def _locks(self, keys: tuple[str, ...]) -> list[bytes]:
        return [f"taskguard:{{{key}}}".encode() for key in keys]


class EscapesByAnothersName(RedisClusterLocks):
    def _locks(self, keys: tuple[str, ...]) -> list[bytes]:
        return super()._locks(tuple("%7D" + k[1:] if k[:1] == "}" else k for k in keys))


Test = Callable[[LockProvider, LockServer, Cluster], object]


def alone(test: Callable[[LockProvider], object]) -> Test:
    return lambda locks, server, cluster: test(locks)


def with_server(test: Callable[[LockProvider, LockServer], object]) -> Test:
    return lambda locks, server, cluster: test(locks, server)


def names_are_apart(locks: LockProvider) -> None:
    """Keys that look escaped are other keys."""
    for key in ("}", "\\}", "\\\\}", "%7D", "", "\\"):
        assert isinstance(take(locks, (key,), new_owner("m")), Granted), key


def test_names_are_apart(server: LockServer, locks: LockProvider) -> None:
    """An escaped key is no other key's name."""
    names_are_apart(locks)


FOUND: list[tuple[type[RedisClusterLocks], Test]] = [
    (GivesNothingBack, alone(contract.TestAcquire().test_all_or_none)),
    (GivesBackWhatItHad, alone(contract.TestAcquire().test_refused_keeps_what_it_had)),
    (
        WritesNoTokenBack,
        lambda locks, server, cluster: test_each_key_remembers_the_highest_token(
            server, locks, cluster
        ),
    ),
    (TakesWhatItGets, alone(contract.TestAcquire().test_all_or_none)),
    (PassesNothingOn, alone(contract.TestOrder().test_several_keys_in_turn)),
    (ReleasesTheFirst, with_server(contract.TestRelease().test_frees)),
    (RenewsByOneKey, alone(contract.TestRenew().test_answers)),
    (EscapesNothing, alone(lambda locks: contract.TestAcquire().test_any_key(locks, "}{"))),
    (EscapesByAnothersName, alone(names_are_apart)),
]


@pytest.mark.parametrize(("mutant", "test"), FOUND, ids=[mutant.__name__ for mutant, _ in FOUND])
def test_mistakes_are_found(
    server: LockServer, cluster: Cluster, mutant: type[RedisClusterLocks], test: Test
) -> None:
    """The suite's test fails with the mutant."""
    wrong = replace(server, connect=lambda: mutant(cluster.url))
    with pytest.raises((AssertionError, LockServerUnavailableError)):
        test(wrong.connect(), wrong, cluster)
