"""Thousands of schedules of messages that wait in line for their key; and every mistake is found.

`make explore` draws other and many more schedules.
"""

from __future__ import annotations

import os

import pytest

from simulation.explore import explore, run_many, run_one, shrink, trace
from simulation.line_mutants import LINE_MUTANTS
from simulation.line_world import LineWorld
from simulation.mutants import Mutant
from support.exploration import Exploration


def test_no_schedule_loses_or_forgets_anybody(
    exploration: Exploration, record_property: pytest.RecordProperty
) -> None:
    """With all that befalls a shop, and a broker and a database that lose what they may; in two
    thirds of them without a relay, which is needed only where a process died or an answer was lost,
    and not where the lock server was emptied.
    """
    schedules = exploration.amount(500, 60_000)
    seed = exploration.seed
    report = explore(schedules, seed, processes=os.cpu_count() or 1, kind=LineWorld)
    for failure in report.failures[:1]:
        small = shrink(failure, kind=LineWorld)
        pytest.fail(f"seed {failure.seed}: {failure.text}\n{trace(small, kind=LineWorld)}")
    assert report.schedules == schedules
    print(dict(report.counts))
    for name in (
        "messages parked",
        "messages called",
        "told Parked",
        "told that it was replaced",
        "enqueued: attached",
        "enqueued: replaced",
        "messages revoked",
        "messages expired",
        "messages duplicated",
        "messages lost on the way",
        "processes killed",
        "processes paused",
        "lock server emptied",
        "broker emptied",
        "database crashed",
        "takeovers",
        "stale commits refused",
    ):
        record_property(name, report.counts[name])
        assert report.counts[name] >= schedules / 25, name


@pytest.mark.parametrize("mutant", LINE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_out(mutant: Mutant, exploration: Exploration) -> None:
    """Each breaks an invariant within few schedules, and that schedule replays exactly."""
    seeds = range(exploration.seed, exploration.seed + 3_000)
    report = run_many(seeds, kind=LineWorld, mistake=mutant.mistake)
    assert report.failures, f"nothing was broken in {report.schedules} schedules"
    failure = report.failures[0]
    assert failure.name in mutant.breaks, failure.text
    again, _ = run_one(failure.seed, kind=LineWorld, mistake=mutant.mistake)
    assert again == failure
