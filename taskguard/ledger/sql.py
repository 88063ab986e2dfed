"""The ledger on taskguard's own tables, on PostgreSQL, MariaDB, MySQL and SQLite.

Guarantees what `base.py` says. Every later change of a claim is one conditional statement that
names the old state, the fence and the owner. Times are µs since 1970 by the database's clock.
What databases differ in is in `dialects/`.
How a claim is taken, completed and renewed is in `statements/`.

Does not guarantee speed on SQLite: one writer at a time, so an open transaction stops the
renewals of others. For one machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakSet

import sqlalchemy as sa

from taskguard.errors import (
    CallTooLargeError,
    ConfigurationError,
    LedgerUnavailableError,
    TransactionRetryError,
)
from taskguard.ledger import outbox
from taskguard.ledger.connections.database import Database, LockTimeoutError
from taskguard.ledger.connections.engine import read_url
from taskguard.ledger.decisions import CLAIMABLE, view_of
from taskguard.ledger.outbox import Overdue
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.own_rows.guarded_row import GuardedRow
from taskguard.ledger.protocol import (
    Busy,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    DeclaredRow,
    LedgerHold,
    WorkView,
)
from taskguard.ledger.refusals import stale
from taskguard.ledger.retention import Purged, purge
from taskguard.ledger.schema.identity import Identity
from taskguard.ledger.schema.privileges import check_privileges, check_privileges_on_row
from taskguard.ledger.schema.upgrades import expect_version, statements_from, upgrade, version_in
from taskguard.ledger.statements import WRITE_LOCK_S, Statements
from taskguard.ledger.tables import (
    FREE,
    KEYS,
    MESSAGES,
    METADATA,
    SCHEMA,
    SCHEMA_VERSION,
    WORKS,
    holding,
    standing,
)
from taskguard.ledger.transactions.core import GuardedTransaction, Transactions
from taskguard.ledger.transactions.external import ForeignConnection, on_foreign
from taskguard.policy import DAY_S, MOST_ROWS, check_number
from taskguard.states import Decision, State

__all__ = ["SqlLedger", "ddl", "ddl_statements", "include_name"]

_LARGE_CALL_CHARS = 100_000  # smaller ones fit everywhere
_SCHEMA_TRIES = 5  # of several that create tables at once MySQL lets one go on


class SqlLedger:
    """A `Ledger` on PostgreSQL, MariaDB, MySQL or SQLite.

    Args:
        database: a SQLAlchemy URL, or an Engine of the user's own, whose settings stay as they
            are.
        lock_timeout_s: how long a claim waits for a row lock before that is busy; on MariaDB and
            MySQL whole seconds, at least one.
        idle_in_transaction_s: PostgreSQL, and MariaDB unless the Engine is the user's, end a
            guarded transaction that idles for so long, so that a frozen holder's row locks end.
        resolve_timeout_s: how long the outcome of an unanswered COMMIT is asked for.
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
        self._identity = Identity(self._database)
        # Users' own tables that were found to be as declared.
        self._checked: WeakSet[GuardedRow] = WeakSet()
        self._transactions = Transactions(
            self._database,
            one_statement=one_statement,
            idle_in_transaction_s=idle_in_transaction_s,
            resolve_timeout_s=resolve_timeout_s,
        )

    def __repr__(self) -> str:
        return f"<SqlLedger {self._database.place}>"

    # -- claims -------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one atomic step, whether this delivery may run."""
        self._check_own(request)
        self._check_call(request)
        try:
            return self._database.twice(lambda: self._statements.claim(request))
        except (LockTimeoutError, TransactionRetryError):
            return Busy(None, None, same_work=False, started=True)

    @property
    def _statements(self) -> Statements:
        return self._transactions.statements

    def look(self, request: ClaimRequest) -> ClaimAnswer:
        """What a claim would find, without claiming."""
        self._check_own(request)
        seen = self._database.twice(lambda: self._statements.look(request))
        row = seen.row
        if seen.decision not in CLAIMABLE and seen.decision is not Decision.BURY:
            return seen.answer(request)
        return Busy(None, None, same_work=False, started=row is not None and row.attempts > 0)

    def _check_own(self, request: ClaimRequest) -> None:
        """The table of the user's own row, once in a process."""
        declared = None if request.row is None else rows.declared_of(request.row)
        if declared is not None and declared not in self._checked:
            self._database.twice(lambda: self._check_rows([declared]))

    def _check_call(self, request: ClaimRequest) -> None:
        """A large one is looked at before it is sent: too large, it looks like an outage."""
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
        """A transaction for the holder's writes; see `base.py`."""
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
        except TransactionRetryError:  # it did not happen; the body need not run again
            self._complete_in_transaction(claim, result_json)

    def _complete_in_transaction(self, claim: Claim, result_json: str | None) -> None:
        with self._transactions.open(claim, of_body=False) as tx:
            tx.complete(claim, result_json)

    def _complete_alone(self, claim: Claim, result_json: str | None) -> bool | None:
        try:
            return self._statements.complete_alone(claim, result_json)
        except (LedgerUnavailableError, TransactionRetryError) as error:
            try:
                self._transactions.resolve(claim, error)
            except TransactionRetryError:
                return self._statements.complete_alone(claim, result_json)
            return True

    # -- small changes ------------------------------------------------------------------------

    def store_result(self, claim: Claim, result_json: str) -> None:
        """Store the result of a work that this claim completed."""
        self._database.twice(lambda: self._statements.store_result(claim, result_json))

    def fail(self, claim: Claim, error: str) -> bool:
        """PROCESSING -> FAILED; ends the lease."""
        return self._end(
            claim,
            state=State.FAILED.value,
            error=self._storable(error),
            lease_until=0,
            rounds=None,
            due=None,
            finished=self._database.now(),
        )

    def give_back(self, claim: Claim) -> bool:
        """PROCESSING -> NEW; ends the lease."""
        return self._end(claim, state=State.NEW.value, owner=FREE, lease_until=0)

    def crash(self, claim: Claim, error: str) -> bool:
        """PROCESSING without a lease: the next claim is a takeover."""
        due = sa.case((WORKS.c.call.is_not(None), self._database.now()))
        values = {"error": self._storable(error), "lease_until": 0, "due": due}
        return self._end(claim, row_too=False, **values)

    def end_round(self, claim: Claim, reason: str, *, most: int) -> State | None:
        """PROCESSING -> NEW, the `most`th time in a row FAILED; ends the lease."""
        rounds = sa.func.coalesce(WORKS.c.rounds, 0) + 1
        last = rounds >= most
        ended = self._end(
            claim,
            state=sa.case((last, State.FAILED.value), else_=State.NEW.value),
            rounds=sa.case((last, None), else_=rounds),
            error=self._storable(reason),
            owner=FREE,
            lease_until=0,
            due=sa.case((last, None), else_=WORKS.c.due),
            finished=sa.case((last, self._database.now()), else_=None),
        )
        if not ended:
            return None
        view = None if claim.work is None else self.view(claim.work)
        return None if view is None else view.state

    def _end(self, claim: Claim, *, row_too: bool = True, **values: Any) -> bool:
        """End the lease; the work gets `values`, and the user's own row its first state."""
        tries = 0

        def end() -> bool:
            nonlocal tries
            tries += 1
            with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
                if claim.row is not None and row_too:
                    rows.read(db, claim.row, lock=True)  # before our own rows, as everybody does
                freed = db.execute(
                    sa.update(KEYS).where(holding(claim)).values(owner=FREE, lease_until=0)
                )
                if claim.work is None:
                    # A first try that got no answer may have freed them.
                    return freed.rowcount == len(claim.keys) or tries > 1
                ended = not claim.formerly or self._all_stand(db, claim)
                if ended:
                    update = sa.update(WORKS).where(standing(claim))
                    ended = db.execute(update.values(**values)).rowcount > 0
                if claim.row is not None and row_too and (ended or _revoked(db, claim)):
                    rows.put_back(db, claim)
                return ended

        return self._database.twice(end)

    @staticmethod
    def _all_stand(db: sa.Connection, claim: Claim) -> bool:
        """Whether nobody has overtaken it who knows its work by a former id alone."""
        select = sa.select(WORKS.c.id).where(standing(claim)).order_by(WORKS.c.id)
        return len(db.execute(select.with_for_update()).all()) == len(claim.works)

    def report_in(self, claim: Claim) -> None:
        """Uncount this holder's crash, once."""
        self._change(
            WORKS.c.id.in_(claim.works),
            WORKS.c.crashed_owner == str(claim.owner),
            WORKS.c.crashes > 0,
            WORKS.c.state != State.DEAD.value,
            crashes=WORKS.c.crashes - 1,
            crashed_owner="",
        )

    def revoke(self, work: str, *, message: str) -> bool:
        """NEW, PROCESSING or FAILED of this message -> FAILED, final."""
        changed = self._change(
            WORKS.c.id == work,
            WORKS.c.message == message,
            WORKS.c.state.in_([State.NEW.value, State.PROCESSING.value, State.FAILED.value]),
            state=State.FAILED.value,
            final=1,
            owner=FREE,
            lease_until=0,
            error="revoked",
            due=None,
            finished=self._database.now(),
        )
        return changed == 1

    def _change(self, *where: Any, **values: Any) -> int:
        def change() -> int:
            with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
                return int(db.execute(sa.update(WORKS).where(*where).values(**values)).rowcount)

        return self._database.twice(change)

    def _storable(self, text: str) -> str:
        """Without what a text of the database cannot hold: NUL, or what is not in its encoding."""
        plain = text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
        if plain.isascii() or self._database.stores_unicode():
            return plain
        return plain.encode("ascii", "backslashreplace").decode()

    # -- renewals -----------------------------------------------------------------------------

    def renew(self, holds: Sequence[LedgerHold]) -> list[str]:
        """Renew many claims; rows that somebody has locked are skipped."""
        return self._database.twice(lambda: self._statements.renew(holds))

    # -- deferrals ----------------------------------------------------------------------------

    def defer(self, request: ClaimRequest, publish: Callable[[int], None]) -> bool:
        """Publish the next copy under the message's row lock, then commit its number."""
        copy = request.message.copy + 1
        if request.work is None:  # a plain lock: no claim of it asks for numbers
            publish(copy)
            return True
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            now_us = self._database.now_us(db)
            if not self._database.dialect.raise_copy(
                db, request.message, copy, work=request.work, now_us=now_us
            ):
                return False
            with self._database.elsewhere_meanwhile(db):
                publish(copy)
            return True

    # -- for people ---------------------------------------------------------------------------

    def view(self, work: str) -> WorkView | None:
        """A work's record."""

        def read() -> Any:
            with self._database.transaction() as db:
                return db.execute(sa.select(WORKS).where(WORKS.c.id == work)).first()

        row = self._database.twice(read)
        return None if row is None else view_of(row)

    def done_elsewhere(self, request: ClaimRequest) -> str | None:
        """Another work of the same task that this message has done; None if there is none."""
        select = sa.select(WORKS.c.id).where(
            WORKS.c.message == request.message.name,
            WORKS.c.task == request.task,
            WORKS.c.state == State.DONE.value,
            WORKS.c.id.not_in([str(request.work), *request.formerly]),
        )

        def read() -> str | None:
            with self._database.transaction() as db:
                found: str | None = db.execute(select.limit(1)).scalar()
                return found

        return self._database.twice(read)

    def works(self, state: State, *, limit: int = 100) -> list[WorkView]:
        """The records of works in a state, those that started last first."""

        check_number("limit", limit, at_least=1, at_most=MOST_ROWS, whole=True)

        def read() -> Any:
            select = sa.select(WORKS).where(WORKS.c.state == state.value)
            with self._database.transaction() as db:
                return db.execute(select.order_by(WORKS.c.started.desc()).limit(limit)).all()

        return [view_of(row) for row in self._database.twice(read)]

    def requeue(self, work: str, *, reason: str) -> bool:
        """DEAD or FAILED -> NEW: its next delivery runs it. False if it is in another state.

        Its messages' numbers are forgotten, so that the same message may be sent again, and its
        fingerprint, so that one with other arguments may.
        """
        text = self._storable(f"requeued: {reason}")

        def requeue() -> bool:
            ended = sa.or_(
                WORKS.c.state.in_([State.DEAD.value, State.FAILED.value]),
                # By this very call, whose COMMIT got no answer.
                sa.and_(WORKS.c.state == State.NEW.value, WORKS.c.error == text),
            )
            with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
                changed = db.execute(
                    sa.update(WORKS)
                    .where(WORKS.c.id == work, ended)
                    .values(
                        state=State.NEW.value,
                        final=0,
                        retries=0,
                        owner=FREE,
                        lease_until=0,
                        crashes=0,
                        crashed_owner="",
                        rounds=None,
                        fingerprint=None,
                        due=sa.case((WORKS.c.call.is_not(None), self._database.now())),
                        error=text,
                        finished=None,
                    )
                )
                if changed.rowcount != 1:
                    return False
                # By their ids: without an index on `work` every row would be locked by the way.
                of_work = MESSAGES.c.work == work
                found = db.execute(sa.select(MESSAGES.c.message).where(of_work)).scalars().all()
                db.execute(sa.delete(MESSAGES).where(MESSAGES.c.message.in_(found), of_work))
                return True

        return self._database.twice(requeue)

    def release(self, key: str, *, fence: int, owner: str) -> bool:
        """End the lease of a holder that is known to be gone. False if it is not the holder.

        Safe if it is wrong: a holder that lives renews it, and its commit is refused only once
        somebody else has claimed. The next delivery takes its work over, which counts as a crash.
        """

        def release() -> bool:
            with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
                held = KEYS.c.key == key, KEYS.c.fence == fence, KEYS.c.owner == owner
                ended = db.execute(
                    sa.update(KEYS).where(*held, KEYS.c.owner != FREE).values(lease_until=0)
                )
                if ended.rowcount != 1:
                    return False
                processing = WORKS.c.state == State.PROCESSING.value
                theirs = processing, WORKS.c.fence == fence, WORKS.c.owner == owner
                # By their ids, as in `requeue`.
                found = db.execute(sa.select(WORKS.c.id).where(*theirs)).scalars().all()
                due = sa.case((WORKS.c.call.is_not(None), self._database.now()))
                db.execute(
                    sa.update(WORKS)
                    .where(WORKS.c.id.in_(found), *theirs)
                    .values(lease_until=0, due=due)
                )
                return True

        return self._database.twice(release)

    # -- works whose calls are stored ---------------------------------------------------------

    def enqueue(
        self, db: sa.Connection | None, request: ClaimRequest, *, due_in_s: float = 5.0
    ) -> None:
        """Write a work with its call as NEW, in the transaction of `db`, which is the user's.

        A work that is known stays as it is, unless it failed, or its own row was set back: then it
        is NEW again. One that nobody is at gets the call, if it has none.

        Args:
            db: a connection to the ledger's database; None: in a transaction of its own.
            request: keys, work, task, message and call.
            due_in_s: from when on its message counts as not sent.

        Raises:
            CallTooLargeError: the call cannot be stored there.
            ConfigurationError: `db` is not of the ledger's database.
        """
        self._check_call(request)
        if db is not None:
            self._identity.require(db, work=str(request.work))
            outbox.write(self._database, db, request, due_in_s=due_in_s)
            return

        def write() -> None:
            with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as own:
                outbox.write(self._database, own, request, due_in_s=due_in_s)

        self._database.twice(write)

    def enqueue_in_foreign(
        self, foreign: ForeignConnection, request: ClaimRequest, *, due_in_s: float = 5.0
    ) -> None:
        """`enqueue()` in the transaction that another library has open on `foreign`.

        Raises ConfigurationError if that is another database.
        """
        if foreign.kind != self._database.engine.dialect.name:
            raise ConfigurationError(
                f"{request.work} was enqueued in a transaction on {foreign.kind}, and the ledger "
                f"is in {self._database.place}: the two do not commit together."
            )
        self._check_call(request)
        with on_foreign(self._database.engine, foreign) as db:
            self._identity.require(db, work=str(request.work))
            outbox.write(self._database, db, request, due_in_s=due_in_s)

    def overdue(
        self, *, limit: int = 1000, after: Overdue | None = None, work: str | None = None
    ) -> list[Overdue]:
        """Works that nobody seems to be at; see `outbox.py`."""
        return self._database.twice(
            lambda: outbox.overdue(self._database, limit=limit, after=after, work=work)
        )

    def sent(self, works: Sequence[Overdue], *, again_after_s: float, counted: bool = True) -> int:
        """The messages of these works were sent again; not `counted`: only tried."""
        return self._database.twice(
            lambda: outbox.sent(self._database, works, again_after_s=again_after_s, counted=counted)
        )

    def abandon(self, work: Overdue, *, error: str) -> bool:
        """NEW, or PROCESSING beyond its lease -> FAILED; False if it changed since it was read."""
        text = self._storable(error)
        return self._database.twice(lambda: outbox.abandon(self._database, work, error=text))

    def purge(self, *, older_than_s: float, batch: int = 1000, dead: bool = False) -> Purged:
        """Forget works that ended so long ago, their messages, and keys whose lease ended before.

        Args:
            older_than_s: in seconds; not shorter than the longest `retention_s` of the tasks, for
                a message of a forgotten work that is younger than that would run it again.
            batch: how many rows go in one transaction.
            dead: DEAD works, too, which wait for a person. NEW and PROCESSING ones never go.

        Raises:
            ConfigurationError: `older_than_s` is less than an hour.
        """
        return purge(self._database, older_than_s=older_than_s, batch=batch, dead=dead)

    def check_schema(self, rows: Iterable[DeclaredRow] = ()) -> None:
        """Raise LedgerSchemaError unless the tables are there, and those of `rows` as declared.

        Also unless the ledger's user may do to them what claims, completions and deferrals do.
        """
        with self._database.transaction() as db:
            expect_version(db.execute(sa.select(sa.func.max(SCHEMA.c.version))).scalar())
        check_privileges(self._database)
        self._check_rows(cast("Iterable[GuardedRow]", rows))

    def _check_rows(self, declared: Iterable[GuardedRow]) -> None:
        for each in declared:
            with self._database.transaction() as db:
                rows.check(db, each, where=self._database.place)
            check_privileges_on_row(self._database, each)
            self._checked.add(each)

    def create_schema(self) -> None:
        """Create what is missing; asked again it does nothing.

        Raises LedgerSchemaError if there are tables of another version.
        """
        for _ in range(_SCHEMA_TRIES):
            with contextlib.suppress(TransactionRetryError):
                self._create_schema()
                return
        self._create_schema()

    def _create_schema(self) -> None:
        with self._database.transaction(bounded=False) as db:
            dialect = self._database.dialect
            dialect.lock_schema(db)
            for table in METADATA.sorted_tables:
                db.execute(sa.schema.CreateTable(table, if_not_exists=True))
                for index in table.indexes:
                    dialect.create_index(db, index)
            version = db.execute(sa.select(sa.func.max(SCHEMA.c.version))).scalar()
            if version is None:
                db.execute(dialect.insert_missing(SCHEMA, {"version": SCHEMA_VERSION}))
            else:
                expect_version(version)

    def upgrade_schema(self) -> tuple[int, int]:
        """Bring tables of an older version to this library's. The versions before and after.

        Raises LedgerSchemaError if there are no tables, or no way from theirs.
        """
        return upgrade(self._database)

    def upgrade_statements(self) -> list[str]:
        """The SQL that `upgrade_schema()` would run now; nothing is changed."""
        kind = self._database.engine.dialect.name
        return statements_from(version_in(self._database), kind=kind)

    def close(self) -> None:
        """Close idle connections."""
        self._database.close()


