"""`guard.transaction(session)`: effects in the user's own transaction, with DONE or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
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

from support.claims import overtake, request
from support.guarded_shop import GuardedShop, NotingQueue, write
from support.proxy import Mode, Proxy
from support.waiting import patience_s, wait_until
from taskguard.errors import (
    ConfigurationError,
    StaleTokenError,
    TransactionUsageError,
)
from taskguard.ledger.sql import SqlLedger
from taskguard.model.delivery import Completed
from taskguard.run.guard import Guard


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(sa.String(40))


@dataclass
class LentRig:
    """A shop, and an Engine of the user's own, which is the ledger's or another one."""

    shop: GuardedShop
    engine: sa.Engine

    def __post_init__(self) -> None:
        Base.metadata.create_all(self.engine)
        with Session(self.engine) as session, session.begin():
            session.add(Order(id=1, status="new"))

    @property
    def orders(self) -> list[str]:
        with self.shop.engine.connect() as db:
            return list(db.execute(sa.select(Order.status).order_by(Order.id)).scalars())

    def close(self) -> None:
        self.shop.close()
        self.engine.dispose()


@pytest.fixture
def build() -> Iterator[Callable[..., LentRig]]:
    made: list[LentRig] = []

    def build(url: str, ledger: Any = None, *, engine: sa.Engine | None = None) -> LentRig:
        made.append(LentRig(GuardedShop(url, ledger), engine or sa.create_engine(url)))
        return made[-1]

    yield build
    for rig in made:
        rig.close()


# MySQL has MariaDB's driver and dialect.
@pytest.fixture(
    params=["pg_url", "sqlite_url", pytest.param("mariadb_url", marks=pytest.mark.debian)]
)
def rig(request: pytest.FixtureRequest, build: Callable[..., LentRig]) -> LentRig:
    """Return a rig with the ledger by a URL, and the user's own Engine."""
    return build(request.getfixturevalue(request.param))


@pytest.fixture
def pg(pg_url: str, build: Callable[..., LentRig]) -> LentRig:
    return build(pg_url)


@pytest.fixture
def behind_proxy(postgres: Any, pg_url: str, build: Any) -> Iterator[tuple[LentRig, Proxy]]:
    """The user's Engine reaches the database by way of the proxy, the ledger does not."""
    with Proxy(postgres.port) as proxy:
        url = pg_url.replace(f":{postgres.port}/", f":{proxy.port}/")
        yield build(pg_url, engine=sa.create_engine(url)), proxy


def _session(rig: LentRig) -> Session:
    return Session(rig.engine)


LENDERS: dict[str, Callable[[LentRig], Any]] = {
    "Session": _session,
    "Connection": lambda rig: rig.engine.connect(),
    "Session on a Connection": lambda rig: Session(rig.engine.connect()),
}


@pytest.fixture(params=LENDERS)
def on(request: pytest.FixtureRequest, rig: LentRig) -> Iterator[Any]:
    """Return the session or connection that the user hands in."""
    lent = LENDERS[request.param](rig)
    yield lent
    bind = lent.get_bind() if not isinstance(lent, sa.Connection) else None
    lent.close()
    if isinstance(bind, sa.Connection):
        bind.close()


# -- together, or not at all ------------------------------------------------------------------


def test_effects_and_done_commit_together(rig: LentRig, on: Any) -> None:
    """The block returns the lent session or connection. Effects and DONE commit together, and a
    duplicate gets the result."""

    def body(guard: Guard) -> None:
        with guard.transaction(on) as given:
            assert given is on
            assert isinstance(guard.db, sa.Connection)
            write(on)
            guard.result = "shipped"

    for _ in range(2):
        outcome: Any = rig.shop.deliver(body)
        assert outcome.value == "shipped"
    assert (rig.shop.effects, rig.shop.states) == (["x"], ["DONE"])
    assert on.execute(sa.text("select 1")).scalar() == 1  # it is still good for more


