"""The ledgers that the contract suite runs on. A new ledger is one entry in `KINDS`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa

from taskguard.lease import new_owner
from taskguard.ledger.base import Claimed, ClaimRequest, MessageRef
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import KEYS, WORKS

KINDS = ["postgresql", "postgresql in steps", "sqlite"]


@dataclass
class Book:
    """A ledger, its database in reach, and short ways to ask."""

    ledger: SqlLedger
    url: str
    kind: str
    engine: sa.Engine
    made: list[SqlLedger] = field(default_factory=list)

    @property
    def postgresql(self) -> bool:
        return self.kind.startswith("postgresql")

    def again(self, url: str | None = None, **options: Any) -> SqlLedger:
        """Another ledger on the same database, as another process would have it."""
        options.setdefault("one_statement", self.kind == "postgresql")
        self.made.append(SqlLedger(url or self.url, **options))
        return self.made[-1]

    def request(
        self, number: int = 1, *, message: str = "m", retries: int = 0, copy: int = 0, **values: Any
    ) -> ClaimRequest:
        """A request for `order:<number>` by an owner of its own."""
        values = {
            "keys": (f"order:{number}",),
            "owner": new_owner(message),
            "ttl_s": 30.0,
            "work": f"ship order:{number}",
            "task": "ship",
            "message": MessageRef(message, retries, copy),
            **values,
        }
        return ClaimRequest(**values)

    def claim(self, number: int = 1, **values: Any) -> Claimed:
        """A request that has to be granted."""
        found = self.ledger.claim(self.request(number, **values))
        assert isinstance(found, Claimed), found
        return found

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

    def work(self, number: int = 1) -> Any:
        with self.engine.connect() as db:
            select = sa.select(WORKS).where(WORKS.c.id == f"ship order:{number}")
            return db.execute(select).first()

    def expire(self, number: int = 1) -> None:
        """What a holder that was paused beyond its lease looks like."""
        with self.engine.begin() as db:
            key, work = f"order:{number}", f"ship order:{number}"
            db.execute(sa.update(KEYS).where(KEYS.c.key == key).values(lease_until=1))
            db.execute(sa.update(WORKS).where(WORKS.c.id == work).values(lease_until=1))


@pytest.fixture(params=KINDS)
def make_book(request: pytest.FixtureRequest) -> Iterator[Callable[..., Book]]:
    """Makes the ledger of this kind, with options."""
    kind: str = request.param
    url: str = request.getfixturevalue("sqlite_url" if kind == "sqlite" else "pg_url")
    books: list[Book] = []

    def make(**options: Any) -> Book:
        ledger = SqlLedger(url, one_statement=kind == "postgresql", **options)
        ledger.create_schema()
        engine = sa.create_engine(url)
        with engine.begin() as db:
            # No unique index: a double effect has to be seen.
            db.execute(sa.text("create table effects (item text, fence bigint)"))
        books.append(Book(ledger, url, kind, engine))
        return books[-1]

    yield make
    for book in books:
        for ledger in (book.ledger, *book.made):
            ledger.close()
        book.engine.dispose()


@pytest.fixture
def book(make_book: Callable[..., Book]) -> Book:
    return make_book()
