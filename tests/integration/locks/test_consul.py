"""Behaviour of locks on Consul: requests, sessions, lost replies, tokens, rights, findings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from urllib3 import HTTPConnectionPool

from support.consul import ask, consul_kind, keys_in
from support.lock_servers import KEY, answered, take, token
from support.needs import need
from support.proxy import Mode, Proxy
from support.waiting import wait_until
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Level
from taskguard.locks.base import Granted, Held, Hold, Renewal
from taskguard.model.lease import new_owner
from taskguard.settings import make_locks
from taskguard_consul import ConsulLocks
from taskguard_sandbox.servers import Consul


@pytest.fixture
def locks(consul: Consul) -> ConsulLocks:
    """A provider on an empty server, with a session."""
    consul_kind(consul)
    locks = ConsulLocks(consul.url, socket_timeout_s=5.0)
    owner = new_owner("m")
    take(locks, owner=owner)
    locks.release(KEY, owner)
    return locks


@contextmanager
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the paths of requests, retries included."""
    asked: list[str] = []
    urlopen = HTTPConnectionPool.urlopen

    def counted(self: HTTPConnectionPool, method: str, url: str, *rest: Any, **options: Any) -> Any:
        asked.append(url.split("/")[2])
        return urlopen(self, method, url, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(HTTPConnectionPool, "urlopen", counted)
        yield asked


class TestRequests:
    """How many requests each step takes, once there is a session."""

    def test_free_keys(self, locks: ConsulLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """One request takes any number of keys, with or without a token. One releases them."""
        for with_fence in (False, True):
            owner, keys = new_owner("m"), tuple(f"order:{number:03}" for number in range(31))
            with requests(monkeypatch) as asked:
                assert isinstance(take(locks, keys, owner, with_fence=with_fence), Granted)
                assert locks.release(keys, owner)
            assert asked == ["txn", "txn"]

    def test_more_keys_than_it_takes(self, locks: ConsulLocks) -> None:
        """Too many keys are refused by name, before any request."""
        with pytest.raises(ConfigurationError, match="31 keys"):
            take(locks, tuple(f"order:{number}" for number in range(32)))

    def test_taken_key(self, locks: ConsulLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """A refused acquire is one request. A second one reads the holder."""
        take(locks)
        with requests(monkeypatch) as asked:
            assert isinstance(take(locks), Held)
        assert asked == ["txn", "kv"]

    def test_renewals(self, locks: ConsulLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """A renewal of 1,000 leases renews one session, and reads 64 keys in each request."""
        holds = [Hold((f"order:{number}",), new_owner("m"), 30.0) for number in range(1000)]
        for hold in holds:
            take(locks, hold.keys, hold.owner)
        with requests(monkeypatch) as asked:
            assert set(locks.renew(holds)) == {Renewal.RENEWED}
        assert asked == ["session"] + ["txn"] * 16


class TestSessions:
    def test_least_ttl(self, locks: ConsulLocks) -> None:
        """A lease has whole seconds, and at least ten. The grant says so."""
        for asked_s, granted_s in [(0.1, 10.0), (12.5, 13.0), (30.0, 30.0)]:
            answer = take(locks, (f"order:{asked_s}",), ttl_s=asked_s)
            assert isinstance(answer, Granted)
            assert answer.ttl_s == granted_s

    def test_a_grant_without_an_answer(self, consul: Consul) -> None:
        """A grant whose reply was lost is released before its session is renewed, so that the
        session does not keep it."""
        consul_kind(consul)
        with Proxy(consul.port) as proxy:
            locks = ConsulLocks(f"consul://127.0.0.1:{proxy.port}", socket_timeout_s=3.0)
            kept = new_owner("kept")
            take(locks, ("kept",), kept)
            proxy.mode = Mode.SWALLOW
            with pytest.raises(LockServerUnavailableError):
                take(locks)
            present = ["taskguard/epoch", "taskguard/lock/kept", "taskguard/lock/order:42"]
            wait_until(lambda: keys_in(consul) == present)  # what is sent still arrives
            proxy.mode = Mode.PASS
            assert locks.renew([Hold(("kept",), kept, 30.0)]) == [Renewal.RENEWED]
            assert keys_in(consul) == ["taskguard/epoch", "taskguard/lock/kept"]
            # A release that did not arrive is repeated as well.
            freed = new_owner("freed")
            take(locks, owner=freed)
            proxy.mode = Mode.CUT
            with pytest.raises(LockServerUnavailableError):
                locks.release(KEY, freed)
            proxy.mode = Mode.PASS
            assert locks.renew([Hold(("kept",), kept, 30.0)]) == [Renewal.RENEWED]
            assert keys_in(consul) == ["taskguard/epoch", "taskguard/lock/kept"]
            locks.close()

    def test_a_session_that_has_ended(self, locks: ConsulLocks, consul: Consul) -> None:
        """If its session has ended, a provider opens another one for the next grant."""
        owner = new_owner("m")
        take(locks, owner=owner)
        for session in locks._sessions.values():
            ask(consul, "PUT", f"/v1/session/destroy/{session.id}")
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.GONE]
        assert isinstance(take(locks), Granted)

    def test_a_longer_ttl(self, locks: ConsulLocks, consul: Consul) -> None:
        """If its owner asks for a longer ttl, a key moves to another session, and keeps its
        token."""
        owner = new_owner("m")
        first = take(locks, owner=owner, ttl_s=10.0, with_fence=True)
        second = take(locks, owner=owner, ttl_s=60.0, with_fence=True)
        assert isinstance(first, Granted)
        assert isinstance(second, Granted)
        assert (second.fence, second.ttl_s) == (first.fence, 60.0)
        ask(consul, "PUT", f"/v1/session/destroy/{locks._sessions[10].id}")
        assert locks.renew([Hold(KEY, owner, 60.0)]) == [Renewal.RENEWED]
        assert locks.release(KEY, owner) is True
        assert keys_in(consul) == ["taskguard/epoch"]

    def test_handed_over_to_another_process(self, locks: ConsulLocks, consul: Consul) -> None:
        """The first renewal by the new owner moves the key into that owner's session."""
        finder, true, other = new_owner("finder"), new_owner("true"), ConsulLocks(consul.url)
        take(locks, owner=finder)
        assert locks.hand_over(KEY, finder, to=true, ttl_s=30.0) is True
        assert other.renew([Hold(KEY, true, 30.0)]) == [Renewal.RENEWED]
        locks.close()
        assert isinstance(take(other), Held)
        assert other.release(KEY, true) is True


class TestTokens:
    def test_emptied(self) -> None:
        """A server that lost its data, and counts its indexes from the beginning, gives higher
        tokens than before."""
        need(Consul)
        with Consul() as server:
            locks = ConsulLocks(server.url)
            before = [token(locks) for _ in range(3)][-1]
            server.kill()
            server.forget()
            server.start()
            assert wait_until(lambda: answered(locks)) > before


RULES = """
key_prefix "taskguard/" { policy = "write" }
session_prefix "" { policy = "write" }
"""


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[Consul, str]]:
    """A Consul that knows tokens, and one that has what the page says."""
    need(Consul)
    acl = 'acl { enabled = true, default_policy = "deny", tokens { master = "root" } }'
    with Consul(hcl=acl) as server:
        yield server, wait_until(lambda: allowed(server, RULES))


class TestRights:
    def test_the_least_rights(self, guarded: tuple[Consul, str]) -> None:
        """A token with the rights of the page takes, renews, waits for and frees locks."""
        server, secret = guarded
        locks = make_locks(f"consul://:{secret}@127.0.0.1:{server.port}")
        assert isinstance(locks, ConsulLocks)
        owner = new_owner("m")
        assert isinstance(take(locks, owner=owner, with_fence=True), Granted)
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
        locks.wait(KEY[0], new_owner(), timeout_s=0.05)
        assert locks.release(KEY, owner) is True
        assert locks.check() == []

    @pytest.mark.parametrize("secret", ["", "c0ffee00-0000-0000-0000-000000000000"])
    def test_who_may_not(self, guarded: tuple[Consul, str], secret: str) -> None:
        """The error and the finding say what is wrong, and do not show the token."""
        server, _ = guarded
        locks = ConsulLocks(f"consul://:{secret or 'anonymous'}@127.0.0.1:{server.port}")
        with pytest.raises(LockServerUnavailableError, match="forbids what locks need") as caught:
            take(locks)
        (finding,) = locks.check()
        assert (finding.name, finding.level) == ("lock_server_rights", Level.ERROR)
        for text in (str(caught.value), str(finding), repr(locks)):
            assert "c0ffee" not in text


def allowed(server: Consul, rules: str) -> str:
    """A new token with these rules; "" as long as the server cannot make one."""
    with_root = "?token=root"
    policy = ask(
        server, "PUT", f"/v1/acl/policy{with_root}", json.dumps({"Name": "locks", "Rules": rules})
    )
    if policy is None:
        return ""
    made = ask(
        server, "PUT", f"/v1/acl/token{with_root}", json.dumps({"Policies": [{"ID": policy["ID"]}]})
    )
    return str(made["SecretID"])


class Lonely(Consul):
    """A server that waits for others, and is not ready before."""

    def _answers(self) -> bool:
        return self._ask(b"GET /v1/status/leader HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")


class TestFindings:
    def test_nothing(self, locks: ConsulLocks) -> None:
        """A newly started Consul has no findings."""
        assert locks.check() == []

    def test_away(self, consul: Consul) -> None:
        """If no server answers, check() raises. If one of several is down, it is a finding."""
        with Consul() as server:
            port = server.port
        with pytest.raises(LockServerUnavailableError):
            ConsulLocks(f"consul://127.0.0.1:{port}").check()
        (finding,) = ConsulLocks(f"consul://127.0.0.1:{port},127.0.0.1:{consul.port}").check()
        assert (finding.name, finding.level) == ("lock_server_member", Level.WARNING)

    def test_no_leader(self) -> None:
        """A server that waits for missing servers has no leader, which is a finding."""
        need(Consul)
        with Lonely(bootstrap_expect=3) as server:
            with pytest.raises(LockServerUnavailableError):
                take(ConsulLocks(server.url, socket_timeout_s=0.5))
            (finding,) = ConsulLocks(server.url, socket_timeout_s=10.0).check()
            assert (finding.name, finding.level) == ("lock_server_quorum", Level.ERROR)
