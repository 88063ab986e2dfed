"""Questions of operators: what they answer, on each database, and what they cost on PostgreSQL."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support import claims
from support.databases import DATABASES
from support.guarded_shop import GuardedShop
from taskguard.errors import ConfigurationError
from taskguard.ledger.operations.cursors import cursor_of
from taskguard.ledger.operations.records import MOST_ACTIONS
from taskguard.ledger.sql import SqlLedger
from taskguard.model.changes import Said
from taskguard.model.claims import Claimed, MessageRef
from taskguard.model.lease import Owner
from taskguard.model.pauses import Pause, pause_names
from taskguard.model.states import State
from taskguard.model.texts import shown_id
from taskguard.model.views import WorkFilter
from taskguard.operations import Operations
from taskguard_sandbox.full_ledger import fill
from taskguard_sandbox.servers import Postgres


@pytest.fixture(scope="module")
def full(postgres: Postgres) -> Iterator[Operations]:
    """Operations on a ledger with thousands of rows."""
    url = postgres.create_database("full_ledger")
    with closing(SqlLedger(url)) as ledger:
        ledger.create_schema()
        fill(url, works=12_000, waiting=6_000, lines=200)
        yield taskguard.connect(locks=None, ledger=ledger).operations


# How many rows of the large tables a question may read, at most.
QUESTIONS: dict[str, tuple[int, Callable[[Operations], Any]]] = {
    "explain a key": (400, lambda ops: ops.explain("order:77")),
    "explain a held key": (400, lambda ops: ops.explain("trouble:6")),
    "explain a key with a line": (2_500, lambda ops: ops.explain("account:0")),
    "explain work": (400, lambda ops: ops.explain("shop.ship trouble:5")),
    "explain a beginning": (400, lambda ops: ops.explain("shop.ship trouble:1")),
    "explain an unknown key": (400, lambda ops: ops.explain("nothing:1")),
    "explain a message": (
        400,
        lambda ops: ops.explain("c4ca4238a0b923820dcc509a6f75849b", message=True),
    ),
    "held keys": (400, lambda ops: ops.keys(longer_s=0.0)),
    "paused keys": (6_000, lambda ops: ops.keys(paused=True)),
    "DEAD": (400, lambda ops: ops.list_work(WorkFilter(state=State.DEAD))),
    "FAILED of a task": (
        400,
        lambda ops: ops.list_work(WorkFilter(state=State.FAILED, task="shop.ship")),
    ),
    "overdue": (1_000, lambda ops: ops.list_work(WorkFilter(overdue=True))),
    "work of a key": (400, lambda ops: ops.list_work(WorkFilter(key="order:77"))),
    "work with a beginning": (
        400,
        lambda ops: ops.list_work(WorkFilter(prefix="shop.ship trouble:1")),
    ),
    "waiting": (400, lambda ops: ops.waiting(limit=100)),
    "waiting for a key": (400, lambda ops: ops.waiting(key="account:0", limit=100)),
    "lines": (40_000, lambda ops: ops.lines(limit=50)),
    "workers": (400, lambda ops: ops.workers()),
    "actions": (400, lambda ops: ops.actions(limit=100)),
}


POSITIONS: dict[str, Callable[[Operations, str], Any]] = {
    "keys": lambda ops, after: ops.keys(after=after),
    "waiting": lambda ops, after: ops.waiting(after=after),
    "work": lambda ops, after: ops.list_work(WorkFilter(), after=after),
    "FAILED": lambda ops, after: ops.list_work(WorkFilter(state=State.FAILED), after=after),
    "actions": lambda ops, after: ops.actions(after=after),
}
UNHEARD = (2**70, float("inf"), float("nan"), "\ud800", [1])


@pytest.mark.parametrize("url", ["pg_url", "sqlite_url"])
def test_a_text_or_a_position_that_no_record_can_have_is_an_error(
    request: pytest.FixtureRequest, url: str
) -> None:
    """A database refuses such values with errors of its driver, or finds nothing."""
    with closing(SqlLedger(request.getfixturevalue(url))) as ledger:
        ledger.create_schema()
        ops = taskguard.connect(locks=None, ledger=ledger).operations
        for ask in POSITIONS.values():
            for position in product(UNHEARD, repeat=2):
                for cursor in (position[:1], position, (*position, *position)):
                    with suppress(ConfigurationError):
                        assert ask(ops, cursor_of(*cursor)).items == ()
        for name in ("a\0b", "shop.ship a\0b", "\ud800", "x" * 70_000):
            with suppress(ConfigurationError):
                assert ops.explain(name).key is None
            with suppress(ConfigurationError):
                assert ops.list_work(WorkFilter(prefix=name)).items == ()
        assert ops.workers().items == ()


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_reads_few_rows_by_an_index(full: Operations, name: str) -> None:
    """No question has a sequential scan of work or keys, or reads an index to its end."""
    most, ask = QUESTIONS[name]
    read = 0
    with noted() as statements:
        assert ask(full) is not None
    assert statements
    database: Any = full._ledger.database  # type: ignore[attr-defined]
    with database.transaction(bounded=False) as db:
        database.dialect.only_read(db)
        for statement, values in statements:
            explained = f"explain (analyze, format json) {statement}"
            [[found]] = db.exec_driver_sql(explained, values).all()
            plan = json.loads(found) if isinstance(found, str) else found
            for node in nodes(plan[0]["Plan"]):
                if node.get("Relation Name") in ("taskguard_work", "taskguard_keys"):
                    assert node["Node Type"] != "Seq Scan", statement
                    removed = node.get("Rows Removed by Filter", 0)
                    read += (node["Actual Rows"] + removed) * node["Actual Loops"]
    assert read <= most


def test_a_pause_reads_the_last_actions_alone(pg: SqlLedger) -> None:
    """It has the row of the key locked meanwhile, and looks again and again."""
    by, read = Said("ann", "audit"), 0
    with pg.database.transaction() as db:
        db.exec_driver_sql(
            "insert into taskguard_actions (at, action, actor, reason)"
            " select i, 'drop', 'ann', 'bulk' from generate_series(1, 60000) i"
        )
        db.exec_driver_sql("analyze taskguard_actions")
    with noted() as statements:
        owner = Owner(*pause_names(Pause("ann", "audit", pg.now_us() / 1e6)))
        assert pg.try_pause("order:1", owner=owner, by=by).paused
    with pg.database.transaction() as db:
        for statement, values in statements:
            if statement.startswith("SELECT") and "taskguard_actions" in statement:
                explained = f"explain (analyze, format json) {statement}"
                [[plan]] = db.exec_driver_sql(explained, values).all()
                for node in nodes(plan[0]["Plan"]):
                    if node.get("Relation Name") == "taskguard_actions":
                        read += node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    assert 0 < read <= MOST_ACTIONS


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from nodes(each)


@contextmanager
def noted() -> Iterator[list[tuple[str, Any]]]:
    """Note the statements that read tables of taskguard."""
    found: list[tuple[str, Any]] = []

    def note(_db: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        if "taskguard_" in statement:
            found.append((statement, values))

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


CALL = '{"queue": "test", "message": "m"}'


def test_each_database_answers_each_question(shop: GuardedShop) -> None:
    """Holders, work and lines are found by key, id, beginning of the id, message and state."""
    ops, ledger = shop.tg.operations, shop.ledger
    held = ledger.claim(claims.request(1, message=MessageRef("held-1")))
    done = ledger.claim(claims.request(2, message=MessageRef("done-2")))
    failed = ledger.claim(claims.request(3, message=MessageRef("failed-3")))
    assert isinstance(held, Claimed)
    assert isinstance(done, Claimed)
    assert isinstance(failed, Claimed)
    ledger.complete_alone(done.claim, '"shipped"')
    ledger.fail(failed.claim, "TimeoutError: bank")
    for number in range(11, 14):
        waits = claims.request(number, keys=("order:1",), call=CALL)
        assert ledger.park(waits)
    key = ops.key("order:1")
    assert key is not None
    [holder] = key.holders
    assert (holder.fence, holder.process.message) == (held.claim.fence, "held-1")
    assert holder.process.pid == os.getpid()
    assert key.line is not None
    assert (key.line.waiting, key.line.more, key.line.promoted) == (3, False, 0)
    assert [each.position for each in key.waiting] == [1, 2, 3]
    assert ops.key("order:9") is None
    work = ops.work("ship order:1")
    assert work is not None
    assert (work.state, work.attempts, work.left) == (State.PROCESSING, 1, False)
    full = ops.work("ship order:2", arguments=True)
    assert full is not None
    assert full.result_json == '"shipped"'
    [line] = ops.lines().items
    assert (line.key, line.waiting, line.holder and line.holder.fence) == (
        "order:1",
        3,
        held.claim.fence,
    )
    first = ops.waiting(limit=2)
    rest = ops.waiting(limit=2, after=first.after)
    waiting = [each.work for each in (*first.items, *rest.items)]
    assert waiting == ["ship order:11", "ship order:12", "ship order:13"]
    assert rest.after is None
    by_beginning = ops.list_work(WorkFilter(prefix="ship order:1"))
    assert [each.id for each in by_beginning.items] == ["ship order:1", *waiting]
    for state in (State.DONE, State.PROCESSING):
        [found] = ops.list_work(WorkFilter(state=state)).items
        assert found.state is state
    assert len(ops.list_work(WorkFilter(state=State.NEW, task="ship")).items) == 3
    explained = ops.explain("done-2", message=True)
    assert explained.work is not None
    assert explained.work.id == "ship order:2"
    assert set(ops.explain("ship order:1").others) == set()
    assert ops.explain("order:1").key == ops.key("order:1")
    assert len(ops.explain("ship order").others) == 6
    assert ops.explain("nothing").key is None


@pytest.mark.parametrize("url", ["sqlite_url"], indirect=True)
def test_a_message_is_shown_by_the_id_that_its_queue_shows(shop: GuardedShop) -> None:
    """The ledger's name of a message also has the time of its sending."""
    waits = MessageRef("8d3f", sending="1795907437.266319")
    assert isinstance(shop.ledger.claim(claims.request(1)), Claimed)
    assert shop.ledger.park(claims.request(2, keys=("order:1",), call=CALL, message=waits))
    [waiting] = shop.tg.operations.waiting().items
    assert waiting.message == "8d3f"
    found = shop.tg.operations.explain("8d3f", message=True)
    assert found.work is not None
    assert found.work.message == "8d3f"
    replaced, repeated = "8d3f~1@1795907437.266319", "8d3f@1795907437.266319~2"
    assert {shown_id(replaced), shown_id(repeated)} == {"8d3f"}
    assert shown_id("ann@example.org") == "ann@example.org"


def test_pages_follow_each_other_without_gaps(shop: GuardedShop) -> None:
    """A page begins after the last row of the page before, in each list."""
    for number in range(7):
        assert isinstance(shop.ledger.claim(claims.request(number)), Claimed)
    ops, after, found = shop.tg.operations, None, []
    while True:
        page = ops.list_work(WorkFilter(state=State.PROCESSING), limit=3, after=after)
        found += [each.id for each in page.items]
        after = page.after
        if after is None:
            break
    assert found == [f"ship order:{number}" for number in range(7)]
    with pytest.raises(ConfigurationError, match="not the cursor of a page"):
        ops.list_work(WorkFilter(state=State.PROCESSING), after="?")
