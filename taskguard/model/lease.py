"""A lease as its holder sees it: who holds what, and until when that may be trusted.

Guarantees: `trusted_until_s` is counted from *before* the request was sent, less a margin, so
that the holder's trust ends before the server's lease does; a fork holds none of its parent's
leases. Does not guarantee exclusion: a paused process cannot know that it was paused. That is
what the fencing token and the ledger are for.

Read next: `watchdog.py`, which renews leases, and `locks/base.py`, which grants them.
"""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass
from typing import Any

from taskguard.clock import Clock
from taskguard.errors import LeaseLostError

__all__ = ["UNKNOWN_HOLDER", "Lease", "Owner", "asked", "new_owner", "trusted_until_s"]

# A nonce is hexadecimal: the worker's number, the process's id, and a counter.
_NUMBER_DIGITS = 8
_PID_DIGITS = 6
_COUNTER_DIGITS = 10
_NONCE_DIGITS = _NUMBER_DIGITS + _PID_DIGITS + _COUNTER_DIGITS
_HEX = frozenset("0123456789abcdef")
UNKNOWN_HOLDER = "an unknown holder"
_MARGIN_SHARE = 0.01
_MARGIN_S = 0.002

_making = threading.Lock()
os.register_at_fork(
    before=_making.acquire,
    after_in_parent=_making.release,
    after_in_child=_making.release,
)


class _Nonces:
    """Nonces of this process, which no other attempt has.

    The worker's number is random, and the same in all processes that fork from the one which
    imported this module. Processes of one number differ by their ids. Where a process gets the id
    of one that has ended, its counter starts elsewhere.
    """

    def __init__(self) -> None:
        # 00000000 and ffffffff are left for owners that are no process.
        self.worker = f"{1 + _random(_NUMBER_DIGITS) % (16**_NUMBER_DIGITS - 2):08x}"
        self.begin()
        # The hook takes no lock: the child has one thread, and the parent keeps its counter.
        os.register_at_fork(after_in_child=self.begin)

    def begin(self, at: int | None = None) -> None:
        """Count from `at`, or from a random number, as this process."""
        prefix = f"{self.worker}{os.getpid() % 16**_PID_DIGITS:06x}"
        self._counting = prefix, itertools.count(_random(_COUNTER_DIGITS) if at is None else at)

    def __call__(self) -> str:
        prefix, numbers = self._counting
        return f"{prefix}{next(numbers) % 16**_COUNTER_DIGITS:010x}"


