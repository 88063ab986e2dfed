"""The contract suite detects advisory locks with a check left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_taskguard.lock_contract import TestAcquire as Acquire
from pytest_taskguard.lock_contract import TestHandOver as HandOver
from pytest_taskguard.lock_contract import TestRelease as Release
from pytest_taskguard.lock_contract import TestSession as Sessions
from pytest_taskguard.lock_contract import server as waiting
from support.advisory import advisory_kind
from support.lock_servers import LockServer
from taskguard.advisory_locks import AdvisoryLocks
from taskguard.advisory_locks.postgresql import PostgreSQLSession
from taskguard.advisory_locks.session import Session
from taskguard.locks.base import LockProvider

pytestmark = pytest.mark.once

Test = Callable[[LockProvider, LockServer], object]


def lost(locks: LockProvider, server: LockServer) -> None:
    assert server.end_session is not None
    Sessions().test_lost((locks, server.connect()), server.end_session)


# Changed attribute, its replacement, and the test that must fail.
MUTANTS: dict[str, tuple[type, str, Any, Test]] = {
    "its own locks may be taken again": (
        Session,
        "owner_of",
        lambda session, name: None,
        lambda k, s: Acquire().test_same_message_is_no_owner(k),
    ),
    "keeps some where one is taken": (
        Session,
        "_give_back",
        lambda session, names: None,
        lambda k, s: Acquire().test_all_or_none_elsewhere(k, s),
    ),
    "frees by forgetting": (
        PostgreSQLSession,
        "_free",
        lambda session, names: len(names),
        lambda k, s: Release().test_frees(k, s),
    ),
    "frees what another has": (
        Session,
        "holds",
        lambda session, key, name, owner: name in session._holds,
        lambda k, s: Release().test_by_another(k),
    ),
    "renews without asking": (
        PostgreSQLSession,
        "taken",
        lambda session, names: set(),
        lost,
    ),
    "hands over by keeping": (
        AdvisoryLocks,
        "hand_over",
        lambda locks, keys, owner, *, to, ttl_s: False,
        lambda k, s: HandOver().test_frees(k, s),
    ),
    "closes nothing": (
        AdvisoryLocks,
        "close",
        lambda locks: None,
        lambda k, s: Sessions().test_close((k, s.connect())),
    ),
}


@pytest.fixture
def server(pg_url: str) -> Iterator[LockServer]:
    with advisory_kind(pg_url) as kind:
        yield kind


def is_caught(locks: LockProvider, server: LockServer, test: Test) -> bool:
    try:
        test(locks, server)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(
    name: str, server: LockServer, locks: LockProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite's test fails with the mutant."""
    kind, attribute, changed, test = MUTANTS[name]
    with monkeypatch.context() as patched:
        patched.setattr(kind, attribute, changed)
        patched.setattr(waiting, "PATIENCE_S", 1.0)  # the test waits for an event that never comes
        assert is_caught(locks, server, test)


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_mutant_it_passes(name: str, server: LockServer, locks: LockProvider) -> None:
    """The suite's test passes without the mutant."""
    assert not is_caught(locks, server, MUTANTS[name][3])
