"""PostgreSQL 14 or later, with any driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from taskguard.ledger.connections.dialects.base import SNAPSHOTS, Fault
from taskguard.ledger.connections.dialects.on_conflict import OnConflict

__all__ = ["BEGUN", "MARK", "PostgreSQL", "bounding", "bounds", "milliseconds"]

# A setting for the holder's transaction. It is gone after a COMMIT, even if another BEGIN, or AND
# CHAIN, follows in the same message.
MARK, BEGUN = "taskguard.transaction", "begun"
_CHECK_CLIENT_MS = 2000

# SQLSTATEs: https://www.postgresql.org/docs/current/errcodes-appendix.html
_FAULTS = {
    "40001": Fault.RETRY,
    "40P01": Fault.RETRY,
    "55P03": Fault.LOCKED,
    "42P01": Fault.NO_TABLE,
    "25006": Fault.CANNOT_WRITE,  # a standby, after a failover
    "53100": Fault.CANNOT_WRITE,
    "25P03": Fault.AWAY,  # idle in its transaction for too long
    "25P04": Fault.AWAY,  # its transaction took too long
}
_FAULTS_BY_CLASS = {
    "42": Fault.REFUSED,  # syntax error or access rule violation: a column, a function, a privilege
    "3F": Fault.REFUSED,  # no such schema
    "XX": Fault.AWAY,  # internal errors, corrupted data
}
_OWN_FAULT = "54"  # a limit of the program: a retry would exceed it again


class PostgreSQL(OnConflict):
    """The dialect of PostgreSQL."""

    insert = staticmethod(insert)
    lock_timeouts_abort = True
    locks_joined = False
    options = MappingProxyType({"isolation_level": "READ COMMITTED"})

    def now(self) -> sa.ColumnElement[int]:
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * 1_000_000, sa.BigInteger)

    @contextmanager
    def waiting(
        self, db: sa.Connection, lock_timeout_s: float, *, apart: bool = False
    ) -> Iterator[None]:
        del apart
        db.exec_driver_sql(
            f"select set_config('lock_timeout', '{milliseconds(lock_timeout_s)}', true)"
        )
        yield

    @contextmanager
    def answering(self, db: sa.Connection, longest_s: float) -> Iterator[None]:
        limit = milliseconds(longest_s)
        db.exec_driver_sql(f"select set_config('statement_timeout', '{limit}', true)")
        yield

    def only_read(self, db: sa.Connection) -> None:
        # Statistics must not make a question read a whole table, or a line to sort it.
        settings = {
            "transaction_read_only": "on",
            "enable_seqscan": "off",
            "enable_sort": "off",
            "jit": "off",
        }
        each = (f"set_config('{name}', '{text}', true)" for name, text in settings.items())
        db.exec_driver_sql(f"select {', '.join(each)}")

    def stores_unicode(self, db: sa.Connection) -> bool:
        # A role or a database may have a default for its clients, and PGCLIENTENCODING is one.
        names = ("server_encoding", "client_encoding")
        return all(db.exec_driver_sql(f"show {name}").scalar() == "UTF8" for name in names)

    def fault(self, origin: Any, driver: Any) -> Fault | None:
        code = getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None)
        found = _FAULTS.get(code or "") or _FAULTS_BY_CLASS.get((code or "")[:2])
        if found is not None or (code or "").startswith(_OWN_FAULT):
            return found
        if isinstance(origin, driver.OperationalError | driver.InterfaceError):
            return Fault.AWAY
        return None

    def lock_schema(self, db: sa.Connection) -> None:
        # Otherwise two processes could find no table at the same time, and one would fail.
        db.exec_driver_sql("select pg_advisory_xact_lock(7310114027)")

    def create_index(self, db: sa.Connection, index: sa.Index) -> None:
        # IF NOT EXISTS waits for all writers before it looks. SQLAlchemy's check reads all indexes.
        found = sa.text(
            "select to_regclass(quote_ident(current_schema()) || '.' || quote_ident(:name))"
        )
        if db.scalar(found, {"name": index.name}) is None:
            index.create(db)

    def keeps_snapshot(self, db: sa.Connection) -> bool:
        return db.get_isolation_level() in SNAPSHOTS

    def begun(self, db: sa.Connection, *, idle_s: float) -> None:
        db.exec_driver_sql(f"select {bounding(idle_s)}").close()

    def bounds_idleness(self, engine: sa.Engine) -> bool:
        del engine
        return True

    def ended(self, db: sa.Connection) -> bool:
        found = db.exec_driver_sql(f"select current_setting('{MARK}', true)").scalar()
        return bool(found != BEGUN)

    def mark(
        self, db: sa.Connection, text: str, *, stored: sa.Select[Any]
    ) -> tuple[str, str | None]:
        del stored
        xid = db.exec_driver_sql("select pg_current_xact_id()::text").scalar_one()
        return text, str(xid)

    def is_at_work(self, db: sa.Connection, session: int) -> bool:
        found = sa.text(
            "select exists (select from pg_stat_activity where pid = :pid"
            " and datname = current_database() and xact_start is not null)"
        )
        return bool(db.execute(found, {"pid": session}).scalar())

    def happened(self, db: sa.Connection, mark: str, *, stored: str | None) -> bool:
        del stored
        status = sa.text("select pg_xact_status(cast(:xid as xid8))")
        return bool(db.execute(status, {"xid": mark}).scalar() == "committed")


def bounds(idle_s: float) -> dict[str, str]:
    """Return the settings of a holder's transaction.

    The server ends an idle transaction, and with it a frozen holder's row locks. It also ends a
    statement whose client is gone.
    """
    return {
        "idle_in_transaction_session_timeout": str(milliseconds(idle_s)),
        "client_connection_check_interval": str(_CHECK_CLIENT_MS),
        MARK: BEGUN,
    }


def bounding(idle_s: float) -> str:
    """Return columns of a SELECT that apply `bounds()` to the transaction."""
    settings = bounds(idle_s).items()
    return ", ".join(f"set_config('{name}', '{value}', true)" for name, value in settings)


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds for a setting. At least 1, because 0 would mean no limit."""
    return max(1, round(seconds * 1000))