def test_a_scoped_session_is_taken_for_the_session_of_its_scope(rig: LentRig) -> None:
    """A scoped session commits with DONE, and a commit() in the block is refused."""
    scoped = scoped_session(sessionmaker(rig.engine))

    @rig.shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction(scoped):
            write(scoped, f"{n}")
            if n == 2:
                scoped.commit()

    ship(1)
    with pytest.raises(TransactionUsageError):
        ship(2)
    scoped.remove()
    assert (rig.shop.effects, rig.shop.states) == (["1"], ["DONE", "FAILED"])


LENT: dict[str, tuple[int, Callable[[str], Any]]] = {
    # BEGIN, the claim with the bounds, effect, DONE, COMMIT
    "Session": (5, lambda url: Session(sa.create_engine(url))),
    "Connection": (5, lambda url: sa.create_engine(url).connect()),
    # and the savepoint that tells whether the body ended the transaction: made, released
    "psycopg": (7, lambda url: psycopg.connect(url.replace("+psycopg", ""))),
}


@pytest.mark.parametrize("lender", LENT)
def test_a_lent_transaction_takes_one_message_more_than_by_hand(
    postgres: Any, pg_url: str, build: Callable[..., LentRig], lender: str
) -> None:
    """On PostgreSQL a lent transaction takes one message more than one by hand."""
    rig, (messages, lend) = build(pg_url), LENT[lender]
    with Proxy(postgres.port) as proxy:
        on = lend(pg_url.replace(f":{postgres.port}/", f":{proxy.port}/"))
        statement: Any = "insert into effects values ('x')"

        @rig.shop.tg.guarded(key="order:<n>")
        def ship(n: int, guard: Guard) -> None:
            del n
            with guard.transaction(on):
                on.execute(statement if lender == "psycopg" else sa.text(statement))

        for number in range(8):  # connected and prepared
            ship(number)
        before = proxy.requests
        ship(8)
        assert proxy.requests - before == messages
        bind = on.get_bind() if isinstance(on, Session) else getattr(on, "engine", None)
        on.close()
        if bind is not None:
            bind.dispose()


@pytest.mark.parametrize("tables", [False, True], ids=["without", "with"])
def test_one_that_translates_the_ledgers_tables_to_others_is_refused(
    pg: LentRig, tables: bool
) -> None:
    """A session that translates the ledger's tables to another schema is refused."""
    with pg.shop.engine.begin() as db:
        db.execute(sa.text("create schema tenant"))
        for table in ("work", "keys") if tables else ():
            db.execute(sa.text(f"create table tenant.taskguard_{table} (like taskguard_{table})"))

    @pg.shop.tg.guarded(key="order:<schema>")
    def ship(schema: str, guard: Guard) -> str:
        engine = pg.engine.execution_options(schema_translate_map={None: schema})
        with guard.transaction(Session(engine)) as session:
            write(session)
        return schema

    with pytest.raises(ConfigurationError, match="another schema"):
        ship("tenant")
    assert ship("public") == "public"
    assert pg.shop.effects == ["x"]


@pytest.mark.parametrize("name", ["pg_url", "sqlite_url"])
@pytest.mark.parametrize("make", [Session, sa.Engine.connect])
def test_on_the_ledgers_own_engine(
    request: pytest.FixtureRequest, build: Callable[..., LentRig], name: str, make: Any
) -> None:
    """A session on the ledger's own Engine commits with DONE, and a commit() in the block is
    refused."""
    url = request.getfixturevalue(name)
    engine = sa.create_engine(url)
    rig = build(url, engine, engine=engine)
    on = make(engine)

    @rig.shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction(on):
            write(on, f"{n}")
            if n == 2:
                on.commit()

    ship(1)
    with pytest.raises(TransactionUsageError):
        ship(2)
    on.close()
    assert (rig.shop.effects, sorted(rig.shop.states)) == (["1"], ["DONE", "FAILED"])


