"""`guard.fenced(update(…))`: a row elsewhere accepts the same holder and newer ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from support.claims import end_leases
from support.guarded_shop import GuardedShop
from support.threads import at_once
from support.waiting import patience_s, wait_until
from taskguard.errors import ConfigurationError, FencedRowMissingError, StaleTokenError
from taskguard.fenced.rows import FencedUpdate
from taskguard.run.guard import Guard

# Beyond what a double can tell apart, and the largest there is.
EDGES = [2**53, 2**53 + 1, 2**63 - 1]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(sa.String(40))
    # The attribute has a name of its own.
    token: Mapped[int | None] = mapped_column("fence_token", sa.BigInteger)


class Odd(Base):
    __tablename__ = "odd"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(sa.String(40))
    token: Mapped[int | None] = mapped_column("fence_token", sa.BigInteger)
    # Named like the column of the token.
    fence_token: Mapped[str | None] = mapped_column("note", sa.String(40))


class Parcel(Base):
    __tablename__ = "parcels"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "parcel"}  # noqa: RUF012  # SQLAlchemy's
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(sa.String(40))
    status: Mapped[str] = mapped_column(sa.String(40))
    token: Mapped[int | None] = mapped_column("fence_token", sa.BigInteger)


class Letter(Parcel):
    __mapper_args__ = {"polymorphic_identity": "letter"}  # noqa: RUF012  # SQLAlchemy's


ORDERS: Any = Order.__table__


# MySQL has MariaDB's driver and dialect.
@pytest.fixture(
    params=["pg_url", "sqlite_url", pytest.param("mariadb_url", marks=pytest.mark.debian)]
)
def engine(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    """A shop's database with orders 1 and 2, which have no fence yet."""
    yield from _shop(request.getfixturevalue(request.param))


@pytest.fixture
def pg(pg_url: str) -> Iterator[sa.Engine]:
    yield from _shop(pg_url)


