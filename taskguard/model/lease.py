"""A lease as its holder sees it: its keys, its owner, and how long to trust it.

Guarantees: `trusted_until_s` counts from *before* the request was sent, less a margin. So the
holder's trust ends before the server's lease does. A fork holds none of its parent's leases.
Does not guarantee exclusion, because a paused process does not know that it was paused. The fencing
token and the ledger exist for that.

Read next: `run/watchdog.py`, which renews leases, and `locks/base.py`, which grants them.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskguard.clock import Clock
from taskguard.errors import LeaseLostError
from taskguard.model.texts import shown_id
from taskguard.model.workers import (
    COUNTER_DIGITS,
    NO_PROCESS,
    NONCE_DIGITS,
    NUMBER_DIGITS,
    nonces,
)

if TYPE_CHECKING:
    from taskguard.model.pauses import Pause

__all__ = ["UNKNOWN_HOLDER", "Lease", "Owner", "limit_option", "new_owner", "trusted_until_s"]

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
        """Whether `new_owner()` can have made it. A lock that another program wrote is no lease."""
        return len(self.nonce) == NONCE_DIGITS and _HEX.issuperset(self.nonce)

    @property
    def is_pause(self) -> bool:
        """Whether it stands for an operator's pause of the key, and not for a delivery."""
        return self.nonce.startswith(NO_PROCESS)

    @property
    def pause(self) -> Pause | None:
        """The operator's pause that it stands for, or None if it is a delivery's owner."""
        if not self.is_pause:
            return None
        from taskguard.model.pauses import pause_in  # not for a delivery whose key is not paused

        return pause_in(self.nonce, self.message)

    @property
    def process(self) -> str:
        """The holder's process, as "worker 1f2e3d4c, pid 4711". "" if the nonce names none."""
        number, pid = self.named if self.is_ours else ("", 0)
        if number == NO_PROCESS:
            return ""
        return f"worker {number}, pid {pid}" if pid else ""

    @property
    def named(self) -> tuple[str, int]:
        """The holder's worker number and its pid. Only for a nonce that is ours."""
        return self.nonce[:NUMBER_DIGITS], int(self.nonce[NUMBER_DIGITS:-COUNTER_DIGITS], 16)

    @property
    def described(self) -> str:
        """The holder's process and message, or its pause, for errors and logs."""
        return self.described_as(self.process)

    def described_as(self, process: str) -> str:
        """Return this description of its process, with its message."""
        if not process:
            return str(self.pause or UNKNOWN_HOLDER)
        return f"{process}, message {shown_id(self.message)}" if self.message else process

    @classmethod
    def parse(cls, text: str) -> Owner:
        nonce, _, message = text.partition("/")
        return cls(nonce, message)


def new_owner(message: str = "") -> Owner:
    """Return an owner with a nonce that no other attempt has, on any machine."""
    return Owner(nonces(), message)


def trusted_until_s(*, requested_at_s: float, ttl_s: float) -> float:
    """Return until when to trust a lease of `ttl_s` that was requested at `requested_at_s`.

    The margin is 1% of the ttl + 2 ms, for clocks that run at different speeds (the figures
    of the Redlock description).
    """
    return requested_at_s + ttl_s - (ttl_s * _MARGIN_SHARE + _MARGIN_S)


class Lease:
    """One holder's hold on a set of keys.

    Attributes:
        keys: the keys, sorted.
        owner: the holder.
        ttl_s: the length that each renewal requests, in seconds.
        fence: the fencing token, 0 until one is known.
        limit: it was granted while fewer holders than this had the key. 1: it excludes others.
        of_work: whether a ledger refuses a late commit of its holder.
        taken_at_s: when the lease was requested, on the monotonic clock.
        trusted_until_s: until when to trust it, on the monotonic clock.
        is_lost: whether the lease was lost. `lost` is an Event that is set then.
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
        """Event that is set once the lease can no longer be trusted. Made at its first use."""
        with _making:
            if self._lost is None:
                self._lost = threading.Event()
        if self.is_lost:  # perhaps just now, before there was an Event to set
            self._lost.set()
        return self._lost

    @property
    def remaining_s(self) -> float:
        """Seconds for which to trust the lease. 0.0 once it is lost."""
        if self.is_lost or self._pid != os.getpid():
            return 0.0
        return max(0.0, self.trusted_until_s - self._clock.monotonic_s())

    @property
    def is_parents(self) -> bool:
        """Whether the lease was taken before a fork. The child neither holds nor ends it."""
        return self._pid != os.getpid()

    def extend(self, trusted_until_s: float) -> None:
        """Note a renewal. A lost lease stays lost. The deadline never moves back."""
        if not self.is_lost:
            self.trusted_until_s = max(self.trusted_until_s, trusted_until_s)

    def mark_lost(self, reason: str) -> bool:
        """Note that the lease can no longer be trusted. Return True the first time."""
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
            "it was taken before a fork" if self._pid != os.getpid() else "it expired"
        )
        refused = (
            " If another process holds it, a commit by guard.transaction() is refused."
            if self.of_work
            else ""
        )
        raise LeaseLostError(
            f"The lease on {self.key} can no longer be trusted: {reason}. Stop working: "
            f"another process may hold the key.{refused}",
            key=self.key,
            fence=self.fence or None,
        )


_UNSAID: dict[str, Any] = {}


def limit_option(limit: int) -> dict[str, Any]:
    """Return the arguments for a limit. A provider without shares takes none."""
    return _UNSAID if limit == 1 else {"limit": limit}