def test_nothing_is_seen_before_the_end_of_the_block(pg: LentRig) -> None:
    """Before the end of the block, others see neither effects nor DONE."""
    with _session(pg) as session:

        def body(guard: Guard) -> None:
            with guard.transaction(session):
                session.get_one(Order, 1).status = "shipped"
                session.flush()
                assert (pg.orders, pg.shop.states) == (["new"], ["PROCESSING"])

        pg.shop.deliver(body)
    assert (pg.orders, pg.shop.states) == (["shipped"], ["DONE"])


def test_a_body_that_fails_writes_nothing(rig: LentRig, on: Any) -> None:
    """The user's session or connection is rolled back, and usable again."""

    def body(guard: Guard) -> None:
        with guard.transaction(on):
            write(on)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.shop.deliver(body)
    assert (rig.shop.effects, rig.shop.states) == ([], ["FAILED"])
    write(on, "later")
    on.commit()
    assert rig.shop.effects == ["later"]


def test_a_holder_that_was_overtaken_writes_nothing(rig: LentRig, on: Any) -> None:
    """Its effects are rolled back with its DONE."""
    shop = rig.shop
    heard: list[BaseException] = []

    def body(guard: Guard) -> None:
        if shop.engine.dialect.name == "sqlite":
            overtake(shop)  # one writer at a time: before the block
        try:
            with guard.transaction(on):
                write(on)
                if shop.engine.dialect.name != "sqlite":
                    overtake(shop)
        except StaleTokenError as error:
            heard.append(error)
            raise

    shop.deliver(body, NotingQueue())
    assert (shop.effects, shop.states) == ([], ["PROCESSING"])
    assert len(heard) == 1


def test_what_the_orm_has_pending_goes_before_done(rig: LentRig) -> None:
    """Pending objects are flushed before DONE. If a constraint fails, nothing is written."""
    with _session(rig) as session:

        def body(guard: Guard) -> None:
            with guard.transaction(session):
                session.add(Order(id=1, status="again"))

        with pytest.raises(sa.exc.IntegrityError):
            rig.shop.deliver(body)
        assert (rig.orders, rig.shop.states) == (["new"], ["FAILED"])
        assert session.get_one(Order, 1).status == "new"


@pytest.mark.parametrize("expire", [True, False])
def test_objects_are_usable_after_the_block(rig: LentRig, expire: bool) -> None:
    """Objects of the session can be used after the block, whether or not the commit expires
    them."""
    with Session(rig.engine, expire_on_commit=expire) as session:

        def body(guard: Guard) -> list[str]:
            with guard.transaction(session):
                old, new = session.get_one(Order, 1), Order(id=2, status="new")
                session.add(new)
                old.status = "shipped"
            return [old.status, new.status]

        assert rig.shop.deliver(body) == Completed(["shipped", "new"])


def test_a_savepoint_may_be_rolled_back_and_another_committed(rig: LentRig) -> None:
    """begin_nested() is for parts that may fail, on a Session as on a Connection."""
    with _session(rig) as session:

        def body(guard: Guard) -> None:
            with guard.transaction(session):
                write(session, "kept")
                with session.begin_nested():
                    write(session, "kept, too")
                part = session.begin_nested()
                write(session, "dropped")
                part.rollback()

        rig.shop.deliver(body)
    assert (rig.shop.effects, rig.shop.states) == (["kept", "kept, too"], ["DONE"])


def test_several_keys_complete_on_it_too(rig: LentRig) -> None:
    """Work with several keys completes on a lent transaction, too."""
    with _session(rig) as session:

        @rig.shop.tg.guarded(key=["order:<n>", "account:<n>"])
        def ship(n: int, guard: Guard) -> None:
            with guard.transaction(session):
                write(session)

        ship(1)
    assert (rig.shop.effects, rig.shop.states) == (["x"], ["DONE"])


# -- the body ends it -------------------------------------------------------------------------


def _inner(session: Any) -> sa.Connection:
    return session if isinstance(session, sa.Connection) else session.connection()


