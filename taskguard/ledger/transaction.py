"""A holder's transaction: its effects and its end are committed together, or not at all.

Guarantees: what is written on the connection is committed only if key and work still carry the
claim's fence and owner at the end; nobody but the block ends the transaction; a COMMIT that got no
answer is resolved before anything is reported.

Does not guarantee that a driver's own ROLLBACK, past SQLAlchemy, is noticed on an Engine of the
user's whose driver does not tell its state.

Read next: `borrowed.py`, for transactions on the user's own Session or Connection.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from taskguard.errors import (
    CommitUnknownError,
    LedgerSchemaError,
    LedgerUnavailableError,
    TaskguardError,
    TransactionRetryError,
)
from taskguard.ledger import rows
from taskguard.ledger.base import Claim
from taskguard.ledger.block import Block
from taskguard.ledger.database import (
    CannotWriteError,
    Database,
    LockTimeoutError,
    driver_of,
)
from taskguard.ledger.engine import listen_once
from taskguard.ledger.foreign import beneath
from taskguard.ledger.refusals import (
    ConnectionBrokenError,
    broken_in_block,
    ended_in_block,
    failed_in_block,
    key_of,
    lock_not_given,
    stale,
    too_long_in_block,
)
from taskguard.ledger.sessions import BodySession
from taskguard.ledger.statements import Statements, statements_for
from taskguard.ledger.tables import (
    KEYS,
    WORKS,
    holding,
    standing,
)
from taskguard.states import State

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "SqlTransaction",
    "Transactions",
]


_IN_TRANSACTION, _IN_ERROR = 2, 3  # psycopg.pq.TransactionStatus
# A parent's transactions, in a forked child: closing them would speak on the parent's sockets.
_parents: list[Any] = []
# Connections in the hands of bodies. A body must not end its transaction: what it wrote
# would be committed without DONE, or what came after would.
_lent: WeakKeyDictionary[sa.Connection, Block] = WeakKeyDictionary()


def _refuse_an_end(db: sa.Connection) -> None:
    """Before a COMMIT, and before the BEGIN that follows any end."""
    block = _lent.get(db)
    if block is not None:
        raise ended_in_block(block.claim)


def _note_error(context: sa.engine.ExceptionContext) -> None:
    """Whatever the body makes of it: the connection tells first."""
    block = None if context.connection is None else _lent.get(context.connection)
    if block is not None:
        block.note(context)


# The transaction around this call that was begun last. It may have ended since, in another context.
_innermost: ContextVar[SqlTransaction | None] = ContextVar("taskguard_transaction", default=None)


def _open_one() -> SqlTransaction | None:
    """The innermost one around this call that is open."""
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


class SqlTransaction:
    """One transaction of a holder, for the time of a `with` block."""

    db: sa.Connection

    def __init__(
        self,
        transactions: Transactions,
        claim: Claim,
        *,
        look_first: bool,
        by_ledger: bool = False,
    ) -> None:
        self._transactions = transactions
        self._claim = claim
        self._look_first = look_first
        self._by_ledger = by_ledger
        self.around: SqlTransaction | None = None
        self.is_open = False

    def __enter__(self) -> Self:
        pools = self._transactions.database.pools
        share = pools.ledgers if self._by_ledger else pools.of_body(_depth())
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(share.turn())
            self.db = self._transactions.begin(
                self._claim, look_first=self._look_first, engine=engine
            )
            self._turn = stack.pop_all()
        self._lend()
        dialect = self._transactions.database.dialect
        self._session = (
            None
            if self._by_ledger
            else BodySession(self.db, own=dialect.own, autocommits=dialect.autocommits)
        )
        return self

    def _lend(self) -> None:
        self.around, self.is_open = _open_one(), True
        _innermost.set(self)
        self._pid = os.getpid()
        self._mark: str | None = None
        self._looked = False  # at the server, whose answer is had once
        self._root = self.db.get_transaction()
        self._driver = beneath(driver_of(self.db))
        self._block = _lent[self.db] = Block(self._claim, self._transactions.database)

    def _take_back(self) -> bool:
        """False in a forked child: the transaction is its parent's."""
        self.is_open = False
        _innermost.set(_open_one())
        if self._pid != os.getpid():
            _parents.append(self.db)
            return False
        _lent.pop(self.db, None)
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._take_back():
            return
        try:
            if error is None:
                self._transactions.commit(self.db, self._claim, self._mark)
            else:
                self._transactions.roll_back(self.db, self._block, error, self._driver)
        finally:
            with self._turn, contextlib.closing(self.db):
                if self._session is not None:
                    self._session.end()

    def complete(self, claim: Claim, result_json: str | None) -> None:
        self._refuse_ended(claim)
        self._transactions.complete(self.db, claim, result_json)

    def _refuse_ended(self, claim: Claim | None = None) -> None:
        """`claim`: it is to be completed now, by what may look itself."""
        if self.db.invalidated:
            raise self._transactions.broken(self._claim)
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
            if status is not None:
                ended = status != _IN_TRANSACTION
            seen = claim is not None and self._transactions.statements.sees_the_end(claim)
            if not ended and not (self._looked or seen):
                ended = self._transactions.ended(self.db, self._claim)
                self._looked = True
            if ended and self._block.asked is not None:
                raise self._block.asked  # the body swallowed it, and what came after is void
            if status == _IN_ERROR:
                raise failed_in_block(self._claim)
        if ended:
            raise ended_in_block(self._claim)

    def checkpoint(self, claim: Claim, progress_json: str) -> None:
        self._refuse_ended()
        with self._transactions.for_ledger():
            if claim.row is not None:
                rows.confirm(self.db, claim)
            # The keys, too: other work may hold them by now, and this work's row does not tell.
            self._transactions.lock_keys(self.db, claim)
            stored, self._mark = self._transactions.mark(self.db, claim, progress_json)
            done = self.db.execute(sa.update(WORKS).where(standing(claim)).values(progress=stored))
        if done.rowcount != len(claim.works):
            raise stale(claim)


