"""Transactions on a Session or Connection of the user.

Guarantees: the block begins and ends the transaction. It refuses a Session that commits in the
block, or begins a second transaction.

If the answer to a COMMIT was lost, new objects of the Session are in the database, but no longer in
the Session.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from taskguard.errors import ConfigurationError, TransactionUsageError
from taskguard.ledger.refusals import ended_in_block, key_of
from taskguard.ledger.transactions.adapter import Connect, TransactionAdapter
from taskguard.ledger.transactions.drivers import driver_connection
from taskguard.model.claims import Claim

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction

__all__ = ["adapter_of"]


def adapter_of(on: Any, claim: Claim) -> TransactionAdapter:
    """Return the adapter for an argument of `guard.transaction()`. Raises ConfigurationError."""
    if isinstance(on, TransactionAdapter):
        return on
    if isinstance(on, sa.Connection):
        return LentConnection(on, claim)
    orm: Any = sys.modules.get("sqlalchemy.orm")  # a Session exists only if it is imported
    if orm is not None:
        session = on() if isinstance(on, orm.scoped_session) else on
        if isinstance(session, orm.Session):
            return LentSession(session, claim)
    external = driver_connection(on)
    if external is not None:
        return external
    raise ConfigurationError(
        "guard.transaction() takes a SQLAlchemy ORM Session or Connection, a connection of psycopg "
        "or sqlite3, or nothing, not "
        f"{type(on).__module__}.{type(on).__qualname__}.",
        key=key_of(claim),
    )


class LentConnection(TransactionAdapter):
    """The user's Connection."""

    def __init__(self, connection: sa.Connection, claim: Claim) -> None:
        self.kind = connection.dialect.name
        self.engine = connection.engine
        self._connection = connection
        self._claim = claim

    def begin(self, connect: Connect) -> sa.Connection:
        del connect
        if self._connection.in_transaction():
            raise _begun(self._claim, "Connection")
        self._connection.begin()
        return self._connection

    def commit(self) -> None:
        self._connection.commit()

    def roll_back(self) -> None:
        self._connection.rollback()


class LentSession(TransactionAdapter):
    """The user's Session. It must not commit or change its connection within the block."""

    def __init__(self, session: Session, claim: Claim) -> None:
        if session.twophase:
            raise ConfigurationError(
                "guard.transaction() was handed a Session with twophase=True; it commits in one.",
                key=key_of(claim),
            )
        self._bind = session.get_bind()
        self.kind = self._bind.dialect.name
        self.engine = self._bind.engine
        self._session = session
        self._claim = claim
        self._ended = False  # a commit() was refused, even if the body caught the error
        self._listeners: dict[str, Callable[..., None]] = {}

    def begin(self, connect: Connect) -> sa.Connection:
        del connect
        session, bind = self._session, self._bind
        joined = isinstance(bind, sa.Connection) and bind.in_transaction()
        if joined or session.in_transaction():
            raise _begun(self._claim, "Connection of the Session" if joined else "Session")
        session.begin()
        try:
            db = session.connection()
        except BaseException:
            session.rollback()
            raise
        self._watch(db)
        return db

    def _watch(self, db: sa.Connection) -> None:
        claim = self._claim

        def refuse_a_commit(session: Session) -> None:
            if session.get_nested_transaction() is None:
                self._ended = True
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

    def _unwatch(self) -> None:
        listeners, self._listeners = self._listeners, {}
        for event, listener in listeners.items():
            sa.event.remove(self._session, event, listener)

    def flush(self) -> None:
        if self._ended:
            raise ended_in_block(self._claim)
        self._session.flush()

    def commit(self) -> None:
        self._unwatch()
        self._session.commit()

    def roll_back(self) -> None:
        self._unwatch()
        try:
            self._session.rollback()
        except sa.exc.DBAPIError:
            with contextlib.suppress(sa.exc.DBAPIError):
                self._session.invalidate()
            raise


def _begun(claim: Claim, what: str) -> TransactionUsageError:
    return TransactionUsageError(
        f"guard.transaction() of {key_of(claim)} was handed a {what} whose transaction has begun "
        "(reading is enough), so that what was done before would be committed with it. Commit or "
        "roll back before the block, or do it in the block.",
        key=key_of(claim),
        fence=claim.fence,
    )
