"""What a guarded body gets: its key, its fencing token, and the transaction that decides.

Guarantees: what is written inside `transaction()` is committed together with PROCESSING -> DONE,
or not at all; inside `checkpoint()`, together with the progress. Does not guarantee anything for
effects elsewhere (mails, HTTP calls): pass `idempotency_key` or `fence` to them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from taskguard.drivers import extras_named
from taskguard.errors import (
    ConfigurationError,
    ResultError,
    TaskguardError,
    TransactionAbandonedError,
    TransactionUsageError,
)
from taskguard.model.claims import Claim, Claimed
from taskguard.model.delivery import Codec, Delivery
from taskguard.model.lease import Lease
from taskguard.run.progress import Progress

if TYPE_CHECKING:
    import sqlalchemy as sa

    from taskguard.fenced.rows import FencedUpdate
    from taskguard.ledger.ports import Effects, LedgerTransaction

__all__ = ["JSON", "MAX_RESULT_BYTES", "Guard", "current_guard", "encode", "running"]

_Lent = TypeVar("_Lent")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

MAX_RESULT_BYTES = 1_000_000


def _dumps(value: Any) -> str:
    # In ASCII, which is text in a database of any encoding; so is half of a surrogate pair.
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


JSON = Codec(dumps=_dumps, loads=json.loads)

_running: ContextVar[Guard | None] = ContextVar("taskguard_guard", default=None)


def current_guard() -> Guard:
    """The guard of the guarded body that is running here.

    Raises:
        TransactionUsageError: no guarded body is running in this thread or greenlet.
    """
    # `with tg.lock()` within a body has a guard that is no body's.
    guard = next((each for each in _around() if not each.is_lock), None)
    if guard is None:
        raise TransactionUsageError(
            "current_guard() was called outside a guarded body. Call it in the body itself, in "
            "the thread that runs it, or take `guard` as a parameter."
        )
    return guard


def guard_with(db: Any) -> Guard | None:
    """The guard, among those of the bodies around this call, whose transaction is on `db`."""
    return next((guard for guard in _around() if guard.is_on(db)), None)


def _around() -> Iterator[Guard]:
    """The guards of the bodies and locks around this call, innermost first.

    A context is copied (asyncio does for a task, `to_thread` for a thread), and the copy may
    outlive the body: guards that have ended are left out. So are those of another asyncio task,
    which goes on while this one runs.
    """
    guard = _standing(_running.get())
    task = _current_task()
    while guard is not None:
        if guard.is_around(task):
            yield guard
        guard = guard.outer


def _standing(guard: Guard | None) -> Guard | None:
    """This guard, or the innermost one around it that has not ended."""
    while guard is not None and guard.ended:
        guard = guard.enclosing
    return guard


def _current_task() -> Any:
    """The asyncio task that runs here; None where there is none, or no asyncio."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:  # noqa: SLF001  # exported
        return None
    return asyncio.current_task()


@contextmanager
def running(guard: Guard) -> Iterator[None]:
    """For the runner: `guard` is the current guard within the block.

    A lock may be left in another context than it was entered in (a `yield` dependency of FastAPI),
    or before a lock that was entered after it.
    """
    guard.ended = False
    _running.set(guard)
    try:
        yield
    finally:
        guard.ended = True
        here = _running.get()
        if here is not None:
            _running.set(_standing(here))
            here.forget_ended()


def holders_around(keys: Iterable[str]) -> list[Guard]:
    """The guards of bodies and locks around this call that hold one of the keys, or a slot of it.

    The innermost one comes first.
    """
    wanted = set(keys)
    return [guard for guard in _around() if wanted.intersection(guard.held)]


def held_keys() -> set[str]:
    """The keys that guarded bodies and locks around this call hold, or hold a slot of."""
    return {key for guard in _around() for key in guard.held}


def _size(text: str) -> int:
    """The bytes of a JSON text in UTF-8; where those are too many, counted without escapes."""
    size = len(text.encode("utf-8"))
    if size <= MAX_RESULT_BYTES:
        return size
    plain = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    return len(plain.encode("utf-8", "surrogatepass"))