ENDS: dict[str, Callable[[Any], Any]] = {
    "commit": lambda on: on.commit(),
    "rollback": lambda on: on.rollback(),
    "close": lambda on: on.close(),
    "commit of the connection": lambda on: _inner(on).commit(),
    "rollback of the connection": lambda on: _inner(on).rollback(),
    "commit of the transaction": lambda on: _inner(on).get_transaction().commit(),
}


GOES_ON = ["stops", "writes", "writes and commits", "swallows"]


@pytest.mark.filterwarnings("ignore:transaction already deassociated:sqlalchemy.exc.SAWarning")
@pytest.mark.parametrize("end", ENDS)
def test_a_body_that_ends_it_gets_an_error(rig: LentRig, on: Any, end: str) -> None:
    """A body that ends the transaction gets an error, and none of its writes is committed later."""
    for goes_on in GOES_ON:
        if isinstance(on, sa.Connection) and on.closed:
            on = rig.engine.connect()

        def body(guard: Guard, goes_on: str = goes_on, on: Any = on) -> None:
            with guard.transaction(on):
                write(on, "before")
                try:
                    ENDS[end](on)
                except TransactionUsageError:
                    if goes_on != "swallows":
                        raise
                if goes_on.startswith("writes"):
                    write(on, "after")
                if goes_on == "writes and commits":
                    on.commit()

        # A Connection that is closed says so itself.
        with pytest.raises((TransactionUsageError, sa.exc.ResourceClosedError)):
            rig.shop.deliver(body)
        assert (rig.shop.effects, rig.shop.states) == ([], ["FAILED"])
        if not (isinstance(on, sa.Connection) and on.closed):
            on.commit()
            write(on, "later")
            on.commit()
            assert rig.shop.effects == ["later"]
            on.execute(sa.text("delete from effects"))
            on.commit()
    if isinstance(on, sa.Connection):
        on.close()


def test_nothing_is_left_open_in_a_pool_that_does_not_reset(
    pg_url: str, build: Callable[..., LentRig]
) -> None:
    """After the block nothing is open in a pool without reset, because the connection's next user
    would commit it."""
    rig = build(pg_url, engine=sa.create_engine(pg_url, pool_reset_on_return=None))
    with _session(rig) as session:

        def body(guard: Guard) -> None:
            with guard.transaction(session):
                write(session)
                session.connection().commit()

        with pytest.raises(TransactionUsageError):
            rig.shop.deliver(body)
    with rig.engine.begin() as db:
        db.execute(sa.text("select 1"))
    assert rig.shop.effects == []


def test_a_second_database_of_the_session_is_refused(pg: LentRig, sqlite_url: str) -> None:
    """A session with a second database is refused, because that would commit apart from DONE."""
    other = sa.create_engine(sqlite_url)
    Base.metadata.create_all(other)
    with Session(pg.engine, binds={Order: other}) as session:

        def body(guard: Guard) -> None:
            with guard.transaction(session):
                write(session)
                session.add(Order(id=5, status="new"))

        with pytest.raises(TransactionUsageError, match="another database"):
            pg.shop.deliver(body)
    with other.connect() as db:
        assert db.execute(sa.select(sa.func.count()).select_from(Order)).scalar() == 0
    other.dispose()
    assert (pg.shop.effects, pg.shop.states) == ([], ["FAILED"])


# -- what is refused at once ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wrote", "read", "added"])
def test_one_that_has_begun_is_refused(rig: LentRig, on: Any, how: str) -> None:
    """A session or connection with an open transaction is refused, and its earlier work is left
    alone."""
    if how == "wrote" and rig.engine.dialect.name == "sqlite":
        return  # one writer at a time: nothing would be claimed
    if how == "added":
        if isinstance(on, sa.Connection):
            return
        on.add(Order(id=2, status="added"))
    else:
        on.execute(sa.text("select 1" if how == "read" else "insert into effects values ('mine')"))

    def body(guard: Guard) -> None:
        with guard.transaction(on):
            write(on)

    with pytest.raises(TransactionUsageError, match="Commit or roll back before the block"):
        rig.shop.deliver(body)
    on.commit()
    assert rig.shop.effects == (["mine"] if how == "wrote" else [])
    assert rig.orders == (["new", "added"] if how == "added" else ["new"])
    assert rig.shop.states == ["FAILED"]


