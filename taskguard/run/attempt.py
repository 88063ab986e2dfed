"""The runner's record of a body that runs: its claim, its transactions, and how they ended.

Guarantees: a body has one transaction at a time, and none after DONE is committed. A body that
catches the error of its transaction does not complete its work by returning.

Read next: `guard.py`, the part of it that the body sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from taskguard.errors import (
    ConfigurationError,
    TaskguardError,
    TransactionAbandonedError,
    TransactionUsageError,
)
from taskguard.model.claims import Claim, Claimed
from taskguard.model.delivery import Codec, Delivery
from taskguard.model.lease import Lease
from taskguard.run import tracing
from taskguard.run.encoding import encode
from taskguard.run.progress import Progress

if TYPE_CHECKING:
    from taskguard.ledger.ports import Effects, LedgerTransaction

__all__ = ["Attempt"]

_UNSET = object()


class Attempt:
    """A delivery's attempt at its work, or a lock's or a leader's term. Made by the runner.

    Args:
        lease: the lease on the key.
        delivery: the delivery that holds it.
        ledger: the ledger, or None with locks only.
        claimed: what the ledger granted, or None with locks only.
        codec: of results and progress.
        on_completed: called once DONE is committed.
        interrupt_by: takes the function that interrupts a body in an event loop. With
            `on_lost="interrupt"` another thread calls that function once the lease is lost.

    Attributes:
        number: 1 for the first holder of this work, higher for later ones.
        completed: True once DONE is committed.
        answered: True once the return value of the body is on record.
        never_began: True if the body was cancelled before its code began.
        progress: the progress that holders of this work have stored.
        called: results of steps whose commit failed, for the next run of the body.
        db: the connection of the open transaction, or None.
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
        self.lease = lease
        self.delivery = delivery
        self.claimed = claimed
        self.codec = codec
        self.number = claimed.attempt if claimed is not None else 1
        self.completed = False
        self.answered = False
        self.never_began = False
        self.progress = Progress(None if claimed is None else claimed.progress_json, codec)
        self.interrupt_by = interrupt_by
        self.db: Any = None
        self._ledger = ledger
        self._on_completed = on_completed
        self._open = False
        self._then: list[Callable[[], None]] = []
        self.called: dict[str, Any] = {}
        self._result: Any = _UNSET
        self._result_json: str | None = None
        # The error by which a transaction was left, until a later one of the body commits.
        self._left: tuple[str, BaseException] | None = None

    @property
    def key(self) -> str:
        """The key; several are joined with ", "."""
        return self.lease.key

    @property
    def held(self) -> set[str]:
        """The keys, and those that were requested: with `limit=3` it holds a slot of these."""
        return {*self.lease.keys, *self.delivery.keys}

    @property
    def claim(self) -> Claim | None:
        """The ledger's grant. None with locks only."""
        return None if self.claimed is None else self.claimed.claim

    @property
    def work(self) -> str:
        """The id under which the work began, whatever its guard's key is now. Each run has one."""
        began_as = None if self.claimed is None else self.claimed.began_as
        claimed = None if self.claim is None else self.claim.work
        return began_as or claimed or self.delivery.work or f"{self.delivery.task} {self.key}"

    # -- the result ---------------------------------------------------------------------------

    @property
    def has_result(self) -> bool:
        """Whether the body has set its result."""
        return self._result is not _UNSET

    @property
    def result(self) -> Any:
        """The result that the body has set; None if it has not."""
        return None if self._result is _UNSET else self._result

    @result.setter
    def result(self, value: Any) -> None:
        if self.completed:
            raise TransactionUsageError(
                f"guard.result of {self.key} was set after DONE was committed. Set it inside "
                "`with guard.transaction()`, or return the value.",
                key=self.key,
            )
        self._result_json = encode(value, self.codec, what="result", key=self.key)
        self._result = value

    # -- transactions -------------------------------------------------------------------------

    @contextmanager
    def completing(self, on: Any) -> Iterator[Any]:
        """A transaction of the body that commits DONE: `Guard.transaction()`."""
        span = tracing.span("complete", self.delivery, self.lease, self.number, later=True)
        with span, self._transaction("transaction", on) as tx:
            yield tx.db if on is None else on
            span.begin()
            tx.complete_in_block(self.required_claim.claim, self._result_json)
        self.note_completed()
        self._call_then()

    @contextmanager
    def storing(self, progress: Any, on: Any) -> Iterator[Any]:
        """A transaction of the body that commits its progress: `Guard.checkpoint()`."""
        text = self._encoded(self.progress.with_value(progress))
        with self._transaction("checkpoint", on) as tx:
            yield tx.db if on is None else on
            tx.checkpoint(self.required_claim.claim, text)
        self.progress.committed(text)
        self._call_then()

    def store_step(self, name: str, result: Any) -> None:
        """Commit the result of a step, in a transaction of its own."""
        record = self.progress.with_step(name, result)
        text = self._encoded(record, f"result of step {name!r}, with those of the other steps,")
        self.called[name] = result  # if its commit fails, the body is run again
        with self._transaction("step") as tx:
            tx.checkpoint(self.required_claim.claim, text)
        self.progress.committed(text)

    def note(self, progress: Any) -> bool:
        """Store a leader's progress without a transaction. Return False if the claim is stale."""
        assert self._ledger is not None  # noqa: S101  # there is no claim without a ledger
        text = self._encoded(self.progress.with_value(progress))
        stored = self._ledger.note(self.required_claim.claim, text)
        if stored:
            self.progress.committed(text)
        return stored

    def _encoded(self, record: dict[str, Any], what: str = "progress") -> str:
        return encode(record, self.codec, what=what, key=self.key)

    def after_commit(self, function: Callable[[], None]) -> None:
        """Call `function` once the open transaction is committed."""
        self._then.append(function)

    def _call_then(self) -> None:
        then, self._then = self._then, []
        for function in then:
            function()

    def is_on(self, db: Any) -> bool:
        """Whether `db` is the connection of the open transaction."""
        return self.db is not None and self.db is db

    @property
    def required_claim(self) -> Claimed:
        """The claim. Raise ConfigurationError if there is no ledger."""
        if self.claimed is None:
            raise ConfigurationError(
                f"{self.delivery.task or self.key}: there is no ledger, so nothing can be "
                "committed with the task. Configure one (TASKGUARD_LEDGER_URL), or leave "
                "guard.transaction() out.",
                key=self.key,
            )
        return self.claimed

    def refuse_transaction(self, name: str) -> None:
        """Raise TransactionUsageError or ConfigurationError if no transaction may begin."""
        _ = self.required_claim
        if self.completed:
            raise TransactionUsageError(
                f"guard.{name}() of {self.key} was called after DONE was committed. A body has "
                "one transaction(); commit parts before it with `with guard.checkpoint(progress)`.",
                key=self.key,
                fence=self.lease.fence,
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
                fence=self.lease.fence,
            )

    @contextmanager
    def _transaction(self, name: str, on: Any = None) -> Iterator[LedgerTransaction]:
        self.refuse_transaction(name)
        claim = self.required_claim.claim
        assert self._ledger is not None  # noqa: S101  # there is no claim without a ledger
        if self.lease.is_parents:
            self.lease.check()  # raises: a forked child holds nothing
        self._open = True
        self._then = []
        result = self._result, self._result_json
        try:
            # While the lease can be trusted, no other holder has claimed: do not look first.
            trusted = self.lease.remaining_s > 0
            with self._ledger.transaction(claim, look_first=not trusted, on=on) as tx:
                self.db = tx.db
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
            self.db = None

    # -- the end of the body ------------------------------------------------------------------

    @property
    def said_by_ledger(self) -> TaskguardError | None:
        """The ledger's error that ended the body's transaction, unless a later one committed."""
        error = None if self._left is None or self.completed else self._left[1]
        if isinstance(error, TaskguardError) and error.key in (None, self.key):
            return error
        return None

    def refuse_end(self) -> None:
        """Raise an error unless the body's end counts as success.

        It does not if the body caught the error of its transaction, and committed no other one.
        """
        if self._left is None or self.completed:
            return
        if self.said_by_ledger is not None:
            raise self.said_by_ledger
        name, error = self._left
        if not isinstance(error, Exception | GeneratorExit):
            raise error  # a shutdown
        raise TransactionAbandonedError(
            f"{type(error).__name__} ended guard.{name}() of {self.key}. The body caught it and "
            "returned as if all was well. Nothing of that block is written, so the work is not "
            "DONE. Do not catch it, or catch it inside the block. If the work is done without "
            "these writes, complete it by another `with guard.transaction(): pass`.",
            key=self.key,
            fence=self.lease.fence,
        ) from error

    def note_completed(self) -> None:
        """Note that DONE is committed."""
        self.completed = True
        self._on_completed()

    def may_have_committed(self, error: BaseException) -> bool:
        """Return True if DONE may be committed although this process got no answer.

        That is so if the interrupt of the COMMIT ended the body, not an error of its own.
        """
        if self._left is None:
            return True
        name, left = self._left
        interrupted = error is left or isinstance(error, TransactionAbandonedError)
        return name == "transaction" and interrupted

    def note_committed_unheard(self) -> None:
        """Note that DONE is committed, after an interrupt prevented that."""
        self.note_completed()
        self._call_then()

    def forget(self) -> None:
        """Forget the last run, because the body runs again under the same lease."""
        self._result, self._result_json = _UNSET, None
        self._left = None
