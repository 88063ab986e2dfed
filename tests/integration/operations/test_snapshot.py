"""The snapshot of the ledger: what it counts, that one viewer takes it, and what it reads."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from taskguard.ledger.operations import snapshot as module
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import SNAPSHOT, WORK
from taskguard.metrics import GAUGES
from taskguard.model.history import Flag
from taskguard.model.line_states import LineState
from taskguard.model.states import State
from taskguard.model.workers import Worker

# Without these three the exporter says where it is from.
ASKED = {each.name for each in GAUGES} - {"snapshot_timestamp", "build_info"}
SECOND = 1_000_000


pytestmark = pytest.mark.usefixtures("patient")


def work(number: int, task: str = "ship", **values: Any) -> dict[str, Any]:
    """Return a row of DONE work, with these values."""
    zeros = dict.fromkeys(("retries", "final", "fence", "lease_until", "attempts", "crashes"), 0)
    texts = {"key": f"k{number}", "owner": "", "crashed_owner": "", "message": f"m{number}"}
    nulls = dict.fromkeys(("call", "due", "line", "rank", "parked", "flag", "since", "started"))
    own = {"id": f"{task} {number}", "task": task, "state": State.DONE.value}
    return {**zeros, **texts, **nulls, **own, "created": 0, "finished": None, **values}


def waiting(number: int, key: str, parked: int, task: str = "mail") -> dict[str, Any]:
    """Return a row of work whose message waits in the line of a key."""
    place = {"line": LineState.WAITING.value, "rank": 0, "parked": parked, "call": "{}"}
    return work(number, task, key=key, state=State.NEW.value, **place)


def flagged(number: int, flag: Flag, state: State, since: int, **values: Any) -> dict[str, Any]:
    """Return a row of work that an operator may look for."""
    return work(number, state=state.value, flag=flag.value, since=since, **values)


def add(ledger: SqlLedger, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    with ledger.database.engine.begin() as db:
        db.execute(sa.insert(table), rows)


def test_what_it_counts(ledger: SqlLedger) -> None:
    """Work by its flag, lines by their keys, workers by kind, and sizes: on each database."""
    now = ledger.now_us()
    ago = lambda seconds: now - seconds * SECOND  # noqa: E731
    alive = {"lease_until": now + 3_600 * SECOND, "started": ago(500)}
    add(
        ledger,
        WORK,
        [
            work(1, finished=ago(90_000)),
            flagged(2, Flag.DEAD, State.DEAD, ago(60)),
            flagged(3, Flag.DEAD, State.DEAD, ago(50)),
            flagged(4, Flag.FAILED, State.FAILED, ago(40), finished=ago(40)),
            flagged(5, Flag.RUNS_LONG, State.PROCESSING, ago(400), **alive),
            # Its holder vanished, and nothing has noticed that yet.
            flagged(6, Flag.RUNS_LONG, State.PROCESSING, ago(900), started=ago(1_000)),
            # A process that leads is none that a delivery waits for.
            flagged(
                12,
                Flag.RUNS_LONG,
                State.PROCESSING,
                ago(9_000),
                **{**alive, "task": "leader", "started": ago(9_000)},
            ),
            flagged(7, Flag.LEFT, State.PROCESSING, ago(700)),
            work(8, state=State.NEW.value, call="{}", due=ago(800)),
            waiting(9, "a", ago(30)),
            waiting(10, "a", ago(20)),
            waiting(11, "b", ago(300), task="pay"),
        ],
    )
    ledger.register_worker(Worker("12345678", "celery", "celery@web-1", "web-1", 1, "", "0.1"))
    found = ledger.snapshot()
    assert set(found.values) == ASKED
    assert {(task, state): n for task, state, n in found.values["work"]} == {
        ("ship", "dead"): 2,
        ("ship", "failed"): 1,
        ("ship", "running"): 1,
        ("ship", "overdue"): 2,
    }
    assert found.number("waiting", "mail") == 2
    assert found.number("waiting", "pay") == 1
    assert found.number("waiting_keys") == 2
    assert found.number("workers", "celery") == 1
    assert found.number("paused_keys") == 0
    # The database's clock goes on, by less than a minute.
    for name, seconds in {
        "oldest_wait": 300,
        "oldest_overdue": 800,
        "longest_hold": 500,
        "oldest_ended": 90_000,
    }.items():
        assert seconds <= (found.number(name) or 0) < seconds + 60, name
    assert found.number("ledger_rows", "taskguard_work") is not None or _has_no_statistics(ledger)
    assert json.loads(json.dumps(found.values)) == found.values


def _has_no_statistics(ledger: SqlLedger) -> bool:
    return ledger.database.engine.dialect.name == "postgresql"


def test_an_empty_ledger(ledger: SqlLedger) -> None:
    """Each number is 0, so that an alert does not take a missing number for trouble."""
    found = ledger.snapshot()
    for name in ("waiting_keys", "oldest_wait", "oldest_overdue", "longest_hold", "paused_keys"):
        assert found.number(name) == 0


def test_keys_that_an_operator_has_paused(ledger: SqlLedger) -> None:
    """A pause counts until it ends, and a key that was paused twice counts once."""
    tg = taskguard.connect(locks=None, ledger=ledger)
    said = {"actor": "ann", "reason": "why"}
    for _ in range(2):
        tg.operations.pause("a", **said)
        tg.operations.resume("a", **said)
    tg.operations.pause("a", **said)
    tg.operations.pause("b", **said)
    tg.operations.resume("b", **said)
    assert ledger.snapshot(max_age_s=0).number("paused_keys") == 1


def test_one_viewer_takes_it_and_the_others_read_it(ledger: SqlLedger) -> None:
    """Eight viewers at once ask the database once, and so do later ones until it is old."""
    asked: list[str] = []

    def note(_db: Any, _cursor: Any, text: str, *_: Any) -> None:
        asked.append(text)

    engine = ledger.database.engine
    sa.event.listen(engine, "before_cursor_execute", note)
    start = threading.Barrier(8)

    def view() -> None:
        start.wait(timeout=60)
        ledger.snapshot()

    viewers = [threading.Thread(target=view) for _ in range(8)]
    for each in viewers:
        each.start()
    for each in viewers:
        each.join()
    taken_s = ledger.snapshot(max_age_s=3_600).taken_s
    assert sum("taskguard_workers.kind" in text for text in asked) == 1
    with engine.begin() as db:  # as if it had been taken an hour before
        db.execute(sa.update(SNAPSHOT).values(taken=SNAPSHOT.c.taken - 3_600 * SECOND))
    assert ledger.snapshot().taken_s >= taken_s
    assert sum("taskguard_workers.kind" in text for text in asked) == 2
    sa.event.remove(engine, "before_cursor_execute", note)


_ENDLESS = {
    "postgresql": "select pg_sleep(60)",
    "sqlite": "with recursive c(n) as (select 1 union all select n + 1 from c)"
    " select max(n) from c",
    "mysql": "select count(*) from information_schema.columns a, information_schema.columns b,"
    " information_schema.columns c, information_schema.columns d where a.column_name"
    " like concat(b.column_name, c.column_name, d.column_name)",
}


def test_a_late_answer_stays_with_its_time(
    ledger: SqlLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database ends a question that takes too long. Its last answer stays, and the other
    answers are new. It is not asked again at once."""
    first = ledger.snapshot()
    calls: list[int] = []

    def endless(db: sa.Connection, now_us: int) -> Any:
        calls.append(now_us)
        name = db.dialect.name
        with ledger.database.dialect.answering(db, 0.2):
            db.exec_driver_sql(_ENDLESS["mysql" if name == "mariadb" else name]).all()

    asks = module.QUESTIONS["work"]
    monkeypatch.setitem(module.QUESTIONS, "work", endless)
    for _ in range(2):
        later = ledger.snapshot(max_age_s=0)
        assert later.read_s["work"] == first.read_s["work"]
        assert later.values["work"] == first.values["work"]
        assert later.read_s["waiting"] > first.read_s["waiting"]
    assert len(calls) == 1
    # Its connections have no limit afterwards: others use them.
    monkeypatch.setitem(module.QUESTIONS, "work", asks)
    monkeypatch.setattr(module, "_LATE_AGAIN_S", 0)
    assert ledger.snapshot(max_age_s=0).read_s["work"] > first.read_s["work"]


