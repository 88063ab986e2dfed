"""The ledgers that the contract suite runs on. A new ledger is one entry in `KINDS`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sqlalchemy as sa
from simulation.ledger import KeyRow, MemoryLedger, Work

from support.claims import request
from support.ledger_databases import LedgerDatabase, LedgerDatabases
from support.line_states import LineWatch
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import FREE, KEYS, MESSAGES, RUNS, WORK
from taskguard.model.claims import Claimed, ClaimRequest, MessageRef
from taskguard.model.line_states import Event
from taskguard.model.states import State

KINDS = [
    "postgresql",
    "postgresql in steps",
    "mariadb",
    "mariadb in steps",
    "mysql",
    "sqlite",
    "memory",
]
# Fixtures of the servers of kinds that do not use PostgreSQL.
SERVERS = {"mariadb": "mariadb", "mariadb in steps": "mariadb", "mysql": "mysql"}
OF_DEBIAN = ("mariadb", "mariadb in steps", "mysql")
# Kinds without a driver of their own: the other kinds with PostgreSQL cover their drivers, and
# SQLite takes the same steps.
ONCE = ("postgresql in steps", "memory")


def _numbers(recorded: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Return the recorded numbers of message "m" for each work. Those of the other work do not
    count here."""
    elsewhere = {"ship order:2": (7, 7)}
    return elsewhere if recorded == (0, 0) else {"ship order:1": recorded, **elsewhere}


