"""MariaDB 10.6 and MySQL 8.0, or later ones, on InnoDB.

This module handles their peculiarities:
* A deadlock rolls back the whole transaction, and a statement like CREATE TABLE commits it. Later
  statements silently go into another transaction. A savepoint at the beginning detects that.
* A lock timeout rolls back only the statement, so the caller has to roll back the transaction. It
  is set for the session, in whole seconds, and is at least one.
* REPEATABLE READ, their default, locks gaps between rows, and so also blocks neighbouring rows. The
  ledger's transactions are READ COMMITTED on any Engine.
* An UPDATE does not count rows that it leaves unchanged. A client can change that with FOUND_ROWS
  when it connects.
* If an interrupt leaves a reply unread, PyMySQL takes it for the answer to its next statement. Such
  a connection is dropped.
* An INSERT of an existing row gets a shared lock. Two such transactions that write the row then
  deadlock. ON DUPLICATE KEY UPDATE gets an exclusive lock.

Does not guarantee that a frozen holder's row locks end on MySQL, which has no timeout for idle
transactions. It does not guarantee that on an Engine of the user, whose sessions stay as they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import insert

from taskguard.errors import ConfigurationError
from taskguard.ledger.connections.dialects.base import SNAPSHOTS, Dialect, Fault, lower
from taskguard.ledger.connections.listeners import listen_once
from taskguard.ledger.connections.sessions import refuse_autocommit

__all__ = ["MySQL", "is_ended"]

_WAIT = "taskguard_wait"  # a key of the `info` that SQLAlchemy keeps with a connection
_NO_SAVEPOINT = 1305
_FOUND_ROWS = 2  # pymysql.constants.CLIENT.FOUND_ROWS
_MOST_MEDIUMTEXT_BYTES = 2**24 - 1
_MOST_OF_THE_REST_BYTES = 50_000  # of a statement, with a hundred keys
_TOOK_TOO_LONG = (1969, 3024)  # on MariaDB, on MySQL
_FIRST_CLIENT_ERROR, _LAST_CLIENT_ERROR = 2000, 2999
_FAULTS = {
    **dict.fromkeys(
        (
            1213,  # deadlock
            1020,  # the row has changed since the snapshot (innodb_snapshot_isolation)
        ),
        Fault.RETRY,
    ),
    **dict.fromkeys((1205, 3572), Fault.LOCKED),  # 3572: NOWAIT on MySQL
    1146: Fault.NO_TABLE,
    **dict.fromkeys(
        (
            1142, 1143, 1227, 1370,  # a privilege: of a table, a column, the server, a routine
            1054, 1364,  # no such column; an additional column without a default
        ),
        Fault.REFUSED,
    ),
    **dict.fromkeys(
        (
            1290, 1792, 1836,  # read-only
            1021, 1026, 1114, 3675,  # the disk or the table is full
        ),
        Fault.CANNOT_WRITE,
    ),
    **dict.fromkeys(
        (
            1040, 1203, 1226,  # too many connections
            1044, 1045, 1049, 1129, 1130,  # the server refuses the connection
            1042, 1043, 1047, 1053, 1077, 1079,  # starting, shutting down, outside its cluster
            1152, 1153, 1154, 1155, 1156, 1157, 1158, 1159, 1160, 1161,  # the network
            1317, 1927, 1969, 3024, 4031,  # ended by an administrator or a timeout
        ),
        Fault.AWAY,
    ),
}  # fmt: skip


class MySQL(Dialect):
    """The dialect of MariaDB and MySQL."""

    @property
    def claims_apart(self) -> bool:
        return self.own

    def watch(self, engine: sa.Engine) -> None:
        listen_once(engine, "handle_error", _throw_away)

    def now(self) -> sa.ColumnElement[int]:
        # This is the start of the statement, so a separate statement reads it after row locks.
        # UNIX_TIMESTAMP() depends on local time, which repeats an hour in autumn.
        text = "timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))"
        return sa.literal_column(text, sa.BigInteger)

    def create_index(self, db: sa.Connection, index: sa.Index) -> None:
        if db.dialect.is_mariadb:  # type: ignore[attr-defined]  # a dialect of MySQL's
            super().create_index(db, index)
            return
        try:
            index.create(db, checkfirst=True)  # MySQL has no IF NOT EXISTS here
        except sa.exc.OperationalError:
            if not sa.inspect(db).has_index(str(index.table), str(index.name)):
                raise  # no other process has created it

    @contextmanager
    def waiting(
        self, db: sa.Connection, lock_timeout_s: float, *, apart: bool = False
    ) -> Iterator[None]:
        driver = db.connection.dbapi_connection
        if apart:
            self.limit_waiting(driver, db.info, lock_timeout_s)
            yield
            return
        _check(driver)
        limit_s = max(1, math.ceil(lock_timeout_s))
        if not self.own:
            db.exec_driver_sql("set transaction isolation level read committed")
        db.exec_driver_sql(
            "set @taskguard_wait = @@innodb_lock_wait_timeout, "
            f"session innodb_lock_wait_timeout = {limit_s}"
        )
        try:
            yield
        finally:
            if not db.invalidated:
                with contextlib.suppress(sa.exc.DBAPIError):
                    db.exec_driver_sql("set session innodb_lock_wait_timeout = @taskguard_wait")

    def limit_waiting(self, driver: Any, kept: dict[Any, Any], lock_timeout_s: float) -> None:
        limit_s = max(1, math.ceil(lock_timeout_s))
        if kept.get(_WAIT) == limit_s:
            return
        _check(driver)
        with contextlib.closing(driver.cursor()) as cursor:
            cursor.execute(f"set session innodb_lock_wait_timeout = {limit_s}")
        kept[_WAIT] = limit_s

    @contextmanager
    def answering(self, db: sa.Connection, longest_s: float) -> Iterator[None]:
        # MariaDB counts in seconds, MySQL in milliseconds and for SELECT alone.
        is_mariadb = getattr(db.dialect, "is_mariadb", False)
        name = "max_statement_time" if is_mariadb else "max_execution_time"
        limit = longest_s if is_mariadb else math.ceil(longest_s * 1000)
        before = db.exec_driver_sql(f"select @@session.{name}").scalar()
        db.exec_driver_sql(f"set session {name} = {limit}")
        try:
            yield
        finally:
            if not db.invalidated:
                db.exec_driver_sql(f"set session {name} = {before}")

    def call_fits(self, db: sa.Connection, call: str) -> bool:
        if len(call) > _MOST_MEDIUMTEXT_BYTES:
            return False
        # Each of these characters takes two bytes in a statement, and a statement is one packet.
        sent = len(call) + sum(map(call.count, "\"'\\"))
        limit = db.exec_driver_sql("select @@max_allowed_packet").scalar_one()
        return bool(sent + _MOST_OF_THE_REST_BYTES <= int(limit))

    def stores_unicode(self, db: sa.Connection) -> bool:
        # The tables can store them. But `?charset=latin1` in the URL may limit the connection.
        return bool(db.exec_driver_sql("select @@character_set_client").scalar() == "utf8mb4")

    def fault(self, origin: Any, driver: Any) -> Fault | None:
        code = _code(origin)
        if code == _NO_SAVEPOINT and _follows_deadlock(origin):
            return Fault.RETRY
        found = _FAULTS.get(code)
        if found is not None:
            return found
        if code == 1030 and "error 28" in str(origin):  # from the storage engine: no space left
            return Fault.CANNOT_WRITE
        if code in _TOOK_TOO_LONG:
            return Fault.AWAY
        if _FIRST_CLIENT_ERROR <= code <= _LAST_CLIENT_ERROR:
            return Fault.AWAY
        return Fault.AWAY if isinstance(origin, driver.InterfaceError) else None

    def insert_missing(self, table: sa.Table, values: Any) -> Any:
        key = next(iter(table.primary_key))
        return insert(table).values(values).on_duplicate_key_update({key.name: key})

    def insert_or_add(self, table: sa.Table, values: Any, number: sa.Column[Any]) -> Any:
        statement = insert(table).values(values)
        added = statement.inserted[number.name]
        return statement.on_duplicate_key_update({number.name: number + added})

    def raise_numbers(
        self,
        db: sa.Connection,
        table: sa.Table,
        key: Mapping[str, object],
        numbers: Mapping[str, int],
        **others: object,
    ) -> bool:
        # The INSERT makes sure that there is a row, and locks it. A new row has lower numbers.
        db.execute(self.insert_missing(table, {**key, **dict.fromkeys(numbers, -1), **others}))
        ours = (table.c[name] == value for name, value in key.items())
        raised = db.execute(
            sa.update(table).where(*ours, lower(table, numbers)).values(**numbers, **others)
        )
        return raised.rowcount == 1

    # -- a body's transaction -----------------------------------------------------------------

    def keeps_snapshot(self, db: sa.Connection) -> bool:
        # MariaDB 11.6 or later has this by default. Otherwise a change sees the newest row on every
        # level, and a frozen holder keeps only the locks of its own writes.
        setting = db.exec_driver_sql("show variables like 'innodb_snapshot_isolation'").first()
        strict = setting is not None and setting[1] == "ON"
        return strict and db.get_isolation_level() in SNAPSHOTS

    def begun(self, db: sa.Connection, *, idle_s: float) -> None:
        _refuse_counting_of_changes(db.connection.dbapi_connection)
        is_mariadb = getattr(db.dialect, "is_mariadb", False)
        if self.own and is_mariadb and not db.info.get("taskguard_idle"):
            limit_s = max(1, math.ceil(idle_s))
            db.exec_driver_sql(f"set session idle_transaction_timeout = {limit_s}")
            db.info["taskguard_idle"] = True
        db.exec_driver_sql("savepoint taskguard")

    def bounds_idleness(self, engine: sa.Engine) -> bool:
        return self.own and bool(getattr(engine.dialect, "is_mariadb", False))

    def ended(self, db: sa.Connection) -> bool:
        try:
            db.exec_driver_sql("release savepoint taskguard")
        except sa.exc.DBAPIError as error:
            if not is_ended(error.orig):
                raise
            return True
        return False

    def longest_statement(self, db: sa.Connection) -> int | None:
        return int(db.exec_driver_sql("select @@max_allowed_packet").scalar_one())

    def mark(
        self, db: sa.Connection, text: str, *, stored: sa.Select[Any]
    ) -> tuple[str, str | None]:
        # The server cannot report the outcome of a transaction. So the text has to differ from the
        # former text. A blank at its end is enough, which JSON ignores.
        before = db.execute(stored.with_for_update()).scalar()
        text = f"{text} " if before == text else text
        return text, text

    def happened(self, db: sa.Connection, mark: str, *, stored: str | None) -> bool:
        del db
        return stored == mark


def is_ended(origin: Any) -> bool:
    """Return True if the driver's error shows that the transaction of `begun()` has ended."""
    return _code(origin) == _NO_SAVEPOINT


