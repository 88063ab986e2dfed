"""The databases that calls and tasks are measured on, and the hand-written code for each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.clocks import family
from benchmarks.hand_written import ByHand, PostgresByHand
from benchmarks.measure import CONSOLE
from taskguard_sandbox.servers import DebianPostgres, MariaDB, Postgres

__all__ = ["Database", "by_hand", "databases"]


@dataclass(frozen=True, slots=True)
class Database:
    """A new, empty database.

    Attributes:
        name: with its version.
        url: SQLAlchemy's.
        clocks: processor time of its server, if it has one.
    """

    name: str
    url: str
    clocks: dict[str, Callable[[], float]]


def databases(
    *,
    without_flushes: bool = False,
    kinds: Iterable[Any] = (Postgres, DebianPostgres, MariaDB, None),
) -> Iterator[Database]:
    """Yield each kind in turn; None is SQLite. Print a line for each that is not installed.

    `without_flushes`: yield each PostgreSQL once more with `fsync=off`. The processor time of
    a flush differs between machines.
    """
    for kind in kinds:
        if kind is None:
            with _file() as url:
                yield Database(f"SQLite {_version(url)}", url, {})
            continue
        missing = kind.available()
        if missing is not None:
            CONSOLE.print(f"skipped: {missing}\n")
            continue
        yield from _server(kind, "")
        if without_flushes and kind is not MariaDB:
            yield from _server(kind, " without flushes", fsync="off")


def _server(kind: Any, note: str, **settings: str) -> Iterator[Database]:
    with kind(**settings) as server:
        url = server.create_database("bench")
        clocks = {"database": family(server.pid)}
        yield Database(f"{kind.name.split()[0]} {_version(url)}{note}", url, clocks)


@contextmanager
def _file() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{Path(folder, 'bench.db')}"


def _version(url: str) -> str:
    engine = sa.create_engine(url)
    with engine.connect() as db:
        numbers = db.dialect.server_version_info or ()
    engine.dispose()
    return ".".join(map(str, numbers[:2]))


def by_hand(locks: str, url: str, *, create: bool = True) -> ByHand:
    """Return the hand-written code for the database of this URL."""
    if url.startswith("postgresql"):
        return PostgresByHand(locks, url, create=create)
    from benchmarks.hand_written_others import MariaDBByHand, SQLiteByHand

    kind = SQLiteByHand if url.startswith("sqlite") else MariaDBByHand
    return kind(locks, url, create=create)
