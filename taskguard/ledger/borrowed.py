"""A holder's transaction on a Session or Connection of the user's own.

Guarantees what `transaction.py` does, on a connection that somebody else has made: the block begins
the transaction there and ends it; it is the ledger's database, which is seen by the claim itself; a
Session that would commit in the block, or begin a second transaction, is refused.

Does not tell the database from a writable copy of it that has the claim already (logical
replication). After a COMMIT whose answer got lost, objects that were new in the
Session are in the database and no longer in the Session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy as sa

from taskguard.errors import ConfigurationError, LedgerSchemaError, TransactionUsageError
from taskguard.ledger.base import Claim
from taskguard.ledger.database import driver_of
from taskguard.ledger.dialects.base import SNAPSHOTS
from taskguard.ledger.driver import driver_connection
from taskguard.ledger.foreign import ForeignConnection, engine_for_foreign, on_foreign
from taskguard.ledger.refusals import broken_in_block, ended_in_block, key_of, stale
from taskguard.ledger.rows import RowMovedError
from taskguard.ledger.tables import WORKS
from taskguard.ledger.transaction import SqlTransaction, Transactions

if TYPE_CHECKING:
    from typing import Self

    from sqlalchemy.orm import Session, SessionTransaction

__all__ = ["BorrowedTransaction"]


class BorrowedTransaction(SqlTransaction):
    """One transaction of a holder on `on`, for the time of a `with` block."""

    def __init__(self, transactions: Transactions, claim: Claim, on: Any) -> None:
        super().__init__(transactions, claim, look_first=False)
        self._home = transactions
        self._lender = _lender(on, claim, transactions.database.engine)

    def __enter__(self) -> Self:
        if self._lender.kind != self._home.database.engine.dialect.name:
            raise self._another_database()
        self._transactions = self._home.elsewhere(self._lender.engine)
        with self._transactions.database.translated():
            self.db = self._lender.begin()
            try:
                self._admit()
            except BaseException:
                self._lender.roll_back()
                raise
        self._lend()
        self._lender.watch(self.db)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._take_back():
            return
        self._lender.unwatch()
        if error is None:
            self._commit()
            return
        origin = self._lender.origin(error)
        broken = self.db.invalidated or self._lender.broken
        mine = origin is not None and self._block.has(origin, self._driver)
        failed = self._transactions.has_failed(self._driver)
        if self._lender.lost and self._block.lost is None:
            self._block.lost = error
        broken = not self._undo() or broken
        if isinstance(error, RowMovedError):
            raise (broken_in_block(self._claim) if broken else self._moved(error)) from None
        said = error if origin is None else origin
        self._transactions.explain(self._block, said, mine=mine, broken=broken, failed=failed)

    def _moved(self, error: RowMovedError) -> Exception:
        with self._home.database.transaction() as home:
            return self._home.moved(home, self._claim, error)

    def complete(self, claim: Claim, result_json: str | None) -> None:
        self._flush(claim)
        super().complete(claim, result_json)

    def checkpoint(self, claim: Claim, progress_json: str) -> None:
        self._flush()
        super().checkpoint(claim, progress_json)

    def _flush(self, claim: Claim | None = None) -> None:
        """What the Session has pending goes before what the ledger writes."""
        self._refuse_ended(claim)
        if self._lender.ended:
            raise ended_in_block(self._claim)
        self._lender.flush()

    def _commit(self) -> None:
        try:
            self._lender.commit()
        except BaseException as error:
            self._undo()
            origin = self._lender.origin(error)
            if origin is None or not self._transactions.is_unknown(origin):
                raise
            self._home.resolve(self._claim, error, self._mark)

    def _undo(self) -> bool:
        """Roll back, whatever the body has done to it. False: the connection broke over it."""
        db = self.db
        ended = self._root is None or not self._root.is_active
        try:
            if ended and not (db.closed or db.invalidated):
                # Ended for SQLAlchemy, by a commit() that was refused, and open for the driver.
                driver_of(db).rollback()
            self._lender.roll_back()
            if ended and not (db.closed or db.in_transaction()):
                # A Connection whose begin was refused would not begin by itself ever after.
                db.begin().rollback()
        except (sa.exc.DBAPIError, self._transactions.database.engine.dialect.loaded_dbapi.Error):
            return False
        return True

    # -- is it the ledger's database? ---------------------------------------------------------

    def _admit(self) -> None:
        """Nothing else begins here, and this claim is seen here."""
        db = self.db
        dialect = self._transactions.database.dialect
        if dialect.autocommits(driver_of(db)):
            raise ConfigurationError(
                "guard.transaction() was handed a session or connection that commits each "
                'statement (isolation_level="AUTOCOMMIT"), so effects and DONE cannot commit '
                "together. Hand it one without that.",
                key=key_of(self._claim),
            )
        dialect.check(db)
        level, seen = self._bound()
        if not seen:
            self._lender.roll_back()  # on SQLite its lock would keep everybody else away
            with self._home.database.transaction() as home:
                if self._home.statements.stands(home, self._claim):
                    raise self._another_database()
            raise stale(self._claim)
        if level in SNAPSHOTS if level else dialect.keeps_snapshot(db):
            # A renewal in between would make the completion a serialization failure.
            self._transactions.lock(db, self._claim)

    def _bound(self) -> tuple[str | None, bool]:
        """The transaction's isolation level, where that is known, and whether it sees the claim."""
        db, transactions = self.db, self._transactions
        database = transactions.database
        driver: Any = database.engine.dialect.loaded_dbapi
        try:
            with database.translated():
                self._lender.prepare(db)
                idle_s = self._home.idle_in_transaction_s
                level, seen = transactions.statements.admit(db, self._claim, idle_s=idle_s)
                # What SQLAlchemy translates (`schema_translate_map`) must be the same table.
                mapped = db.get_execution_options().get("schema_translate_map")
                return level, seen and (
                    not mapped or transactions.stands_as_mapped(db, self._claim)
                )
        except (LedgerSchemaError, sa.exc.ProgrammingError, driver.ProgrammingError) as error:
            raise self._another_database() from error

    def _another_database(self) -> ConfigurationError:
        return ConfigurationError(
            f"guard.transaction() of {key_of(self._claim)} was handed a session or connection that "
            f"does not see this work's claim in taskguard_works: it is not of the ledger's "
            f"database ({self._home.database.place}), or finds its tables in another schema, or "
            "may not read them. Two databases do not commit together: write there under "
            "guard.fenced(), and use guard.transaction() for the ledger's.",
            key=key_of(self._claim),
            fence=self._claim.fence,
        )


