"""The first of a long line is found by its index, even without statistics of the database.

Otherwise each promotion reads and sorts the whole line, above all right after an installation or
when a line has grown within a minute. The same holds if statistics are from a time without a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from support.claims import request
from taskguard.ledger.lines.postgresql import PROMOTE_NEXT
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.statements import postgresql
from taskguard.ledger.tables import WORK
from taskguard.model.claims import MessageRef
from taskguard.model.line_states import LineState
from taskguard.model.states import State

KEY, WAITING = "account:1", 5_000
CALL = '{"queue": "celery", "message": "m"}'


@pytest.fixture(
    params=[
        ("pg", "nothing"),
        ("pg", "nobody waited"),
        pytest.param(("mariadb", "nothing"), marks=pytest.mark.debian),
    ],
    ids=" ".join,
    name="ledger",
)
def made_ledger(request: pytest.FixtureRequest) -> Iterator[SqlLedger]:
    """Return a ledger with a long line of a key, which the database's statistics do not show."""
    kind, known = request.param
    made = SqlLedger(request.getfixturevalue(f"{kind}_url"))
    made.create_schema()
    with made.database.engine.begin() as db:
        if kind == "pg":
            off = "alter table taskguard_work set (autovacuum_enabled = off)"
            db.exec_driver_sql(off)
        if known == "nobody waited":
            ended = {"state": State.DONE.value, "line": None, "parked": None, "call": None}
            rows = [_waiting(WAITING + number) for number in range(200)]
            db.execute(sa.insert(WORK), [{**row, "key": row["id"], **ended} for row in rows])
            db.exec_driver_sql("analyze taskguard_work")
        db.execute(sa.insert(WORK), [_waiting(number) for number in range(WAITING)])
    yield made
    made.close()


def _waiting(number: int) -> dict[str, Any]:
    zero = dict.fromkeys(("retries", "final", "fence", "lease_until", "attempts", "crashes"), 0)
    texts = {"task": "ship", "key": KEY, "owner": "", "crashed_owner": "", "call": CALL}
    own = {"id": f"ship {number}", "message": f"m{number}", "state": State.NEW.value}
    place = {"line": LineState.WAITING.value, "rank": 0, "parked": number + 1}
    return {**zero, **texts, **own, **place, "created": 0}


def _asked(ledger: SqlLedger, ask: Callable[[], object]) -> list[tuple[str, Any]]:
    """Return the statements that SQLAlchemy sends for it."""
    found: list[tuple[str, Any]] = []

    def note(_db: Any, _cursor: Any, text: str, values: Any, *_: Any) -> None:
        found.append((text, values))

    sa.event.listen(ledger.database.engine, "before_cursor_execute", note)
    ask()
    sa.event.remove(ledger.database.engine, "before_cursor_execute", note)
    return [(text, values) for text, values in found if "FROM taskguard_work" in text]


def _plan(ledger: SqlLedger, text: str, values: Any) -> str:
    """Return the database's plan. PostgreSQL runs it, and reports the rows it has read."""
    is_pg = ledger.database.engine.dialect.name == "postgresql"
    with ledger.database.engine.connect() as db:
        rows = db.exec_driver_sql(f"explain {'analyze' if is_pg else ''} {text}", values)
        return "\n".join(" ".join(map(str, row)) for row in rows)


def _reads_all(plan: str) -> bool:
    """Return whether it reads a table or a line from beginning to end."""
    lines = [line for line in plan.splitlines() if "Incremental Sort" not in line]
    whole = "Seq Scan on taskguard_work", "Sort ", "Using filesort", " ALL "
    if any(part in line for part in whole for line in lines):
        return True
    read = re.findall(r"(?:actual .*rows|loops)=([\d]+)|Rows Removed by .*: (\d+)", plan)
    return any(int(count or removed) > WAITING / 10 for count, removed in read)


def _next(ledger: SqlLedger, **options: Any) -> object:
    options = {"app": "", "queues": ["celery"], "expected_s": 5.0, **options}
    return ledger.promote_next(KEY, **options)


def test_which_message_is_promoted(ledger: SqlLedger) -> None:
    """The index finds the next message, with each database's statement and with that of keys with a
    limit."""
    asked = _asked(ledger, lambda: _next(ledger, ahead_s=2.0)) + _asked(
        ledger, lambda: _next(ledger)
    )
    assert asked
    if ledger.database.engine.dialect.name == "postgresql":
        values = {
            "key": KEY,
            "app": "",
            "queues": '["celery"]',
            "expected_us": 1,
            "lock_timeout": "1000",
        }
        asked.append((PROMOTE_NEXT, values))
    plans = [_plan(ledger, *each) for each in asked]
    assert [plan for plan in plans if _reads_all(plan)] == []


def test_who_claims(ledger: SqlLedger) -> None:
    """A claim that is refused because of the line reads its first message only."""
    newcomer = request(1, keys=(KEY,), in_line=True, message=MessageRef("new"))
    if ledger.database.engine.dialect.name == "postgresql":
        values = {
            "key": KEY,
            "work": newcomer.work,
            "message": "new",
            "rank": 0,
            "now_us": 0,
            "owner": "x",
            "ttl_us": 1,
            "lock_timeout": "1000",
            "task": "ship",
            "fingerprint": None,
            "call": None,
            "trace": None,
        }
        asked: list[tuple[str, Any]] = [(postgresql._CLAIM_FIRST_IN_LINE, values)]
    else:
        asked = _asked(ledger, lambda: ledger.claim(newcomer))
    plans = [_plan(ledger, *each) for each in asked]
    assert plans
    assert [plan for plan in plans if _reads_all(plan)] == []


def test_what_a_relay_looks_at(ledger: SqlLedger) -> None:
    """A relay's look reads one page of lines by their index. It neither reads all work nor sorts
    the whole line.

    MariaDB has no index of lines alone, and reads the table once, not once for each key.
    """
    with ledger.database.engine.begin() as db:
        more = [{**_waiting(WAITING * 2 + n), "key": f"later:{n:04d}"} for n in range(1_000)]
        db.execute(sa.insert(WORK), more)
    asked = _asked(ledger, lambda: ledger.look(queues=["celery"], most=100))
    if ledger.database.engine.dialect.name != "postgresql":
        assert len(asked) <= 7
        assert not [text for text, _ in asked if "RECURSIVE" in text]
        return
    plans = [_plan(ledger, *each) for each in asked]
    # The test counts rows that are read. Sorting concerns one page, after its keys were looked up.
    read = ["\n".join(line for line in plan.splitlines() if "Sort" not in line) for plan in plans]
    assert [plan for plan in read if _reads_all(plan)] == []