def _random(digits: int) -> int:
    return int(os.urandom(digits // 2).hex(), 16)


_nonces = _Nonces()


@dataclass(frozen=True, slots=True)
class Owner:
    """The holder of a key: a nonce, which is new for every attempt, and the attempt's message.

    The text `nonce/message` is the value in the lock server and in the ledger's `owner` columns,
    so that the two can be compared.
    """

    nonce: str
    message: str

    def __str__(self) -> str:
        return f"{self.nonce}/{self.message}"

    @property
    def is_ours(self) -> bool:
        """Whether `new_owner()` can have made it: what others write into a lock is no lease."""
        return len(self.nonce) == _NONCE_DIGITS and _HEX.issuperset(self.nonce)

    @property
    def process(self) -> str:
        """The holder's process, as "worker 1f2e3d4c, pid 4711"; "" where the nonce names none."""
        number, pid = self.named if self.is_ours else ("", 0)
        return f"worker {number}, pid {pid}" if pid else ""

    @property
    def named(self) -> tuple[str, int]:
        """The number of the holder's worker, and its pid; of a nonce that is ours."""
        return self.nonce[:_NUMBER_DIGITS], int(self.nonce[_NUMBER_DIGITS:-_COUNTER_DIGITS], 16)

    @property
    def described(self) -> str:
        """The holder's process and message, for errors and logs."""
        process = self.process
        if not process:
            return UNKNOWN_HOLDER
        return f"{process}, message {self.message}" if self.message else process

    @classmethod
    def parse(cls, text: str) -> Owner:
        nonce, _, message = text.partition("/")
        return cls(nonce, message)


def new_owner(message: str = "") -> Owner:
    """An owner with a nonce that no other attempt has, on any machine."""
    return Owner(_nonces(), message)


def trusted_until_s(*, asked_at_s: float, ttl_s: float) -> float:
    """Until when a lease of `ttl_s` that was asked for at `asked_at_s` may be trusted.

    The margin is 1% of the ttl + 2 ms, for clocks that run at different speeds (the figures
    of the Redlock description).
    """
    return asked_at_s + ttl_s - (ttl_s * _MARGIN_SHARE + _MARGIN_S)


class Lease:
    """One holder's hold on a set of keys.

    Attributes:
        keys: the keys, sorted.
        owner: who holds them.
        ttl_s: how long each renewal asks for, in seconds.
        fence: the fencing token, 0 until one is known.
        limit: it came in while fewer than so many held the key; 1: it has its keys alone.
        of_work: whether a ledger refuses a late commit of its holder.
        taken_at_s: when the lease was asked for, on the clock's monotonic scale.
        trusted_until_s: until when it may be trusted, on the same scale.
        is_lost: whether the lease was lost; `lost` is the same as an Event to wait for.
    """

    def __init__(
        self,
        *,
        keys: tuple[str, ...],
        owner: Owner,
        ttl_s: float,
        clock: Clock,
        taken_at_s: float,
        trusted_until_s: float,
        fence: int = 0,
        limit: int = 1,
        of_work: bool = False,
        max_hold_until_s: float | None = None,
    ) -> None:
        self.keys = keys
        self.owner = owner
        self.ttl_s = ttl_s
        self.fence = fence
        self.limit = limit
        self.of_work = of_work
        self.taken_at_s = taken_at_s
        self.is_lost = False
        self._lost: threading.Event | None = None
        self.lost_reason: str | None = None
        self.max_hold_until_s = max_hold_until_s
        self._clock = clock
        self.trusted_until_s = trusted_until_s
        self._pid = os.getpid()

    @property
    def key(self) -> str:
        """The keys as one text, for messages."""
        return ", ".join(self.keys)

    @property
    def lost(self) -> threading.Event:
        """Set once the lease can no longer be trusted. Made when first asked for."""
        with _making:
            if self._lost is None:
                self._lost = threading.Event()
        if self.is_lost:  # also if that happened just now, before there was an Event to set
            self._lost.set()
        return self._lost

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease may still be trusted; 0.0 once lost."""
        if self.is_lost or self._pid != os.getpid():
            return 0.0
        return max(0.0, self.trusted_until_s - self._clock.monotonic_s())

    @property
    def is_parents(self) -> bool:
        """Whether the lease was taken before a fork: the child neither holds nor ends it."""
        return self._pid != os.getpid()

    def extend(self, trusted_until_s: float) -> None:
        """Note a renewal. A lost lease stays lost; trust never shrinks."""
        if not self.is_lost:
            self.trusted_until_s = max(self.trusted_until_s, trusted_until_s)

    def mark_lost(self, reason: str) -> bool:
        """Say that the lease can no longer be trusted. True the first time."""
        if self.is_lost:
            return False
        self.lost_reason = reason
        self.is_lost = True
        if self._lost is not None:
            self._lost.set()
        return True

    def check(self) -> None:
        """Raise LeaseLostError unless the lease can be trusted at this moment."""
        if self.remaining_s > 0.0:
            return
        reason = self.lost_reason or (
            "it was taken before a fork" if self._pid != os.getpid() else "it ran out"
        )
        refused = " A commit by guard.transaction() is refused if one does." if self.of_work else ""
        raise LeaseLostError(
            f"The lease on {self.key} can no longer be trusted: {reason}. Stop working; "
            f"another process may hold the key.{refused}",
            key=self.key,
            fence=self.fence or None,
        )


_UNSAID: dict[str, Any] = {}


def asked(limit: int) -> dict[str, Any]:
    """What is said of a limit to a lock provider, who may know of none."""
    return _UNSAID if limit == 1 else {"limit": limit}