def _revoked(db: sa.Connection, claim: Claim) -> bool:
    """Whether its work was revoked under its hands: nobody else puts the user's row back."""
    where = WORKS.c.id.in_(claim.works), WORKS.c.fence == claim.fence, WORKS.c.final == 1
    return db.execute(sa.select(WORKS.c.id).where(*where)).first() is not None


def ddl(url: str) -> str:
    """The SQL that `create_schema` would run, for a review or a migration."""
    return "".join(f"{each};\n\n" for each in ddl_statements(url))


def ddl_statements(url: str, *, if_not_exists: bool = False) -> list[str]:
    """The same one by one; with `if_not_exists` they do no harm where the tables are there.

    Of the URL only the kind of database and the driver matter.
    """
    dialect = read_url(url).get_dialect()()
    parts: list[Any] = []
    for table in METADATA.sorted_tables:
        parts.append(sa.schema.CreateTable(table, if_not_exists=if_not_exists))
        parts += [
            sa.schema.CreateIndex(index, if_not_exists=if_not_exists) for index in table.indexes
        ]
    tables = [str(part.compile(dialect=dialect)).strip() for part in parts]
    values = sa.insert(SCHEMA).values(version=SCHEMA_VERSION)
    if if_not_exists:
        there = sa.select(SCHEMA.c.version)
        new = sa.select(sa.literal(SCHEMA_VERSION)).where(~there.exists())
        values = sa.insert(SCHEMA).from_select(["version"], new)
    version = str(values.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    return [*tables, version]


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """For Alembic's `context.configure(include_name=taskguard.include_name)`.

    The ledger's tables are no part of an application's models: `alembic revision --autogenerate`
    would drop them. Everything else is included.
    """
    del parent_names
    return type_ != "table" or name not in METADATA.tables