class Transactions:
    """How holders' transactions on one database begin, complete and end.

    Args:
        database: where.
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
        self._database = database
        self._one_statement = one_statement
        self._dialect = database.dialect
        self._idle_in_transaction_s = idle_in_transaction_s
        self._resolve_timeout_s = resolve_timeout_s
        self._snapshots: bool | None = None
        listeners: dict[str, Any] = {
            "commit": _refuse_an_end,
            "begin": _refuse_an_end,
            "handle_error": _note_error,
        }
        for event, listener in listeners.items():
            listen_once(database.engine, event, listener)

    @property
    def database(self) -> Database:
        """Where."""
        return self._database

    @functools.cached_property
    def statements(self) -> Statements:
        """Those of this kind of database. Raises LedgerUnavailableError where that is not known."""
        return statements_for(self._database, one_statement=self._one_statement)

    @property
    def idle_in_transaction_s(self) -> float:
        """For how long a transaction may idle, in seconds."""
        return self._idle_in_transaction_s

    def elsewhere(self, engine: sa.Engine) -> Transactions:
        """The same by way of another Engine, which may use another driver."""
        if engine is self._database.engine:
            return self
        database = self._database.elsewhere(engine)
        return Transactions(
            database,
            one_statement=self._one_statement,
            idle_in_transaction_s=self._idle_in_transaction_s,
            resolve_timeout_s=self._resolve_timeout_s,
        )

    def open(self, claim: Claim, *, look_first: bool, by_ledger: bool = False) -> SqlTransaction:
        """A transaction for a `with` block; `by_ledger`: on a connection that is no body's."""
        return SqlTransaction(self, claim, look_first=look_first, by_ledger=by_ledger)

    def begin(self, claim: Claim, *, look_first: bool, engine: sa.Engine) -> sa.Connection:
        """A connection in a transaction; refuses a claim that is seen to be stale."""
        with self._database.translated():
            db = self.statements.begin(engine, idle_s=self._idle_in_transaction_s)
            try:
                if self._keeps_snapshot(db):
                    # A renewal in between would make the completion a serialization failure.
                    self.lock(db, claim)
                elif look_first and not self.statements.stands(db, claim):
                    raise stale(claim)
            except BaseException:
                db.close()
                raise
        return db

    def _keeps_snapshot(self, db: sa.Connection) -> bool:
        """Whether transactions on the user's own Engine see the rows of their beginning."""
        if self._snapshots is None:
            ours = self._database.begins_itself
            self._snapshots = not ours and self._dialect.keeps_snapshot(db)
        return self._snapshots

    def lock(self, db: sa.Connection, claim: Claim) -> None:
        """Keep keys and work ours until the transaction ends, or refuse."""
        if claim.row is not None:
            rows.read(db, claim.row, lock=True)
        self.lock_keys(db, claim)
        work = db.execute(sa.select(WORKS.c.id).where(standing(claim)).with_for_update()).first()
        if work is None:
            raise stale(claim)

    @staticmethod
    def stands_as_mapped(db: sa.Connection, claim: Claim) -> bool:
        """Whether it stands by SQLAlchemy's names for the tables, which users may change."""
        return db.execute(sa.select(WORKS.c.id).where(standing(claim))).first() is not None

    def roll_back(self, db: sa.Connection, block: Block, error: BaseException, driver: Any) -> None:
        """Nothing is written. What the database asked for decides how the body goes on."""
        claim, broken = block.claim, db.invalidated
        failed = self.has_failed(driver)
        if not broken:
            try:
                db.rollback()
            except sa.exc.DBAPIError:
                broken = True
        if isinstance(error, rows.RowMovedError):
            raise (broken_in_block(claim) if broken else self.moved(db, claim, error)) from None
        mine = block.has(error, driver)
        self.explain(block, error, mine=mine, broken=broken, failed=failed)

    def has_failed(self, driver: Any) -> bool:
        """Whether the database takes no more statements until this transaction is rolled back."""
        status = getattr(getattr(driver, "pgconn", None), "transaction_status", None)
        return status in (None, _IN_ERROR) and not self._dialect.one_writer

    def explain(
        self, block: Block, error: BaseException, *, mine: bool, broken: bool, failed: bool
    ) -> None:
        """Raise what befell the transaction, after which nothing is written, if that was the end.

        Args:
            block: what the driver has said.
            error: by what the body left; its own goes on, unless the connection was lost, or the
                database had asked to run it again and the transaction is `failed`.
            mine: it is an error of this connection.
            broken: the connection is lost, also if that was not by an error of the driver.
            failed: see `has_failed()`.
        """
        claim = block.claim
        if block.lost is not None or broken or isinstance(error, ConnectionBrokenError):
            self._refuse_too_long(block, error)
        if not isinstance(error, Exception) or isinstance(error, TaskguardError):
            return
        if block.lost is not None:
            raise self.broken(claim) from error
        if failed and isinstance(block.asked, TransactionRetryError):
            raise block.asked from error
        mapped = self._database.map(error) if mine else None
        if mapped is None:
            return
        if broken or getattr(error, "connection_invalidated", False):
            raise broken_in_block(claim) from error
        if isinstance(mapped, LockTimeoutError):
            raise lock_not_given(claim) from error
        if isinstance(mapped, TransactionRetryError | CannotWriteError):
            raise mapped from error

    def _refuse_too_long(self, block: Block, error: BaseException) -> None:
        """What the server takes from nobody is no trouble of the ledger's."""
        if not block.size or not isinstance(error, Exception):
            return
        try:
            with self._database.transaction() as db:
                limit = self._dialect.longest_statement(db)
        except LedgerUnavailableError:
            return
        if limit is not None and block.size >= limit:
            raise too_long_in_block(block.claim, block.size, limit) from error

    def broken(self, claim: Claim) -> TransactionRetryError:
        """What the body is told, with what may have done it."""
        return broken_in_block(claim, idle_s=self._idle_in_transaction_s)

    def moved(self, db: sa.Connection, claim: Claim, error: rows.RowMovedError) -> Exception:
        """By whom the user's row was moved: its body, whose doing is rolled back, or others."""
        with self._database.translated():
            return rows.changed_by_body(db, claim, error) or stale(claim)

    def lock_keys(self, db: sa.Connection, claim: Claim) -> None:
        """Keep the keys ours until the transaction ends, or refuse."""
        select = sa.select(KEYS.c.key).where(holding(claim)).order_by(KEYS.c.key)
        if len(db.execute(select.with_for_update()).all()) != len(claim.keys):
            raise stale(claim)

    def ended(self, db: sa.Connection, claim: Claim) -> bool:
        """Whether the server has ended the transaction, and the driver does not tell."""
        try:
            return self._dialect.ended(db)
        except sa.exc.DBAPIError as error:
            raise broken_in_block(claim) from error

    def mark(self, db: sa.Connection, claim: Claim, progress_json: str) -> tuple[str, str | None]:
        """The progress to store, and by what the outcome of its COMMIT can be asked for later."""
        return self._dialect.mark(db, claim, progress_json)

    def commit(self, db: sa.Connection, claim: Claim, mark: str | None = None) -> None:
        """Commit, and find out what became of it."""
        try:
            db.commit()
        except sa.exc.DBAPIError as error:
            if not self.is_unknown(error):
                raise  # the database said no: a deferred constraint
            db.invalidate()  # its row locks, and whatever its session has
            db.close()
            self.resolve(claim, error, mark)
        except BaseException:
            # An interrupt, or a listener of the user's. COMMIT may not have been sent: whoever has
            # the connection next must not do it.
            with contextlib.suppress(Exception):
                db.rollback()
            raise

    def is_unknown(self, error: BaseException) -> bool:
        """Whether nobody knows what became of the COMMIT that failed with it.

        Raises TransactionRetryError where the database asks for it.
        """
        mapped = self._database.map(error)
        if isinstance(mapped, TransactionRetryError):
            raise mapped from error
        return isinstance(mapped, LedgerUnavailableError)

    def resolve(self, claim: Claim, error: BaseException, mark: str | None = None) -> None:
        """Learn what became of a COMMIT that got no answer."""
        until_s = time.monotonic() + self._resolve_timeout_s
        while True:
            try:
                with self._database.transaction(lock_timeout_s=self._resolve_timeout_s) as db:
                    select = sa.select(WORKS).where(WORKS.c.id == claim.work)
                    row = db.execute(select.with_for_update()).first()
                    mine = row is not None and (row.fence, row.owner) == (
                        claim.fence,
                        str(claim.owner),
                    )
                    committed = mark is not None and self._dialect.happened(
                        db, mark, row, mine=mine
                    )
                break
            except LedgerUnavailableError as unavailable:
                if time.monotonic() >= until_s:
                    raise CommitUnknownError(
                        f"COMMIT of {key_of(claim)} got no answer and the database stays away.",
                        key=key_of(claim),
                        fence=claim.fence,
                    ) from unavailable
                time.sleep(0.2)
        if committed or (mine and row is not None and row.state == State.DONE.value):
            return
        if mine and row is not None and row.state == State.PROCESSING.value:
            raise TransactionRetryError(
                f"COMMIT of {key_of(claim)} did not happen.", key=key_of(claim), fence=claim.fence
            ) from error
        raise stale(claim) from error

    @contextmanager
    def for_ledger(self) -> Iterator[None]:
        """Statements on the ledger's own tables: what is refused there is no error of the body."""
        try:
            yield
        except sa.exc.DBAPIError as error:
            mapped = self._database.map(error)
            if not isinstance(mapped, LedgerSchemaError):
                raise
            raise mapped from error

    def complete(self, db: sa.Connection, claim: Claim, result_json: str | None) -> None:
        """The user's row, the keys in order, then the work: all still ours, or nothing."""
        if db.invalidated:  # the body swallowed the error that said so
            raise broken_in_block(claim)
        try:
            with self.for_ledger():
                completed = self.statements.complete(db, claim, result_json)
        except CannotWriteError:
            raise
        except LockTimeoutError as error:
            raise lock_not_given(claim) from error
        except LedgerUnavailableError as error:
            raise self.broken(claim) from error
        if not completed:
            if self.statements.sees_the_end(claim) and self.ended(db, claim):
                raise ended_in_block(claim)
            raise stale(claim)
