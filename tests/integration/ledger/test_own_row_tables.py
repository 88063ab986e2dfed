"""A GuardedRow that does not fit its table is reported, and no message is lost.

The SQL decides as `states.decide_by_row()` does for all rows.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.databases import DATABASES
from support.own_rows import ORDERS, Shop, Step, own_row
from support.proxy import Mode, Proxy
from support.waiting import patience_s, wait_until
from taskguard import GuardedRow
from taskguard.errors import (
    LedgerSchemaError,
    RowChangedError,
    RowIneligibleError,
    StaleTokenError,
    TaskguardError,
)
from taskguard.integration import Completed, Deferred, attempt_of
from taskguard.ledger.connections.database import Database
from taskguard.ledger.decisions import CLAIMABLE, decide_row
from taskguard.ledger.own_rows.changes import Found, state_of
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.claims import Answer, Busy, Claimed, ClaimRequest, MessageRef, RowRef
from taskguard.model.lease import new_owner
from taskguard.model.states import Decision
from taskguard.run.guard import Guard
from taskguard_celery import guarded_task
from taskguard_celery.startup import check_worker


@pytest.fixture(params=[*DATABASES, "postgresql in steps"])
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    steps = "steps" in request.param
    url = request.getfixturevalue("pg_url" if steps else request.param)
    made = Shop(url, one_statement=not steps)
    yield made
    made.close()


@pytest.fixture
def pg(pg_url: str) -> Iterator[Shop]:
    made = Shop(pg_url)
    yield made
    made.close()


MEND = {
    "no fence": (
        "alter table orders drop column fence_token",
        r"has no column 'fence_token': (ALTER TABLE orders ADD COLUMN fence_token BIGINT)",
    ),
    "a narrow fence": (
        "alter table orders alter column fence_token type integer",
        r"a fence has 64 bits: (ALTER TABLE orders ALTER COLUMN fence_token TYPE BIGINT)",
    ),
    "short states": (
        "alter table orders alter column status type varchar(5)",
        r"'SHIPPING', which holds 5 .*: (ALTER TABLE orders ALTER COLUMN status TYPE VARCHAR\(8\))",
    ),
}


@pytest.mark.parametrize("case", MEND)
def test_what_the_table_lacks_is_named_with_what_mends_it(pg: Shop, case: str) -> None:
    """Deliveries are deferred until the statement of the error has run. Then they are done."""
    breaking, problem = MEND[case]
    pg.change(breaking)
    ship = pg.step()
    with pytest.raises(LedgerSchemaError, match=problem) as caught:
        pg.ledger.check_schema([own_row()])
    assert isinstance(ship(), Deferred)
    assert pg.effects == []
    pg.change(str(caught.value).rpartition(": ")[2])
    assert ship(deferrals=1) == Completed("ship")


def test_a_lacking_column_is_found_on_sqlite(shop: Shop) -> None:
    """The first delivery finds a missing column, and is deferred until it exists."""
    shop.change("alter table orders drop column fence_token")
    ship = shop.step()
    assert isinstance(ship(), Deferred)
    shop.change("alter table orders add column fence_token bigint")
    assert ship(deferrals=1) == Completed("ship")


def test_a_table_elsewhere_is_named_with_where_it_was_looked_for(shop: Shop) -> None:
    """The table has to be in the ledger's own database, which the error names."""
    shop.change("alter table orders rename to elsewhere")
    with pytest.raises(LedgerSchemaError, match="orders of a GuardedRow is not in the ledger's"):
        shop.ledger.check_schema([own_row()])