@dataclass
class Book:
    """A ledger, its database, and short ways to use both."""

    ledger: SqlLedger
    database: LedgerDatabase
    kind: str
    made: list[SqlLedger] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = LineWatch(self.records)
        self.watch.install(self.ledger)

    def records(self) -> dict[str, Any]:
        """Return the columns of all work that concern its line."""
        columns = "id, line, parked, state, final, due"
        rows = self.database.outside.exec_driver_sql(f"select {columns} from taskguard_work")
        return {row.id: row for row in rows}

    @property
    def url(self) -> str:
        """Return the URL of the database."""
        return self.database.url

    @property
    def engine(self) -> sa.Engine:
        """Return an Engine on the database, which is not the ledger's."""
        return self.database.engine

    @property
    def locks_rows(self) -> bool:
        """Return whether other transactions may write while one is open."""
        return self.kind != "sqlite"

    def again(self, url: str | None = None, **options: Any) -> SqlLedger:
        """Return another ledger on the same database, as another process would have it."""
        options.setdefault("one_statement", not self.kind.endswith("in steps"))
        self.made.append(SqlLedger(url or self.url, **options))
        self.watch.install(self.made[-1])
        return self.made[-1]

    def request(
        self,
        number: int = 1,
        *,
        message: str = "m",
        retries: int = 0,
        deferrals: int = 0,
        **values: Any,
    ) -> ClaimRequest:
        """Return a request for `order:<number>` by a new owner."""
        return request(number, message=MessageRef(message, retries, deferrals), **values)

    def claim(self, number: int = 1, **values: Any) -> Claimed:
        """Claim, and check that the claim is granted."""
        found = self.ledger.claim(self.request(number, **values))
        assert isinstance(found, Claimed), found
        return found

    @contextmanager
    def transaction(self, *, commits: bool = True) -> Iterator[Any]:
        """Open a transaction of the user's."""
        events = Event.ENQUEUE, Event.REPLACE, Event.END
        with self.watch.window(*events), self.engine.connect() as db:
            yield db
            if commits:
                db.commit()

    def make_due(self) -> None:
        """Make work due now that is due at any time."""
        with self.engine.begin() as db:
            db.execute(sa.update(WORK).where(WORK.c.due.is_not(None)).values(due=1))

    def purge(self) -> int:
        """Forget ended work as if it were old. Return the number of work items."""
        with self.engine.begin() as db:
            db.execute(sa.update(WORK).where(WORK.c.finished.is_not(None)).values(finished=1))
        return self.ledger.purge(older_than_s=7200).work_items

    def effect(self, db: Any, item: object, fence: int = 0) -> None:
        db.execute(
            sa.text("insert into effects values (:item, :fence)"),
            {"item": str(item), "fence": fence},
        )

    def effects(self) -> Counter[str]:
        with self.engine.connect() as db:
            return Counter(db.execute(sa.text("select item from effects")).scalars())

    def key(self, number: int = 1) -> Any:
        with self.engine.connect() as db:
            return db.execute(sa.select(KEYS).where(KEYS.c.key == f"order:{number}")).first()

    def key_named(self, name: str) -> Any:
        with self.engine.connect() as db:
            return db.execute(sa.select(KEYS).where(KEYS.c.key == name)).first()

    def held_keys(self) -> list[str]:
        """Return the keys that have an owner."""
        with self.engine.connect() as db:
            return sorted(db.execute(sa.select(KEYS.c.key).where(KEYS.c.owner != FREE)).scalars())

    def pass_time(self, us: int) -> None:
        """Let time pass for rates. A negative time sets the clock back."""
        with self.engine.begin() as db:
            db.execute(sa.update(KEYS).values(next_start=KEYS.c.next_start - us))

    def work(self, number: int = 1) -> Any:
        with self.engine.connect() as db:
            select = sa.select(WORK).where(WORK.c.id == f"ship order:{number}")
            return db.execute(select).first()

    def put(
        self,
        *,
        work: dict[str, Any] | None,
        key: dict[str, Any] | None,
        recorded: tuple[int, int],
    ) -> None:
        """Write these rows of `order:1` and its message's numbers in another work, and no
        others."""
        with self.engine.begin() as db:
            for table in (KEYS, WORK, MESSAGES, RUNS):
                db.execute(sa.delete(table))
            if key is not None:
                db.execute(sa.insert(KEYS).values(key="order:1", **key))
            if work is not None:
                fixed = {"id": "ship order:1", "task": "ship", "key": "order:1", "created": 1}
                db.execute(sa.insert(WORK).values(**fixed, **work))
            for work_id, (retries, deferrals) in _numbers(recorded).items():
                values = {"message": "m", "work": work_id, "updated": 1}
                db.execute(
                    sa.insert(MESSAGES).values(retries=retries, deferrals=deferrals, **values)
                )

    @contextmanager
    def locked(self, table: str, number: int = 1) -> Iterator[None]:
        """Keep a transaction open that changed the row of "keys" or "work"."""
        column = KEYS.c.key if table == "keys" else WORK.c.id
        name = f"order:{number}" if table == "keys" else f"ship order:{number}"
        with self.engine.begin() as db:
            same = column.table.c.fence
            db.execute(sa.update(column.table).where(column == name).values(fence=same))
            yield

    def set_fence(self, fence: int) -> None:
        with self.engine.begin() as db:
            db.execute(sa.update(KEYS).values(fence=fence))

    def numbers(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the highest recorded (retries, deferrals) of each message in each work."""
        with self.engine.connect() as db:
            rows = db.execute(sa.select(MESSAGES)).all()
            return {(row.message, row.work): (row.retries, row.deferrals) for row in rows}

    def states(self) -> dict[str, str]:
        """Return the state of each record."""
        with self.engine.connect() as db:
            return {row.id: row.state for row in db.execute(sa.select(WORK))}

    def forget(self) -> None:
        """Delete all records."""
        with self.engine.begin() as db:
            for table in (KEYS, WORK, MESSAGES, RUNS):
                db.execute(sa.delete(table))

    def close(self) -> None:
        for ledger in (self.ledger, *self.made):
            ledger.close()
        # No CHECK constraint fails, whatever the test has written.
        written = set(self.states().values())
        assert written <= {state.value for state in State}

    def expire(self, number: int = 1) -> None:
        """Expire a lease, as if its holder had been paused beyond it."""
        with self.engine.begin() as db:
            key, work = f"order:{number}", f"ship order:{number}"
            db.execute(sa.update(KEYS).where(KEYS.c.key == key).values(lease_until=1))
            db.execute(sa.update(WORK).where(WORK.c.id == work).values(lease_until=1))

    def expire_all(self) -> None:
        """Expire the leases of all holders."""
        with self.engine.begin() as db:
            for table in (KEYS, WORK):
                db.execute(sa.update(table).values(lease_until=1))

    def is_leased(self) -> bool:
        """Return whether every record has a lease."""
        with self.engine.connect() as db:
            return all(until > 1 for until in db.execute(sa.select(WORK.c.lease_until)).scalars())


class MemoryBook(Book):
    """The book of the simulation's ledger, which has no database."""

    ledger: Any  # type: ignore[assignment]

    def records(self) -> dict[str, Any]:
        return {row.id: row for row in self.ledger.work_items.values()}

    def again(self, url: str | None = None, *, lock_timeout_s: float = 0.25, **options: Any) -> Any:
        del url, options
        self.ledger.lock_timeout_s = lock_timeout_s
        return self.ledger

    @contextmanager
    def transaction(self, *, commits: bool = True) -> Iterator[Any]:
        tx = self.ledger.begin_plain()
        try:
            yield tx
            if commits:
                self.ledger.commit(tx)
        finally:
            self.ledger.unlock(tx)

    def make_due(self) -> None:
        rows = self.ledger.work_items
        due = {name: row for name, row in rows.items() if row.due is not None}
        rows.update({name: replace(row, due=1) for name, row in due.items()})

    def purge(self) -> int:
        pytest.skip("the simulation's ledger purges as it likes")

    def effect(self, db: Any, item: object, fence: int = 0) -> None:
        db.write((item, fence))

    def effects(self) -> Counter[str]:
        return Counter(self.ledger.count_effects())

    def key(self, number: int = 1) -> Any:
        return self.ledger.keys.get(f"order:{number}")

    def key_named(self, name: str) -> Any:
        return self.ledger.keys.get(name)

    def held_keys(self) -> list[str]:
        return sorted(name for name, row in self.ledger.keys.items() if row.owner != FREE)

    def pass_time(self, us: int) -> None:
        for name, row in self.ledger.keys.items():
            if row.next_start is not None:
                self.ledger.keys[name] = replace(row, next_start=row.next_start - us)

    def work(self, number: int = 1) -> Any:
        return self.ledger.work_items.get(f"ship order:{number}")

    def put(
        self,
        *,
        work: dict[str, Any] | None,
        key: dict[str, Any] | None,
        recorded: tuple[int, int],
    ) -> None:
        ledger = self.ledger
        ledger.keys = {} if key is None else {"order:1": KeyRow(**key)}
        ledger.numbers = {("m", work_id): number for work_id, number in _numbers(recorded).items()}
        ledger.work_items = {}
        if work is not None:
            values = {**work, "state": State(work["state"]), "final": bool(work["final"])}
            fixed = {"id": "ship order:1", "task": "ship", "key": "order:1", "created": 1}
            ledger.work_items["ship order:1"] = Work(started=1, **fixed, **values)

    def locked(self, table: str, number: int = 1) -> AbstractContextManager[None]:
        name = f"order:{number}" if table == "keys" else f"ship order:{number}"
        return self._locked((table.removesuffix("s"), name))

    @contextmanager
    def _locked(self, row: tuple[str, str]) -> Iterator[None]:
        by = object()
        with self.ledger.locking(by, [row]):
            pass
        yield
        self.ledger.unlock(by)

    def set_fence(self, fence: int) -> None:
        self.ledger.keys = {key: replace(row, fence=fence) for key, row in self.ledger.keys.items()}

    def numbers(self) -> dict[tuple[str, str], tuple[int, int]]:
        return dict(self.ledger.numbers)

    def states(self) -> dict[str, str]:
        return {work.id: work.state.value for work in self.ledger.work_items.values()}

    def forget(self) -> None:
        for rows in (self.ledger.keys, self.ledger.work_items, self.ledger.numbers):
            rows.clear()

    def close(self) -> None:
        """Do nothing."""

    def expire(self, number: int = 1) -> None:
        ledger, key, work = self.ledger, f"order:{number}", f"ship order:{number}"
        if key in ledger.keys:
            ledger.keys[key] = replace(ledger.keys[key], lease_until=1)
        if work in ledger.work_items:
            ledger.work_items[work] = replace(ledger.work_items[work], lease_until=1)

    def expire_all(self) -> None:
        for rows in (self.ledger.keys, self.ledger.work_items):
            rows.update({name: replace(row, lease_until=1) for name, row in rows.items()})

    def is_leased(self) -> bool:
        return all(work.lease_until > 1 for work in self.ledger.work_items.values())


def _marks(kind: str) -> list[pytest.MarkDecorator]:
    marks = [(pytest.mark.debian, OF_DEBIAN), (pytest.mark.once, ONCE)]
    return [mark for mark, kinds in marks if kind in kinds]


@contextmanager
def making_books(request: pytest.FixtureRequest, kind: str) -> Iterator[Callable[..., Book]]:
    """Return a context with a function that makes ledgers of this kind in one database."""
    databases: LedgerDatabases = request.getfixturevalue("ledger_databases")
    if kind == "sqlite":
        context = databases.in_file(request.getfixturevalue("sqlite_url"))
    else:
        request.getfixturevalue("no_certificates")
        server = SERVERS.get(kind, "postgres")
        context = databases.on(request.getfixturevalue(server))
    books: list[Book] = []

    def make(**options: Any) -> Book:
        options.setdefault("one_statement", not kind.endswith("in steps"))
        ledger = SqlLedger(database.url, **options)
        books.append(Book(ledger, database, kind))
        return books[-1]

    with context as database, ExitStack() as closed:
        yield make
        for book in books:
            closed.callback(book.close)


@pytest.fixture(params=[pytest.param(kind, marks=_marks(kind)) for kind in KINDS])
def make_book(request: pytest.FixtureRequest) -> Iterator[Callable[..., Book]]:
    """Return a function that makes a ledger of this kind, with options."""
    kind: str = request.param
    if kind == "memory":
        yield lambda **options: MemoryBook(MemoryLedger(**options), None, kind)  # type: ignore[arg-type]
        return
    with making_books(request, kind) as make:
        yield make


@pytest.fixture
def book(make_book: Callable[..., Book]) -> Book:
    return make_book()
