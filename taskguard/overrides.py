"""Another lock server and another ledger for every guard of this process, for tests.

    with overridden(Overrides(locks, ledger, listener)):
        ship(42)                    # whatever its decorator and its settings say

Guarantees: guards made before and guards made within the block use them, and go back to what they
were configured with afterwards. A guard that is configured without a ledger, or without locks, has
none here either. Each `Overrides` is like a process of its own, with its own leases and watchdog.

Does not reach other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from taskguard.clock import Clock
from taskguard.events import Event
from taskguard.ledger.protocol import DatabaseLedger
from taskguard.locks.base import LockProvider

__all__ = ["Overrides", "now", "overridden"]


@dataclass(frozen=True, eq=False)
class Overrides:
    """What guards use instead.

    Attributes:
        locks: the lock provider; None: the ledger alone.
        ledger: the ledger; None: locks only.
        listener: hears the guards' events, besides their own listeners.
        renewing: whether leases are renewed while bodies run, which takes a thread; by default so.
        clock: by which leases are trusted; None: the clock of each guard.
    """

    locks: LockProvider | None
    ledger: DatabaseLedger | None
    listener: Callable[[Event], None]
    renewing: bool = True
    clock: Clock | None = None


# Those that are in force; None outside tests.
now: Overrides | None = None


@contextmanager
def overridden(by: Overrides) -> Iterator[None]:
    """Use these overrides, in all threads, for the time of a `with` block."""
    global now  # noqa: PLW0603  # tasks read it wherever they were decorated
    before, now = now, by
    try:
        yield
    finally:
        now = before
