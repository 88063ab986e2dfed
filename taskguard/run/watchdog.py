"""One native thread that renews every lease of the process.

Guarantees: every lease is renewed at a third of its ttl. Due leases share one batch, on connections
of the providers' own. A renewal without an answer does not change the deadline, and is tried again
until the deadline. After that, by the local clock, the lease is marked lost, the body is notified,
an event is emitted, and the lock server's lease is released. The thread starts with the first
lease, in the process that took it. A forked child starts with no leases. The thread never dies
silently.

Does not guarantee anything while the process is paused. See `lease.py`.

`tick()` does all of the work without timeouts of its own, so a simulation can call it without the
thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from taskguard.clock import SYSTEM_CLOCK, Clock
from taskguard.errors import LockServerUnavailableError, TaskguardError
from taskguard.events import Events, Lost, RenewalFailed, Renewed
from taskguard.locks.base import Hold, LockProvider, Renewal
from taskguard.model.lease import Lease, limit_option, trusted_until_s
from taskguard.native import Wakeup, allocate_lock, greenlets, start_thread
from taskguard.run.names import Names
from taskguard.run.tally import Tally
from taskguard.run.tracked import RENEWALS_PER_TTL, TrackedLease

if TYPE_CHECKING:
    from taskguard.ledger.ports import Claims

__all__ = ["Watchdog"]

logger = logging.getLogger("taskguard")

# Leases that are due a little later are renewed, too, so that leases share round trips.
_SLACK_SHARE = 0.1
_LINGER_S = 1.0
_RETRY_SHARE = 0.1
_LONGEST_PATIENCE_S = 1.0  # leases that begin meanwhile may be short


class _Renewals:
    """A native thread that runs one function after the other.

    Under gevent and eventlet, a native thread has a hub and connections of its own, which would
    stay open after its end. So it never ends there.
    """

    def __init__(self) -> None:
        self._mutex = allocate_lock()
        self._wakeup = Wakeup()
        self._function: Callable[[], None] | None = None
        self._running = False

    def start(self, function: Callable[[], None]) -> None:
        """Run a function once the previous one has ended.

        Raises RuntimeError if no thread can start.
        """
        with self._mutex:
            self._function = function
            start, self._running = not self._running, True
        self._wakeup.set()
        if start:
            try:
                start_thread(self._run)
            except BaseException:
                self._function, self._running = None, False
                raise

    def _run(self) -> None:
        linger_s = None if greenlets() else _LINGER_S
        try:
            while True:
                woken = self._wakeup.wait(linger_s)
                with self._mutex:
                    function, self._function = self._function, None
                    if function is None and not woken:
                        self._running = False
                        return
                if function is not None:
                    function()
        except BaseException:
            self._running = False
            raise


class Watchdog:
    """Keeps leases of one lock provider and one ledger (either may be None).

    Attributes:
        names: notes in the ledger that this worker was seen, after the renewals.
        tally: counts renewals and lost leases.
    """

    def __init__(
        self,
        *,
        locks: LockProvider | None,
        ledger: Claims | None,
        events: Events,
        clock: Clock = SYSTEM_CLOCK,
        threaded: bool = True,
    ) -> None:
        self._locks = locks
        self._ledger = ledger
        self._events = events
        self._clock = clock
        self._threaded = threaded
        self.names = Names(None)
        self.tally = Tally(kept=False)
        self._reset()

    def _reset(self) -> None:
        """Forget all leases: at the start, and in a child after a fork."""
        self._pid = os.getpid()
        self._tracked: dict[int, TrackedLease] = {}
        self._mutex = allocate_lock()
        self._wakeup = Wakeup()
        self._renewals = _Renewals()
        self._running = False
        self._used = False
        self._wakes_at_s = float("inf")

    def __len__(self) -> int:
        return len(self._tracked)

    def track(self, tracked: TrackedLease) -> None:
        """Renew this lease from now on."""
        if self._pid != os.getpid():
            self._reset()
        with self._mutex:
            self._tracked[id(tracked)] = tracked
            self._used = True
            start = self._threaded and not self._running
            self._running = self._running or start
            wake = not start and _due_s(tracked) < self._wakes_at_s
        if start:
            try:
                start_thread(self._run)
            except BaseException:
                self._running = False  # the next lease tries again to start the thread
                raise
        elif wake:
            self._wakeup.set()

    def untrack(self, tracked: TrackedLease) -> None:
        """Stop renewing this lease. A second call does nothing."""
        if self._pid != os.getpid():
            self._reset()  # the parent's mutex may have been held at the fork
        with self._mutex:
            self._tracked.pop(id(tracked), None)

    def release_lock(self, tracked: TrackedLease, *, handed: bool = False) -> bool | None:
        """End the lease at the lock server, as `TrackedLease.end()` does."""
        return tracked.end(self._free, handed=handed and self._locks is not None)

    def _free(self, lease: Lease) -> bool:
        assert self._locks is not None  # noqa: S101  # it holds the lease, or may
        return self._locks.release(lease.keys, lease.owner, **limit_option(lease.limit))

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        pid = self._pid
        while pid == os.getpid():
            try:
                pause_s = self._pause_s()
                if pause_s is None:
                    return  # the next lease starts another
                self._wakeup.wait(pause_s)
                self._round()
            except Exception:
                # A bug here would lose every lease of the process, so log it and go on.
                logger.exception("watchdog: a round failed; leases are valid until their deadlines")
                self._clock.sleep(0.1)

    def _round(self) -> None:
        """`tick()`, but with renewals in a thread of their own.

        Leases expire by the local clock, even while a lock server or ledger gives no answer.
        """
        now_s = self._clock.monotonic_s()
        due = self._due(now_s)
        if not due and not self.names.is_old:
            return
        ended = Wakeup()

        def renew() -> None:
            try:
                self._renew(due, now_s)
                if self.names.is_old:
                    self.names.refresh()
            except Exception:
                logger.exception("watchdog: a round failed; leases are valid until their deadlines")
                self._clock.sleep(0.1)
            finally:
                ended.set()

        try:
            self._renewals.start(renew)
        except RuntimeError:  # there can be no more threads
            self._renew(due, now_s)
            return
        while not ended.wait(self._patience_s()):
            self._expire(self._everything())

    def _patience_s(self) -> float:
        """Return how long renewals may take before the next lease may expire."""
        now_s = self._clock.monotonic_s()
        ends_s = (tracked.lease.trusted_until_s for tracked in self._everything())
        return min(_LONGEST_PATIENCE_S, max(0.01, min(ends_s, default=now_s + 1.0) - now_s))

    def _everything(self) -> list[TrackedLease]:
        with self._mutex:
            return list(self._tracked.values())

    def _pause_s(self) -> float | None:
        with self._mutex:
            now_s = self._clock.monotonic_s()
            if self._tracked:
                self._wakes_at_s = min(map(_due_s, self._tracked.values()))
            elif self._used:
                # Stay awake for a moment, so that not every short body has to wake the thread.
                self._used = False
                self._wakes_at_s = now_s + _LINGER_S
            else:
                self._running = False
                return None
            return self._wakes_at_s - now_s

    # -- one round ----------------------------------------------------------------------------

    def tick(self) -> None:
        """Renew due leases, and mark lost ones."""
        now_s = self._clock.monotonic_s()
        due = self._due(now_s)
        if due:
            self._renew(due, now_s)

    def renew_now(self, tracked: TrackedLease) -> bool:
        """Renew one lease at once, unless it turns out to be lost. Return False without an answer.

        A row that another transaction has locked is tried a second time.
        """
        for _ in range(2):
            now_s = self._clock.monotonic_s()
            self._renew([tracked], now_s)
            if tracked.lease.is_lost or tracked.requested_at_s >= now_s:
                return True
        return False

    def _due(self, now_s: float) -> list[TrackedLease]:
        """Mark lost leases, and return those that are due for a renewal."""
        everything = self._everything()
        for tracked in everything:
            if tracked.abandoned:
                self.untrack(tracked)
            if tracked.abandoned and not tracked.by_token:  # another process may release that
                logger.warning(
                    "%s: the Lock object is gone, and nothing released it: it is no longer "
                    "renewed, and expires",
                    tracked.lease.key,
                )
        everything = [tracked for tracked in everything if not tracked.abandoned]
        self._expire(everything)
        return [
            tracked
            for tracked in everything
            if tracked.renew_at_s <= now_s + tracked.lease.ttl_s * _SLACK_SHARE
            and not tracked.lease.is_lost
        ]

    def _renew(self, due: list[TrackedLease], now_s: float) -> None:
        self._renew_ledger([tracked for tracked in due if tracked.claim is not None])
        self._renew_locks([tracked for tracked in due if tracked.at_lock_server])
        self._schedule(due, requested_at_s=now_s)
        self._expire(due)

    def _schedule(self, due: Iterable[TrackedLease], *, requested_at_s: float) -> None:
        """Set the next renewal: a third of a ttl after a success, sooner after a failure."""
        now_s = self._clock.monotonic_s()
        for tracked in due:
            ttl_s = tracked.lease.ttl_s
            renewed = tracked.requested_at_s >= requested_at_s or (
                tracked.decided_by_ledger and not tracked.claim
            )
            tracked.renew_at_s = (
                requested_at_s + ttl_s / RENEWALS_PER_TTL
                if renewed
                else now_s + ttl_s * _RETRY_SHARE
            )

    def _renew_ledger(self, due: list[TrackedLease]) -> None:
        if not due or self._ledger is None:
            return
        claims = [(tracked, claim) for tracked in due if (claim := tracked.claim) is not None]
        requested_at_s = self._clock.monotonic_s()
        ledger = self._ledger
        answers = self._ask(due, "ledger", lambda: ledger.renew([claim for _, claim in claims]))
        for (tracked, _), answer in zip(claims, answers, strict=False):
            if answer == Renewal.RENEWED:
                self._extend(tracked, requested_at_s)
            elif answer == Renewal.TAKEN and tracked.claim is not None and not tracked.ended:
                self.lose(tracked, "another holder took it over", by_server=True)

    def _renew_locks(self, due: list[TrackedLease]) -> None:
        if not due or self._locks is None:
            return
        requested_at_s = self._clock.monotonic_s()
        leases = [tracked.lease for tracked in due]
        holds = [Hold(lease.keys, lease.owner, lease.ttl_s, lease.limit) for lease in leases]
        locks = self._locks
        answers = self._ask(due, "locks", lambda: locks.renew(holds))
        for tracked, answer in zip(due, answers, strict=False):
            if answer == Renewal.RENEWED:
                if not tracked.decided_by_ledger:
                    self._extend(tracked, requested_at_s)
            elif tracked.ended or answer in (Renewal.UNANSWERED, Renewal.SKIPPED):
                continue
            elif not tracked.decided_by_ledger:
                tracked.at_lock_server = False
                self.lose(tracked, "the lock server no longer knows it", by_server=True)
            else:
                self._take_again(tracked)

    def _ask(
        self, due: list[TrackedLease], server: str, renew: Callable[[], list[str]]
    ) -> list[str]:
        """Renew one batch. Without an answer no deadline changes."""
        started_s = self._clock.monotonic_s()
        try:
            answers = renew()
        except TaskguardError as error:
            self.tally.no_answer(server, "renew")
            self._tell_failed(due, str(error), started_s)
            return []
        took_s = self._clock.monotonic_s() - started_s
        self.tally.answer(server, "renew", took_s)
        answered = due
        if Renewal.UNANSWERED in answers:
            both = list(zip(due, answers, strict=False))
            answered = [tracked for tracked, answer in both if answer != Renewal.UNANSWERED]
            silent = [tracked for tracked, answer in both if answer == Renewal.UNANSWERED]
            self.tally.no_answer(server, "renew")
            self._tell_failed(silent, "a part of the lock server gave no answer", started_s)
        if answered:
            self.tally.renewals(len(answered), renewed=True)
            self._events.emit(
                Renewed(
                    key=answered[0].lease.key,
                    task=answered[0].task,
                    message=answered[0].message,
                    count=len(answered),
                    took_s=took_s,
                )
            )
        return answers

    def _tell_failed(self, due: list[TrackedLease], reason: str, started_s: float) -> None:
        first = due[0]
        self.tally.renewals(len(due), renewed=False)
        self._events.emit(
            RenewalFailed(
                key=first.lease.key,
                task=first.task,
                message=first.message,
                count=len(due),
                error=reason,
                took_s=self._clock.monotonic_s() - started_s,
            )
        )

    def _extend(self, tracked: TrackedLease, requested_at_s: float) -> None:
        tracked.requested_at_s = requested_at_s
        until_s = trusted_until_s(requested_at_s=requested_at_s, ttl_s=tracked.lease.ttl_s)
        tracked.lease.extend(until_s)

    def _take_again(self, tracked: TrackedLease) -> None:
        """Acquire a lease again that the lock server forgot and the ledger holds, by its nonce."""
        lease = tracked.lease
        with tracked.mutex:
            if tracked.ended or self._locks is None:
                return
            tracked.forgotten = True
            try:
                self._locks.acquire(
                    lease.keys, lease.owner, ttl_s=lease.ttl_s, with_fence=False, wait_s=0
                )
            except LockServerUnavailableError as error:
                logger.debug("taking %s again got no answer: %s", lease.key, error)

    def _expire(self, everything: Iterable[TrackedLease]) -> None:
        now_s = self._clock.monotonic_s()
        for tracked in everything:
            lease = tracked.lease
            if tracked.ended or (tracked.decided_by_ledger and tracked.claim is None):
                continue
            if lease.max_hold_until_s is not None and now_s >= lease.max_hold_until_s:
                self.lose(tracked, "it was held for longer than max_hold_s", kind="max_hold")
            elif now_s >= lease.trusted_until_s:
                self.lose(tracked, "it could not be renewed in time", kind="expired")

    def lose(
        self, tracked: TrackedLease, reason: str, *, by_server: bool = False, kind: str = "taken"
    ) -> None:
        """Mark a lease lost, notify its body, emit an event, and release it. Once only.

        `by_server`: a server has answered that it does not know the lease. If the lease belongs to
        a token, another process has released it, and no event is emitted. `kind`: the reason, as
        it is counted.
        """
        released = by_server and tracked.by_token
        if not tracked.lease.mark_lost("it was released by its token" if released else reason):
            return
        self.untrack(tracked)
        if not released:
            self.tally.lease_lost(tracked.task, kind, tracked.lease, reason)
            self._events.emit(
                Lost(
                    key=tracked.lease.key,
                    task=tracked.task,
                    message=tracked.message,
                    work="" if tracked.claim is None else tracked.claim.work or "",
                    fence=tracked.lease.fence,
                    reason=reason,
                    cause=kind,
                    held_s=self._clock.monotonic_s() - tracked.lease.taken_at_s,
                )
            )
        tracked.interrupt()
        self.release_lock(tracked)


def _due_s(tracked: TrackedLease) -> float:
    """Return when the watchdog must handle this lease next."""
    return min(
        tracked.renew_at_s,
        tracked.lease.trusted_until_s,
        tracked.lease.max_hold_until_s or float("inf"),
    )
