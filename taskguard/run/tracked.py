"""A lease that this process holds, and the interrupt of the body under it.

Guarantees: after `end()` no renewal takes the lease again at the lock server, and after
`leave_body()` no interrupt arrives.

Read next: `watchdog.py`, which renews these leases.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from taskguard.errors import LeaseLostError, LockServerUnavailableError
from taskguard.model.claims import Claim
from taskguard.model.lease import Lease
from taskguard.native import allocate_lock, greenlets, raise_in_thread

__all__ = ["RENEWALS_PER_TTL", "TrackedLease"]

logger = logging.getLogger("taskguard")

RENEWALS_PER_TTL = 3


class TrackedLease:
    """One lease that the watchdog renews.

    Attributes:
        by_token: whether any process that knows its message may release it.
        claim: the ledger's grant. None with locks only, and after the claim has ended.
        at_lock_server: whether the lock server probably has the lease, too.
        ended: whether the lock server's lease was released or handed over. After that no renewal
            may take it again.
        forgotten: whether the lock server turned out to have forgotten the lease.
        abandoned: whether nothing can release the lease any more, so that it is to expire.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        claim: Claim | None,
        at_lock_server: bool,
        requested_at_s: float,
        task: str = "",
        message: str = "",
        interrupt: bool = False,
        by_token: bool = False,
    ) -> None:
        self.lease = lease
        self.claim = claim
        self.decided_by_ledger = claim is not None
        self.at_lock_server = at_lock_server
        self.requested_at_s = requested_at_s
        self.task = task
        self.message = message
        self.by_token = by_token
        self.renew_at_s = requested_at_s + lease.ttl_s / RENEWALS_PER_TTL
        self.ended = False
        self.forgotten = False
        self.abandoned = False
        # A renewal in flight must not take the lease again after its release.
        self.mutex = allocate_lock()
        self._interruptible = interrupt and greenlets() is None
        self._thread: int | None = None
        self._cancel: Callable[[], None] | None = None
        self._interrupted = False

    def end(self, free: Callable[[Lease], bool], *, handed: bool = False) -> bool | None:
        """End the lease at the lock server by `free`. If it gives no answer, the lease expires.

        Args:
            free: releases the lease. Returns whether the lock server knew it.
            handed: call `free` even if this process did not take the lease there. A delivery that
                the ledger refused may have handed its own lease over.

        Returns:
            The value of `free`. None if it was not called, or got no answer.
        """
        if self.lease.is_parents:
            return None
        with self.mutex:
            self.ended = True
            if not (self.at_lock_server or handed):
                return None
            self.at_lock_server = False
            try:
                known = free(self.lease)
            except LockServerUnavailableError as error:
                logger.debug("release of %s got no answer: %s", self.lease.key, error)
                return None
            self.forgotten = self.forgotten or not known
            return known

    def enter_body(self) -> None:
        """Allow interrupts of the running thread from now on."""
        if self._interruptible:
            self._thread, self._cancel = threading.get_ident(), None

    def interrupt_by(self, cancel: Callable[[], None]) -> None:
        """Interrupt a body in an event loop by cancelling its task.

        An error that is raised between two steps of the loop would hit the loop, not the body.
        """
        if self._interruptible:
            with self.mutex:
                self._cancel = cancel

    def leave_body(self) -> None:
        """Stop interrupts. After this no interrupt arrives, not even one that was under way."""
        if self.lease.is_parents:
            return
        with self.mutex:
            thread, self._thread = self._thread, None
            if thread is not None and self._interrupted:
                raise_in_thread(thread, None)

    def interrupt(self) -> None:
        """Raise LeaseLostError in the body's thread, once its present C call returns."""
        with self.mutex:
            if self._thread is not None and not self._interrupted:
                self._interrupted = True
                if self._cancel is not None:
                    self._cancel()
                    return
                raise_in_thread(self._thread, _interruption(self.lease))


def _interruption(lease: Lease) -> type[LeaseLostError]:
    """Return an error class without arguments, because the interpreter instantiates it."""
    key, fence = lease.key, lease.fence

    class LeaseLostInterruptError(LeaseLostError):
        def __init__(self) -> None:
            super().__init__(
                f"The lease on {key} was lost; the body was interrupted.", key=key, fence=fence
            )

    return LeaseLostInterruptError
