"""Another lock server and another ledger for every guard of this process, for tests.

    with overridden(Overrides(locks, ledger, listener)):
        ship(42)                    # uses them whatever its decorator and settings are

Guarantees: all guards use the overrides during the block, and their own configuration after it. A
guard without a ledger, or without locks, has none in the block either. Each `Overrides` is like a
process of its own, with its own leases and watchdog.

Does not reach other processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from taskguard.clock import Clock
from taskguard.events import Event
from taskguard.locks.base import LockProvider

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger

__all__ = ["Overrides", "now", "overridden", "until_changed"]

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Overrides:
    """The locks, ledger and clock that every guard of this process uses during a test.

    Attributes:
        locks: the lock provider. None: the ledger alone.
        ledger: the ledger. None: locks only.
        listener: gets the guards' events, in addition to their own listeners.
        renewing: whether a thread renews leases while bodies run. True by default.
        clock: the clock by which leases are trusted. None (the default): the clock of each guard.
    """

    locks: LockProvider | None
    ledger: DatabaseLedger | None
    listener: Callable[[Event], None]
    renewing: bool = True
    clock: Clock | None = None


# The current overrides; None outside tests.
now: Overrides | None = None


@contextmanager
def overridden(by: Overrides) -> Iterator[None]:
    """Use these overrides in all threads, during a `with` block."""
    before = _put(by)
    try:
        yield
    finally:
        _put(before)


_changing = threading.RLock()  # so that no guard keeps a runner of overrides that have just ended
os.register_at_fork(
    before=_changing.acquire,
    after_in_parent=_changing.release,
    after_in_child=_changing.release,
)
_keeping: WeakSet[Any] = WeakSet()


def _put(by: Overrides | None) -> Overrides | None:
    """Replace the current overrides; return the former ones."""
    global now  # all guards read it
    with _changing:
        before, now = now, by
        for guard in _keeping:
            guard.__dict__.pop("runner", None)
        _keeping.clear()
    return before


class until_changed(Generic[_T]):  # noqa: N801  # it is used as `functools.cached_property` is
    """A guard's `runner`: made when it is first read, and again after overrides have changed."""

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __get__(self, guard: Any, kind: type[Any]) -> _T:
        if guard is None:  # documentation tools read it from the class
            return self  # type: ignore[return-value]
        with _changing:
            made = guard.__dict__["runner"] = self._make(guard)
            _keeping.add(guard)
        return made
