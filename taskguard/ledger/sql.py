"""The ledger on taskguard's own tables, on PostgreSQL, MariaDB, MySQL and SQLite.

Guarantees what `ports.py` says. Every later change of a claim is one conditional statement that
names the old state, the fence and the owner. Times are µs since 1970 by the database's clock.
What databases differ in is in `connections/dialects/`.
How a claim is taken, completed and renewed is in `statements/`.

Does not guarantee speed on SQLite: one writer at a time, so an open transaction stops the
renewals of others. For one machine.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import sqlalchemy as sa

from taskguard.errors import (
    CallTooLargeError,
    ConfigurationError,
    LedgerUnavailableError,
    TransactionRetryError,
)
from taskguard.findings import Finding
from taskguard.ledger import endings, operator, outbox
from taskguard.ledger.connections.database import WRITE_LOCK_S, Database, LockTimeoutError
from taskguard.ledger.decisions import CLAIMABLE
from taskguard.ledger.lines import newest, reading, relay
from taskguard.ledger.messages import raise_deferrals
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.own_rows.guarded_row import GuardedRow
from taskguard.ledger.records import overdue_of
from taskguard.ledger.refusals import stale
from taskguard.ledger.retention import purge
from taskguard.ledger.schema import creation
from taskguard.ledger.schema.identity import Identity
from taskguard.ledger.schema.privileges import check_privileges, check_privileges_on_row
from taskguard.ledger.schema.upgrades import expect_version, statements_from, upgrade, version_in
from taskguard.ledger.transactions.core import GuardedTransaction, Transactions
from taskguard.ledger.transactions.external import on_external
from taskguard.locks.base import Holder
from taskguard.model.bounds import NO_RATES, Bounds, Rate
from taskguard.model.claims import (
    Answer,
    Busy,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    DeclaredRow,
    MessageRef,
    Overdue,
    ParkedNewest,
    RowRef,
)
from taskguard.model.lease import Owner
from taskguard.model.policy import DAY_S, MOST_ROWS, check_number
from taskguard.model.records import Once, Purged, Seen, Waiting, WorkView
from taskguard.model.states import EXPIRED, Decision, State

if TYPE_CHECKING:
    from taskguard.ledger.ports import LentConnection

__all__ = ["SqlLedger"]

# In the beginning and at the end of a stored call.
_QUEUE = re.compile(r'"queue": "([^"\\]+)"')
_APP = re.compile(r', "app": ("(?:[^"\\]|\\.)*")\}$')
_LARGE_CALL_CHARS = 100_000  # smaller ones fit everywhere


class SqlLedger:
    """A `Ledger` on PostgreSQL, MariaDB, MySQL or SQLite.

    Args:
        database: a SQLAlchemy URL, or an Engine of the user's own, whose settings stay as they
            are.
        lock_timeout_s: how many seconds a claim waits for a row lock before it counts as busy; on
            MariaDB and MySQL whole seconds, at least one. 0.25 by default.
        idle_in_transaction_s: PostgreSQL, and MariaDB unless the Engine is the user's, end a
            guarded transaction that idles for so many seconds, so that a frozen holder's row locks
            end.
        resolve_timeout_s: for how many seconds the outcome of an unanswered COMMIT is asked for; 10
            by default.
        one_statement: False claims, completes and renews in several statements on PostgreSQL and
            MariaDB, too.
        pooled: False closes each connection after its use, so that the database can be dropped
            at any time, as at the end of tests; an Engine of the user's own keeps its pool.
    """

    def __init__(
        self,
        database: Any,
        *,
        lock_timeout_s: float = 0.25,
        idle_in_transaction_s: float = 60.0,
        resolve_timeout_s: float = 10.0,
        one_statement: bool = True,
        pooled: bool = True,
    ) -> None:
        check_number("lock_timeout_s", lock_timeout_s, at_least=0, at_most=DAY_S)
        check_number("idle_in_transaction_s", idle_in_transaction_s, at_least=0.001, at_most=DAY_S)
        check_number("resolve_timeout_s", resolve_timeout_s, at_least=0, at_most=DAY_S)
        self._database = Database(database, lock_timeout_s=lock_timeout_s, pooled=pooled)
        self._idle_s = idle_in_transaction_s
        self._identity = Identity(self._database)
        # Declarations of users' rows whose tables were found to be as declared.
        self._checked: WeakSet[GuardedRow] = WeakSet()
        self._transactions = Transactions(
            self._database,
            one_statement=one_statement,
            idle_in_transaction_s=idle_in_transaction_s,
            resolve_timeout_s=resolve_timeout_s,
        )

    def __repr__(self) -> str:
        return f"<SqlLedger {self._database.place}>"

    @property
    def database(self) -> Database:
        """Its connections, for what else stands in the same database."""
        return self._database

    # -- claims -------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one atomic step, whether this delivery may run."""
        if request.row is not None:
            self._check_own(request.row)
        if request.call is not None:
            self._check_call(request)
        try:
            return self._database.twice(lambda: self._transactions.statements.claim(request))
        except (LockTimeoutError, TransactionRetryError):
            return Busy(None, None, same_work=False, started=True)

    def peek(self, request: ClaimRequest) -> ClaimAnswer:
        """What a claim would find, without claiming."""
        if request.row is not None:
            self._check_own(request.row)
        seen = self._database.twice(lambda: self._transactions.statements.peek(request))
        row = seen.row
        if seen.decision not in CLAIMABLE and seen.decision is not Decision.BURY:
            return seen.answer(request)
        return Busy(None, None, same_work=False, started=row is not None and row.attempts > 0)

    def _check_own(self, row: RowRef) -> None:
        """Check the table of the user's own row, once in a process."""
        declared = rows.declared_of(row)
        if declared not in self._checked:
            self._database.twice(lambda: self._check_rows([declared]))

    def _check_call(self, request: ClaimRequest) -> None:
        """Raise CallTooLargeError for a call that is too large, which would look like an outage."""
        call = request.call
        if call is None or len(call) < _LARGE_CALL_CHARS:
            return

        def fits() -> bool:
            with self._database.transaction() as db:
                return self._database.dialect.call_fits(db, call)

        if not self._database.twice(fits):
            key = ", ".join(request.keys)
            raise CallTooLargeError(
                f"{request.task} {key}: its arguments make a call of {len(call):,} bytes, which "
                f"{self._database.place} cannot store with the work (recoverable=True, enqueue()). "
                "Nothing was run or written. Store the data elsewhere and pass its id.",
                key=key,
            )

    # -- the holder's transactions ------------------------------------------------------------

    def transaction(
        self, claim: Claim, *, look_first: bool = True, on: Any = None
    ) -> GuardedTransaction:
        """A transaction for the holder's writes; see `ports.py`."""
        return self._transactions.open(claim, on=on, look_first=look_first)

    def complete(self, claim: Claim, result_json: str | None) -> None:
        """PROCESSING -> DONE in a transaction of its own."""
        completed = self._complete_alone(claim, result_json)
        if completed:
            return
        if completed is False and claim.row is None:
            raise stale(claim)
        # A transaction says what became of the user's row.
        try:
            self._complete_in_transaction(claim, result_json)
        except TransactionRetryError:  # nothing was committed; only the completion is tried again
            self._complete_in_transaction(claim, result_json)

    def _complete_in_transaction(self, claim: Claim, result_json: str | None) -> None:
        def complete() -> None:
            with self._transactions.open(claim, of_body=False) as tx:
                tx.complete(claim, result_json)

        self._database.twice(complete)

    def _complete_alone(self, claim: Claim, result_json: str | None) -> bool | None:
        try:
            return self._transactions.statements.complete_alone(claim, result_json)
        except (LedgerUnavailableError, TransactionRetryError) as error:
            try:
                self._transactions.resolve(claim, error)
            except TransactionRetryError:
                return self._transactions.statements.complete_alone(claim, result_json)
            return True

    # -- small changes ------------------------------------------------------------------------

    def store_result(self, claim: Claim, result_json: str) -> None:
        """Store the result of a work that this claim completed."""
        self._database.twice(lambda: self._transactions.statements.store_result(claim, result_json))

    def note(self, claim: Claim, progress_json: str) -> bool:
        """Store progress of a work that this claim holds, by itself. False if it does not."""
        statements = self._transactions.statements
        return self._database.twice(lambda: statements.note(claim, progress_json))

    def fail(self, claim: Claim, error: str) -> bool:
        """PROCESSING -> FAILED; ends the lease."""
        return endings.fail(self._database, claim, error)

    def give_back(self, claim: Claim) -> bool:
        """PROCESSING -> NEW; ends the lease."""
        return endings.give_back(self._database, claim)

    def crash(self, claim: Claim, error: str) -> bool:
        """PROCESSING without a lease: the next claim is a takeover."""
        return endings.crash(self._database, claim, error)

    def end_round(self, claim: Claim, reason: str, *, most: int) -> State | None:
        """PROCESSING -> NEW, the `most`th time in a row FAILED; ends the lease."""
        if not endings.end_round(self._database, claim, reason, most=most):
            return None
        view = None if claim.work is None else self.view(claim.work)
        return None if view is None else view.state

    def uncount_crash(self, claim: Claim) -> None:
        """Uncount this holder's crash, once."""
        endings.uncount_crash(self._database, claim)

    def revoke(self, work: str, *, message: str) -> bool:
        """NEW, PROCESSING or FAILED of this message -> FAILED, final."""
        return endings.revoke(self._database, work, message=message)

    def expire(
        self,
        work: str,
        *,
        message: MessageRef,
        retries: int | None = None,
        due: bool = False,
        error: str = EXPIRED,
    ) -> bool:
        """Work that nobody is at, of a message that has expired -> FAILED, and out of its line."""
        return endings.expire(
            self._database, work, message=message, retries=retries, due=due, error=error
        )

    # -- renewals -----------------------------------------------------------------------------

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        """Renew many claims; rows that somebody has locked are skipped."""
        return self._database.twice(lambda: self._transactions.statements.renew(claims))

    # -- deferrals ----------------------------------------------------------------------------

    def defer(self, request: ClaimRequest, publish: Callable[[int], None]) -> bool:
        """Publish the message again under its row lock, then commit its number of deferrals."""
        deferrals = request.message.deferrals + 1
        if request.work is None:  # a plain lock: no claim of it asks for numbers
            publish(deferrals)
            return True
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            now_us = self._database.now_us(db)
            if not raise_deferrals(
                self._database, db, request.message, deferrals, work=request.work, now_us=now_us
            ):
                return False
            with self._database.elsewhere_meanwhile(db):
                publish(deferrals)
            return True

    # -- for people ---------------------------------------------------------------------------

    def view(self, work: str) -> WorkView | None:
        """A work's record."""
        return operator.view(self._database, work)

    def holds(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Whether the owner has one of these keys, by a claim that has not ended."""
        return operator.holds(self._database, keys, owner)

    def done_elsewhere(self, request: ClaimRequest) -> str | None:
        """Another work of the same task that this message has done; None if there is none."""
        return operator.done_elsewhere(self._database, request)

    def list_work(self, state: State, *, limit: int = 100) -> list[WorkView]:
        """The records of all work in a state, what started last first."""
        return operator.list_work(self._database, state, limit=limit)

    def waiting(self, key: str | None = None, *, limit: int = 100) -> list[Waiting]:
        """Who waits in the line of a key, or of each, the first of them first."""
        check_number("limit", limit, at_least=1, at_most=MOST_ROWS, whole=True)
        return self._database.twice(lambda: reading.waiting(self._database, key, limit=limit))

    def requeue(self, work: str, *, reason: str) -> bool:
        """DEAD or FAILED -> NEW: its next delivery runs it. False if it is in another state.

        Its messages' numbers are forgotten, so that the same message may be sent again, and its
        fingerprint, so that one with other arguments may.
        """
        return operator.requeue(self._database, work, reason=reason)

    def holders(self, key: str) -> list[Holder]:
        """Return the holders of a key whose leases stand: one, or those of its slots."""
        return operator.holders(self._database, key)

    def release(self, key: str, *, fence: int, owner: str) -> bool:
        """End the lease of a holder that is known to be gone. False if it is not the holder.

        Safe if the holder is alive after all: it renews the lease, and its commit is refused only
        once somebody else has claimed. The next delivery takes its work over, which counts as a
        crash.
        """
        return operator.release(self._database, key, fence=fence, owner=owner)

    # -- work whose call is stored ------------------------------------------------------------

    def enqueue(
        self,
        db: sa.Connection | None,
        request: ClaimRequest,
        *,
        due_in_s: float = 5.0,
        once: Once | None = None,
    ) -> None:
        """Write work with its call as NEW, in the transaction of `db`, which is the user's.

        Work that is known stays as it is, unless it failed, or the user's own row was set back:
        then it is NEW again. Work that is NEW, or whose lease has run out, gets the call if it has
        none.

        Args:
            db: a connection to the ledger's database; None: in a transaction of its own.
            request: keys, work, task, message and call.
            due_in_s: from when on its message counts as not sent.
            once: what to do where the work is waiting or in progress; None: leave it as it is.

        Raises:
            CallTooLargeError: the call cannot be stored there.
            ConfigurationError: `db` is not of the ledger's database.
        """
        self._check_call(request)
        if db is not None:
            self._identity.require(db, work=str(request.work))
            outbox.write(self._database, db, request, due_in_s=due_in_s, once=once)
            return

        def write() -> None:
            with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as own:
                outbox.write(self._database, own, request, due_in_s=due_in_s, once=once)

        self._database.twice(write)

    def enqueue_external(
        self,
        external: LentConnection,
        request: ClaimRequest,
        *,
        due_in_s: float = 5.0,
        once: Once | None = None,
    ) -> None:
        """`enqueue()` in the transaction that another library has open on `external`.

        Raises ConfigurationError if that is another database.
        """
        if external.kind != self._database.engine.dialect.name:
            raise ConfigurationError(
                f"{request.work} was enqueued in a transaction on {external.kind}, and the ledger "
                f"is in {self._database.place}: the two do not commit together."
            )
        self._check_call(request)
        with on_external(self._database.engine, external) as db:
            self._identity.require(db, work=str(request.work))
            outbox.write(self._database, db, request, due_in_s=due_in_s, once=once)

    def overdue(
        self,
        *,
        limit: int = 1000,
        after: Overdue | None = None,
        work: str | None = None,
        parked: bool | None = None,
    ) -> list[Overdue]:
        """Work that is overdue; see `outbox.py`."""
        return self._database.twice(
            lambda: outbox.overdue(
                self._database, limit=limit, after=after, work=work, parked=parked
            )
        )

    def sent(
        self, items: Sequence[Overdue], *, again_after_s: float | None, counted: bool = True
    ) -> int:
        """Note that the messages of these were sent again; see `ports.py`."""
        return self._database.twice(
            lambda: outbox.sent(self._database, items, again_after_s=again_after_s, counted=counted)
        )

    def abandon(self, work: Overdue, *, error: str) -> bool:
        """NEW, or PROCESSING beyond its lease -> FAILED; False if it changed since it was read."""
        text = endings.storable(self._database, error)
        return self._database.twice(lambda: outbox.abandon(self._database, work, error=text))

    # -- work in line for its key -------------------------------------------------------------

    def park(self, request: ClaimRequest, *, only_new: bool = False) -> bool:
        """Store the work with its call in the line of its key; False if it is not to wait."""
        self._check_call(request)
        statements = self._transactions.statements
        return self._database.twice(lambda: statements.park(request, only_new=only_new))

    def park_newest(
        self, request: ClaimRequest, *, only_new: bool = False
    ) -> ParkedNewest | Answer | None:
        """The same as the only one of its task that waits for the key; see `ports.py`."""
        self._check_call(request)
        return self._database.twice(lambda: newest.park(self._database, request, only_new=only_new))

    def told(self, work: str) -> None:
        """Note that the caller of work that was superseded while it waited is being told so."""
        self._database.twice(lambda: newest.told(self._database, work))

    def call_next(
        self,
        key: str,
        *,
        expected_s: float,
        app: str = "",
        queues: Sequence[str] | None = None,
        bounds: Bounds | None = None,
        ahead_s: float | None = None,
        rates: Mapping[str, Rate | None] = NO_RATES,
    ) -> Overdue | None:
        """Note that the first in line is called, if the key is free; see `ports.py`."""
        call = functools.partial(
            self._transactions.statements.call_next,
            key,
            app=app,
            queues=queues,
            expected_s=expected_s,
            bounds=bounds,
            ahead_s=ahead_s,
            rates=rates,
        )
        found = self._database.twice(call)
        return None if found is None else overdue_of(found)

    def expired(
        self, *, app: str = "", queues: Sequence[str] | None = None, limit: int = 1000
    ) -> list[Overdue]:
        """Who waits in a line, and has expired, to be sent for that; see `ports.py`."""
        found = self._database.twice(
            lambda: relay.expired(self._database, app=app, queues=queues, limit=limit)
        )
        return [overdue_of(each) for each in found]

    def keep(self, claim: Claim, *, retries: int, call: str | None, due_in_s: float) -> bool:
        """The message of FAILED work that keeps its place was sent once more, as this call."""
        statements = self._transactions.statements
        return self._database.twice(
            lambda: statements.keep(claim, retries=retries, call=call, due_in_s=due_in_s)
        )

    def leave(self, claim: Claim, *, retries: int) -> bool:
        """FAILED work that keeps its place gives it up: its message does not come again."""
        statements = self._transactions.statements
        return self._database.twice(lambda: statements.leave(claim, retries=retries))

    def standing(self, *, most: int = 10_000) -> dict[tuple[str, str], int]:
        """How many messages wait in lines, by their namespace and the kind of their queue.

        At most `most` messages are read.
        """
        found: dict[tuple[str, str], int] = {}
        for begin, end in self._database.twice(lambda: reading.standing(self._database, most=most)):
            queue, app = _QUEUE.search(begin), _APP.search(end)
            if queue is not None:
                name = json.loads(app[1]) if app is not None else "", queue[1]
                found[name] = found.get(name, 0) + 1
        return found

    def has_lines(self, *, app: str = "", queues: Sequence[str] | None = None) -> bool:
        """Return True if a message of this namespace, and of these queues (None: any), waits."""
        return self._database.twice(lambda: relay.has_lines(self._database, app=app, queues=queues))

    def look(
        self,
        *,
        app: str = "",
        queues: Sequence[str] | None = None,
        ahead_s: float = 0.0,
        after: str | None = None,
        most: int = 2000,
        announce: str | None = None,
        rates: Mapping[str, Rate | None] = NO_RATES,
    ) -> Seen:
        """What a relay has to do; see `ports.py`."""
        return self._database.twice(
            lambda: outbox.look(
                self._database,
                app=app,
                queues=queues,
                ahead_s=ahead_s,
                after=after,
                most=most,
                announce=announce,
                rates=rates,
            )
        )

    def purge(self, *, older_than_s: float, batch: int = 1000, dead: bool = False) -> Purged:
        """Forget work that ended so long ago, its messages, and keys whose lease ended before.

        Args:
            older_than_s: in seconds; not shorter than the longest `retention_s` of the tasks, for
                a message of forgotten work that is younger than that would run it again.
            batch: how many rows go in one transaction.
            dead: DEAD work, too, which waits for a person. NEW and PROCESSING work never goes.

        Raises:
            ConfigurationError: `older_than_s` is less than an hour.
        """
        return purge(self._database, older_than_s=older_than_s, batch=batch, dead=dead)

    def check_schema(self, rows: Iterable[DeclaredRow] = ()) -> None:
        """Raise LedgerSchemaError unless the tables are there, and those of `rows` as declared.

        It is also raised if the ledger's user lacks a privilege that workers need on them.
        """
        from taskguard.ledger import health  # not for deliveries

        expect_version(health.version_of_tables(self._database))
        check_privileges(self._database)
        self._check_rows(cast("Iterable[GuardedRow]", rows))

    def check(
        self,
        rows: Iterable[DeclaredRow] = (),
        *,
        longest_body_s: float = 30.0,
        retention_s: float = 30 * DAY_S,
    ) -> list[Finding]:
        """What is wrong with the database, its settings and the tables; nothing is changed.

        Args:
            rows: the users' own rows, whose tables have to be as declared.
            longest_body_s: how long a body may take, which no time-out should cut short.
            retention_s: the longest of the tasks' `retention_s`.

        Raises:
            LedgerUnavailableError: it gives no answer at all.
        """
        from taskguard.ledger import health  # not for deliveries

        bounded = self._database.dialect.bounds_idleness(self._database.engine)
        bodies = health.Bodies(
            longest_s=longest_body_s,
            idle_s=self._idle_s if bounded else None,
            retention_s=retention_s,
        )
        declared = cast("Iterable[GuardedRow]", rows)
        return health.check(
            self._database, bodies=bodies, check_rows=lambda: self._check_rows(declared)
        )

    def now_us(self) -> int:
        """The database's clock, in µs since 1970."""
        return self._database.clock_us()

    def _check_rows(self, declared: Iterable[GuardedRow]) -> None:
        for each in declared:
            with self._database.transaction() as db:
                rows.check(db, each, where=self._database.place)
            check_privileges_on_row(self._database, each)
            self._checked.add(each)

    def mark(self, *, make: bool) -> str | None:
        """24 characters by which this ledger's database is told from others, not from its copies.

        None where none has been made yet, and `make` is not set.
        """
        mark = self._identity.mark(make=make)
        return mark and mark[:24]

    def create_schema(self) -> None:
        """Create what is missing; asked again it does nothing.

        Raises LedgerSchemaError if there are tables of another version.
        """
        creation.create(self._database)

    def upgrade_schema(self) -> tuple[int, int]:
        """Upgrade the tables, and return the versions before and after.

        Raises LedgerSchemaError if there are no tables, or nothing upgrades them.
        """
        return upgrade(self._database)

    def upgrade_statements(self) -> list[str]:
        """The SQL that `upgrade_schema()` would run now; nothing is changed."""
        kind = self._database.engine.dialect.name
        return statements_from(version_in(self._database), kind=kind)

    def close(self) -> None:
        """Close idle connections."""
        self._database.close()