def test_a_worker_says_at_its_start_what_the_table_lacks(pg: Shop) -> None:
    """A worker reports what the table lacks, and does not start."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(taskguard_locks="memory://", taskguard_ledger_url=pg.url)

    @app.task(shared=False)
    @guarded_task(key="order:<order_id>", row=own_row())
    def ship(order_id: int) -> None: ...

    logging.getLogger("taskguard").setLevel(logging.ERROR)
    try:
        check_worker(app)
        pg.change("alter table orders drop column fence_token")
        with pytest.raises(LedgerSchemaError, match="ADD COLUMN"):
            check_worker(app)
    finally:
        logging.getLogger("taskguard").setLevel(logging.NOTSET)


class Stage(enum.Enum):
    """Stored by value."""

    PAID = "paid"
    SHIPPING = "shipping"
    SHIPPED = "shipped"


def orders(kind: Any) -> sa.Table:
    """Orders of tenants, in a table of their own with such states."""
    return sa.Table(
        "tenants_orders",
        sa.MetaData(),
        sa.Column("tenant", sa.String(8), primary_key=True),
        sa.Column("no", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("stage", kind),
        sa.Column("fence", sa.Numeric(20)),
    )


VALUES = sa.Enum(Stage, name="stage", values_callable=lambda kind: [each.value for each in kind])
STAGES: dict[str, tuple[Any, tuple[Any, Any, Any]]] = {
    "an Enum by its values": (VALUES, (Stage.PAID, Stage.SHIPPING, Stage.SHIPPED)),
    "an Enum of texts": (sa.Enum("a", "b", "c", name="texts"), ("a", "b", "c")),
    "numbers": (sa.Integer(), (0, 10, 20)),
    "padded texts": (sa.CHAR(10), ("paid", "shipping", "shipped")),
}


@pytest.mark.parametrize("case", STAGES)
def test_states_and_ids_of_all_kinds(shop: Shop, case: str) -> None:
    """Rows with composite keys, enums, numbers, CHAR(n) and a NUMERIC fence are claimed, failed and
    completed."""
    kind, (new, processing, done) = STAGES[case]
    table = orders(kind)
    table.create(shop.engine)
    with shop.engine.begin() as db:
        db.execute(sa.insert(table).values(tenant="eu", no=7, stage=new))
    declared = GuardedRow(
        table,
        id={"tenant": "eu", "no": "<order_id>"},
        state="stage",
        fence="fence",
        new=new,
        processing=processing,
        done=done,
    )
    shop.ledger.check_schema([declared])
    ship = Step(shop, "ship", declared)

    def stage() -> Any:
        with shop.engine.connect() as db:
            found = db.execute(sa.select(table.c.stage)).scalar_one()
        return found.rstrip() if isinstance(found, str) else found

    def fail(guard: Any) -> None:
        assert stage() == processing
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ship(fail)
    assert stage() == new
    assert ship(retries=1) == Completed("ship")
    assert stage() == done


def test_a_numeric_fence_is_exact(shop: Shop) -> None:
    """A NUMERIC fence is exact beyond the range of a float."""
    table = orders(sa.Text())
    table.create(shop.engine)
    shop.change(f"insert into tenants_orders values ('eu', 7, 'a', {2**62 + 1})")
    declared = GuardedRow(
        table,
        id={"tenant": "eu", "no": "<order_id>"},
        state="stage",
        fence="fence",
        new="a",
        processing="b",
        done="c",
    )
    assert Step(shop, "ship", declared)(lambda guard: guard.fence) == Completed(2**62 + 2)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_engine_that_keeps_snapshots(pg_url: str, level: str) -> None:
    """On an Engine with snapshots, the row is locked before the snapshot is taken."""
    engine = sa.create_engine(pg_url, isolation_level=level)
    shop = Shop(pg_url, engine)
    ship = shop.step()
    with pytest.raises(ZeroDivisionError):
        ship(lambda guard: 1 / 0)
    assert ship(retries=1) == Completed("ship")
    assert (shop.status, shop.effects) == ("SHIPPED", ["ship order:7"])
    shop.close()


def test_a_state_that_the_enum_of_the_database_lacks(pg: Shop) -> None:
    """If the database's enum lacks a state, the error has the ALTER TYPE that adds it."""
    pg.change("create type stage as enum ('paid', 'shipped')")
    pg.change("alter table orders alter column status type stage using lower(status)::stage")
    table = sa.Table(
        "orders",
        sa.MetaData(),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("status", VALUES),
        sa.Column("fence_token", sa.BigInteger),
    )
    declared = own_row(
        table=table,
        state="status",
        new=Stage.PAID,
        processing=Stage.SHIPPING,
        done=Stage.SHIPPED,
    )
    with pytest.raises(LedgerSchemaError, match="ALTER TYPE stage ADD VALUE 'shipping'"):
        pg.ledger.check_schema([declared])


# -- decisions ---------------------------------------------------------------------------------

