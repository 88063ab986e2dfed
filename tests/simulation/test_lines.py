"""Thousands of schedules of messages that wait in line for their key; and every mistake is
detected.

`make explore` runs other schedules, and many more.
"""

from __future__ import annotations

import pytest

from simulation.checks import expect_found_out, expect_no_failure
from simulation.line_mutants import LINE_MUTANTS
from simulation.line_world import LineWorld
from simulation.mutants import Mutant
from support.exploration import Exploration


def test_no_schedule_loses_or_forgets_anybody(
    exploration: Exploration, record_property: pytest.RecordProperty
) -> None:
    """No schedule loses or forgets a message, with all faults of a shop, its broker and its
    database.

    Two thirds of the schedules have no relay. A relay is needed only if a process died or an answer
    was lost, and not if the lock server was emptied.
    """
    sees = (
        "messages parked",
        "messages promoted",
        "reported Parked",
        "reported as replaced",
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
    )
    schedules, seed = exploration.amount(500, 60_000), exploration.seed
    record = record_property
    expect_no_failure(schedules, seed, sees=sees, one_in=25, record=record, kind=LineWorld)


@pytest.mark.parametrize("mutant", LINE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_out(mutant: Mutant, exploration: Exploration) -> None:
    """A mistake violates an invariant within few schedules, and the schedule replays exactly."""
    seeds = range(exploration.seed, exploration.seed + 3_000)
    expect_found_out(mutant, seeds, kind=LineWorld)
