"""A holder's transaction: its effects and its end are committed together, or not at all.

Guarantees: effects are committed only if key and work still have the claim's fence and owner at the
end. Only the block ends the transaction. A connection of the user must reach the ledger's database:
it must see the claim. If a COMMIT gets no answer, its outcome is resolved before it is reported.

Does not guarantee that a ROLLBACK of the driver, past SQLAlchemy, is noticed. It is missed on an
Engine of the user if the driver does not report its state. A writable copy of the database that
already has the claim (logical replication) is not recognised.

One module of more than 450 lines: the report of an end depends on the beginning, the completion and
the answer to the COMMIT, so they are read together.

Read next: `adapter.py`, for the kinds of connections.
"""

from __future__ import annotations

import functools
import os
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from taskguard.errors import (
    ConfigurationError,
    LedgerSchemaError,
    LedgerUnavailableError,
    TransactionRetryError,
    TransactionUsageError,
)
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.dialects.base import SNAPSHOTS
from taskguard.ledger.connections.errors import CannotWriteError, LockTimeoutError
from taskguard.ledger.connections.libpq import NOT_SENT, Commit
from taskguard.ledger.connections.sessions import autocommits
from taskguard.ledger.connections.taken import driver_of
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.refusals import (
    broken_in_block,
    ended_in_block,
    failed_in_block,
    key_of,
    lock_not_given,
    stale,
)
from taskguard.ledger.statements import Statements, statements_for
from taskguard.ledger.tables import KEYS, WORK, claimed_by, holding
from taskguard.ledger.transactions import outcomes
from taskguard.ledger.transactions.adapter import TransactionAdapter
from taskguard.ledger.transactions.block import Block, hand_out, is_heard, take_back, watch
from taskguard.ledger.transactions.external import engine_for_external, on_external
from taskguard.ledger.transactions.lent import adapter_of
from taskguard.ledger.transactions.own import OwnConnection
from taskguard.model.claims import Claim

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GuardedTransaction", "Transactions"]

_KEPT = "_taskguard_transactions"  # an attribute of an Engine
_IN_TRANSACTION, _IN_ERROR = 2, 3  # psycopg.pq.TransactionStatus
# The parent's transactions in a forked child. Closing them would write to the parent's sockets.
_parents: list[Any] = []


class Transactions:
    """Holders' transactions on one database, with one Engine.

    Args:
        database: the ledger's database.
        one_statement: see `SqlLedger`.
        idle_in_transaction_s: see `SqlLedger`.
        resolve_timeout_s: see `SqlLedger`.
    """

    def __init__(
        self,
        database: Database,
        *,
        one_statement: bool,
        idle_in_transaction_s: float,
        resolve_timeout_s: float,
    ) -> None:
        self.database = database
        self.idle_s = idle_in_transaction_s
        self._one_statement = one_statement
        self._resolve_timeout_s = resolve_timeout_s
        self._snapshots: bool | None = None
        watch(database.engine)

    @functools.cached_property
    def statements(self) -> Statements:
        """Return the statements for this database.

        Raises LedgerUnavailableError if the server's kind cannot be read yet.
        """
        return statements_for(self.database, one_statement=self._one_statement)

    def open(
        self, claim: Claim, *, on: Any = None, look_first: bool = True, of_body: bool = True
    ) -> GuardedTransaction:
        """Return a transaction for a `with` block.

        Args:
            claim: the claim of the holder.
            on: a session or connection of the user. None: a connection of the ledger's.
            look_first: check for a stale claim before the body writes anything.
            of_body: False takes a connection from a pool that bodies do not use.
        """
        if on is not None:
            return GuardedTransaction(self, claim, adapter_of(on, claim))
        pools = self.database.pools
        share = pools.of_body(_depth()) if of_body else pools.ledgers
        own = OwnConnection(self.statements.database, share, idle_s=self.idle_s, of_body=of_body)
        return GuardedTransaction(self, claim, own, look_first=look_first)

    def elsewhere(self, engine: sa.Engine) -> Transactions:
        """Return the transactions on this database with another Engine, maybe of another driver."""
        if engine is self.database.engine:
            return self
        kept: WeakKeyDictionary[Transactions, Transactions]
        kept = vars(engine).setdefault(_KEPT, WeakKeyDictionary())
        found = kept.get(self)
        if found is None:
            found = kept[self] = Transactions(
                self.database.elsewhere(engine),
                one_statement=self._one_statement,
                idle_in_transaction_s=self.idle_s,
                resolve_timeout_s=self._resolve_timeout_s,
            )
        return found

    def keeps_snapshot(self, db: sa.Connection) -> bool:
        """Return True if transactions on the Engine of `db` read from a snapshot."""
        if self._snapshots is None:
            ours = self.database.begins_itself
            self._snapshots = not ours and self.database.dialect.keeps_snapshot(db)
        return self._snapshots

    def resolve(
        self,
        claim: Claim,
        error: BaseException,
        mark: str | None = None,
        *,
        session: int | None = None,
    ) -> None:
        """Find the outcome of a COMMIT that got no answer. See `outcomes.resolve()`."""
        timeout_s = self._resolve_timeout_s
        outcomes.resolve(
            self.database, claim, error, timeout_s=timeout_s, mark=mark, session=session
        )