def _shop(url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([kind(id=n, status="new") for kind in (Order, Odd) for n in (1, 2)])
        session.commit()
    yield engine
    engine.dispose()


def fenced(fence: int, status: str = "shipped", *, order: int | None = 1) -> FencedUpdate:
    update = sa.update(ORDERS).values(status=status)
    if order is not None:
        update = update.where(ORDERS.c.id == order)
    return FencedUpdate(update, column="fence_token", key="order:1", fence=fence)


def write(engine: sa.Engine, fence: int, status: str = "shipped", **options: Any) -> int:
    with engine.begin() as db:
        return fenced(fence, status, **options).execute(db)


def rows(engine: sa.Engine) -> list[tuple[str, int | None]]:
    with engine.connect() as db:
        select = sa.select(ORDERS.c.status, ORDERS.c.fence_token).order_by(ORDERS.c.id)
        return [(row.status, row.fence_token) for row in db.execute(select)]


# -- which holder may write -------------------------------------------------------------------


def test_a_row_without_a_fence_takes_any_fence(engine: sa.Engine) -> None:
    """A row without a fence accepts any fence: NULL is older than all. Other rows stay as
    they are."""
    assert write(engine, 7) == 1
    assert rows(engine) == [("shipped", 7), ("new", None)]


def test_the_same_holder_writes_again_and_a_newer_one_too(engine: sa.Engine) -> None:
    """The same holder may write a row twice, also if its body runs again under the same lease."""
    for fence, status in ((7, "packed"), (7, "shipped"), (8, "returned")):
        write(engine, fence, status)
    assert rows(engine)[0] == ("returned", 8)


@pytest.mark.parametrize("newer", EDGES)
def test_an_older_holder_is_refused(engine: sa.Engine, newer: int) -> None:
    """An older holder is refused on all 64 bits. The error has the key and both fences, and the row
    stays."""
    write(engine, newer, "newer")
    with pytest.raises(StaleTokenError) as raised:
        write(engine, newer - 1, "older")
    error = raised.value
    assert (error.key, error.fence, error.newer_fence) == ("order:1", newer - 1, newer)
    assert rows(engine)[0] == ("newer", newer)


def test_a_row_that_is_not_there_is_no_stale_one(engine: sa.Engine) -> None:
    """A missing row raises an error of its own, because it needs another fix than a stale
    holder."""
    with pytest.raises(FencedRowMissingError, match="orders has no row"):
        write(engine, 7, order=99)


def test_one_stale_row_among_several_refuses_them_all(engine: sa.Engine) -> None:
    """One stale row among several refuses the whole write and its transaction."""
    write(engine, 9, "newer", order=2)
    with pytest.raises(StaleTokenError):
        write(engine, 8, "older", order=None)
    assert rows(engine) == [("new", None), ("newer", 9)]
    assert write(engine, 10, "all", order=None) == 2


def test_a_condition_that_the_write_itself_ends_is_no_trouble(engine: sa.Engine) -> None:
    """The write may change a column that its own where() names."""
    update = sa.update(ORDERS).where(ORDERS.c.status == "new").values(status="shipped")
    with engine.begin() as db:
        done = FencedUpdate(update, column="fence_token", key="k", fence=7).execute(db)
    assert done == 2


# -- at the same time -------------------------------------------------------------------------


def _while_it_waits(pg: sa.Engine, fence: int, first: Callable[[sa.Connection], Any]) -> Any:
    """Return the result of a write with `fence` that waits, in its thread, for another
    transaction."""
    results: list[Any] = []

    def wait_and_write() -> None:
        try:
            results.append(write(pg, fence, "mine"))
        except Exception as error:
            results.append(error)

    with pg.connect() as db:
        end = first(db)
        thread = threading.Thread(target=wait_and_write)
        thread.start()
        waiting = sa.text(
            "select count(*) from pg_stat_activity"
            " where wait_event_type = 'Lock' and datname = current_database()"
        )
        with pg.execution_options(isolation_level="AUTOCOMMIT").connect() as watcher:
            wait_until(lambda: watcher.execute(waiting).scalar() == 1)
        end()
        thread.join(patience_s())
    return results[0]


def test_a_newer_holder_that_is_just_committing_wins(pg: sa.Engine) -> None:
    """An older write waits for a newer one that is committing, sees its fence, and is refused."""

    def newer(db: sa.Connection) -> Callable[[], None]:
        fenced(8, "newer").execute(db)
        return db.commit

    error = _while_it_waits(pg, 7, newer)
    assert isinstance(error, StaleTokenError)
    assert error.newer_fence == 8
    assert rows(pg)[0] == ("newer", 8)


def test_a_newer_holder_that_rolls_back_was_never_there(pg: sa.Engine) -> None:
    """If the newer write rolls back, the older one succeeds."""

    def newer(db: sa.Connection) -> Callable[[], None]:
        fenced(8, "newer").execute(db)
        return db.rollback

    assert _while_it_waits(pg, 7, newer) == 1
    assert rows(pg)[0] == ("mine", 7)


def test_a_row_that_is_deleted_meanwhile_is_missing(pg: sa.Engine) -> None:
    """If the row is deleted meanwhile, the error says missing, not stale."""

    def delete(db: sa.Connection) -> Callable[[], None]:
        db.execute(sa.delete(ORDERS).where(ORDERS.c.id == 1))
        return db.commit

    assert isinstance(_while_it_waits(pg, 7, delete), FencedRowMissingError)


def test_a_row_that_comes_into_being_between_update_and_look_is_written(engine: sa.Engine) -> None:
    """A row that is inserted between the update and the check is not reported as missing."""
    inserted: list[int] = []

    def insert_after_the_update(db: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE") and not inserted:
            inserted.append(3)
            db.execute(sa.insert(ORDERS).values(id=3, status="new"))

    with engine.begin() as db:
        sa.event.listen(db, "after_cursor_execute", insert_after_the_update)
        assert fenced(7, order=3).execute(db) == 1
    assert rows(engine)[2] == ("shipped", 7)


def test_of_many_holders_at_once_the_newest_has_the_row(pg: sa.Engine) -> None:
    """Of several writes, in any order, an older one never overwrites a newer one, and is refused
    instead."""
    refused: list[StaleTokenError] = []

    def hold(number: int) -> None:
        for _ in range(5):
            try:
                write(pg, number + 1, str(number + 1))
            except StaleTokenError as error:
                refused.append(error)

    at_once(8, hold)
    assert rows(pg)[0] == ("8", 8)
    assert all(each.newer_fence > each.fence for each in refused)


# -- on what ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scoped", [False, True])
def test_an_orm_session_runs_it_too(engine: sa.Engine, scoped: bool) -> None:
    """A Session runs it with an ORM class whose attribute and column have different names. Its
    objects are updated."""
    update = sa.update(Order).where(Order.id == 1).values(status="shipped")
    make = sessionmaker(engine)
    session: Any = scoped_session(make) if scoped else make()
    order = session.get(Order, 1)
    assert FencedUpdate(update, column="fence_token", key="k", fence=7).execute(session) == 1
    assert (order.status, order.token) == ("shipped", 7)
    session.commit()
    assert rows(engine)[0] == ("shipped", 7)
    order = session.get(Order, 1)  # loads fence 7, which is then older than what the row has
    assert order.token == 7
    session.rollback()
    write(engine, 9, "newer")
    session.get(Order, 1)
    with pytest.raises(StaleTokenError):
        FencedUpdate(update, column="fence_token", key="k", fence=8).execute(session)
    session.rollback()
    assert (order.status, order.token) == ("newer", 9)
    session.close()


@pytest.mark.parametrize("how", ["auto", "evaluate", "fetch"])
@pytest.mark.parametrize("kind", [Order, Odd])
def test_objects_of_a_session_hear_of_the_write(sqlite_url: str, how: Any, kind: Any) -> None:
    """Objects are updated by each way to synchronize a session, even if another attribute has the
    column's name."""
    for engine in _shop(sqlite_url):
        with Session(engine) as session:
            mine, other = (session.get(kind, order) for order in (1, 2))
            update = sa.update(kind).where(kind.id == 1).values(status="shipped")
            update = update.execution_options(synchronize_session=how)
            fenced = FencedUpdate(update, column="fence_token", key="k", fence=7)
            assert fenced.execute(session) == 1
            assert (mine.status, mine.token) == ("shipped", 7)
            assert (other.status, other.token) == ("new", None)
            newer = FencedUpdate(update, column="fence_token", key="k", fence=6)
            with pytest.raises(StaleTokenError):
                newer.execute(session)
            if kind is Odd:
                assert mine.fence_token is None


def test_a_column_is_meant_by_its_name_in_the_database(sqlite_url: str) -> None:
    """A column is found by its name in the database, and otherwise by its key."""
    table = sa.Table(
        "odd",
        sa.MetaData(),
        sa.Column("status", sa.String(40)),
        sa.Column("note", sa.String(40), key="fence_token"),
        sa.Column("fence_token", sa.BigInteger, key="token"),
    )
    for engine in _shop(sqlite_url):
        for fence, column in ((7, "fence_token"), (8, "token")):
            update = sa.update(table).values({table.c.fence_token: "note"})
            with engine.begin() as db:
                FencedUpdate(update, column=column, key="k", fence=fence).execute(db)
                found = db.execute(sa.text("select note, fence_token from odd")).all()
            assert [tuple(row) for row in found] == [("note", fence)] * 2


@pytest.mark.parametrize("by", ["name", "column", "attribute"])
def test_a_value_that_the_statement_gives_the_token_does_not_count(
    sqlite_url: str, by: str
) -> None:
    """The holder's own fence replaces a value that the statement gives the fence's column."""
    update = {
        "name": sa.update(ORDERS).values(fence_token=99),
        "column": sa.update(ORDERS).values({ORDERS.c.fence_token: 99}),
        "attribute": sa.update(Order).values({Order.token: 99}),
    }[by]
    for engine in _shop(sqlite_url):
        with Session(engine) as session, session.begin():
            FencedUpdate(update, column="fence_token", key="k", fence=7).execute(session)
        assert [fence for _, fence in rows(engine)] == [7, 7]


def test_rows_of_another_class_in_the_table_do_not_count(sqlite_url: str) -> None:
    """An update of a class that shares its table reaches only rows of that class."""
    for engine in _shop(sqlite_url):
        with Session(engine) as session:
            session.add_all([Parcel(id=1, status="new", token=99), Letter(id=2, status="new")])
            session.flush()
            update = sa.update(Letter).values(status="sent")
            fenced = FencedUpdate(update, column="fence_token", key="k", fence=7)
            assert fenced.execute(session) == 1


@pytest.mark.parametrize("on", ["engine", "driver", "nothing"])
def test_what_is_no_connection_is_refused(engine: sa.Engine, on: str) -> None:
    """An object that is no connection or session is refused before anything is sent."""
    raw = engine.raw_connection()
    try:
        given = {"engine": engine, "driver": raw.driver_connection, "nothing": None}[on]
        with pytest.raises(ConfigurationError, match="Connection or an ORM Session"):
            fenced(7).execute(given)
    finally:
        raw.close()


@pytest.mark.parametrize(
    "statement",
    [
        sa.insert(ORDERS).values(id=1),
        sa.delete(ORDERS),
        sa.select(ORDERS),
        sa.text("update orders set status = 'x'"),
        sa.update(ORDERS).values(status="x").returning(ORDERS.c.id),
        sa.update(ORDERS).ordered_values((ORDERS.c.status, "x")),
        sa.update(Order).ordered_values((Order.status, "x")),
        "update orders set status = 'x'",
    ],
    ids=["insert", "delete", "select", "text", "returning", "ordered", "ordered orm", "str"],
)
def test_only_a_plain_update_can_be_fenced(statement: Any) -> None:
    """Another statement than a plain update is refused, with what to do instead."""
    with pytest.raises(ConfigurationError, match=r"guard\.fenced\(\) takes .*update\(\)"):
        FencedUpdate(statement, column="fence_token", key="k", fence=1)


def test_a_column_that_is_not_there_is_named(engine: sa.Engine) -> None:
    """A missing column is named at once."""
    with pytest.raises(ConfigurationError, match="orders has no column 'token'"):
        FencedUpdate(sa.update(Order), column="token", key="k", fence=1)


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        (sa.BigInteger(), True),
        (sa.Numeric(), True),
        (sa.Numeric(20, 0), True),
        (sa.BigInteger().with_variant(sa.Integer(), "sqlite"), True),
        (sa.Integer(), False),
        (sa.SmallInteger(), False),
        (sa.Numeric(20, 2), False),
        (sa.Numeric(asdecimal=False), False),
        (sa.Float(53), False),
        (sa.Double(), False),
        (sa.Text(), False),
        (sa.types.NullType(), False),
    ],
    ids=str,
)
def test_a_column_that_is_too_narrow_is_refused_at_use(
    pg: sa.Engine, kind: sa.types.TypeEngine[Any], holds: bool
) -> None:
    """A column of doubles or of 32 bits is refused, because it would confuse fences."""
    table = sa.table("orders", sa.column("id", sa.Integer), sa.column("fence_token", kind))
    update = FencedUpdate(sa.update(table), column="fence_token", key="k", fence=2**62)
    with pg.begin() as db:
        if holds:
            assert update.execute(db) == 2
        else:
            with pytest.raises(ConfigurationError, match=r"orders\.fence_token is .* 64 bits"):
                update.execute(db)