ME, OTHER = new_owner("m"), new_owner("x")
FAR = 2**62
DECLARED = own_row(dead="STUCK")
FENCES = [1, 10**6, 2**60]
OWN = st.none() | st.tuples(
    st.sampled_from(["PAID", "SHIPPING", "SHIPPED", "STUCK", "CANCELLED"]),
    st.sampled_from([None, *FENCES, 2**61]),
)
RECORDS = st.none() | st.fixed_dictionaries(
    {
        "state": st.sampled_from(["NEW", "PROCESSING", "DONE", "FAILED", "DEAD"]),
        "final": st.sampled_from([0, 0, 1]),
        "fence": st.sampled_from(FENCES),
        "owner": st.sampled_from([str(ME), str(OTHER)]),
        "lease_until": st.sampled_from([1, FAR]),
        "message": st.sampled_from(["m", "x"]),
        "retries": st.integers(0, 1),
        "attempts": st.just(1),
        "crashes": st.integers(0, 2),
        "crashed_owner": st.just(""),
        "result": st.sampled_from([None, "2"]),
        "progress": st.sampled_from([None, "[1]"]),
    }
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(own=OWN, work=RECORDS, retries=st.integers(0, 1), max_crashes=st.integers(1, 3))
def test_sql_decides_as_the_table_does(
    shop: Shop, own: Any, work: Any, retries: int, max_crashes: int
) -> None:
    """The SQL writes one declared transition of the row and the record, or nothing."""
    with shop.engine.begin() as db:
        for table in (KEYS, WORK, ORDERS):
            db.execute(sa.delete(table))
        if own is not None:
            db.execute(sa.insert(ORDERS).values(id=7, status=own[0], fence_token=own[1]))
        if work is not None:
            fixed = {"id": "ship order:7", "task": "ship", "key": "order:7", "created": 1}
            db.execute(sa.insert(WORK).values(**fixed, **work))
    request = ClaimRequest(
        keys=("order:7",),
        owner=ME,
        ttl_s=30.0,
        work="ship order:7",
        task="ship",
        message=MessageRef("m", retries),
        max_crashes=max_crashes,
        row=RowRef(DECLARED, (7,)),
    )
    record = _record(shop)
    found = None if own is None else Found(*own)
    where = state_of(request.row, found, record)  # type: ignore[arg-type]
    decision = decide_row(request, record, (0, 0), 1000, where)

    answer = shop.ledger.claim(request)

    after, moved = shop.order(), _record(shop)
    if decision in CLAIMABLE and decision is not Decision.SAME:
        assert isinstance(answer, Claimed)
        fence = answer.claim.fence
        assert (after.status, after.fence_token) == ("SHIPPING", fence)
        assert (moved.state, moved.fence, moved.owner) == ("PROCESSING", fence, str(ME))
        assert fence > max(own[1] or 0, 0 if work is None else 1)
        assert shop.ledger.give_back(answer.claim)
        assert shop.status == "PAID"
    elif decision is Decision.BURY:
        assert moved.state == "DEAD"
        assert after.status == "STUCK"
    elif decision is not Decision.SAME:
        assert isinstance(answer, Answer | Busy)
        assert (None if after is None else (after.status, after.fence_token)) == own
        assert moved == record
        if isinstance(answer, Answer):
            assert answer.decision is decision
            done = decision is Decision.DONE and record is not None and record.state == "DONE"
            assert answer.result_json == (record.result if done else answer.result_json)


def _record(shop: Shop) -> Any:
    with shop.engine.connect() as db:
        return db.execute(sa.select(WORK)).first()


def test_other_tasks_keep_the_one_statement(pg: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim without a row of its own takes one statement, and reads no table of the user's."""
    from taskguard.ledger.parts import claims as part
    from taskguard.ledger.statements import claims

    monkeypatch.setattr(claims, "claim", None)
    monkeypatch.setattr(part, "rows", None)
    ledger = SqlLedger(pg.url)
    request = ClaimRequest(keys=("k",), owner=ME, ttl_s=30.0, work="w k")
    claimed = ledger.claim(request)
    assert isinstance(claimed, Claimed)
    ledger.complete_alone(claimed.claim, None)
    ledger.close()


def test_a_row_that_is_new_is_claimed_and_completed_in_one_statement_each(
    pg: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first claim and a completion take one statement each, apart from BEGIN, the body's
    statements, and COMMIT."""
    from taskguard.ledger.statements import claims

    monkeypatch.setattr(claims, "claim", None)
    asked: list[str] = []
    ask_in = Database.ask_in

    def noting(self: Database, db: Any, statement: str, values: dict[str, Any]) -> Any:
        asked.append(statement)
        return ask_in(self, db, statement, values)

    monkeypatch.setattr(Database, "ask_in", noting)
    assert pg.step()() == Completed("ship")
    assert len(asked) == 1
    assert (pg.status, pg.effects) == ("SHIPPED", ["ship order:7"])


@pytest.mark.parametrize("name", ["found", "granted", "moved", "own", "w", "k"])
def test_a_table_may_have_any_name(shop: Shop, name: str) -> None:
    """The table may have a name that a statement of the ledger uses for one of its parts."""
    table = ORDERS.to_metadata(sa.MetaData(), name=name)
    table.create(shop.engine)
    with shop.engine.begin() as db:
        db.execute(sa.insert(table).values(id=7, status="PAID"))
    ship = shop.step(table=table, state="status")
    assert ship() == Completed("ship")
    assert ship(message="again").value == "ship"
    with shop.engine.begin() as db:
        db.execute(sa.update(table).values(status="PAID"))
    assert ship(lambda guard: None, message="anew") == Completed(None)
    with shop.engine.connect() as db:
        assert db.execute(sa.select(table.c.status)).scalar() == "SHIPPED"


def test_a_body_that_writes_nothing_completes_its_row(shop: Shop) -> None:
    """If the body writes nothing, its row is completed with its key and its work, or not at all."""
    assert shop.step()(lambda guard: None) == Completed(None)
    assert (shop.status, shop.state()) == ("SHIPPED", "DONE")


STALE = {
    "the key": "update taskguard_keys set owner = 'other', fence = fence + 1",
    "the work": "update taskguard_work set owner = 'other', fence = fence + 1",
    "the row": "update orders set fence_token = fence_token + 1",
}


@pytest.mark.parametrize("whose", STALE)
def test_a_row_is_not_completed_without_its_key_and_its_work(shop: Shop, whose: str) -> None:
    """A holder whose row, key or work was overtaken cannot complete it, although its body writes
    nothing."""

    seen: list[Any] = []

    def body(guard: Guard) -> None:
        shop.change(STALE[whose])
        claim = attempt_of(guard).claim
        assert claim is not None
        with pytest.raises((StaleTokenError, RowChangedError)):
            shop.ledger.complete_alone(claim, None)
        seen.append((shop.status, shop.state()))

    with contextlib.suppress(TaskguardError):
        shop.step()(body)
    assert seen == [("SHIPPING", "PROCESSING")]


def test_a_row_whose_lone_completion_got_no_answer_is_done(postgres: Any, pg_url: str) -> None:
    """If a completion alone gets no answer, the record decides, and the body does not run again."""
    with Proxy(postgres.port) as proxy:
        shop = Shop(pg_url, pg_url.replace(f":{postgres.port}/", f":{proxy.port}/"))
        ran: list[int] = []

        def body(guard: Guard) -> None:
            ran.append(guard.fence)
            claim = attempt_of(guard).claim
            assert claim is not None
            proxy.lose_reply_to(str(claim.owner).encode(), then=Mode.CUT)

        assert shop.step()(body) == Completed(None)
        assert not proxy.armed
        assert (len(ran), shop.status, shop.state()) == (1, "SHIPPED", "DONE")
        shop.close()


def test_what_its_owner_makes_of_a_row_refuses_its_lone_completion(pg: Shop) -> None:
    """If a constraint refuses the completion, the database's own error is raised, and nothing is
    written."""
    pg.change("alter table orders add check (status <> 'SHIPPED')")
    with pytest.raises(Exception, match="orders_status_check"):
        pg.step()(lambda guard: None)
    assert (pg.status, pg.state()) == ("PAID", "FAILED")


@pytest.mark.parametrize("to", ["status = 'CANCELLED'", "fence_token = 9000000000000000000"])
def test_a_row_that_moves_while_it_is_claimed_is_not_claimed(pg_url: str, to: str) -> None:
    """A claim waits for the owner's transaction. If the row has moved, it leaves no key and no
    work."""
    shop = Shop(pg_url, lock_timeout_s=60.0)
    outcomes: list[Any] = []
    with shop.engine.begin() as db:
        db.execute(sa.text(f"update orders set {to} where id = 7"))
        thread = threading.Thread(target=lambda: outcomes.append(_outcome(shop.step())))
        thread.start()
        wait_until(lambda: _waits(shop), message="a claim that waits for the row")
    thread.join(patience_s())
    if "status" in to:
        assert isinstance(outcomes[0], RowIneligibleError)
        with shop.engine.connect() as db:
            assert db.execute(sa.select(WORK)).first() is None
    else:
        assert outcomes[0] == Completed("ship")
        assert shop.order().fence_token > 9 * 10**18
    shop.close()


def _outcome(step: Step) -> Any:
    try:
        return step()
    except RowIneligibleError as error:
        return error


def _waits(shop: Shop) -> bool:
    with shop.engine.connect() as db:
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        return bool(db.execute(sa.text(waiting)).scalar())
