"""Thousands of schedules of lines with an order, slots and rates; and every mistake is found.

`make explore` draws other and many more schedules.
"""

from __future__ import annotations

import os

import pytest

from simulation.bounded_mutants import BOUNDED_MUTANTS
from simulation.bounded_world import BoundedWorld
from simulation.explore import explore, run_many, run_one, shrink, trace
from simulation.mutants import Mutant
from support.exploration import Exploration


def test_no_schedule_exceeds_a_bound_or_breaks_an_order(
    exploration: Exploration, record_property: pytest.RecordProperty
) -> None:
    """Nor loses or forgets anybody, with all that befalls lines; who is one too many is told."""
    schedules = exploration.amount(400, 60_000)
    seed = exploration.seed
    report = explore(schedules, seed, processes=os.cpu_count() or 1, kind=BoundedWorld)
    for failure in report.failures[:1]:
        small = shrink(failure, kind=BoundedWorld)
        pytest.fail(f"seed {failure.seed}: {failure.text}\n{trace(small, kind=BoundedWorld)}")
    assert report.schedules == schedules
    print(dict(report.counts))
    for name in (
        "begun beside others",
        "starts by a rate",
        "starts that were too early",
        "strict work that was retried",
        "strict work that was taken over",
        "called before one who was sent earlier",
        "messages refused by a full line",
        "told GaveUpError",
        "told WorkDeadError",
        "processes killed",
        "processes paused",
        "lock server emptied",
        "stale commits refused",
    ):
        record_property(name, report.counts[name])
        assert report.counts[name] >= schedules / 25, name


@pytest.mark.parametrize("mutant", BOUNDED_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_out(mutant: Mutant, exploration: Exploration) -> None:
    """Each breaks an invariant within few schedules, and that schedule replays exactly."""
    seeds = range(exploration.seed, exploration.seed + 3_000)
    report = run_many(seeds, kind=BoundedWorld, mistake=mutant.mistake)
    assert report.failures, f"nothing was broken in {report.schedules} schedules"
    failure = report.failures[0]
    assert failure.name in mutant.breaks, failure.text
    again, _ = run_one(failure.seed, kind=BoundedWorld, mistake=mutant.mistake)
    assert again == failure