def test_a_session_that_joins_an_open_transaction_is_refused(rig: LentRig) -> None:
    """A session that joins an open transaction is refused, because its commit() would not
    commit."""
    with rig.engine.connect() as db:
        outer = db.begin()

        def body(guard: Guard) -> None:
            with Session(db) as session, guard.transaction(session):
                write(session)

        with pytest.raises(TransactionUsageError):
            rig.shop.deliver(body)
        outer.rollback()


@pytest.mark.parametrize("ledger_there", ["none", "empty", "same_work"])
def test_another_database_is_refused_with_the_reason(
    postgres: Any, pg: LentRig, ledger_there: str
) -> None:
    """A session of another database is refused, even if that has a ledger that knows the work."""
    url = postgres.create_database(f"other_{ledger_there}")
    other = sa.create_engine(url)
    with other.begin() as db:
        db.execute(sa.text("create table effects (item text)"))
    if ledger_there != "none":
        ledger = SqlLedger(other)
        ledger.create_schema()
    if ledger_there == "same_work":
        ledger.claim(request())
    for make in (Session, sa.Engine.connect):
        on: Any = make(other)
        pg.shop.refuses(on, r"not of the ledger's.*guard\.fenced")
        assert on.execute(sa.text("select count(*) from effects")).scalar() == 0
        on.close()
    other.dispose()
    postgres.drop_database(url.rsplit("/", 1)[1])


def test_another_kind_of_database_is_refused(pg: LentRig, sqlite_url: str) -> None:
    """A session of another kind of database is refused before it is used."""
    other = sa.create_engine(sqlite_url)
    with Session(other) as session:
        pg.shop.refuses(session, r"guard\.fenced")
        assert not session.in_transaction()
    other.dispose()


def test_another_schema_is_refused(pg: LentRig) -> None:
    """A session that would not find the ledger's tables in its schema is refused."""
    with pg.shop.engine.begin() as db:
        db.execute(sa.text("create schema mine"))
    engine = sa.create_engine(pg.engine.url, connect_args={"options": "-c search_path=mine"})
    with Session(engine) as session:
        pg.shop.refuses(session, "another schema")
    engine.dispose()


@pytest.mark.parametrize("name", ["pg_url", "sqlite_url"])
def test_one_that_commits_each_statement_is_refused(
    request: pytest.FixtureRequest, build: Callable[..., LentRig], name: str
) -> None:
    """A session with AUTOCOMMIT is refused, because effects and DONE could not commit together."""
    url = request.getfixturevalue(name)
    rig = build(url, engine=sa.create_engine(url, isolation_level="AUTOCOMMIT"))
    with _session(rig) as session:
        rig.shop.refuses(session, "AUTOCOMMIT")
    assert rig.shop.effects == []


@pytest.mark.parametrize("on", ["engine", "url", "factory", "twophase"])
def test_what_is_neither_session_nor_connection_is_refused(pg: LentRig, on: str) -> None:
    """An object of another type is refused by name, and so is a two-phase session."""
    given: Any = {
        "engine": pg.engine,
        "url": str(pg.engine.url),
        "factory": sessionmaker(pg.engine),
        "twophase": Session(pg.engine, twophase=True),
    }[on]
    pg.shop.refuses(given, "Session")


# -- the database says no, or nothing ---------------------------------------------------------


