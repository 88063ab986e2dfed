"""The ledger on taskguard's own tables, on PostgreSQL and SQLite, by SQLAlchemy Core.

Guarantees what `base.py` says. Every later change of a claim is one conditional statement that
names the old state, the fence and the owner. Times are µs since 1970 by the database's clock.
Claims and renewals take one round trip on PostgreSQL (`postgresql/`), several elsewhere
(`steps.py`); both decide by `states.decide()`.

Does not guarantee speed on SQLite: one writer at a time, so an open transaction stops the
renewals of others. For one machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as postgresql_dialect
from sqlalchemy.dialects import sqlite

from taskguard.errors import (
    CommitUnknownError,
    ConfigurationError,
    LedgerSchemaError,
    LedgerUnavailableError,
    StaleTokenError,
    TransactionRetryError,
    TransactionUsageError,
)
from taskguard.ledger import postgresql
from taskguard.ledger.answers import CLAIMABLE, answer, view_of
from taskguard.ledger.base import (
    Busy,
    Claim,
    ClaimAnswer,
    Claimed,
    ClaimRequest,
    LedgerHold,
    WorkView,
)
from taskguard.ledger.database import CannotWriteError, Database, LockTimeoutError, driver_of
from taskguard.ledger.steps import claim_in_steps, look, renew_in_steps
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
from taskguard.states import Decision, State

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SqlLedger", "ddl"]

_PUBLISH_LOCK_S = 5.0
_IN_TRANSACTION = 2  # psycopg.pq.TransactionStatus.INTRANS
# A parent's transactions, in a forked child: closing them would speak on the parent's sockets.
_parents: list[Any] = []
# Connections in the hands of bodies. A body must not end its transaction: what it wrote
# would be committed without DONE, or what came after would.
_lent: WeakKeyDictionary[sa.Connection, Claim] = WeakKeyDictionary()


def _refuse_an_end(db: sa.Connection) -> None:
    """Before a COMMIT, and before the BEGIN that follows any end."""
    claim = _lent.get(db)
    if claim is not None:
        raise _ended(claim)


class SqlTransaction:
    """One transaction of a holder, for the time of a `with` block."""

    db: sa.Connection

    def __init__(self, ledger: SqlLedger, claim: Claim, *, look_first: bool) -> None:
        self._ledger = ledger
        self._claim = claim
        self._look_first = look_first

    def __enter__(self) -> Self:
        self.db = self._ledger.begin(self._claim, look_first=self._look_first)
        self._pid = os.getpid()
        self._xid: str | None = None
        self._root = self.db.get_transaction()
        _lent[self.db] = self._claim
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pid != os.getpid():
            _parents.append(self.db)
            return
        _lent.pop(self.db, None)
        try:
            if error is None:
                self._ledger.commit(self.db, self._claim, self._xid)
            else:
                self._ledger.roll_back(self.db, self._claim, error)
        finally:
            self.db.close()

    def complete(self, claim: Claim, result_json: str | None) -> None:
        self._refuse_ended()
        self._ledger.complete_in(self.db, claim, result_json)

    def _refuse_ended(self) -> None:
        if self.db.invalidated:
            raise _broken(self._claim)
        ended = (
            self._pid != os.getpid()
            or self.db.closed
            or self.db.get_transaction() is not self._root
            or self._root is None
            or not self._root.is_active
        )
        if not ended:
            driver = driver_of(self.db)
            status = getattr(getattr(driver, "pgconn", None), "transaction_status", None)
            ended = status is not None and status != _IN_TRANSACTION
        if ended:
            raise _ended(self._claim)

    def checkpoint(self, claim: Claim, progress_json: str) -> None:
        self._refuse_ended()
        # The keys, too: other work may hold them by now, and this work's row does not tell.
        self._ledger.lock_keys(self.db, claim)
        self._xid = self._ledger.xid(self.db)
        done = self.db.execute(
            sa.update(WORKS).where(standing(claim)).values(progress=progress_json)
        )
        if done.rowcount != 1:
            raise _stale(claim)


class SqlLedger:
    """A `Ledger` on PostgreSQL or SQLite.

    Args:
        database: a SQLAlchemy URL, or an Engine of the user's own, whose settings stay as they
            are.
        lock_timeout_s: how long a claim waits for a row lock before that is busy.
        idle_in_transaction_s: PostgreSQL ends a guarded transaction that idles for so long, so
            that a frozen holder's row locks end.
        resolve_timeout_s: how long the outcome of an unanswered COMMIT is asked for.
        one_statement: False claims and renews in several statements on PostgreSQL, too.
    """

    def __init__(
        self,
        database: Any,
        *,
        lock_timeout_s: float = 0.25,
        idle_in_transaction_s: float = 60.0,
        resolve_timeout_s: float = 10.0,
        one_statement: bool = True,
    ) -> None:
        self._database = Database(database, lock_timeout_s=lock_timeout_s)
        for event in ("commit", "begin"):
            if not sa.event.contains(self._database.engine, event, _refuse_an_end):
                sa.event.listen(self._database.engine, event, _refuse_an_end)
        self._one_statement = one_statement and self._database.one_statement
        self._idle_in_transaction_s = idle_in_transaction_s
        self._resolve_timeout_s = resolve_timeout_s
        self._snapshots: bool | None = None

    def __repr__(self) -> str:
        return f"<SqlLedger {self._database.place}>"

    # -- claims -------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one atomic step, whether this delivery may run."""
        try:
            return self._database.twice(lambda: self._claim(request))
        except (LockTimeoutError, TransactionRetryError):
            return Busy(None, None, same_work=False, started=True)

    def _claim(self, request: ClaimRequest) -> ClaimAnswer:
        if self._one_statement:
            answered = postgresql.claim(self._database, request)
            if answered is not None:
                return answered
        found = claim_in_steps(self._database, request)
        if self._one_statement and not isinstance(found, Claimed):
            # The one statement may have got the key where another had just got the work.
            self._free_keys(request)
        return found

    def _free_keys(self, request: ClaimRequest) -> None:
        with self._database.transaction(lock_timeout_s=_PUBLISH_LOCK_S) as db:
            db.execute(
                sa.update(KEYS)
                .where(KEYS.c.key.in_(request.keys), KEYS.c.owner == str(request.owner))
                .values(owner=FREE, lease_until=0)
            )

    def look(self, request: ClaimRequest) -> ClaimAnswer:
        """What a claim would find, without claiming."""
        row, decision, now_us = self._database.twice(lambda: look(self._database, request))
        if decision not in CLAIMABLE and decision is not Decision.BURY:
            return answer(request, row, decision, now_us)
        return Busy(None, None, same_work=False, started=row is not None and row.attempts > 0)

    # -- the holder's transactions ------------------------------------------------------------

    def transaction(self, claim: Claim, *, look_first: bool = True) -> SqlTransaction:
        """A transaction for the holder's writes; see `base.py`."""
        return SqlTransaction(self, claim, look_first=look_first)

    def begin(self, claim: Claim, *, look_first: bool) -> sa.Connection:
        """For `SqlTransaction`: a connection in a transaction."""
        with self._database.translated():
            db = self._begin()
            try:
                if self._keeps_snapshot(db):
                    # A renewal in between would make the completion a serialization failure.
                    self._lock(db, claim)
                elif look_first and not self._stands(db, claim):
                    raise _stale(claim)
            except BaseException:
                db.close()
                raise
        return db

    def _begin(self) -> sa.Connection:
        if self._database.one_statement:
            idle_s = self._idle_in_transaction_s
            db = postgresql.begin(self._database, idle_in_transaction_s=idle_s)
        else:
            db = self._database.connect()
        if not db.in_transaction():
            db.begin()  # else a Session on it would take a transaction of its own, and commit it
        driver = driver_of(db)
        autocommit = getattr(driver, "autocommit", False) is True or (
            # SQLite: nothing begins by itself, and nobody said BEGIN.
            getattr(driver, "isolation_level", "") is None
            and getattr(driver, "in_transaction", True) is False
        )
        if autocommit and not self._database.begins_itself:
            db.close()
            raise ConfigurationError(
                'The ledger\'s Engine commits each statement (isolation_level="AUTOCOMMIT"), so '
                "effects and DONE cannot commit together. Give the ledger an Engine without it."
            )
        return db

    def _keeps_snapshot(self, db: sa.Connection) -> bool:
        """Whether transactions on the user's own Engine see the rows of their beginning."""
        if self._snapshots is None:
            levels = ("REPEATABLE READ", "SERIALIZABLE")
            ours = self._database.begins_itself or not self._database.postgresql
            self._snapshots = not ours and db.get_isolation_level() in levels
        return self._snapshots

    def _lock(self, db: sa.Connection, claim: Claim) -> None:
        self.lock_keys(db, claim)
        work = db.execute(sa.select(WORKS.c.id).where(standing(claim)).with_for_update()).first()
        if work is None:
            raise _stale(claim)

    @staticmethod
    def _stands(db: sa.Connection, claim: Claim) -> bool:
        return db.execute(sa.select(WORKS.c.id).where(standing(claim))).first() is not None

    def roll_back(self, db: sa.Connection, claim: Claim, error: BaseException) -> None:
        """Nothing is written. What the database asked for decides how the body goes on."""
        broken = db.invalidated
        if not broken:
            try:
                db.rollback()
            except sa.exc.DBAPIError:
                broken = True
        mapped = self._database.map(error)
        if mapped is None:
            return
        if broken or getattr(error, "connection_invalidated", False):
            raise _broken(claim) from error
        if isinstance(mapped, LockTimeoutError):
            raise TransactionRetryError(
                f"A lock that the transaction of {_key(claim)} wanted was not given in time.",
                key=_key(claim),
                fence=claim.fence,
            ) from error
        if isinstance(mapped, TransactionRetryError | CannotWriteError):
            raise mapped from error

    def lock_keys(self, db: sa.Connection, claim: Claim) -> None:
        """Keep the keys ours until the transaction ends, or refuse."""
        select = sa.select(KEYS.c.key).where(holding(claim)).order_by(KEYS.c.key)
        if len(db.execute(select.with_for_update()).all()) != len(claim.keys):
            raise _stale(claim)

    def xid(self, db: sa.Connection) -> str | None:
        """By what the outcome of the transaction can be asked for later."""
        if not self._database.postgresql:
            return None
        return str(db.exec_driver_sql("select pg_current_xact_id()::text").scalar_one())

    def commit(self, db: sa.Connection, claim: Claim, xid: str | None = None) -> None:
        """For `SqlTransaction`: commit, and find out what became of it."""
        try:
            db.commit()
        except sa.exc.DBAPIError as error:
            mapped = self._database.map(error)
            if isinstance(mapped, TransactionRetryError):
                raise mapped from error
            if not isinstance(mapped, LedgerUnavailableError):
                raise  # the database said no: a deferred constraint
            db.close()  # its row locks and its place in the pool
            self._resolve(claim, error, xid)

    def _resolve(self, claim: Claim, error: BaseException, xid: str | None = None) -> None:
        """Learn what became of a COMMIT that got no answer."""
        until_s = time.monotonic() + self._resolve_timeout_s
        while True:
            try:
                with self._database.transaction(lock_timeout_s=self._resolve_timeout_s) as db:
                    select = sa.select(WORKS).where(WORKS.c.id == claim.work)
                    row = db.execute(select.with_for_update()).first()
                    committed = xid is not None and (
                        db.execute(
                            sa.text("select pg_xact_status(cast(:xid as xid8))"), {"xid": xid}
                        ).scalar()
                        == "committed"
                    )
                break
            except LedgerUnavailableError as unavailable:
                if time.monotonic() >= until_s:
                    raise CommitUnknownError(
                        f"COMMIT of {_key(claim)} got no answer and the database stays away.",
                        key=_key(claim),
                        fence=claim.fence,
                    ) from unavailable
                time.sleep(0.2)
        mine = row is not None and (row.fence, row.owner) == (claim.fence, str(claim.owner))
        if committed or (mine and row is not None and row.state == State.DONE.value):
            return
        if mine and row is not None and row.state == State.PROCESSING.value:
            raise TransactionRetryError(
                f"COMMIT of {_key(claim)} did not happen.", key=_key(claim), fence=claim.fence
            ) from error
        raise _stale(claim) from error

    def complete_in(self, db: sa.Connection, claim: Claim, result_json: str | None) -> None:
        """Keys first, in order; then the work: both still ours, or nothing."""
        if db.invalidated:  # the body swallowed the error that said so
            raise _broken(claim)
        if self._in_one_statement(claim):
            try:
                completed = self._database.ask_in(db, *postgresql.complete(claim, result_json))
            except LedgerUnavailableError as error:
                raise _broken(claim) from error
            if not completed:
                raise _stale(claim)
            return
        for key in claim.keys:
            ended = db.execute(
                sa.update(KEYS)
                .where(KEYS.c.key == key, holding(claim))
                .values(owner=FREE, lease_until=0)
            )
            if ended.rowcount != 1:
                raise _stale(claim)
        done = db.execute(
            sa.update(WORKS)
            .where(standing(claim))
            .values(
                state=State.DONE.value,
                result=result_json,
                lease_until=0,
                finished=self._database.now(),
            )
        )
        if done.rowcount != 1:
            raise _stale(claim)

    def complete(self, claim: Claim, result_json: str | None) -> None:
        """PROCESSING -> DONE in a transaction of its own."""
        if not self._in_one_statement(claim):
            try:
                self._complete_in_steps(claim, result_json)
            except TransactionRetryError:  # it did not happen; the body need not run again
                self._complete_in_steps(claim, result_json)
            return
        if not self._complete_alone(claim, result_json):
            raise _stale(claim)

    def _complete_in_steps(self, claim: Claim, result_json: str | None) -> None:
        with self.transaction(claim) as tx:
            tx.complete(claim, result_json)

    def _complete_alone(self, claim: Claim, result_json: str | None) -> bool:
        statement, values = postgresql.complete(claim, result_json)
        try:
            return bool(self._database.ask(statement, values))
        except (LedgerUnavailableError, TransactionRetryError) as error:
            try:
                self._resolve(claim, error)
            except TransactionRetryError:
                return bool(self._database.ask(statement, values))
            return True

    def _in_one_statement(self, claim: Claim) -> bool:
        return self._one_statement and len(claim.keys) == 1

    # -- small changes ------------------------------------------------------------------------

    def store_result(self, claim: Claim, result_json: str) -> None:
        """Store the result of a work that this claim completed."""
        if self._one_statement:
            database = self._database
            database.twice(lambda: postgresql.store_result(database, claim, result_json))
            return
        self._change(
            WORKS.c.id == claim.work,
            WORKS.c.state == State.DONE.value,
            WORKS.c.fence == claim.fence,
            WORKS.c.owner == str(claim.owner),
            result=result_json,
        )

    def fail(self, claim: Claim, error: str) -> bool:
        """PROCESSING -> FAILED; ends the lease."""
        return self._end(
            claim,
            state=State.FAILED.value,
            error=error.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode(),
            lease_until=0,
            finished=self._database.now(),
        )

    def give_back(self, claim: Claim) -> bool:
        """PROCESSING -> NEW; ends the lease."""
        return self._end(claim, state=State.NEW.value, owner=FREE, lease_until=0)

    def _end(self, claim: Claim, **values: Any) -> bool:
        def end() -> bool:
            with self._database.transaction(lock_timeout_s=_PUBLISH_LOCK_S) as db:
                db.execute(sa.update(KEYS).where(holding(claim)).values(owner=FREE, lease_until=0))
                if claim.work is None:
                    return True
                changed = db.execute(sa.update(WORKS).where(standing(claim)).values(**values))
                return changed.rowcount == 1

        return self._database.twice(end)

    def report_in(self, claim: Claim) -> None:
        """Uncount this holder's crash, once."""
        self._change(
            WORKS.c.id == claim.work,
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
            finished=self._database.now(),
        )
        return changed == 1

    def _change(self, *where: Any, **values: Any) -> int:
        def change() -> int:
            with self._database.transaction(lock_timeout_s=_PUBLISH_LOCK_S) as db:
                return int(db.execute(sa.update(WORKS).where(*where).values(**values)).rowcount)

        return self._database.twice(change)

    # -- renewals -----------------------------------------------------------------------------

    def renew(self, holds: Sequence[LedgerHold]) -> list[str]:
        """Renew many claims; rows that somebody has locked are skipped."""
        if self._one_statement:
            return self._database.twice(lambda: postgresql.renew(self._database, holds))
        return self._database.twice(lambda: renew_in_steps(self._database, holds))

    # -- deferrals ----------------------------------------------------------------------------

    def defer(self, request: ClaimRequest, publish: Callable[[int], None]) -> bool:
        """Publish the next copy under the message's row lock, then commit its number."""
        retries, copy = request.message.retries, request.message.copy + 1
        insert = postgresql_dialect.insert if self._database.postgresql else sqlite.insert
        with self._database.transaction(lock_timeout_s=_PUBLISH_LOCK_S) as db:
            now_us = self._database.now_us(db)
            statement: Any = insert(MESSAGES).values(
                message=request.message.id,
                work=request.work,
                retries=retries,
                copy=copy,
                updated=now_us,
            )
            statement = statement.on_conflict_do_update(
                index_elements=[MESSAGES.c.message],
                set_={"retries": retries, "copy": copy, "updated": now_us},
                where=sa.or_(
                    MESSAGES.c.retries < retries,
                    sa.and_(MESSAGES.c.retries == retries, MESSAGES.c.copy < copy),
                ),
            ).returning(MESSAGES.c.copy)
            if db.execute(statement).first() is None:
                return False
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

    def check_schema(self) -> None:
        """Raise LedgerSchemaError unless the tables are there in this library's version."""
        with self._database.transaction() as db:
            version = db.execute(sa.select(sa.func.max(SCHEMA.c.version))).scalar()
        if version != SCHEMA_VERSION:
            raise LedgerSchemaError(
                f"The ledger's tables have version {version}, this library wants "
                f"{SCHEMA_VERSION}. Run `taskguard ledger create`."
            )

    def create_schema(self) -> None:
        """Create what is missing; asked again it does nothing."""
        with self._database.transaction() as db:
            if self._database.postgresql:
                # Two at once would both find no table and one would fail.
                db.exec_driver_sql("select pg_advisory_xact_lock(7310114027)")
            METADATA.create_all(db)
            if db.execute(sa.select(SCHEMA.c.version)).first() is None:
                db.execute(sa.insert(SCHEMA).values(version=SCHEMA_VERSION))

    def close(self) -> None:
        """Close idle connections."""
        self._database.close()