class _OfLedger:
    """A block for statements on the ledger's tables. It separates their errors from the body's.

    `completing`: the claim that the last statement completes. If that gets no lock, the error names
    the claim.
    """

    def __init__(self, database: Database, *, completing: Claim | None = None) -> None:
        self._database = database
        self._completing = completing

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._completing is not None and isinstance(error, LockTimeoutError):
            raise lock_not_given(self._completing) from error
        if isinstance(error, sa.exc.DBAPIError):
            mapped = self._database.faults.map(error)
            if isinstance(mapped, LedgerSchemaError):
                raise mapped from error


class GuardedTransaction:
    """One transaction of a holder, for the time of a `with` block.

    Args:
        home: makes transactions on the ledger's database.
        claim: the claim of the holder.
        adapter: begins and ends the transaction on its connection.
        look_first: see `Transactions.open()`. A lent connection is always checked.
    """

    db: sa.Connection

    def __init__(
        self,
        home: Transactions,
        claim: Claim,
        adapter: TransactionAdapter,
        *,
        look_first: bool = True,
    ) -> None:
        self._home = home
        self._transactions = home
        self._claim = claim
        self._adapter = adapter
        self._look_first = look_first
        self._mark: str | None = None
        self._looked = False  # whether the server was asked if the transaction has ended
        self.around: GuardedTransaction | None = None
        self.is_open = False
        # The claim and the result that are completed in the same message as the COMMIT.
        self._last: tuple[Claim, str | None] | None = None

    # -- begin --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        home, adapter = self._home, self._adapter
        if adapter.kind != home.database.engine.dialect.name:
            raise self._another_database()
        ledgers = home.database.engine
        if adapter.lent:
            self._transactions = home.elsewhere(adapter.engine or engine_for_external(ledgers))
        with self._transactions.database.faults.translated():
            self.db = adapter.begin(functools.partial(on_external, ledgers))
            try:
                (self._admit_lent if adapter.lent else self._admit)()
                self._hand_out()
            except BaseException:
                self.is_open = False
                take_back(self.db)
                if adapter.lent:
                    adapter.roll_back()
                adapter.close()
                raise
        return self

    def _admit(self) -> None:
        """Refuse a claim that is already stale."""
        if self._transactions.keeps_snapshot(self.db):
            self._lock()
        elif self._look_first and not self._transactions.statements.is_current(
            self.db, self._claim
        ):
            raise stale(self._claim)

    def _admit_lent(self) -> None:
        """Refuse a lent connection that does not see this claim: it has another database."""
        db, dialect = self.db, self._transactions.database.dialect
        if autocommits(driver_of(db)):
            raise ConfigurationError(
                "guard.transaction() was handed a session or connection that commits each "
                'statement (isolation_level="AUTOCOMMIT"), so effects and DONE cannot commit '
                "together. Hand it one without that.",
                key=key_of(self._claim),
            )
        level, seen = self._bound()
        if not seen:
            self._adapter.roll_back()  # on SQLite its lock would stop all other writers
            with self._home.database.transaction() as home:
                if self._home.statements.is_current(home, self._claim):
                    raise self._another_database()
            raise stale(self._claim)
        if level in SNAPSHOTS if level else dialect.keeps_snapshot(db):
            self._lock()

    def _bound(self) -> tuple[str | None, bool]:
        """Return the isolation level, or None if unknown, and whether the claim is visible."""
        db, database = self.db, self._transactions.database
        driver: Any = database.engine.dialect.loaded_dbapi
        try:
            with database.faults.translated():
                level, seen = self._transactions.statements.admit(
                    db, self._claim, idle_s=self._home.idle_s
                )
                # With a `schema_translate_map`, the mapped table must be the ledger's table, too.
                if seen and db.get_execution_options().get("schema_translate_map"):
                    mapped = sa.select(WORK.c.id).where(claimed_by(self._claim))
                    seen = db.execute(mapped).first() is not None
                return level, seen
        except (LedgerSchemaError, sa.exc.ProgrammingError, driver.ProgrammingError) as error:
            raise self._another_database() from error

    def _another_database(self) -> ConfigurationError:
        return ConfigurationError(
            f"guard.transaction() of {key_of(self._claim)} was handed a session or connection that "
            f"does not see this work's claim in taskguard_work: it is not of the ledger's "
            f"database ({self._home.database.place}), or finds its tables in another schema, or "
            "may not read them. Two databases do not commit together: write there under "
            "guard.fenced(), and use guard.transaction() for the ledger's.",
            key=key_of(self._claim),
            fence=self._claim.fence,
        )

    def _lock(self) -> None:
        """Lock the keys and the work until the transaction ends, or refuse a stale claim.

        On a snapshot, a renewal in between would make the completion fail to serialize.
        """
        db, claim = self.db, self._claim
        if claim.row is not None:
            rows.read(db, claim.row, lock=True)
        self._lock_keys()
        work = db.execute(sa.select(WORK.c.id).where(claimed_by(claim)).with_for_update()).first()
        if work is None:
            raise stale(claim)

    def _lock_keys(self) -> None:
        select = sa.select(KEYS.c.key).where(holding(self._claim)).order_by(KEYS.c.key)
        if len(self.db.execute(select.with_for_update()).all()) != len(self._claim.keys):
            raise stale(self._claim)

    # -- in the body's hands ------------------------------------------------------------------

    def _hand_out(self) -> None:
        self.around, self.is_open = _open_one(), True
        _innermost.set(self)
        self._pid = os.getpid()
        self._root = self.db.get_transaction()
        driver = self._adapter.driver
        self._driver = driver_of(self.db) if driver is None else driver
        self._block = Block(self._claim, self._transactions.database)
        hand_out(self.db, self._block)

    def _take_back(self) -> bool:
        """Take the connection back from the body. Return False in a forked child.

        There, the transaction is the parent's.
        """
        self.is_open = False
        _innermost.set(_open_one())
        if self._pid != os.getpid():
            _parents.append((self.db, self._adapter))
            return False
        take_back(self.db)
        return True

    def complete_in_block(self, claim: Claim, result_json: str | None) -> None:
        """PROCESSING -> DONE: the user's row, the keys in order, then the work; all or nothing.

        This happens now, or together with the COMMIT at the end of the block.
        """
        self._flush(claim)
        if self.db.invalidated:  # the body swallowed the error
            raise broken_in_block(claim)
        statements = self._transactions.statements
        if not self._adapter.lent and statements.ends_at_once(claim) and not is_heard(self.db):
            self._last = claim, result_json
        else:
            self._complete_in_block(claim, result_json)

    def _complete_in_block(self, claim: Claim, result_json: str | None) -> None:
        statements = self._transactions.statements
        try:
            with _OfLedger(self._transactions.database, completing=claim):
                completed = statements.complete_in_block(self.db, claim, result_json)
        except CannotWriteError:
            raise
        except LedgerUnavailableError as error:
            raise broken_in_block(claim, idle_s=self._home.idle_s) from error
        if not completed:
            if statements.sees_the_end(claim):
                self._refuse_ended(None)
            raise stale(claim)

    def checkpoint(self, claim: Claim, progress_json: str) -> None:
        """Store progress, fenced; the state stays PROCESSING."""
        self._flush()
        database = self._transactions.database
        with _OfLedger(database):
            if claim.row is not None:
                rows.confirm(self.db, claim)
            # Check the keys, too. Other work may hold them, and this work's row does not show
            # that.
            self._lock_keys()
            before = sa.select(WORK.c.progress).where(claimed_by(claim))
            text, self._mark = database.dialect.mark(self.db, progress_json, stored=before)
            done = self.db.execute(sa.update(WORK).where(claimed_by(claim)).values(progress=text))
        if done.rowcount != len(claim.work_ids):
            raise stale(claim)

    def _flush(self, claim: Claim | None = None) -> None:
        """Flush the body's pending changes, and check that its transaction has not ended.

        `claim`: the claim that is completed next. Its statement may check for the end itself.
        """
        self._refuse_ended(claim)
        if self._adapter.lent:
            self._adapter.flush()
            self._refuse_ended(claim)

    def _refuse_ended(self, claim: Claim | None) -> None:
        if self.db.invalidated:
            raise broken_in_block(self._claim, idle_s=self._home.idle_s)
        ended = (
            self._pid != os.getpid()
            or self.db.closed
            or self.db.get_transaction() is not self._root
            or self._root is None
            or not self._root.is_active
        )
        if not ended:
            status = _status(driver_of(self.db))
            if status is not None:
                ended = status != _IN_TRANSACTION
            sees = claim is not None and self._transactions.statements.sees_the_end(claim)
            if not ended and not (self._looked or sees):
                ended = self._has_ended()
                self._looked = True
            if ended and self._block.asked is not None:
                raise self._block.asked  # the body caught it; later writes have no effect
            if status == _IN_ERROR:
                raise failed_in_block(self._claim)
        if ended:
            raise ended_in_block(self._claim)

    def _has_ended(self) -> bool:
        """Return True if the server has ended the transaction and the driver does not know it."""
        try:
            return self._transactions.database.dialect.ended(self.db)
        except sa.exc.DBAPIError as error:
            raise broken_in_block(self._claim) from error

    # -- end ----------------------------------------------------------------------------------

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        mine = True
        try:
            mine = self._take_back()
            if not mine:
                return
            if error is None:
                self._finish()
            else:
                self._roll_back(error)
        finally:
            if mine:
                self._adapter.close()

    def _finish(self) -> None:
        """Commit, and complete in the same message if that was postponed until now."""
        commit = NOT_SENT
        if self._last is not None:
            try:
                commit = self._complete_with_commit(*self._last)
                if not commit.sent:
                    self._complete_in_block(*self._last)
            except BaseException as error:
                self._roll_back(error)
                raise
        self._commit(commit)

    def _complete_with_commit(self, claim: Claim, result_json: str | None) -> Commit:
        statements = self._transactions.statements
        try:
            with _OfLedger(self._transactions.database, completing=claim):
                return statements.complete_with_commit(self.db, claim, result_json)
        except TransactionUsageError:
            if self._block.asked is not None:
                raise self._block.asked from None  # the body caught it, and ended its transaction
            raise

    def _commit(self, commit: Commit) -> None:
        """Commit by SQLAlchemy, even if `commit` was sent already: SQLAlchemy must know of it."""
        try:
            if commit.error is not None:
                raise self._transactions.database.faults.as_sqlalchemys(commit.error)
            self._adapter.commit()
        except BaseException as error:
            # The next user of the connection must not commit this open transaction.
            unknown = False
            try:
                origin = self._origin(error)
                database = self._transactions.database
                unknown = origin is not None and outcomes.is_unknown(database, origin)
            finally:
                self._undo(self._adapter.lose if unknown else self._adapter.roll_back)
            if not unknown:
                raise
            self._resolve(error, commit.session)

    def _resolve(self, error: BaseException, session: int | None) -> None:
        """Return if the COMMIT that failed with `error` has happened, and raise if it has not.

        `session`: the server's session if the completion was in the same message as the COMMIT.
        """
        try:
            self._home.resolve(self._claim, error, self._mark, session=session)
        except TransactionRetryError as undone:
            if session is None:
                raise
            # The connection may have been lost long before, for example because it was idle.
            raise broken_in_block(self._claim, idle_s=self._home.idle_s) from undone

    def _roll_back(self, error: BaseException) -> None:
        """Roll back. If the database asked for a retry or refused a lock, raise that error."""
        block, claim, database = self._block, self._claim, self._transactions.database
        origin = self._origin(error)
        mine = origin is not None and block.has(origin, self._driver)
        failed = _status(self._driver) in (None, _IN_ERROR) and not database.dialect.one_writer
        if getattr(self._driver, "broken", False) is True and block.lost is None:
            block.lost = error  # an error of psycopg, past SQLAlchemy
        broken = self.db.invalidated or self._adapter.broken
        broken = not self._undo(self._adapter.roll_back) or broken
        if isinstance(error, rows.RowMovedError):
            raise (broken_in_block(claim) if broken else self._moved(error)) from None
        outcomes.explain(
            database,
            block,
            error if origin is None else origin,
            mine=mine,
            broken=broken,
            failed=failed,
            idle_s=self._home.idle_s,
        )

    def _origin(self, error: BaseException) -> BaseException | None:
        return error if isinstance(error, sa.exc.DBAPIError) else self._adapter.origin(error)

    def _undo(self, roll_back: Any) -> bool:
        """Roll back in any state of the connection. Return False if the connection is broken."""
        db = self.db
        ended = self._root is None or not self._root.is_active
        try:
            if ended and not (db.closed or db.invalidated):
                # A refused commit() has ended the transaction for SQLAlchemy, but not for the
                # driver.
                driver_of(db).rollback()
            roll_back()
            if ended and self._adapter.lent and not (db.closed or db.in_transaction()):
                # After a refused begin, a Connection would never again begin automatically.
                db.begin().rollback()
        except (sa.exc.DBAPIError, self._transactions.database.engine.dialect.loaded_dbapi.Error):
            return False
        return True

    def _moved(self, error: rows.RowMovedError) -> Exception:
        """Return the error for a moved row: the body's, now rolled back, or a stale claim's."""
        with self._home.database.transaction() as db:
            return rows.changed_by_body(db, self._claim, error) or stale(self._claim)


def _status(driver: Any) -> int | None:
    """Return psycopg's `transaction_status`, or None with another driver."""
    status: int | None = getattr(getattr(driver, "pgconn", None), "transaction_status", None)
    return status


# The innermost transaction around this call. Another context may have ended it.
_innermost: ContextVar[GuardedTransaction | None] = ContextVar(
    "taskguard_transaction", default=None
)


def _open_one() -> GuardedTransaction | None:
    """Return the innermost open transaction around this call."""
    transaction = _innermost.get()
    while transaction is not None and not transaction.is_open:
        transaction = transaction.around
    return transaction


def _depth() -> int:
    """How many transactions are open around this call."""
    transaction, depth = _innermost.get(), 0
    while transaction is not None:
        depth += transaction.is_open
        transaction = transaction.around
    return depth
