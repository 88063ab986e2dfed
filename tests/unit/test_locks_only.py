"""With locks only, errors and log lines name the holder, and speak of no ledger and no body."""

from __future__ import annotations

import contextvars
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

import taskguard
from taskguard.errors import (
    KeyAlreadyHeldError,
    KeyArgumentError,
    KeyBusyError,
    LeaseLostError,
    LockServerUnavailableError,
)
from taskguard.events import Contended, Event
from taskguard.locks.memory import MemoryLocks
from taskguard.model.lease import Owner

US = rf"worker [0-9a-f]{{8}}, pid {os.getpid()}"


class Silent(MemoryLocks):
    """A server that never answers an acquire."""

    def acquire(self, *args: Any, **options: Any) -> Any:
        raise LockServerUnavailableError("no answer")


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def tg(heard: list[Event]) -> Iterator[taskguard.TaskGuard]:
    made = taskguard.connect(locks=MemoryLocks(), ledger=None, listeners=[heard.append])
    yield made
    made.close()


@pytest.mark.parametrize("wrong", ["", "\ud800", "x" * 70_000, 42])
def test_a_key_that_cannot_be_stored_is_refused(tg: taskguard.TaskGuard, wrong: Any) -> None:
    """`lock()` and `release()` raise a public error for it."""
    with pytest.raises(KeyArgumentError, match=r"^the key (has to be|holds|is) "):
        tg.lock(wrong)
    if wrong and isinstance(wrong, str):
        with pytest.raises(KeyArgumentError, match=r"^the key (holds|is) "):
            tg.release(wrong)


class TestBusy:
    """A refused call learns which process holds the key."""

    def test_a_busy_lock_names_its_holder(
        self, tg: taskguard.TaskGuard, heard: list[Event]
    ) -> None:
        """Worker number, pid and remaining time in the text; the owner as an attribute."""
        with tg.lock("inventory:42", ttl_s=30.0) as lease:
            error = elsewhere(tg, "inventory:42")
        assert re.fullmatch(
            rf"inventory:42 is held by {US}, for at most (30\.0|29\.\d) s\. The lock was not "
            r"taken; try again later, or wait for it with wait_s\.",
            str(error),
        )
        assert error.owner == str(lease.owner)
        [event] = [each for each in heard if isinstance(each, Contended)]
        assert re.fullmatch(US, event.held_by)

    def test_a_busy_call_names_the_process(self, tg: taskguard.TaskGuard) -> None:
        """A guarded function has no queue's message; its process is named with its call."""

        @tg.guarded(key="order:<number>")
        def ship(number: int) -> KeyBusyError:
            return elsewhere(tg, f"order:{number}")

        assert re.match(rf"order:7 is held by {US}, message [0-9a-f]+-\d+, for", str(ship(7)))

    def test_text_of_another_program_is_no_process(self) -> None:
        """Another application's value is called so, and there is no owner to release."""
        locks = MemoryLocks()
        locks.acquire(("a",), Owner("cron job", ""), ttl_s=9.0, with_fence=False, wait_s=0.0)
        tg = taskguard.connect(locks=locks, ledger=None)
        error = caught(tg, "a")
        assert "is held by a value that taskguard did not write" in str(error)
        assert error.owner is None


def caught(tg: taskguard.TaskGuard, key: str) -> KeyBusyError:
    with pytest.raises(KeyBusyError) as found, tg.lock(key):
        pass
    return found.value


def elsewhere(tg: taskguard.TaskGuard, key: str) -> KeyBusyError:
    """The error of a call that is not made within the lock or body around it."""
    return contextvars.Context().run(caught, tg, key)


def test_a_reader_within_a_reader_is_refused_as_the_holder(tg: taskguard.TaskGuard) -> None:
    """There is no guarded body, and no function to call."""
    with tg.lock("report", mode="read"), pytest.raises(KeyAlreadyHeldError) as found:
        with tg.lock("report", mode="read"):
            pass
    assert str(found.value) == (
        "lock() requests report, which the lock around it holds: it would wait for itself. A lock "
        "cannot be taken twice, not even to read: use the lease that is held."
    )


def test_a_silent_lock_server_is_reported_without_a_ledger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says that the lock was not taken, and not that a ledger decides."""
    tg = taskguard.connect(locks=Silent(), ledger=None)
    with caplog.at_level(logging.WARNING, logger="taskguard"):
        with pytest.raises(LockServerUnavailableError), tg.lock("a"):
            pass
    assert [record.getMessage() for record in caplog.records] == [
        "lock server gave no answer (no answer); a was not taken"
    ]


def test_a_lost_lock_mentions_no_commit(tg: taskguard.TaskGuard) -> None:
    """`lease.check()` speaks of another process; a guarded body's also of its commit."""
    with pytest.raises(LeaseLostError) as found, tg.lock("a") as lease:
        lease.mark_lost("it expired")
        lease.check()
    assert str(found.value) == (
        "The lease on a can no longer be trusted: it expired. Stop working: another process may "
        "hold the key."
    )
