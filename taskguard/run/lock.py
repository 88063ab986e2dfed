"""The lock of `tg.lock()` as an object, for threads and for coroutines.

Guarantees: a lease belongs to the thread or the asyncio task that acquired it, or to the lock's
token. A forked child holds none of its parent's locks. `async with` does not block the event loop:
the same steps run in threads (`beside.py`).

Read next: `locking.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from taskguard.errors import (
    KeyAlreadyHeldError,
    KeyBusyError,
    LeaseLostError,
    LockNotOwnedError,
)
from taskguard.model.delivery import Delivery
from taskguard.model.lease import Lease
from taskguard.run.current import Running, begin, current_task, end
from taskguard.run.holding import Holding
from taskguard.run.locking import Locking, lost
from taskguard.run.refusals import refuse_reentry
from taskguard.run.waiting import Waiting

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Lock"]


@dataclass(slots=True, eq=False)
class _Held:
    """One lease of a lock.

    Attributes:
        by: the asyncio task or the thread that acquired it. With a token None.
        of_block: whether a `with` statement acquired it, whose end needs to find it.
        locking: what ends the lease. Tests replace the runner.
        running: what tells calls of this thread that the lock is around them. None: it is around
            none, because another process may release it.
        ended: whether it was released, or given up as lost.
        interrupted: whether the task of its block was cancelled because the lease was lost.
        cancelling: how often that task was cancelled before its block, as asyncio counts.
    """

    by: object
    of_block: bool
    locking: Locking
    holding: Holding
    running: Running | None
    ended: bool = False
    interrupted: bool = False
    cancelling: int = 0

    @property
    def lease(self) -> Lease:
        return self.holding.tracked.lease


def _is_by_loss(held: _Held, error: BaseException | None) -> bool:
    """Take the cancellation for a lost lease back. Return True if it was the block's only one."""
    from asyncio import CancelledError

    alone = current_task().uncancel() <= held.cancelling
    return alone and isinstance(error, CancelledError)


