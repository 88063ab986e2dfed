"""Thousands of schedules of lines with an order, slots and rates; and every mistake is detected.

`make explore` runs other schedules, and many more.
"""

from __future__ import annotations

import pytest

from simulation.bounded_mutants import BOUNDED_MUTANTS
from simulation.bounded_world import BoundedWorld
from simulation.checks import expect_found_out, expect_no_failure
from simulation.mutants import Mutant
from support.exploration import Exploration


def test_no_schedule_exceeds_a_bound_or_breaks_an_order(
    exploration: Exploration, record_property: pytest.RecordProperty
) -> None:
    """No schedule exceeds a limit, breaks an order, or loses a message. A message that a full line
    refuses is reported."""
    sees = (
        "begun beside others",
        "starts by a rate",
        "starts that were too early",
        "strict work that was retried",
        "strict work that was taken over",
        "promoted before a message that was sent earlier",
        "messages refused by a full line",
        "superseded while they waited",
        "reported as outdated",
        "reported GaveUpError",
        "reported WorkDeadError",
        "processes killed",
        "processes paused",
        "lock server emptied",
        "stale commits refused",
    )
    schedules, seed = exploration.amount(400, 60_000), exploration.seed
    record = record_property
    expect_no_failure(schedules, seed, sees=sees, one_in=25, record=record, kind=BoundedWorld)


@pytest.mark.parametrize("mutant", BOUNDED_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_out(mutant: Mutant, exploration: Exploration) -> None:
    """A mistake violates an invariant within few schedules, and the schedule replays exactly."""
    seeds = range(exploration.seed, exploration.seed + 3_000)
    expect_found_out(mutant, seeds, kind=BoundedWorld)