def encode(value: Any, codec: Codec, *, what: str, key: str) -> str:
    """`value` as JSON text for the ledger. Raises ResultError where that cannot be."""
    try:
        text = codec.dumps(value)
        size = _size(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultError(
            f"The {what} of {key} is not JSON ({type(error).__name__}: {error}). Return plain "
            "dicts, lists, texts and numbers, or store it elsewhere and return its id.",
            key=key,
        ) from error
    # PostgreSQL's text cannot hold NUL; JSON writes it as an escape, so only raw ones matter.
    if size > MAX_RESULT_BYTES:
        raise ResultError(
            f"The {what} of {key} is {size:,} bytes of JSON; at most {MAX_RESULT_BYTES:,} are "
            "stored. Store it elsewhere and return its id.",
            key=key,
        )
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


_UNSET = object()


def _reference(task: Any) -> Callable[[], Any] | None:
    return None if task is None else weakref.ref(task)


class Guard:
    """The running body's side of its lease and its claim. Made by the runner, one per body.

    Attributes:
        attempt: 1 for the first holder of this work, higher for later ones.
        completed: whether DONE is committed.
        answered: whether the record says what the body returned.
        ended: whether the body, or the block of a lock, was left.
        enclosing: the guard that was around this one when it began, perhaps ended since.
        interrupt_by: set by integrations that run the body in an event loop: what cancels the body
            there. `on_lost="interrupt"` calls it, from another thread.
    """

    def __init__(
        self,
        *,
        lease: Lease,
        delivery: Delivery,
        ledger: Effects | None,
        claimed: Claimed | None,
        codec: Codec,
        on_completed: Callable[[], None] = lambda: None,
        interrupt_by: Callable[[Callable[[], None]], None] = lambda _: None,
    ) -> None:
        self._lease = lease
        self._delivery = delivery
        self._ledger = ledger
        self._claimed = claimed
        self._codec = codec
        self._on_completed = on_completed
        self.interrupt_by = interrupt_by
        self.enclosing = _standing(_running.get())
        self._task = _reference(_current_task())
        self.ended = False
        self._open = False
        self._db: Any = None
        self._then: list[Callable[[], None]] = []
        self._result: Any = _UNSET
        self._result_json: str | None = None
        self.attempt = claimed.attempt if claimed is not None else 1
        self._called: dict[str, Any] = {}
        self.completed = False
        self.answered = False
        # The error by which a transaction was left, until a later one of the body commits.
        self._left: tuple[str, BaseException] | None = None

    def __repr__(self) -> str:
        return f"<Guard {self.key} fence={self.fence} attempt={self.attempt}>"

    @property
    def key(self) -> str:
        """The key; several are joined with ", "."""
        return self._lease.key

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, sorted."""
        return self._lease.keys

    @property
    def held(self) -> set[str]:
        """The keys, and those that were asked for: with `limit=3` it holds one of their slots."""
        return {*self.keys, *self._delivery.keys}

    @property
    def fence(self) -> int:
        """The fencing token: 64 bits, grows with every claim of the key; with `limit=3`, of the
        slot."""
        return self._lease.fence

    @property
    def lost(self) -> threading.Event:
        """Set once the lease can no longer be trusted."""
        return self._lease.lost

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease may still be trusted; renewed while the body runs."""
        return self._lease.remaining_s

    def check(self) -> None:
        """Raise LeaseLostError unless the lease can be trusted at this moment."""
        if not self.completed:
            self._lease.check()

    @property
    def idempotency_key(self) -> str:
        """Stable for this work over all its deliveries: for a payment provider. 32 hex digits."""
        return _digest(self._work)

    def idempotency_key_for(self, step: str) -> str:
        """Like `idempotency_key`, for one step of the work. 32 hex digits."""
        return _digest(f"{self._work}\0{step}")

    @property
    def _work(self) -> str:
        began_as = None if self._claimed is None else self._claimed.began_as
        return began_as or self._delivery.work or f"{self._delivery.task} {self.key}"

    @functools.cached_property
    def _progress(self) -> Progress:
        return Progress(None if self._claimed is None else self._claimed.progress_json, self._codec)

    @property
    def progress(self) -> Any:
        """What the last holder, or this one, stored with `checkpoint()`; None if nothing."""
        return self._progress.value

    @property
    def result(self) -> Any:
        """The task's result, committed with DONE when set inside `transaction()`."""
        return None if self._result is _UNSET else self._result

    @result.setter
    def result(self, value: Any) -> None:
        if self.completed:
            raise TransactionUsageError(
                f"guard.result of {self.key} was set after DONE was committed. Set it inside "
                "`with guard.transaction()`, or return the value.",
                key=self.key,
            )
        self._result_json = encode(value, self._codec, what="result", key=self.key)
        self._result = value

    @property
    def has_result(self) -> bool:
        """Whether `result` was set."""
        return self._result is not _UNSET

    @property
    def db(self) -> sa.Connection:
        """The connection of the open transaction; with `atomic=True`, of the whole body."""
        if self._db is None:
            raise TransactionUsageError(
                f"guard.db of {self.key} is there inside `with guard.transaction()` only, or in "
                "a task with atomic=True.",
                key=self.key,
            )
        db: sa.Connection = self._db
        return db

    @overload
    def transaction(self, on: None = None) -> AbstractContextManager[sa.Connection]: ...
    @overload
    def transaction(self, on: _Lent) -> AbstractContextManager[_Lent]: ...
    @contextmanager
    def transaction(self, on: Any = None) -> Iterator[Any]:
        """A database transaction that commits this work's effects together with DONE.

        Yields a SQLAlchemy Connection (`Session(bind=db)` puts an ORM session on it), or `on`. Left
        normally, PROCESSING -> DONE is written last and everything is committed; left by an
        exception, nothing is.

        Args:
            on: an ORM Session or a Connection of your own, by whatever Engine it reaches the
                ledger's database, or a plain connection of psycopg or sqlite3. As by
                `session.begin()`, the block begins its transaction and ends it: no transaction may
                be open on it before.

        Raises:
            StaleTokenError: a newer holder exists; nothing was written.
            TransactionRetryError: deadlock or serialization failure; the runner runs the body
                again.
            TransactionUsageError: DONE is committed already, or a transaction is open, here or on
                `on`.
            ConfigurationError: the task has no ledger, or `on` is another database's: the two
                could not commit together. Use `fenced()` there.
        """
        with self._transaction("transaction", on) as tx:
            yield tx.db if on is None else on
            tx.complete_in_block(self._standing.claim, self._result_json)
        self.note_completed()
        self._call_then()

    @overload
    def checkpoint(
        self, progress: Any, on: None = None
    ) -> AbstractContextManager[sa.Connection]: ...
    @overload
    def checkpoint(self, progress: Any, on: _Lent) -> AbstractContextManager[_Lent]: ...
    @contextmanager
    def checkpoint(self, progress: Any, on: Any = None) -> Iterator[Any]:
        """Like `transaction(on)`, but commits JSON `progress` with the effects, and not DONE.

        A later holder finds it in `guard.progress` and goes on from there.
        """
        record = self._progress.with_value(progress)
        progress_json = encode(record, self._codec, what="progress", key=self.key)
        with self._transaction("checkpoint", on) as tx:
            yield tx.db if on is None else on
            tx.checkpoint(self._standing.claim, progress_json)
        self._progress.committed(progress_json)
        self._call_then()

    def note(self, progress: Any) -> bool:
        """For a leader: `checkpoint()` without a transaction. False if the claim does not stand."""
        assert self._ledger is not None  # noqa: S101  # there is no claim without a ledger
        record = self._progress.with_value(progress)
        progress_json = encode(record, self._codec, what="progress", key=self.key)
        stored = self._ledger.note(self._standing.claim, progress_json)
        if stored:
            self._progress.committed(progress_json)
        return stored

    def step(
        self,
        name: str,
        function: Callable[_Args, _Result],
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """`function(*args, **kwargs)`, once per work: later attempts get its stored result.

        For what happens elsewhere (a payment, a mail) in a body of several parts. The result is
        committed, fenced, right after the call. If it cannot be stored (its holder died in between,
        or the database went away) the next one calls again, so hand
        `guard.idempotency_key_for(name)` to whoever does it. All results of a work stand in one
        record, which every step writes anew: steps are for parts, not for thousands of items.

        Args:
            name: a text that tells the work's steps apart; in a loop each turn needs one.
            function: called with the other arguments if no attempt has got its result stored yet.

        Returns:
            The result as it was stored: what JSON makes of it.

        Raises:
            LeaseLostError: the lease cannot be trusted any more; nothing was called.
            ResultError: the result is not JSON, or too large. The call has happened.
            StaleTokenError: a newer holder exists; the result was not stored.
            TransactionUsageError: inside a transaction, or after DONE was committed.
            ConfigurationError: the task has no ledger.
            TypeError: the name is no text, or the function is async.
        """
        self._refuse_transaction("step")
        # JSON would make a text of it, and the step would not be found again.
        if not isinstance(name, str):
            raise TypeError(f"guard.step({name!r}, …): a step's name is a text.")
        if iscoroutinefunction(function):
            raise TypeError(
                f"guard.step({name!r}, …): nobody would await {function!r}. Give a plain function; "
                "in a coroutine, `await asyncio.to_thread(guard.step, …)` leaves its loop free."
            )
        if name not in self._progress.steps:
            if name in self._called:
                result: Any = self._called[name]
            else:
                self.check()
                result = function(*args, **kwargs)
            record = self._progress.with_step(name, result)
            what = f"result of step {name!r}, with those of the other steps,"
            text = encode(record, self._codec, what=what, key=self.key)
            self._called[name] = result  # if its commit fails, the body is run again
            with self._transaction("step") as tx:
                tx.checkpoint(self._standing.claim, text)
            self._progress.committed(text)
        stored: _Result = self._progress.steps[name]
        return stored

    def after_commit(self, function: Callable[[], None]) -> None:
        """Call `function` once the open transaction is committed; not if it is rolled back.

        Raises TransactionUsageError outside of a transaction.
        """
        _ = self.db
        self._then.append(function)

    def _call_then(self) -> None:
        then, self._then = self._then, []
        for function in then:
            function()

    def is_on(self, db: Any) -> bool:
        """Whether `db` is the connection of the open transaction."""
        return self._db is not None and self._db is db

    def fenced(self, statement: Any, *, column: str = "fence_token") -> FencedUpdate:
        """`statement` for rows elsewhere, so that they refuse an older holder's writes.

            shipped = update(orders).where(orders.c.id == 42).values(status="shipped")
            guard.fenced(shipped).execute(db)

        `execute(db)` takes a Connection or an ORM Session of any database, changes the row only if
        its `fence_token` is NULL or not newer than `guard.fence`, and leaves `guard.fence` there.
        That write is not committed together with DONE, and may happen again; it never happens over
        a newer holder's. For writes to the ledger's own database use `transaction()`.

        Args:
            statement: SQLAlchemy's `update()` of a table or an ORM class, without `returning()`.
            column: the table's column for the fence: a nullable BigInteger.

        Raises:
            ConfigurationError: it is no update(), or the table has no such column; or the task has
                a `limit=`, whose holders have fences that say nothing of each other.
        """
        with extras_named("guard.fenced()"):
            from taskguard.fenced.rows import FencedUpdate

        if self._delivery.policy.limit > 1:
            raise ConfigurationError(
                f"{self._delivery.task} has limit={self._delivery.policy.limit}: its holders are "
                "at work at once, each with a fence of its own slot, so no row can refuse the "
                "older of two. Write in guard.transaction(), or guard by a key that one holds at "
                "a time."
            )

        return FencedUpdate(statement, column=column, key=self.key, fence=self.fence)

    @property
    def _standing(self) -> Claimed:
        if self._claimed is None:
            raise ConfigurationError(
                f"{self._delivery.task or self.key}: there is no ledger, so nothing can be "
                "committed with the task. Configure one (TASKGUARD_LEDGER_URL), or leave "
                "guard.transaction() out.",
                key=self.key,
            )
        return self._claimed

    def _refuse_transaction(self, name: str) -> None:
        """Raise TransactionUsageError or ConfigurationError where no transaction can begin."""
        _ = self._standing
        if self.completed:
            raise TransactionUsageError(
                f"guard.{name}() of {self.key} was called after DONE was committed. A body has "
                "one transaction(); commit parts before it with `with guard.checkpoint(progress)`.",
                key=self.key,
                fence=self.fence,
            )
        if self._open:
            advice = (
                "Call it before: its result is committed by itself."
                if name == "step"
                else "Use the connection that is open."
            )
            raise TransactionUsageError(
                f"guard.{name}() of {self.key} was called inside a transaction. {advice}",
                key=self.key,
                fence=self.fence,
            )

    @contextmanager
    def _transaction(self, name: str, on: Any = None) -> Iterator[LedgerTransaction]:
        self._refuse_transaction(name)
        claim = self._standing.claim
        assert self._ledger is not None  # noqa: S101  # there is no claim without a ledger
        if self._lease.is_parents:
            self._lease.check()  # raises: a forked child holds nothing
        self._open = True
        self._then = []
        result = self._result, self._result_json
        try:
            # While the lease can be trusted nobody else can have claimed: no need to look.
            trusted = self.remaining_s > 0
            with self._ledger.transaction(claim, look_first=not trusted, on=on) as tx:
                self._db = tx.db
                yield tx
        except BaseException as error:
            self._left = name, error
            self._result, self._result_json = result
            raise
        else:
            # A step's result is committed by itself: it is not lost with the body's own
            # transaction.
            if name != "step" or (self._left is not None and self._left[0] == "step"):
                self._left = None
        finally:
            self._open = False
            self._db = None

    # -- for the runner -----------------------------------------------------------------------

    @property
    def claim(self) -> Claim | None:
        """What the ledger granted; None with locks only."""
        return None if self._claimed is None else self._claimed.claim

    @property
    def is_lock(self) -> bool:
        """Whether this is a plain lock's or a leader's, and no body's."""
        return self._delivery.is_lock

    @property
    def outer(self) -> Guard | None:
        """The guard of the guarded body around this one, which has not ended."""
        return _standing(self.enclosing)

    def forget_ended(self) -> None:
        """Drop the references to enclosing guards that have ended."""
        guard: Guard | None = self
        while guard is not None:
            following = guard.outer
            guard.enclosing = following
            guard = following

    def is_around(self, task: Any) -> bool:
        """Whether a call in the asyncio task `task` runs within this guard's body.

        None stands for no task: then it does, as in a thread that the body waits for (`to_thread`).
        """
        mine = None if self._task is None else self._task()
        return mine is None or task is None or mine is task

    @property
    def said_by_ledger(self) -> TaskguardError | None:
        """The error by which the ledger ended the body's transaction, if no later one committed."""
        error = None if self._left is None or self.completed else self._left[1]
        if isinstance(error, TaskguardError) and error.key in (None, self.key):
            return error
        return None

    def refuse_end(self) -> None:
        """Raise unless the body's end may be taken for DONE.

        A body that caught the error that ended its transaction is not one that had nothing to
        write.
        """
        if self._left is None or self.completed:
            return
        if self.said_by_ledger is not None:
            raise self.said_by_ledger
        name, error = self._left
        if not isinstance(error, Exception | GeneratorExit):
            raise error  # a shutdown
        raise TransactionAbandonedError(
            f"The body of {self.key} left guard.{name}() by {type(error).__name__}, caught that, "
            "and ended as if all was well. Nothing of that block is written, so the work is not "
            "DONE. Let the exception go on, or catch it inside the block; if the work is done "
            "without those writes, say so by another `with guard.transaction(): pass`.",
            key=self.key,
            fence=self.fence,
        ) from error

    def note_completed(self) -> None:
        """DONE is committed."""
        self.completed = True
        self._on_completed()

    def may_have_committed(self, error: BaseException) -> bool:
        """Whether DONE may be committed though nobody has heard of it.

        That is, whether the body ended by what interrupted the COMMIT, not by an error of its own.
        """
        if self._left is None:
            return True
        name, left = self._left
        interrupted = error is left or isinstance(error, TransactionAbandonedError)
        return name == "transaction" and interrupted

    def note_committed_unheard(self) -> None:
        """Note that DONE is committed, which an interrupt kept this process from noting."""
        self.note_completed()
        self._call_then()

    def forget_attempt(self) -> None:
        """The body is going to run again under the same lease."""
        self._result, self._result_json = _UNSET, None
        self._left = None