def test_a_numeric_column_compares_all_digits(pg: sa.Engine) -> None:
    """A NUMERIC column compares all digits of a fence."""
    with pg.begin() as db:
        db.execute(sa.text("alter table orders alter fence_token type numeric"))
    table = sa.table("orders", sa.column("fence_token", sa.Numeric))
    with pg.begin() as db:
        FencedUpdate(sa.update(table), column="fence_token", key="k", fence=2**62).execute(db)
        with pytest.raises(StaleTokenError) as raised:
            FencedUpdate(sa.update(table), column="fence_token", key="k", fence=2**62 - 1).execute(
                db
            )
    assert raised.value.newer_fence == 2**62


def test_sqlites_integers_are_wide_enough(sqlite_url: str) -> None:
    """SQLite's INTEGER is wide enough for fences."""
    for engine in _shop(sqlite_url):
        table = sa.table("orders", sa.column("fence_token", sa.Integer))
        update = FencedUpdate(sa.update(table), column="fence_token", key="k", fence=2**62)
        with engine.begin() as db:
            assert update.execute(db) == 2


# -- in a body --------------------------------------------------------------------------------


def test_a_holder_that_was_overtaken_cannot_write_elsewhere(pg: sa.Engine, sqlite_url: str) -> None:
    """With the ledger on SQLite and the orders on PostgreSQL, the row refuses the late write."""
    shops = [GuardedShop(sqlite_url), GuardedShop(sqlite_url)]
    fences: list[int] = []

    def ship(n: int, guard: Guard) -> str:
        fences.append(guard.fence)
        attempt = len(fences)
        mine = guard.fenced(sa.update(Order).where(Order.id == n).values(status=f"by {attempt}"))
        if attempt == 1:  # it is paused here, for longer than its lease
            end_leases(shops[0].engine)
            with ThreadPoolExecutor() as elsewhere:
                assert elsewhere.submit(tasks[1], n).result() == "shipped"
        with pg.begin() as db:
            mine.execute(db)
        return "shipped"

    tasks = [shop.tg.guarded(key="order:<n>", work="ship")(ship) for shop in shops]
    try:
        assert tasks[0](1) == "shipped"  # answered from the record
    finally:
        for shop in shops:
            shop.close()
    assert rows(pg)[0] == ("by 2", fences[1])
    assert "stale_refused" in shops[0].happened