def test_no_question_reads_all_work(pg: SqlLedger) -> None:
    """PostgreSQL's plans read taskguard_work by its indexes alone."""
    now = pg.now_us()
    done = [work(number, finished=now) for number in range(30_000)]
    lines = [waiting(30_000 + number, f"line {number % 100}", now) for number in range(3_000)]
    dead = [flagged(40_000 + number, Flag.DEAD, State.DEAD, now) for number in range(300)]
    due = [
        work(50_000 + number, state=State.NEW.value, call="{}", due=now) for number in range(300)
    ]
    add(pg, WORK, done + lines + dead + due)
    engine = pg.database.engine
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.exec_driver_sql("vacuum analyze taskguard_work")
    asked: list[tuple[str, Any]] = []

    def note(_db: Any, _cursor: Any, text: str, values: Any, *_: Any) -> None:
        asked.append((text, values))

    sa.event.listen(engine, "before_cursor_execute", note)
    pg.snapshot()
    sa.event.remove(engine, "before_cursor_execute", note)
    questions = [each for each in asked if "FROM taskguard_work" in each[0]]
    assert len(questions) >= 8
    with engine.connect() as db:
        for text, values in questions:
            plan = "\n".join(db.exec_driver_sql(f"explain {text}", values).scalars())
            assert not re.search(r"Seq Scan on taskguard_work\b", plan), f"{text}\n{plan}"