def _check(driver: Any) -> None:
    refuse_autocommit(driver)
    _refuse_counting_of_changes(driver)


def _refuse_counting_of_changes(driver: Any) -> None:
    flags = getattr(driver, "client_flag", None)
    if flags is not None and not flags & _FOUND_ROWS:
        raise ConfigurationError(
            "The ledger's Engine makes connections that count changed rows instead of found "
            "ones. Pass client_flag=pymysql.constants.CLIENT.FOUND_ROWS to pymysql.connect()."
        )


def _throw_away(context: sa.engine.ExceptionContext) -> None:
    """Drop a connection after an error that is not the driver's, for example an interrupt."""
    if not isinstance(context.original_exception, context.dialect.loaded_dbapi.Error):
        context.is_disconnect = True
        context.invalidate_pool_on_disconnect = False


def _follows_deadlock(error: BaseException | None) -> bool:
    """Return True if a savepoint is missing because a deadlock ended the transaction before."""
    while error is not None:
        if _FAULTS.get(_code(error)) is Fault.RETRY:
            return True
        error = error.__context__
    return False


def _code(origin: Any) -> int:
    """Return the error's number, which is its first argument with all drivers. 0 without one."""
    code = origin.args[0] if origin.args else 0
    return code if isinstance(code, int) else 0
