"""Real processes are killed (SIGKILL) at each boundary of a delivery, and the queue delivers again.

Each work has one effect, none is lost, and all are DONE. PostgreSQL runs at all boundaries, the
other databases at some, and at all in `make explore`. The boundaries come from the interfaces of
the code. A boundary that no delivery here reaches is listed with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_taskguard.crashes import boundaries
from support.crash_rig import CrashRig, crash_rig
from support.exploration import Exploration
from support.waiting import wait_until

KINDS = {
    "celery": ("transaction", "plain", "checkpoint", "fails", "slow", "twice"),
    # A work horse for every job takes time. "twice" reaches no other boundaries than "slow".
    "rq": ("transaction", "plain", "checkpoint", "fails", "twice"),
}
TIMES = {"celery": 2, "rq": 1}

# Boundaries that these deliveries do not reach, and why.
ELSEWHERE = {
    "ledger.crash": "a body that ends its process; tests/celery/test_exits.py",
    "ledger.give_back": "shutdown and a lost lease; tests/celery/test_interrupts.py",
    "ledger.end_round": "the database ended the transaction; tests/integration",
    "ledger.done_elsewhere": "a redelivery that begins new work; tests/integration",
    "ledger.holds": "the lock server forgot a holder; tests/integration",
    "ledger.park": 'busy="park" only; test_parking_crashes.py',
    "ledger.promote_next": "the same",
    "ledger.keep": "the same",
    "ledger.leave": "the same",
    "parking.failed": "the same",
    "parking.call": "the same",
    "parking.send": "the same",
    "ledger.park_newest": 'busy="latest" or "supersede" only; test_line_faults.py',
    "ledger.note_notified": "the same",
    "ledger.note": "what a leader remembers; tests/celery/test_leader_beat.py",
    "ledger.uncount_crash": "a holder that was taken over and is alive; tests/integration",
    "locks.leave_hint": 'busy="park" only; test_parking_crashes.py',
    "locks.release_and_take_hint": "the same",
    "locks.acquire_promoted": "the same",
    "locks.hand_over": "the lock server forgot a holder; tests/integration",
    "locks.wait": 'busy="wait" only; tests/integration',
    "locks.holders": "an operator releases a key; tests/integration/operations/test_release.py",
    "ledger.has_lines": "a relay starts; tests/celery/test_deploys.py",
    "ledger.count_waiting": "a worker or the doctor starts; tests/celery/test_deploys.py",
    "ledger.join": 'once_per="run" only; test_run_crashes.py',
    "ledger.of_run": "the same",
    "ledger.pause_of": "an operator paused the key; tests/contract/ledger/test_pausing.py",
    "ledger.now_us": "an enqueue with a delay; tests/celery/test_unique.py",
}


@pytest.fixture(
    params=[
        ("celery", "pg_url"),
        ("celery", "sqlite_url"),
        pytest.param(("celery", "mariadb_url"), marks=pytest.mark.debian),
        pytest.param(("celery", "mysql_url"), marks=pytest.mark.debian),
        ("rq", "pg_url"),
        ("rq", "sqlite_url"),
    ],
    ids=lambda param: f"{param[0]}-{param[1].removesuffix('_url')}",
)
def rig(
    request: pytest.FixtureRequest,
    valkey: Any,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[CrashRig]:
    del redis_url  # empties the server
    queue, url = request.param
    database = str(request.getfixturevalue(url))
    with crash_rig(queue, database, valkey, tmp_path, monkeypatch) as made:
        yield made


@pytest.mark.timeout(900)
def test_killed_at_any_boundary_there_is_one_effect(
    rig: CrashRig, exploration: Exploration
) -> None:
    """First run each kind of body without a fault, to learn its boundaries. Then kill a process at
    each of them."""
    kinds = KINDS[rig.queue]
    with rig.worker(), rig.worker():
        for kind in kinds:  # one after the other, so that both workers are free for "twice"
            rig.send(kind, kind)
            rig.wait_until_done([kind])
        # DONE may be in the ledger before its holder has logged its boundaries.
        wait_until(lambda: all("body done" in rig.seen(kind) for kind in kinds))
        points = {kind: _points(rig.seen(kind), TIMES[rig.queue]) for kind in kinds}
        _expect_every_boundary(rig, {point for each in points.values() for point in each})
        cases = [(kind, at) for kind in kinds for at in points[kind]]
        if rig.engine.dialect.name != "postgresql":
            cases = exploration.pick(cases, at_most=12)
        # RQ's ids are letters, digits and dashes.
        items = {re.sub(r"\W", "-", f"{kind} {at}"): (kind, at) for kind, at in cases}
        for item, (kind, at) in items.items():
            rig.send(item, kind, at)
        rig.wait_until_done(list(items))
        struck = [item for item in items if rig.struck(item)]
    effects = rig.effects()
    for item, (kind, _) in items.items():
        assert effects[item] == (kind != "plain"), item
        assert effects[f"{item} half"] == (kind == "checkpoint"), item
    # Boundaries that depend on timing (a renewal, a duplicate) may not occur again.
    assert len(struck) >= 0.8 * len(items), sorted(set(items) - set(struck))
    print(f"{len(items)} boundaries, {len(struck)} kills, one effect each")


def _points(seen: list[str], times: int) -> list[str]:
    """Return each boundary, up to `times` times."""
    found = dict.fromkeys(seen)
    return [each for each in found if int(each.partition("#")[2] or 1) <= times]


def _expect_every_boundary(rig: CrashRig, points: set[str]) -> None:
    known = {point.partition("#")[0] for point in points}
    missing = {point.rpartition(" ")[0] for point in boundaries()} - {
        point.rpartition(" ")[0] for point in known
    }
    if rig.queue == "rq":
        missing.discard("ledger.defer")  # RQ keeps one entry of a job, and records no deferrals
    assert missing <= set(ELSEWHERE), f"no delivery comes by {sorted(missing - set(ELSEWHERE))}"
