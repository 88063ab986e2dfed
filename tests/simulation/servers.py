"""The lock server, the database and the broker as a process sees them: calls that can fail.

Each call is sent, done at the server at one moment, and answered. Before it is sent and before it
is answered, other threads may run, and the process may be killed or paused. A call without an
answer may be done, not done, or done later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from simulation.history import ViolationError
from simulation.ledger import MemoryTransaction
from simulation.scheduler import Process
from taskguard.errors import (
    CommitUnknownError,
    LedgerUnavailableError,
    LockServerUnavailableError,
    StaleTokenError,
    TransactionRetryError,
)
from taskguard.findings import Finding
from taskguard.locks.base import Granted, Held, Hold, Holder, Traits
from taskguard.model.claims import Claim, ClaimAnswer, ClaimRequest, MessageRef, Overdue
from taskguard.model.lease import Owner
from taskguard.model.records import Seen, WorkView
from taskguard.model.states import State
from taskguard.model.workers import Worker

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["Boundary", "BrokerError", "DatabaseError", "PortLedger", "PortLocks"]

Answer = TypeVar("Answer")

_TIMEOUT_S = 0.5
_TRIES = 2  # a call without an answer is repeated once, with the same nonce


class BrokerError(Exception):
    """The broker did not confirm a message."""


class DatabaseError(Exception):
    """A body's statement failed: the connection broke, or the transaction was ended."""


class _NoAnswerError(Exception):
    """A call timed out. If `late` is set, the server will still do it."""

    def __init__(self, name: str, *, late: bool = False) -> None:
        super().__init__(name)
        self.late = late