class Lock:
    """A lock on keys, which may be acquired any number of times. Made by `TaskGuard.lock()`.

    `with lock as lease:` acquires it for a block. It raises `KeyBusyError` if the keys stay taken
    for `wait_s`, and at the end `LeaseLostError` if the lease was lost meanwhile. Then the block
    may have overlapped with another holder's. An exception of the block itself is raised instead.
    `async with` does the same without blocking the event loop. The other methods block it.

    Threads can share the object: each thread, and each asyncio task, has a lease of its own. With
    `token=` the lease belongs to the token. Any thread or process with that token owns it.

    taskguard renews a lease until it is released, or until this object is garbage collected.
    """

    def __init__(self, locking: Callable[[], Locking], delivery: Delivery) -> None:
        self._locking = locking
        self._delivery = delivery
        self._by_token = bool(delivery.message.id)
        # Appended to and removed from without a mutex, which a fork could leave locked.
        self._held: list[_Held] = []

    def __repr__(self) -> str:
        token = f" token={self._delivery.message.id!r}" if self._by_token else ""
        return f"<Lock {self._delivery.key}{token}>"

    def acquire(self) -> Lease | None:
        """Acquire the keys, and return the lease. Return None if they stay taken for `wait_s`.

        Raises:
            KeyAlreadyHeldError: it would wait for this thread, this token, or a body around it.
            LockServerUnavailableError, LedgerUnavailableError: a server gave no answer.
        """
        try:
            return self._acquire(of_block=False).lease
        except KeyBusyError:
            return None
        except KeyAlreadyHeldError:
            if self._delivery.policy.waits_up_to_s:
                raise
            return None

    def release(self) -> None:
        """Release the keys. With a token, also if another thread or process acquired them.

        The holder then stops renewing the lease. Its `lease.lost` is set, and no event `lost` is
        emitted.

        Raises:
            LeaseLostError: the lease was lost meanwhile. A new holder's lease stays.
            LockNotOwnedError: this thread, or this token, does not hold the keys.
        """
        held = self._mine()
        if held is not None:
            self._end(held)
        elif not (self._by_token and self._locking().release_by_token(self._delivery)):
            raise self._not_owned()

    def extend(self) -> None:
        """Renew the lease now, for a whole `ttl_s`, and check with the server that it is held.

        taskguard renews a lease by itself. Call this before a step that stops all threads of the
        process, and with a token for a lease whose holder has ended.

        Raises:
            LeaseLostError: the lease was lost meanwhile.
            LockNotOwnedError: this thread, or this token, does not hold the keys.
            LockServerUnavailableError, LedgerUnavailableError: a server gave no answer.
        """
        held = self._mine()
        if held is not None:
            held.locking.extend(held.holding)
        elif not (self._by_token and self._locking().extend_by_token(self._delivery)):
            raise self._not_owned()

    def locked(self) -> bool:
        """Return True if any holder, in any process, has one of the keys."""
        return self._locking().is_held(self._delivery)

    def owned(self) -> bool:
        """Return True if this thread, or this token, holds the keys. A server is asked."""
        held = self._mine()
        if held is not None:
            return held.locking.owns(held.holding)
        return self._by_token and self._locking().owns_by_token(self._delivery)

    def __enter__(self) -> Lease:
        held = self._acquire(of_block=True)
        held.holding.tracked.enter_body()
        return held.lease

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end(self._left())
        except (LeaseLostError, LockNotOwnedError):
            if error is None:
                raise

    async def __aenter__(self) -> Lease:
        from taskguard.run import beside  # it loads asyncio

        lost_before = self._lost_before()
        if lost_before is not None:
            self._forget(lost_before)
            await beside.run(lambda: lost_before.locking.end(lost_before.holding))
        refuse_reentry(self._delivery)
        locking, delivery = self._locking(), self._delivery
        wait_s = delivery.policy.waits_up_to_s
        waiting = Waiting(wait_s)

        def give_up(call: Future[Holding]) -> None:
            if waiting.give_up():
                locking.stop_waiting(delivery, waiting)
            else:
                locking.undo(call.result())

        if not wait_s:
            holding = await beside.run(lambda: locking.take(delivery, waiting), give_up)
            return self._began_in_task(locking, holding)
        # One coroutine of this event loop waits at the lock server, and needs a thread.
        until_s = time.monotonic() + wait_s
        try:
            async with beside.in_line((id(locking), delivery.keys), wait_s=wait_s):
                waiting.wait_s = max(0.0, until_s - time.monotonic())
                holding = await beside.run(lambda: locking.take(delivery, waiting), give_up)
        except TimeoutError:
            raise KeyBusyError(
                f"{delivery.key} is wanted by coroutines of this process that came earlier. The "
                "lock was not taken; try again later, or wait longer with wait_s.",
                key=delivery.key,
            ) from None
        return self._began_in_task(locking, holding)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        from taskguard.run import beside

        own_error = error
        try:
            held = self._left()
            self._forget(held)
            if held.interrupted and _is_by_loss(held, error):
                own_error = None
            if not await beside.run(lambda: held.locking.end(held.holding)):
                raise lost(held.holding)
        except (LeaseLostError, LockNotOwnedError) as told:
            if own_error is None:
                raise told from error

    def __del__(self) -> None:
        # The watchdog ends the renewal. A mutex must not be taken here: this thread may have it.
        for held in getattr(self, "_held", ()):
            held.holding.tracked.abandoned = True
            if held.running is not None:
                held.running.ended = True

    def _acquire(self, *, of_block: bool) -> _Held:
        lost_before = self._lost_before()
        if lost_before is not None:
            with contextlib.suppress(LeaseLostError):
                self._end(lost_before)  # the event `lost` tells of it
        refuse_reentry(self._delivery)
        locking = self._locking()
        return self._began(locking, locking.take(self._delivery), of_block=of_block)

    def _began_in_task(self, locking: Locking, holding: Holding) -> Lease:
        held, task = self._began(locking, holding, of_block=True), current_task()
        loop, held.cancelling = task.get_loop(), task.cancelling()

        def cancel() -> None:
            if not held.ended:
                held.interrupted = True
                task.cancel()

        def interrupt() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(cancel)

        holding.tracked.enter_body()
        holding.tracked.interrupt_by(interrupt)
        return held.lease

    def _began(self, locking: Locking, holding: Holding, *, of_block: bool) -> _Held:
        around = begin(holding.attempt) if of_block or not self._by_token else None
        held = _Held(self._by(), of_block, locking, holding, around)
        self._held.append(held)
        return held

    def _lost_before(self) -> _Held | None:
        """Return the caller's lease if it was lost. Raise KeyAlreadyHeldError if it was not."""
        held = self._mine()
        if held is not None and held.lease.remaining_s > 0.0:
            raise KeyAlreadyHeldError(
                f"{self!r} is acquired already, so acquire() would wait for itself. Use the lease "
                "that is held, or release it first.",
                key=self._delivery.key,
                fence=held.lease.fence or None,
            )
        return held

    def _left(self) -> _Held:
        """Return the lease of the block that ends here. Raise LockNotOwnedError if it has none.

        A block may end in another thread than it began in: a `yield` dependency of FastAPI.
        """
        by = self._by()
        blocks = [each for each in reversed(self._held) if each.of_block]
        block = next((each for each in blocks if each.by is by), next(iter(blocks), None))
        if block is not None:
            self._held.remove(block)
        held = self._mine() if block is None or block.ended else block
        if held is None:
            raise self._not_owned()
        return held

    def _end(self, held: _Held) -> None:
        self._forget(held)
        if not held.locking.end(held.holding):
            raise lost(held.holding)

    def _forget(self, held: _Held) -> None:
        """Note that the lease ends, before it does. Its block is not interrupted any more."""
        held.holding.tracked.leave_body()
        held.ended = True
        if held in self._held and not held.of_block:
            self._held.remove(held)
        if held.running is not None:
            end(held.running)

    def _mine(self) -> _Held | None:
        """Return the caller's lease. None if it has none, or if its parent process has it."""
        by = self._by()
        for each in reversed(self._held):
            if each.by is by and not each.ended and not each.lease.is_parents:
                return each
        return None

    def _by(self) -> Any:
        return None if self._by_token else current_task() or threading.current_thread()

    def _not_owned(self) -> LockNotOwnedError:
        holder = f"token {self._delivery.message.id!r}" if self._by_token else "this thread"
        return LockNotOwnedError(
            f"{self._delivery.key} is not held by {holder}: it was not acquired, or its lease has "
            "ended since.",
            key=self._delivery.key,
        )