def _key(claim: Claim) -> str:
    return ", ".join(claim.keys)


def _stale(claim: Claim) -> StaleTokenError:
    return StaleTokenError(
        f"The database refused to commit {_key(claim)} with fence {claim.fence}: a newer holder "
        "exists, or the claim is gone after a crash of the database. Nothing was written.",
        key=_key(claim),
        fence=claim.fence,
    )


def _ended(claim: Claim) -> TransactionUsageError:
    return TransactionUsageError(
        f"The guarded transaction of {_key(claim)} was ended or left in the block (by commit(), "
        "rollback(), close(), a Session's rollback(), or in a forked child). It ends with the "
        "block; for parts that may fail use begin_nested(), for parts that commit checkpoint().",
        key=_key(claim),
        fence=claim.fence,
    )


def _broken(claim: Claim) -> TransactionRetryError:
    return TransactionRetryError(
        f"The connection broke in the guarded transaction of {_key(claim)}; nothing was written.",
        key=_key(claim),
        fence=claim.fence,
    )


def ddl(url: str) -> str:
    """The SQL that `create_schema` would run, for a review or a migration."""
    dialect = sa.make_url(url).get_dialect()()
    tables = [
        str(sa.schema.CreateTable(each).compile(dialect=dialect)).strip()
        for each in METADATA.sorted_tables
    ]
    version = str(
        sa.insert(SCHEMA)
        .values(version=SCHEMA_VERSION)
        .compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    )
    return "".join(f"{each};\n\n" for each in (*tables, version))
