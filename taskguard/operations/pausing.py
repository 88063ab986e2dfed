"""Pause a key, and resume it.

While a key is paused, no delivery gets it, or a slot of it. Messages wait in its line, or are
deferred; none is skipped, and none fails.

Guarantees: a pause waits until no delivery and no lock holds the key. With `now` it ends their
leases instead, and their late commits are refused. A wait that is interrupted, or whose process
dies, leaves no pause behind.

Read next: `ledger/operations/pausing.py`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from taskguard.errors import (
    KeyBusyError,
    LedgerUnavailableError,
    LockServerUnavailableError,
)
from taskguard.locks.base import NO_LIMIT, Held, LockProvider
from taskguard.model.changes import Said
from taskguard.model.history import Action
from taskguard.model.lease import UNKNOWN_HOLDER, Owner, limit_option
from taskguard.model.pauses import Pause, pause_names
from taskguard.model.policy import DAY_S, check_number
from taskguard.operations.base import Base, logger
from taskguard.run.names import Names

if TYPE_CHECKING:
    from taskguard.model.changes import PauseTried

__all__ = ["Pauses"]

# For how long free slots stay closed if the process that waits for the others dies.
_LEASE_S = 15.0
# Without a lock server, the key is free for about 10 ms between two messages of a line, and the
# pause has to find that.
_POLL_S = 0.02
_MOST_POLL_S = 0.5


class _Turn:
    """A pause's position at the lock server, in turn with deliveries that wait there.

    The ledger decides about the pause, so a lock server without an answer only costs the turn.
    """

    def __init__(
        self, locks: LockProvider | None, key: str, owner: Owner, timeout_s: float
    ) -> None:
        self._locks = locks if locks is not None and locks.traits.owners else None
        self._key = key
        self._owner = owner
        self._timeout_s = timeout_s
        self._waits = False

    def holders(self, *, closed: bool) -> tuple[Owner, ...]:
        """Return the holders there for which the pause has to wait.

        While the key is closed in the ledger, those are the holders of shares, which the ledger
        does not know.
        """
        self._waits = False
        if self._locks is None:
            return ()
        times = {"ttl_s": self._timeout_s + _LEASE_S, "wait_s": self._timeout_s}
        with contextlib.suppress(LockServerUnavailableError):
            found = self._locks.acquire((self._key,), self._owner, with_fence=False, **times)
            self._waits = isinstance(found, Held)
            if isinstance(found, Held) and (found.shared or not closed):
                return (found.owner,)
        return ()

    def wait(self, for_s: float) -> bool:
        """Wait until its turn may have come. Return False at once if another server decides."""
        if self._locks is None or not self._waits:
            return False
        try:
            self._locks.wait(self._key, self._owner, timeout_s=for_s)
        except LockServerUnavailableError:
            return False
        return True

    def close(self) -> None:
        """Leave the key, and the line of those that wait for it."""
        if self._locks is not None:
            with contextlib.suppress(LockServerUnavailableError):
                self._locks.release((self._key,), self._owner)


class Pauses(Base):
    """Pauses of keys."""

    def pause(
        self,
        key: str,
        *,
        reason: str,
        actor: str | None = None,
        now: bool = False,
        timeout_s: float = 60.0,
    ) -> Pause:
        """Let no delivery have the key until `resume()`.

        Locks of several holders (`limit=`, `mode="read"`) are holders, too. With `now`, the lock
        server ends their leases, and they learn of it at their next renewal.

        Args:
            key: the key, as `tg.lock()` takes it or as errors show it. It may have slots.
            reason: why, for the record and for everything that is refused meanwhile.
            actor: the operator's name. By default the user and the host of this process.
            now: do not wait for the holders. Their leases end, and their late commits are refused.
            timeout_s: how long to wait for the holders, in seconds.

        Raises:
            KeyBusyError: the key is still held after `timeout_s`, is paused already, or was resumed
                meanwhile. Nothing has changed.
            ConfigurationError: there is no ledger, or no reason.
        """
        check_number("timeout_s", timeout_s, at_least=0, at_most=DAY_S)
        by, ledger = self._said(Action.PAUSE, actor, reason), self._ledger
        name = self._on_record(self._keys(key, "pause()"))
        pause = Pause(by.actor, by.reason, ledger.now_us() / 1e6)
        owner = Owner(*pause_names(pause))
        paused = False
        try:
            if now:
                tried = ledger.try_pause(name, owner=owner, by=by, now=True)
            else:
                tried = self._wait(name, owner, by, timeout_s)
            paused = tried.paused
        finally:
            if not paused:  # even if this process is interrupted
                self._give_up(name, owner, by)
        if not tried.paused:
            raise self._busy(name, tried, timeout_s)
        if now:
            self._end_shares(name)
        logger.warning("%s: paused by %s: %s", name, by.actor, by.reason)
        return pause

    def resume(self, key: str, *, reason: str, actor: str | None = None) -> Pause | None:
        """End the pause of a key, and let its line go on. Return the pause, or None.

        A pause that another call has begun, and that still waits for holders, is given up.

        Raises:
            ConfigurationError: there is no ledger, or no reason.
        """
        by, ledger = self._said(Action.RESUME, actor, reason), self._ledger
        names = self._keys(key, "resume()")
        paused = (each for each in names if ledger.pause_of((each,)))
        name = next(paused, None) or self._on_record(names)
        owner = ledger.pause_of((name,))
        now = Owner(*pause_names(Pause(by.actor, by.reason, ledger.now_us() / 1e6)))
        if not ledger.resume(name, owner=owner or now, by=by) or owner is None:
            return None
        logger.warning("%s: resumed by %s: %s", name, by.actor, by.reason)
        self.goes_on(name)
        return owner.pause

    def paused(self, *, limit: int = 100) -> list[tuple[str, Pause]]:
        """Return the keys that are paused, in order.

        Raises:
            ConfigurationError: there is no ledger.
        """
        return self._ledger.paused(limit=limit)

    def _wait(self, key: str, owner: Owner, by: Said, timeout_s: float) -> PauseTried:
        """Try until no delivery holds the key, or the time is over."""
        ledger, clock = self._ledger, self._runner.clock
        until_s, poll_s = clock.monotonic_s() + timeout_s, _POLL_S
        closed, tries = False, 0
        with contextlib.closing(_Turn(self._runner.locks, key, owner, timeout_s)) as turn:
            while True:
                also, tries = turn.holders(closed=closed), tries + 1
                tried = ledger.try_pause(key, owner=owner, by=by, lease_s=_LEASE_S, also=also)
                closed = tried.closed
                left_s = max(0.0, until_s - clock.monotonic_s())
                if tried.paused or tried.by or tried.resumed or (tries > 1 and not left_s):
                    return tried
                if not turn.wait(min(left_s, _MOST_POLL_S)):
                    clock.sleep(min(poll_s, left_s))
                    poll_s = min(2 * poll_s, _MOST_POLL_S) if closed else _POLL_S

    def _give_up(self, key: str, owner: Owner, by: Said) -> None:
        """Free the key of a pause that did not complete, or did so without an answer."""
        ledger = self._ledger
        with contextlib.suppress(LedgerUnavailableError):  # its lease expires
            ledger.give_up_pause(key, owner=owner)
            if ledger.pause_of((key,)) == owner:
                ledger.resume(key, owner=owner, by=Said(by.actor, "the pause was interrupted"))
        self.goes_on(key)

    def _end_shares(self, key: str) -> None:
        """End the leases of holders that share the key, which only the lock server knows."""
        locks = self._runner.locks
        if locks is None or not locks.traits.shares:
            return
        try:
            for each in locks.holders(key):
                if each.shared and each.owner.process:
                    locks.release((key,), each.owner, **limit_option(NO_LIMIT))
        except LockServerUnavailableError as error:
            logger.warning("%s: paused in the ledger alone: %s", key, error)

    def _busy(self, key: str, tried: PauseTried, timeout_s: float) -> KeyBusyError:
        if tried.by is not None:
            return KeyBusyError(f"{key} is {tried.by}. Resume it first.", key=key)
        if tried.resumed is not None:
            return KeyBusyError(
                f"{key} is not paused: {tried.resumed.actor} resumed it while this pause waited: "
                f"{tried.resumed.reason}. If it should be paused nevertheless, pause it again.",
                key=key,
            )
        names = Names(self._ledger)
        holders = ", ".join(map(names.described, tried.holders)) or UNKNOWN_HOLDER
        return KeyBusyError(
            f"{key} is not paused: after {timeout_s:g} s it is still held by {holders}. Wait "
            "longer (timeout_s=, --timeout), or pause it at once (now=True, --now): then late "
            "commits are refused.",
            key=key,
        )
