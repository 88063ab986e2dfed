"""Another lock server and another ledger for every guard of this process, for tests.

    with overridden(Overrides(locks, ledger, listener)):
        ship(42)                    # whatever its decorator and its settings say

Guarantees: guards made before and guards made within use them, and go back to what they were
configured with afterwards. One that is to have no ledger, or no locks, has none here either.
Each `Overrides` is like a process of its own: no lease and no watchdog of another is known to it.

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

__all__ = ["Overrides", "overridden", "overrides"]


@dataclass(frozen=True, eq=False)
class Overrides:
    """What guards use instead.

    Attributes:
        listener: hears their events, besides the listeners of their own.
        renewing: whether leases are renewed while bodies run, which takes a thread.
        clock: what their leases are trusted by; None: that of each guard.
    """

    locks: LockProvider | None
    ledger: DatabaseLedger | None
    listener: Callable[[Event], None]
    renewing: bool = True
    clock: Clock | None = None


_now: Overrides | None = None


def overrides() -> Overrides | None:
    """Those of this moment; None outside tests."""
    return _now


@contextmanager
def overridden(by: Overrides) -> Iterator[None]:
    """Use them, in all threads, for the time of a `with` block."""
    global _now  # noqa: PLW0603  # tasks read it wherever they were decorated
    before, _now = _now, by
    try:
        yield
    finally:
        _now = before