def test_a_commit_that_got_no_answer_is_resolved(behind_proxy: tuple[LentRig, Proxy]) -> None:
    """If a COMMIT that happened gets no answer, the body does not run again, and the session can go
    on."""
    rig, proxy = behind_proxy
    runs: list[int] = []
    with _session(rig) as session:

        def body(guard: Guard) -> str:
            runs.append(1)
            with guard.transaction(session):
                order = session.get_one(Order, 1)
                order.status = "shipped"
                write(session)
                proxy.lose_reply_to(b"COMMIT", then=Mode.CUT)
            return order.status

        assert rig.shop.deliver(body) == Completed("shipped")
    assert (len(runs), rig.shop.effects) == (1, ["x"])
    assert (rig.orders, rig.shop.states) == (["shipped"], ["DONE"])


def test_a_body_of_several_parts_commits_them_on_one_session(
    behind_proxy: tuple[LentRig, Proxy],
) -> None:
    """Each part commits with its progress. A part whose COMMIT got no answer is not done twice."""
    rig, proxy = behind_proxy
    with _session(rig) as session:

        def body(guard: Guard) -> None:
            for part in range(guard.progress or 0, 3):
                with guard.checkpoint(part + 1, session) as given:
                    assert given is session
                    session.add(Order(id=10 + part, status=f"part {part}"))
                    if part == 1 and guard.attempt == 1:
                        proxy.lose_reply_to(b"COMMIT", then=Mode.CUT)
            with guard.transaction(session):
                write(session)

        rig.shop.deliver(body)
    assert proxy.lost > 0
    assert rig.orders == ["new", "part 0", "part 1", "part 2"]
    assert (rig.shop.effects, rig.shop.states) == (["x"], ["DONE"])


def test_a_commit_in_a_checkpoint_is_refused(rig: LentRig) -> None:
    """A commit() in a checkpoint is refused, and neither the part nor its progress is written."""
    with _session(rig) as session:

        def body(guard: Guard) -> None:
            with guard.checkpoint(1, session):
                write(session)
                session.commit()

        with pytest.raises(TransactionUsageError):
            rig.shop.deliver(body)
    view = rig.shop.ledger.view("ship order:1")
    assert view is not None
    assert (rig.shop.effects, view.progress_json) == ([], None)


def test_a_commit_that_did_not_happen_runs_the_body_again(
    behind_proxy: tuple[LentRig, Proxy],
) -> None:
    """If the session ends before COMMIT, the body runs again, and has one effect."""
    rig, _ = behind_proxy
    runs: list[int] = []
    with _session(rig) as session:

        def end_the_session(_: Session) -> None:
            if len(runs) == 1:
                pid = session.connection().exec_driver_sql("select pg_backend_pid()").scalar()
                with rig.shop.engine.connect() as db:
                    db.execute(sa.text("select pg_terminate_backend(:pid)"), {"pid": pid})

        def body(guard: Guard) -> None:
            runs.append(1)
            with guard.transaction(session):
                write(session)
                if len(runs) == 1:
                    sa.event.listen(session, "before_commit", end_the_session)

        rig.shop.deliver(body)
    assert (len(runs), rig.shop.effects, rig.shop.states) == (2, ["x"], ["DONE"])


def test_a_connection_that_breaks_in_the_block_runs_the_body_again(
    behind_proxy: tuple[LentRig, Proxy],
) -> None:
    """If the connection breaks in the block, the body runs again on the same session."""
    rig, proxy = behind_proxy
    runs: list[int] = []
    with _session(rig) as session:

        def body(guard: Guard) -> None:
            runs.append(1)
            with guard.transaction(session):
                write(session)
                if len(runs) == 1:
                    proxy.cut()
                write(session, "y")

        rig.shop.deliver(body)
    assert (len(runs), rig.shop.effects, rig.shop.states) == (2, ["x", "y"], ["DONE"])


def test_a_database_that_is_away_puts_the_delivery_off(behind_proxy: tuple[LentRig, Proxy]) -> None:
    """If the database is down, the delivery is deferred."""
    rig, proxy = behind_proxy
    rig.engine.dispose()
    queue = NotingQueue()
    with _session(rig) as session:

        def body(guard: Guard) -> None:
            with guard.transaction(session):
                raise AssertionError("unreachable")

        proxy.mode = Mode.CUT
        rig.shop.deliver(body, queue)
        proxy.mode = Mode.PASS
    assert (queue.deferrals, rig.shop.states) == ([1], ["NEW"])