class Boundary:
    """The point at which calls of one process leave it."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process

    def call(
        self, name: str, do: Callable[[], Answer], when_late: Callable[[], None] = lambda: None
    ) -> Answer:
        """Send the call once. Raise _NoAnswerError if the request or the answer is lost."""
        world = self.world
        world.boundary(self.process, f"{name} asked")
        lost = world.loses(name)
        if lost == "late":
            when_late()
            world.later(do)
        if lost in ("question", "late"):
            world.scheduler.sleep(_TIMEOUT_S)
            raise _NoAnswerError(name, late=lost == "late")
        try:
            answer = do()
        except ViolationError as error:
            world.violation = error  # taskguard may catch it
            raise
        world.boundary(self.process, f"{name} done")
        if lost == "answer":
            world.scheduler.sleep(_TIMEOUT_S)
            raise _NoAnswerError(name)
        return answer

    def ask(
        self, name: str, do: Callable[[], Answer], unavailable: type[Exception], tries: int = _TRIES
    ) -> Answer:
        """Send the call, and repeat it."""
        for left in reversed(range(tries)):
            try:
                return self.call(name, do)
            except _NoAnswerError:
                if not left:
                    raise unavailable(f"{name}: no answer") from None
        raise AssertionError("unreachable")


class PortLocks(Boundary):
    """The lock server, as a `LockProvider`."""

    def _ask(self, name: str, do: Callable[[], Answer]) -> Answer:
        return self.ask(f"locks.{name}", do, LockServerUnavailableError)

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        return self._ask(
            "acquire",
            lambda: self.world.locks.acquire(
                keys, owner, ttl_s=ttl_s, with_fence=with_fence, wait_s=wait_s
            ),
        )

    def acquire_promoted(
        self, key: str, owner: Owner, *, ttl_s: float, wait_s: float
    ) -> Granted | Held:
        return self._ask(
            "acquire",
            lambda: self.world.locks.acquire_promoted(key, owner, ttl_s=ttl_s, wait_s=wait_s),
        )

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        return self._ask("release", lambda: self.world.release(keys, owner))

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        return self._ask(
            "hand_over", lambda: self.world.locks.hand_over(keys, owner, to=to, ttl_s=ttl_s)
        )

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        return self._ask("renew", lambda: self.world.locks.renew(holds))

    def holders(self, key: str) -> list[Holder]:
        return self._ask("holders", lambda: self.world.locks.holders(key))

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        locks = self.world.locks
        self.world.scheduler.block(lambda: locks._is_turn(key, owner), min(timeout_s, 1.0))

    def leave_hint(self, key: str) -> bool:
        return self._ask("leave_hint", lambda: self.world.locks.leave_hint(key))

    def release_and_take_hint(self, key: str, owner: Owner) -> tuple[bool, bool]:
        """Release the key, and consume its hint. A repeated call returns True twice, because the
        first one may have done both."""
        found: list[tuple[bool, bool]] = []
        self._ask("release", lambda: found.append(self.world.release_and_take_hint(key, owner)))
        return (True, True) if len(found) > 1 else found[0]

    @property
    def traits(self) -> Traits:
        return replace(self.world.locks.traits, hints=self.world.hints)

    def check(self) -> list[Finding]:
        return []

    def close(self) -> None:
        """Do nothing."""


class PortTransaction:
    """A transaction of a process. Its body writes with `db`."""

    def __init__(self, port: PortLedger, tx: MemoryTransaction) -> None:
        self._port = port
        self.tx = tx

    @property
    def db(self) -> PortTransaction:
        return self

    def _ask(self, name: str, do: Callable[[], None]) -> None:
        try:
            self._port.call(f"tx.{name}", lambda: self._port.world.in_transaction(self.tx, do))
        except (_NoAnswerError, LedgerUnavailableError) as error:
            raise DatabaseError(name) from error

    def write(self, effect: Any) -> None:
        self._ask("write", lambda: self.tx.write(effect))

    def complete_in_block(self, claim: Claim, result_json: str | None) -> None:
        self._ask("complete", lambda: self.tx.complete_in_block(claim, result_json))

    def checkpoint(self, claim: Claim, progress_json: str) -> None:
        self._ask("checkpoint", lambda: self.tx.checkpoint(claim, progress_json))


class PortLedger(Boundary):
    """The database, as a `Ledger`."""

    def _ask(self, name: str, do: Callable[[], Answer], tries: int = _TRIES) -> Answer:
        return self.ask(f"ledger.{name}", do, LedgerUnavailableError, tries)

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        return self._ask("claim", lambda: self.world.claim(self.process, request))

    def peek(self, request: ClaimRequest) -> ClaimAnswer:
        return self._ask("peek", lambda: self.world.ledger.peek(request))

    def of_run(self, request: ClaimRequest) -> ClaimRequest:
        return self._ask("of_run", lambda: self.world.ledger.of_run(request))

    def join(self, request: ClaimRequest) -> None:
        self._ask("join", lambda: self.world.ledger.join(request))

    def fail(self, claim: Claim, error: str, **how: Any) -> bool:
        return self._ask("fail", lambda: self.world.ledger.fail(claim, error, **how))

    def give_back(self, claim: Claim, **how: Any) -> bool:
        return self._ask("give_back", lambda: self.world.ledger.give_back(claim, **how))

    def crash(self, claim: Claim, error: str) -> bool:
        return self._ask("crash", lambda: self.world.ledger.crash(claim, error))

    def end_round(self, claim: Claim, reason: str, **how: Any) -> State | None:
        return self._ask("end_round", lambda: self.world.ledger.end_round(claim, reason, **how))

    def store_result(self, claim: Claim, result_json: str) -> None:
        self._ask("store_result", lambda: self.world.ledger.store_result(claim, result_json))

    def note(self, claim: Claim, progress_json: str) -> bool:
        return self._ask("note", lambda: self.world.ledger.note(claim, progress_json))

    def uncount_crash(self, claim: Claim, **how: Any) -> None:
        self._ask("uncount_crash", lambda: self.world.ledger.uncount_crash(claim, **how))

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        return self._ask("renew", lambda: self.world.ledger.renew(claims))

    def defer(self, request: ClaimRequest, publish: Callable[[int], None]) -> bool:
        """Run the transaction around a publish. Its COMMIT may get lost."""

        def publish_and_lose(deferrals: int) -> None:
            publish(deferrals)
            raise LedgerUnavailableError("defer: the number of deferrals was not committed")

        self.world.boundary(self.process, "ledger.defer asked")
        lost = self.world.loses("ledger.defer")
        if lost in ("question", "late"):
            self.world.scheduler.sleep(_TIMEOUT_S)
            raise LedgerUnavailableError("defer: no answer")
        published = self.world.ledger.defer(request, publish_and_lose if lost else publish)
        self.world.boundary(self.process, "ledger.defer done")
        return published

    # -- transactions -------------------------------------------------------------------------

    @contextmanager
    def transaction(
        self, claim: Claim, *, look_first: bool = True, on: None = None
    ) -> Iterator[PortTransaction]:
        """Begin a transaction like `SqlTransaction`: a broken connection raises
        TransactionRetryError."""
        world = self.world
        tx = self._ask(
            "begin", lambda: world.begin(self.process, claim, look_first=look_first), tries=1
        )
        try:
            yield PortTransaction(self, tx)
        except BaseException as error:
            self.world.close(tx)
            if isinstance(error, DatabaseError):
                raise self._broken(claim) from error
            raise
        self._commit(tx, claim)

    def _commit(self, tx: MemoryTransaction, claim: Claim) -> None:
        def lost() -> None:
            self.world.keep_open(tx)

        try:
            self.call("tx.commit", lambda: self.world.commit(tx, claim), when_late=lost)
        except (_NoAnswerError, DatabaseError) as error:
            if not getattr(error, "late", False):
                # The server ends the transaction of a connection that broke.
                self.world.close(tx)
            self.world.counts["unknown outcomes"] += 1
            self._resolve(claim, error, tx)
        except BaseException:  # killed, or sent and not done
            self.world.close(tx)
            raise

    def complete_alone(self, claim: Claim, result_json: str | None) -> None:
        """Complete in one statement that commits itself. Repeat it if it was not done."""

        def do() -> None:
            tx = self.world.begin(self.process, claim, look_first=False)
            try:
                tx.complete_in_block(claim, result_json)
                self.world.commit(tx, claim)
            finally:
                self.world.close(tx)

        while True:
            try:
                self.call("ledger.complete_alone", do)
                return
            except _NoAnswerError as error:
                self.world.counts["unknown outcomes"] += 1
                try:
                    self._resolve(claim, error)
                    return
                except TransactionRetryError:
                    continue

    def _resolve(
        self, claim: Claim, error: BaseException, tx: MemoryTransaction | None = None
    ) -> None:
        try:
            view = self._ask("resolve", lambda: self.world.locked_view(claim))
        except LedgerUnavailableError as unavailable:
            raise CommitUnknownError(
                "the outcome stays unknown", key=", ".join(claim.keys), fence=claim.fence
            ) from unavailable
        mine = view is not None and (view.fence, view.owner) == (claim.fence, str(claim.owner))
        if (tx is not None and tx.committed) or (
            mine and view is not None and view.state is State.DONE
        ):
            return
        if mine and view is not None and view.state is State.PROCESSING:
            raise self._broken(claim) from error
        raise StaleTokenError("a newer holder exists", key=", ".join(claim.keys), fence=claim.fence)

    @staticmethod
    def _broken(claim: Claim) -> TransactionRetryError:
        key = ", ".join(claim.keys)
        text = "the connection broke; nothing was written"
        return TransactionRetryError(text, key=key, fence=claim.fence)

    # -- stored calls -------------------------------------------------------------------------

    def park(self, request: ClaimRequest, *, only_new: bool = False) -> bool:
        return self._ask("park", lambda: self.world.park(request, only_new=only_new))

    def park_newest(self, request: ClaimRequest, *, only_new: bool = False) -> Any:
        return self._ask("park", lambda: self.world.park_newest(request, only_new=only_new))

    def note_notified(self, work: str) -> None:
        self._ask("note_notified", lambda: self.world.ledger.note_notified(work))

    def keep(self, claim: Claim, **how: Any) -> bool:
        return self._ask("keep", lambda: self.world.ledger.keep(claim, **how))

    def leave(self, claim: Claim, **how: Any) -> bool:
        return self._ask("leave", lambda: self.world.ledger.leave(claim, **how))

    def promote_next(self, key: str, **asked: Any) -> Overdue | None:
        return self._ask("promote_next", lambda: self.world.promote_next(key, **asked))

    def look(self, **asked: Any) -> Seen:
        return self._ask("look", lambda: self.world.ledger.look(**asked))

    def expired(self, **asked: Any) -> list[Overdue]:
        return self._ask("expired", lambda: self.world.ledger.expired(**asked))

    def overdue(self, **asked: Any) -> list[Overdue]:
        return self._ask("overdue", lambda: self.world.ledger.overdue(**asked))

    def sent(self, items: Sequence[Overdue], **how: Any) -> int:
        return self._ask("sent", lambda: self.world.ledger.sent(items, **how))

    def abandon(self, work: Overdue, *, error: str) -> bool:
        return self._ask("abandon", lambda: self.world.abandon(work, error=error))

    def enqueue(self, db: None, request: ClaimRequest, **how: Any) -> str:
        """Enqueue, never late: of several statements the server does only the COMMIT by itself."""
        work = ""
        for left in reversed(range(_TRIES)):
            self.world.boundary(self.process, "ledger.enqueue asked")
            lost = self.world.loses("ledger.enqueue")
            if lost != "question":
                work = self.world.enqueue(db, request, **how)
            self.world.boundary(self.process, "ledger.enqueue done")
            if lost is None:
                return work
            self.world.scheduler.sleep(_TIMEOUT_S)
            if not left:
                raise LedgerUnavailableError("enqueue: no answer")
        raise AssertionError("unreachable")

    # -- not used by the runner --------------------------------------------------------------

    def revoke(self, work: str, *, message: str) -> bool:
        return self._ask("revoke", lambda: self.world.ledger.revoke(work, message=message))

    def expire(
        self, work: str, *, message: MessageRef, retries: int | None = None, due: bool = False
    ) -> bool:
        assert (retries, due) == (None, False), "what RQ's jobs say, which are not simulated"
        return self._ask("expire", lambda: self.world.expire(work, message))

    def view(self, work: str) -> WorkView | None:
        return self.world.ledger.view(work)

    def holds(self, keys: tuple[str, ...], owner: Owner) -> bool:
        return self._ask("holds", lambda: self.world.ledger.holds(keys, owner))

    def pause_of(self, keys: tuple[str, ...]) -> Owner | None:
        return self._ask("pause_of", lambda: self.world.ledger.pause_of(keys))

    def done_elsewhere(self, request: ClaimRequest) -> str | None:
        return self.world.ledger.done_elsewhere(request)

    def register_worker(self, worker: Worker) -> bool:
        """Do nothing: names decide nothing."""
        del worker
        return True

    def worker(self, number: str) -> None:
        """Return no name."""
        del number

    def add_counts(self, rows: Any, *, happened: Any = (), committing: Any = None) -> None:
        """Do nothing: counts decide nothing."""

    def begin_counts(self, tasks: Any) -> None:
        """Do nothing: counts decide nothing."""

    def check_schema(self, rows: Any = ()) -> None:
        """Do nothing: there is no schema."""

    def create_schema(self) -> None:
        """Do nothing: there is no schema."""

    def close(self) -> None:
        """Do nothing."""