# -- whose it is ------------------------------------------------------------------------------


class _Lender(Protocol):
    """What a Session, a Connection and another library's connection have in common for a block."""

    ended: bool  # a commit() was refused, whatever the body made of that

    @property
    def kind(self) -> str: ...  # of database

    @property
    def engine(self) -> sa.Engine: ...

    @property
    def broken(self) -> bool: ...  # as far as SQLAlchemy's Connection does not tell

    @property
    def lost(self) -> bool: ...  # broken, and not closed by the body

    def begin(self) -> sa.Connection: ...

    def prepare(self, db: sa.Connection) -> None: ...

    def watch(self, db: sa.Connection) -> None: ...

    def unwatch(self) -> None: ...

    def flush(self) -> None: ...

    def commit(self) -> None: ...

    def roll_back(self) -> None: ...

    def origin(self, error: BaseException) -> Any: ...  # the driver's, or SQLAlchemy's for it


def _lender(on: Any, claim: Claim, ledgers: sa.Engine) -> _Lender:
    foreign = on if isinstance(on, ForeignConnection) else driver_connection(on)
    if foreign is not None:
        return _OfForeign(foreign, ledgers)
    if isinstance(on, sa.Connection):
        return _OfConnection(on, claim)
    from sqlalchemy.orm import Session, scoped_session

    session = on() if isinstance(on, scoped_session) else on
    if isinstance(session, Session):
        return _OfSession(session, claim)
    raise ConfigurationError(
        "guard.transaction() takes a SQLAlchemy ORM Session or Connection, a connection of psycopg "
        "or sqlite3, or nothing, not "
        f"{type(on).__module__}.{type(on).__qualname__}.",
        key=key_of(claim),
    )


class _OfSQLAlchemy:
    """What is the same for all that SQLAlchemy has made."""

    engine: sa.Engine
    broken = lost = False  # the Connection tells

    @property
    def kind(self) -> str:
        return self.engine.dialect.name

    def prepare(self, db: sa.Connection) -> None:
        """Nothing."""

    def origin(self, error: BaseException) -> Any:
        return error if isinstance(error, sa.exc.DBAPIError) else None


class _OfConnection(_OfSQLAlchemy):
    """The user's Connection."""

    ended = False  # the connection itself tells

    def __init__(self, connection: sa.Connection, claim: Claim) -> None:
        self.engine = connection.engine
        self._connection = connection
        self._claim = claim

    def begin(self) -> sa.Connection:
        if self._connection.in_transaction():
            raise _begun(self._claim, "Connection")
        self._connection.begin()
        return self._connection

    def watch(self, db: sa.Connection) -> None:
        """Nothing: its COMMIT is refused where all lent connections' are."""

    def unwatch(self) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def commit(self) -> None:
        self._connection.commit()

    def roll_back(self) -> None:
        self._connection.rollback()


