"""Engines for the ledger: created from URLs, or the user's own, unchanged.

Guarantees: an Engine that is created here connects or raises an error within seconds. On SQLite,
its transactions begin as writers. On MariaDB and MySQL, it is strict and READ COMMITTED. A forked
child does not use its connections. No message contains a password.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import sqlalchemy as sa

from taskguard.drivers import extra_of
from taskguard.errors import ConfigurationError, MissingDriverError
from taskguard.ledger.connections import services, sessions
from taskguard.ledger.connections.pools import (
    Lifo,
    emptied_in_children,
    end_transaction,
    end_unless_committed,
)

__all__ = [
    "CONNECT_TIMEOUT_S",
    "LEVEL",
    "READ_COMMITTED",
    "begins_itself",
    "failover_s",
    "hosts_of",
    "make_engine",
    "read_url",
]

LEVEL = "taskguard_level"  # in a connection's `info`: the isolation level of lone statements
READ_COMMITTED = "read committed"  # as PostgreSQL writes it

CONNECT_TIMEOUT_S = 5
_LEAST_CONNECT_S = 2  # libpq takes no less
_NO_LIMIT_S = 130.0  # as psycopg has it for connect_timeout=0
_POOL = {"pool_size": 10, "max_overflow": -1}  # `pools.py` counts them
_POSTGRESQL: dict[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_MYSQL: dict[str, Any] = {"isolation_level": "READ COMMITTED"}
_NO_LIMIT = 2**64 - 1  # the server's sql_select_limit; DEFAULT is the global setting
_KEEPALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,
}


def make_engine(
    database: Any,
    *,
    lock_timeout_s: float,
    pooled: bool = True,
    connect_timeout_s: int = CONNECT_TIMEOUT_S,
) -> sa.Engine:
    """Return an Engine for a URL, or the given Engine. Without `pooled`: no idle connections."""
    if isinstance(database, sa.Engine):
        _refuse_async(database.url, database.dialect)
        emptied_in_children.add(database)
        return database
    if hasattr(database, "sync_engine"):
        _refuse_async(database.url, database.dialect)
    url = read_url(database)
    extra = extra_of(url.drivername)
    if extra is None:
        raise ConfigurationError(
            f"A database of kind {url.get_backend_name()!r} cannot have a ledger. Use "
            "postgresql+psycopg://, mariadb+pymysql://, mysql+pymysql:// or sqlite:///."
        )
    try:
        _refuse_async(url, url.get_dialect())
        engine = _create(url, lock_timeout_s, pooled=pooled, connect_timeout_s=connect_timeout_s)
    except (ModuleNotFoundError, sa.exc.NoSuchModuleError) as error:
        raise MissingDriverError(
            f"The driver of {url.drivername!r} is not installed: pip install "
            f"'celery-taskguard[{extra}]', and write postgresql+psycopg:// for "
            "psycopg 3, mariadb+pymysql:// or mysql+pymysql:// for PyMySQL."
        ) from error
    emptied_in_children.add(engine)
    return engine


def read_url(given: Any) -> sa.URL:
    """Parse a URL. Raises ConfigurationError, which shows no part of it, if it is malformed."""
    url = None
    # SQLAlchemy's own error quotes the URL with its password.
    with contextlib.suppress(sa.exc.ArgumentError, ValueError):
        url = sa.make_url(given)
    if url is None or _splits_a_password(url, given):
        raise ConfigurationError(
            "The ledger's URL is malformed. Write "
            '"postgresql+psycopg://user:password@host/database". Characters such as @ / # ? : in '
            "a password must be percent-encoded (urllib.parse.quote)."
        )
    return url


_SYNCHRONOUS = {
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "sqlite": "sqlite",
}


def _refuse_async(url: sa.URL, dialect: Any) -> None:
    """Raise ConfigurationError for drivers for asyncio, which plain calls cannot use."""
    if getattr(dialect, "is_async", False):
        usable = url.set(drivername=_SYNCHRONOUS.get(url.get_backend_name(), "postgresql+psycopg"))
        raise ConfigurationError(
            f"The ledger cannot use an Engine for asyncio (here {url.drivername}). Give it the URL "
            f"{usable.render_as_string(hide_password=True)}. The application can keep its own "
            "Engine."
        )


def _splits_a_password(url: sa.URL, given: Any) -> bool:
    """Return True if a part of the password was parsed as the host, because of an `@`.

    Messages that name the ledger's host would show it.
    """
    if url.get_backend_name() == "sqlite":
        return False
    return "@" in (url.host or "") or (isinstance(given, str) and given.count("@") > 1)


def begins_itself(url: sa.URL) -> bool:
    """Return True if Engines commit each statement, except where `Database` sends BEGIN."""
    return url.get_backend_name() == "postgresql" and url.get_driver_name() == "psycopg"


def _create(
    url: sa.URL, lock_timeout_s: float, *, pooled: bool, connect_timeout_s: int
) -> sa.Engine:
    unpooled: dict[str, Any] = {"poolclass": sa.NullPool}
    if url.get_backend_name() == "sqlite":
        connect: dict[str, Any] = {"factory": sessions.noting_connection()}
        if "timeout" not in url.query:
            connect["timeout"] = max(lock_timeout_s, 5.0)
        engine = sa.create_engine(url, connect_args=connect, **({} if pooled else unpooled))
        sa.event.listen(engine, "connect", _tune_sqlite)
        sa.event.listen(engine, "begin", _begin_immediate)
        return engine
    if url.get_backend_name() in ("mysql", "mariadb"):
        pool = {"poolclass": Lifo, **_POOL} if pooled else unpooled
        return _create_mysql(url, pool, connect_timeout_s)
    connect = _postgresql_options(url, connect_timeout_s)
    options = {"connect_args": connect, **(_POOL if pooled else unpooled)}
    if not begins_itself(url):
        engine = sa.create_engine(url, isolation_level="READ COMMITTED", **options)
        sa.event.listen(engine, "before_cursor_execute", sessions.note)
        return engine
    # psycopg opens a transaction for each statement. To switch that off and on takes a tenth of the
    # time of a lone statement. So switch it off, and `Database` sends BEGIN itself.
    psycopg: Any = url.get_dialect().import_dbapi()
    connect["cursor_factory"] = sessions.noting(psycopg.Cursor)
    engine = sa.create_engine(
        url,
        isolation_level="AUTOCOMMIT",
        pool_reset_on_return=None,
        **{**({"poolclass": Lifo} if pooled else {}), **options},
    )
    sa.event.listen(engine, "connect", _tune_psycopg)
    sa.event.listen(engine, "reset", end_transaction)
    return engine


def _postgresql_options(url: sa.URL, connect_timeout_s: int) -> dict[str, Any]:
    """Options of libpq, except those that the URL, the environment or a service file gives."""
    of_service = services.options_of(url)
    limit_s = max(_LEAST_CONNECT_S, connect_timeout_s // len(hosts_of(url)))
    options = {**_POSTGRESQL, "connect_timeout": limit_s}
    if "connect_timeout" in of_service:  # psycopg does not read it from a service file
        options["connect_timeout"] = of_service.pop("connect_timeout")
    elif "PGCONNECT_TIMEOUT" in os.environ:
        del options["connect_timeout"]
    given = url.query.keys() | of_service.keys()
    return {name: option for name, option in options.items() if name not in given}


def hosts_of(url: sa.URL) -> list[str]:
    """Return the hosts that a connection to PostgreSQL tries in order, at least one."""
    named = url.query.get("host", ())
    texts = [url.host or "", *((named,) if isinstance(named, str) else named)]
    hosts = [host for text in texts for host in text.split(",") if host]
    elsewhere = services.options_of(url).get("host") or os.environ.get("PGHOST", "")
    return hosts or elsewhere.split(",")


def failover_s(url: sa.URL) -> float:
    """Return the seconds to connect if all hosts except the last one do not answer."""
    if url.get_backend_name() != "postgresql" or (others := len(hosts_of(url)) - 1) < 1:
        return 0.0
    options = _postgresql_options(url, CONNECT_TIMEOUT_S)
    given = url.query.get("connect_timeout") or os.environ.get("PGCONNECT_TIMEOUT")
    try:
        limit_s = float(str(options.get("connect_timeout", given)))
    except ValueError:
        return 0.0  # libpq reports the error
    return others * max(float(_LEAST_CONNECT_S), limit_s) if limit_s > 0 else _NO_LIMIT_S * others


def _create_mysql(url: sa.URL, pool: dict[str, Any], connect_timeout_s: int) -> sa.Engine:
    by_pymysql = url.get_driver_name() == "pymysql"
    limits = {"connect_timeout": connect_timeout_s, "read_timeout": connect_timeout_s}
    limits = {name: limit for name, limit in limits.items() if name not in url.query}
    connect: dict[str, Any] = dict(limits)
    if by_pymysql:
        pymysql: Any = url.get_dialect().import_dbapi()
        connect["cursorclass"] = sessions.noting(pymysql.cursors.Cursor)
        if url.password:
            # PyMySQL would write it in Latin-1, the server's own clients write UTF-8.
            connect["password"] = url.password.encode()
    else:
        connect.pop("read_timeout", None)
    engine = sa.create_engine(
        url, connect_args=connect, pool_reset_on_return=None, **_MYSQL, **pool
    )
    sa.event.listen(engine, "reset", end_unless_committed)
    if not by_pymysql:
        sa.event.listen(engine, "before_cursor_execute", sessions.note)

    def tune(connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            # Without these modes, the server cuts long texts, and replaces unknown storage engines.
            # With a lower sql_select_limit, a claim of several keys may see only one of them.
            strict = "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION"
            cursor.execute(
                f"set session sql_mode = concat(@@sql_mode, ',{strict}'), "
                f"session sql_select_limit = {_NO_LIMIT}"
            )
        if "read_timeout" in connect:
            _watch_by_keepalive(connection)

    sa.event.listen(engine, "connect", tune)
    return engine


def _watch_by_keepalive(connection: Any) -> None:
    """Let a body's statement run for any time, but detect a server that is down.

    PyMySQL has one timeout for both, which is set for connecting. The kernel can distinguish them.
    """
    connection._read_timeout = None  # noqa: SLF001 - the only way to remove it
    with contextlib.suppress(AttributeError, OSError):
        sock = connection._sock  # noqa: SLF001
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _tune_psycopg(connection: Any, record: Any) -> None:
    """Prepare nothing behind a pooler, and let lone statements read the newest rows.

    PgBouncer may give each transaction another session, without psycopg's prepared statements and
    settings. It is recognised by the process id in its greeting, which is not the session's.
    """
    asked = "select pg_backend_pid(), current_setting('default_transaction_isolation')"
    session_pid, level = connection.execute(asked).fetchone()
    connection.rollback()  # sends nothing if the query opened no transaction
    pooled = session_pid != connection.pgconn.backend_pid
    if pooled:
        connection.prepare_threshold = None
    elif level != READ_COMMITTED:  # set for the role or the database
        read_committed = f"set default_transaction_isolation = '{READ_COMMITTED}'"
        connection.execute(read_committed)
        connection.commit()  # sends nothing if the query opened no transaction
        level = READ_COMMITTED
        vars(connection)[sessions.AGAIN] = f"; {read_committed}"
    kind: Any = type(connection)
    connection.__class__ = sessions.forgetting(kind)
    vars(connection)[sessions.POOLED] = pooled
    record.info[LEVEL] = level


def _tune_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
