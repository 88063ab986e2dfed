"""Schedules with an operator's changes at any moment, and every mistake is detected.

`make explore` runs other schedules, and many more.
"""

from __future__ import annotations

import pytest

from simulation.checks import expect_found_out, expect_no_failure
from simulation.mutants import Mutant
from simulation.operator_mutants import OPERATOR_MUTANTS
from simulation.operator_world import OperatorWorld
from support.exploration import Exploration


def test_no_change_breaks_anything(
    exploration: Exploration, record_property: pytest.RecordProperty
) -> None:
    """Ended work never begins again, requeued work has one effect, and nothing is claimed or
    committed while its key is paused. Workers with a former guard are among the others."""
    sees = (
        "operator: drop",
        "operator: done",
        "operator: requeue",
        "operator: requeue_left",
        "operator: pause",
        "operator: pause of a held key",
        "operator: resume",
        "operator: resume of a pause that waits",
        "operator: release",
        "work claimed under two guards",
    )
    schedules, seed = exploration.amount(400, 30_000), exploration.seed
    record = record_property
    expect_no_failure(schedules, seed, sees=sees, one_in=100, record=record, kind=OperatorWorld)


@pytest.mark.parametrize("mutant", OPERATOR_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_out(mutant: Mutant, exploration: Exploration) -> None:
    """A mistake violates an invariant within few schedules, and the schedule replays exactly."""
    seeds = range(exploration.seed, exploration.seed + 4_000)
    expect_found_out(mutant, seeds, kind=OperatorWorld)
