"""Real workers are killed (SIGKILL) at each boundary of parking and promoting.

Each line has three messages: the first one runs for a moment, the others are parked and promoted.
One of their workers dies at a boundary, once. In the end each message has run once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.crash_rig import CrashRig, crash_rig
from support.exploration import Exploration
from support.waiting import wait_until
from taskguard_celery import enqueue

ROLES = ("first", "second", "third")
PARKING = {
    *(
        "ledger.park asked",
        "ledger.park done",
        "ledger.promote_next asked",
        "ledger.promote_next done",
    ),
    *("locks.leave_hint asked", "locks.leave_hint done"),
    *("locks.release_and_take_hint asked", "locks.release_and_take_hint done"),
    *("locks.acquire_promoted asked", "locks.acquire_promoted done"),
    *("parking.call asked", "parking.call done", "parking.send asked", "parking.send done"),
}


@pytest.fixture(
    params=[
        ("celery", "pg_url"),
        ("celery", "sqlite_url"),
        pytest.param(("celery", "mariadb_url"), marks=pytest.mark.debian),
        pytest.param(("celery", "mysql_url"), marks=pytest.mark.debian),
        ("rq", "pg_url"),
    ],
    ids="-".join,
)
def rig(
    request: pytest.FixtureRequest,
    valkey: Any,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[CrashRig]:
    del redis_url  # empties the server
    queue, kind = request.param
    database = str(request.getfixturevalue(kind))
    with crash_rig(queue, database, valkey, tmp_path, monkeypatch) as made:
        made.task = f"support.crashing.in_line{'_by_rq' if queue == 'rq' else ''}"
        yield made


def send(rig: CrashRig, line: str, **crashes: str) -> list[str]:
    items = [f"{line}-{role}" for role in ROLES]
    for role, item in zip(ROLES, items, strict=True):
        rig.send_in_line(item, line, crashes.get(role))
    return items


@pytest.mark.timeout(900)
def test_killed_at_any_boundary_of_a_line_each_runs_once(
    rig: CrashRig, exploration: Exploration
) -> None:
    """First run without a fault, to learn the boundaries. Then kill a worker at each of them."""
    with rig.worker(), rig.worker():
        items = send(rig, "calm")
        rig.wait_until_done(items)
        wait_until(lambda: all("body done" in rig.seen(item) for item in items))
        cases = [
            (role, at)
            for role, item in zip(ROLES, items, strict=True)
            for at in dict.fromkeys(rig.seen(item))
            if role != "third" or at.partition("#")[0] in PARKING
        ]
        assert {at.partition("#")[0] for _, at in cases} >= PARKING
        if rig.engine.dialect.name != "postgresql" or rig.queue == "rq":
            cases = exploration.pick(cases, at_most=12)
        lines = [(re.sub(r"\W", "-", f"{role} {at}"), role, at) for role, at in cases]
        for line, role, at in lines:
            items += send(rig, line, **{role: at})
        rig.wait_until_done(items)
        struck = [line for line, role, _ in lines if rig.struck(f"{line}-{role}")]
    assert rig.effects() == dict.fromkeys(items, 1)
    # The order of arrival decides which message is parked, and depends on how busy the machine is.
    assert len(struck) >= 0.5 * len(lines), sorted({line for line, *_ in lines} - set(struck))
    print(f"{len(lines)} boundaries, {len(struck)} kills, one effect each")


# Boundaries of a message that fails, and keeps its position until Celery has decided about a retry.
FIRST = ("body asked", "ledger.fail asked", "ledger.fail done", "parking.failed done")
FIRST += ("ledger.keep asked", "ledger.keep done", "transaction.commit done")
SECOND = ("ledger.leave asked", "ledger.leave done", "ledger.promote_next done")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rig", [("celery", "pg_url"), ("celery", "sqlite_url")], indirect=True)
def test_killed_while_it_keeps_its_place_the_order_stays(rig: CrashRig) -> None:
    """The first message is retried, and the second has no retries left. No later message goes
    before them, each has its effect once, and the line goes on."""
    rig.task = "support.crashing.strictly"
    cases = [("first", at) for at in FIRST] + [("second", at) for at in SECOND]
    lines = [(re.sub(r"\W", "-", f"{role} {at}"), role, at) for role, at in cases]
    with rig.worker(), rig.worker():
        for line, role, at in lines:
            for each in ROLES:  # each has its position from its enqueueing on
                item = f"{line}-{each}"
                args = (item, line, at if each == role else None)
                enqueue(rig.jobs.strictly, args, task_id=item)
        rig.wait_until_done([f"{line}-{role}" for line, _, _ in lines for role in ROLES[::2]])
        struck = [line for line, role, _ in lines if rig.struck(f"{line}-{role}")]
    for line, _, _ in lines:
        began = [each for each, _ in itertools.groupby(rig.began(line))]
        assert began == [f"{line}-{role}" for role in ROLES]
    assert rig.effects() == {f"{line}-{role}": 1 for line, _, _ in lines for role in ROLES[::2]}
    assert rig.ledger.waiting() == []
    assert len(struck) == len(lines), sorted({line for line, *_ in lines} - set(struck))
