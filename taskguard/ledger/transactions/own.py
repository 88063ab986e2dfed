"""Transactions on a connection of the ledger's Engine, which may be an Engine of the user."""

from __future__ import annotations

import functools

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.pools import COMMITTED, Share
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.connections.sessions import BodySession
from taskguard.ledger.transactions.adapter import Connect, TransactionAdapter

__all__ = ["OwnConnection"]


class OwnConnection(TransactionAdapter):
    """A connection of a share. It returns to its pool in its original state.

    Args:
        database: begins the transaction.
        share: the share that gives the connection.
        idle_s: how long the transaction may be idle, in seconds.
        of_body: a body uses the connection, and may change its session.
    """

    lent = False

    def __init__(self, database: Database, share: Share, *, idle_s: float, of_body: bool) -> None:
        self.kind = share.engine.dialect.name
        self._database = database
        self._share = share
        self._idle_s = idle_s
        self._of_body = of_body

    def begin(self, connect: Connect) -> sa.Connection:
        del connect
        begin = functools.partial(
            self._database.begin,
            self._share.__enter__(),
            idle_s=self._idle_s,
            meanwhile=self._watched,
        )
        try:
            # Without a body, the caller repeats the whole completion instead.
            made = (retried(begin) if self._of_body else begin)()
            self._db, self._session = made
        except BaseException:
            self._share.__exit__()
            raise
        return self._db

    def _watched(self, db: sa.Connection) -> BodySession | None:
        return BodySession(db, own=self._database.dialect.own) if self._of_body else None

    def commit(self) -> None:
        self._db.commit()
        self._db.info[COMMITTED] = True

    def roll_back(self) -> None:
        self._db.rollback()

    def lose(self) -> None:
        self._db.invalidate()  # closing it frees its row locks
        self._db.close()

    def close(self) -> None:
        try:
            with self._db:
                if self._session is not None:
                    self._session.end()
        finally:
            self._share.__exit__()
