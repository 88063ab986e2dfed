"""The guard of a body: its key, its fencing token, and the transaction that decides.

Guarantees: writes inside `transaction()` are committed together with PROCESSING -> DONE, or not at
all. Writes inside `checkpoint()` are committed together with the progress. Does not guarantee
anything for effects elsewhere (mails, HTTP calls): pass `idempotency_key` or `fence` to them.

Every public member is for the body. The members for the runner are in `attempt.py`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from taskguard.drivers import extras_named
from taskguard.errors import ConfigurationError, TransactionUsageError
from taskguard.run.attempt import Attempt

if TYPE_CHECKING:
    import sqlalchemy as sa

    from taskguard.fenced.rows import FencedUpdate

__all__ = ["Guard", "attempt_of"]

_Lent = TypeVar("_Lent")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Guard:
    """A running body's key, lease, fencing token and transactions. The runner makes it."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def __repr__(self) -> str:
        return f"<Guard {self.key} fence={self.fence} attempt={self.attempt}>"

    @property
    def key(self) -> str:
        """The key; several are joined with ", "."""
        return self._attempt.lease.key

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, sorted."""
        return self._attempt.lease.keys

    @property
    def attempt(self) -> int:
        """1 for the first holder of this work, higher for later ones."""
        return self._attempt.number

    @property
    def completed(self) -> bool:
        """Whether DONE is committed."""
        return self._attempt.completed

    @property
    def fence(self) -> int:
        """The fencing token, a 64-bit integer that grows with every claim of the key.

        With `limit=3` it grows with every claim of the slot.
        """
        return self._attempt.lease.fence

    @property
    def lost(self) -> threading.Event:
        """Event that is set once the lease can no longer be trusted."""
        return self._attempt.lease.lost

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease may still be trusted; renewed while the body runs."""
        return self._attempt.lease.remaining_s

    def check(self) -> None:
        """Raise LeaseLostError unless the lease can be trusted at this moment."""
        if not self._attempt.completed:
            self._attempt.lease.check()

    @property
    def idempotency_key(self) -> str:
        """32 hex digits, equal in all deliveries of this work, for a payment provider."""
        return _digest(self._attempt.work)

    def idempotency_key_for(self, step: str) -> str:
        """Like `idempotency_key`, for one step of the work. 32 hex digits."""
        return _digest(f"{self._attempt.work}\0{step}")

    @property
    def progress(self) -> Any:
        """The progress that this or the last holder stored with `checkpoint()`. None if none."""
        return self._attempt.progress.value

    @property
    def result(self) -> Any:
        """The task's result, committed with DONE when set inside `transaction()`."""
        return self._attempt.result

    @result.setter
    def result(self, value: Any) -> None:
        self._attempt.result = value

    @property
    def db(self) -> sa.Connection:
        """The connection of the open transaction; with `atomic=True`, of the whole body."""
        if self._attempt.db is None:
            raise TransactionUsageError(
                f"guard.db of {self.key} is there inside `with guard.transaction()` only, or in "
                "a task with atomic=True.",
                key=self.key,
            )
        db: sa.Connection = self._attempt.db
        return db

    @overload
    def transaction(self, on: None = None) -> AbstractContextManager[sa.Connection]: ...
    @overload
    def transaction(self, on: _Lent) -> AbstractContextManager[_Lent]: ...
    def transaction(self, on: Any = None) -> AbstractContextManager[Any]:
        """A database transaction that commits this work's effects together with DONE.

        Yields a SQLAlchemy Connection (`Session(bind=db)` puts an ORM session on it), or `on`. At a
        normal end of the block, PROCESSING -> DONE is written last, and everything is committed. If
        the block raises an exception, nothing is committed.

        Args:
            on: an ORM Session or a Connection of your own to the ledger's database, by any Engine,
                or a plain connection of psycopg or sqlite3. Like `session.begin()`, the block
                begins and ends its transaction. No transaction may be open on it before.

        Raises:
            StaleTokenError: a newer holder exists; nothing was written.
            TransactionRetryError: deadlock or serialization failure; the runner runs the body
                again.
            TransactionUsageError: DONE is committed already, or a transaction is open, here or on
                `on`.
            ConfigurationError: the task has no ledger; or `on` is another database's, so that the
                two could not commit together. Use `fenced()` there.
        """
        return self._attempt.completing(on)

    @overload
    def checkpoint(
        self, progress: Any, on: None = None
    ) -> AbstractContextManager[sa.Connection]: ...
    @overload
    def checkpoint(self, progress: Any, on: _Lent) -> AbstractContextManager[_Lent]: ...
    def checkpoint(self, progress: Any, on: Any = None) -> AbstractContextManager[Any]:
        """Like `transaction(on)`, but commits JSON `progress` with the effects, and not DONE.

        A later holder finds it in `guard.progress` and goes on from there.
        """
        return self._attempt.storing(progress, on)

    def step(
        self,
        name: str,
        function: Callable[_Args, _Result],
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """`function(*args, **kwargs)`, once per work: later attempts get its stored result.

        Use it for effects elsewhere (a payment, a mail) in a body of several parts. The result is
        committed, fenced, right after the call. If the result cannot be stored, because the holder
        died or the database was down, the next attempt calls the function again. So pass
        `guard.idempotency_key_for(name)` to the other system. One record has all results of the
        work, and every step writes it anew. So use steps for parts, not for thousands of items.

        Args:
            name: a text that is different for each step, and for each turn of a loop.
            function: called with the other arguments if no attempt has stored its result yet.

        Returns:
            The result as it was stored, after a round trip through JSON.

        Raises:
            LeaseLostError: the lease cannot be trusted any more; nothing was called.
            ResultError: the result is not JSON, or too large. The call has happened.
            StaleTokenError: a newer holder exists; the result was not stored.
            TransactionUsageError: inside a transaction, or after DONE was committed.
            ConfigurationError: the task has no ledger.
            TypeError: the name is no text, or the function is async.
        """
        attempt = self._attempt
        attempt.refuse_transaction("step")
        # JSON would make a text of it, and the step would not be found again.
        if not isinstance(name, str):
            raise TypeError(f"guard.step({name!r}, …): a step's name is a text.")
        if iscoroutinefunction(function):
            raise TypeError(
                f"guard.step({name!r}, …) would not await {function!r}. Give a plain function; "
                "in a coroutine, `await asyncio.to_thread(guard.step, …)` leaves its loop free."
            )
        if name not in attempt.progress.steps:
            if name in attempt.called:
                result: Any = attempt.called[name]
            else:
                self.check()
                result = function(*args, **kwargs)
            attempt.store_step(name, result)
        stored: _Result = attempt.progress.steps[name]
        return stored

    def after_commit(self, function: Callable[[], None]) -> None:
        """Call `function` once the open transaction is committed; not if it is rolled back.

        Raises TransactionUsageError outside of a transaction.
        """
        _ = self.db
        self._attempt.after_commit(function)

    def fenced(self, statement: Any, *, column: str = "fence_token") -> FencedUpdate:
        """`statement` for rows elsewhere, so that they refuse an older holder's writes.

            shipped = update(orders).where(orders.c.id == 42).values(status="shipped")
            guard.fenced(shipped).execute(db)

        `execute(db)` takes a Connection or an ORM Session of any database. It changes the row only
        if its `fence_token` is NULL or not newer than `guard.fence`, and sets it to `guard.fence`.
        That write is not committed together with DONE, and may happen again. It never overwrites a
        newer holder's write. For writes to the ledger's own database use `transaction()`.

        Args:
            statement: SQLAlchemy's `update()` of a table or an ORM class, without `returning()`.
            column: the table's column for the fence: a nullable BigInteger.

        Raises:
            ConfigurationError: it is no update(), or the table has no such column; or the task has
                a `limit=`, and the fences of its slots cannot be compared.
        """
        with extras_named("guard.fenced()"):
            from taskguard.fenced.rows import FencedUpdate

        delivery = self._attempt.delivery
        if delivery.policy.has_slots:
            raise ConfigurationError(
                f"{delivery.task} has limit={delivery.policy.limit}: its holders are "
                "in progress at once, each with a fence of its own slot, so no row can refuse "
                "the older of two. Write in guard.transaction(), or use a key without limit=."
            )

        return FencedUpdate(statement, column=column, key=self.key, fence=self.fence)


def attempt_of(guard: Guard) -> Attempt:
    """Return the attempt of this guard.

    * `refuse_end()` raises an error unless the end of the body counts as success. If an exception
      means success for a queue, its integration calls this first.
    * `interrupt_by(cancel)` sets the function that interrupts a body in an event loop. Another
      thread calls it once the lease is lost (`on_lost="interrupt"`).
    """
    return guard._attempt  # noqa: SLF001  # this is how it is handed out
