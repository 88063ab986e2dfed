"""Thousands of schedules of messages that wait in line for their key; and every mistake is found.

`make explore` draws other and many more schedules.
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
    """With all that befalls a shop, and a broker and a database that lose what they may; in two
    thirds of them without a relay, which is needed only where a process died or an answer was lost,
    and not where the lock server was emptied.
    """
    sees = (
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
    )
    schedules, seed = exploration.amount(500, 60_000), exploration.seed
    record = record_property
    expect_no_failure(schedules, seed, sees=sees, one_in=25, record=record, kind=LineWorld)


@pytest.mark.parametrize("mutant", LINE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_out(mutant: Mutant, exploration: Exploration) -> None:
    """Each breaks an invariant within few schedules, and that schedule replays exactly."""
    seeds = range(exploration.seed, exploration.seed + 3_000)
    expect_found_out(mutant, seeds, kind=LineWorld)
