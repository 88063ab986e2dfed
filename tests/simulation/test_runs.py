"""Thousands of schedules of work that may be done again once it has ended; and every mistake is
detected.

`make explore` runs other schedules, and many more.
"""

from __future__ import annotations

import pytest

from simulation.checks import expect_found_out, expect_no_failure
from simulation.mutants import Mutant
from simulation.run_mutants import RUN_MUTANTS, RUN_MUTANTS_OF_SHOP
from simulation.run_world import RunWorld
from support.exploration import Exploration


def test_no_schedule_mixes_two_runs(
    exploration: Exploration, record_property: pytest.RecordProperty
) -> None:
    """No schedule runs two runs of one work at once, runs one again, or loses a call.

    Messages come while a run is in progress, after it has ended, or again. Calls are enqueued with
    each value of `duplicate=`.
    """
    sees = (
        "runs begun",
        "later runs begun",
        "runs that follow",
        "enqueued: attached",
        "enqueued: replaced",
        "enqueued: sent",
        "reported as replaced",
        "reported WorkFailedError",
        "reported GaveUpError",
        "messages revoked",
        "messages expired",
        "messages duplicated",
        "messages lost on the way",
        "processes killed",
        "processes paused",
        "broker emptied",
        "takeovers",
    )
    schedules, seed = exploration.amount(400, 60_000), exploration.seed
    record = record_property
    expect_no_failure(schedules, seed, sees=sees, one_in=25, record=record, kind=RunWorld)


@pytest.mark.parametrize("mutant", RUN_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_out(mutant: Mutant, exploration: Exploration) -> None:
    """A mistake violates an invariant within few schedules, and the schedule replays exactly."""
    seeds = range(exploration.seed, exploration.seed + 3_000)
    expect_found_out(mutant, seeds, kind=RunWorld)


@pytest.mark.parametrize("mutant", RUN_MUTANTS_OF_SHOP, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_out_without_an_outbox(mutant: Mutant, exploration: Exploration) -> None:
    """A mistake with plain messages violates an invariant in the shop without lines, too."""
    expect_found_out(mutant, range(exploration.seed, exploration.seed + 2_000))
