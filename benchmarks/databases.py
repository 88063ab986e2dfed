"""The databases that calls and tasks are measured on, and the hand-written code for each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


def databases() -> Iterator[Database]:
    """Yield each in turn. Print a line for each that is not installed."""
    for kind in (Postgres, DebianPostgres, MariaDB):
        missing = kind.available()
        if missing is not None:
            CONSOLE.print(f"skipped: {missing}\n")
            continue
        with kind() as server:
            url = server.create_database("bench")
            clocks = {"database": family(server.pid)}
            yield Database(f"{kind.name.split()[0]} {_version(url)}", url, clocks)
    with _file() as url:
        yield Database(f"SQLite {_version(url)}", url, {})


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