class _OfSession(_OfSQLAlchemy):
    """The user's Session: its connection is only as good as what the Session does with it."""

    def __init__(self, session: Session, claim: Claim) -> None:
        if session.twophase:
            raise ConfigurationError(
                "guard.transaction() was handed a Session with twophase=True; it commits in one.",
                key=key_of(claim),
            )
        self._bind = session.get_bind()
        self.engine = self._bind.engine
        self._session = session
        self._claim = claim
        self.ended = False
        self._listeners: dict[str, Callable[..., None]] = {}

    def begin(self) -> sa.Connection:
        session, bind = self._session, self._bind
        joined = isinstance(bind, sa.Connection) and bind.in_transaction()
        if joined or session.in_transaction():
            raise _begun(self._claim, "Connection of the Session" if joined else "Session")
        session.begin()
        try:
            return session.connection()
        except BaseException:
            session.rollback()
            raise

    def watch(self, db: sa.Connection) -> None:
        claim = self._claim

        def refuse_a_commit(session: Session) -> None:
            if session.get_nested_transaction() is None:
                self.ended = True
                raise ended_in_block(claim)

        def refuse_another(_: Session, _transaction: SessionTransaction, begun: Any) -> None:
            if begun is not db:
                raise TransactionUsageError(
                    f"The Session in the guarded transaction of {key_of(claim)} began another one "
                    "in the block: after a rollback() or close(), or on another database, which "
                    "would not commit together with DONE.",
                    key=key_of(claim),
                    fence=claim.fence,
                )

        self._listeners = {"before_commit": refuse_a_commit, "after_begin": refuse_another}
        for event, listener in self._listeners.items():
            sa.event.listen(self._session, event, listener)

    def unwatch(self) -> None:
        for event, listener in self._listeners.items():
            sa.event.remove(self._session, event, listener)

    def flush(self) -> None:
        self._session.flush()

    def commit(self) -> None:
        self._session.commit()

    def roll_back(self) -> None:
        try:
            self._session.rollback()
        except sa.exc.DBAPIError:
            with contextlib.suppress(sa.exc.DBAPIError):
                self._session.invalidate()
            raise


class _OfForeign:
    """Another library's connection: SQLAlchemy's on top of it writes, and ends nothing."""

    ended = False  # the library tells before the end

    def __init__(self, foreign: ForeignConnection, ledgers: sa.Engine) -> None:
        self.kind = foreign.kind
        self._foreign = foreign
        self._ledgers = ledgers
        self.engine = engine_for_foreign(ledgers)
        self._db: sa.Connection | None = None

    @property
    def broken(self) -> bool:
        return self._foreign.broken

    @property
    def lost(self) -> bool:
        return getattr(self._foreign.driver, "broken", False) is True  # psycopg's

    def begin(self) -> sa.Connection:
        try:
            self._foreign.begin()
        except Exception as error:
            origin = self.origin(error)
            if origin is None:
                raise
            raise origin from error
        try:
            self._db = on_foreign(self._ledgers, self._foreign)
            self._db.begin()
        except BaseException:
            self.roll_back()
            raise
        return self._db

    def prepare(self, db: sa.Connection) -> None:
        """On SQLite a reader that wants to write later is refused if somebody else has written."""
        if self.kind == "sqlite":
            db.execute(sa.update(WORKS).where(sa.false()).values(final=0))

    def watch(self, db: sa.Connection) -> None:
        """Nothing: the library refuses a commit() in its block."""

    def unwatch(self) -> None:
        """Nothing."""

    def flush(self) -> None:
        self._foreign.before_end()

    def commit(self) -> None:
        try:
            self._foreign.commit()
        finally:
            self._close()

    def roll_back(self) -> None:
        try:
            self._foreign.roll_back()
        finally:
            self._close()

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()

    def origin(self, error: BaseException) -> Any:
        return error if isinstance(error, sa.exc.DBAPIError) else self._foreign.origin(error)


def _begun(claim: Claim, what: str) -> TransactionUsageError:
    return TransactionUsageError(
        f"guard.transaction() of {key_of(claim)} was handed a {what} whose transaction has begun "
        "(reading is enough), so that what was done before would be committed with it. Commit or "
        "roll back before the block, or do it in the block.",
        key=key_of(claim),
        fence=claim.fence,
    )