def test_a_constraint_that_fails_at_commit_is_the_bodys_error(pg: LentRig) -> None:
    """A constraint that fails at COMMIT is the body's error: the outcome is known, and the Session
    can go on."""
    with pg.shop.engine.begin() as db:
        db.execute(sa.text("create table u (id int unique deferrable initially deferred)"))
    with _session(pg) as session:

        def body(guard: Guard) -> None:
            with guard.transaction(session):
                session.execute(sa.text("insert into u values (1), (1)"))

        with pytest.raises(sa.exc.IntegrityError):
            pg.shop.deliver(body)
        assert session.execute(sa.text("select count(*) from u")).scalar() == 0
    assert pg.shop.states == ["FAILED"]


def test_a_deadlock_runs_the_body_again(pg: LentRig) -> None:
    """After a deadlock the body runs again on the same session."""
    with pg.shop.engine.begin() as db:
        db.execute(sa.text("insert into orders values (2, 'new')"))
    runs: list[int] = []
    lock = "select * from orders where id = {} for update"
    with _session(pg) as session, pg.shop.engine.connect() as rival:
        rival.execute(sa.text("set deadlock_timeout = '60s'"))
        rival.execute(sa.text(lock.format(2)))

        def rivals_turn() -> None:
            rival.execute(sa.text(lock.format(1)))
            rival.commit()

        thread = threading.Thread(target=rivals_turn)
        waiting = sa.text("select count(*) from pg_stat_activity where wait_event_type = 'Lock'")

        def body(guard: Guard) -> None:
            runs.append(1)
            with guard.transaction(session):
                session.execute(sa.text(lock.format(1)))
                if len(runs) == 1:
                    thread.start()
                    autocommit = pg.shop.engine.execution_options(isolation_level="AUTOCOMMIT")
                    with autocommit.connect() as watcher:
                        wait_until(lambda: watcher.execute(waiting).scalar() == 1)
                session.execute(sa.text(lock.format(2)))
                write(session)

        pg.shop.deliver(body)
        thread.join(patience_s())
    assert (len(runs), pg.shop.effects, pg.shop.states) == (2, ["x"], ["DONE"])


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_body_longer_than_a_renewal_on_a_snapshot(
    pg_url: str, build: Callable[..., LentRig], level: str
) -> None:
    """A renewal by the watchdog does not make a body on a snapshot run again."""
    rig = build(pg_url, engine=sa.create_engine(pg_url, isolation_level=level))
    runs: list[int] = []
    with _session(rig) as session:

        @rig.shop.tg.guarded(key="order:<n>", ttl_s=6.0)
        def ship(n: int, guard: Guard) -> None:
            runs.append(1)
            with guard.transaction(session):
                write(session)
                wait_until(lambda: "renewed" in rig.shop.happened)

        ship(1)
    assert (len(runs), rig.shop.effects) == (1, ["x"])


def test_it_leaves_no_listener_on_the_session(rig: LentRig, on: Any) -> None:
    """After the block, commit() works as before."""

    def body(guard: Guard) -> None:
        with guard.transaction(on):
            write(on)
        write(on, "after")
        on.commit()
        write(on, "dropped")
        on.rollback()

    rig.shop.deliver(body)
    assert rig.shop.effects == ["after", "x"]


def test_a_second_transaction_is_refused(rig: LentRig, on: Any) -> None:
    """A second transaction is refused inside the block, and after DONE."""

    def body(guard: Guard) -> None:
        with guard.transaction(on):
            with pytest.raises(TransactionUsageError, match="inside a transaction"):
                with guard.transaction(on):
                    pass
            write(on)
        with pytest.raises(TransactionUsageError, match="after DONE"):
            with guard.transaction(on):
                pass

    rig.shop.deliver(body)
    assert (rig.shop.effects, rig.shop.states) == (["x"], ["DONE"])
