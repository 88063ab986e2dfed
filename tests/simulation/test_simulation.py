"""Thousands of schedules of the real runner, watchdog and guard; and every mistake is found out.

`make explore` draws other and many more schedules.
"""

from __future__ import annotations

import threading

import pytest

import taskguard.run.watchdog
from simulation.checks import expect_found_out, expect_no_failure
from simulation.explore import run_many, run_one, shrink, trace
from simulation.history import ViolationError
from simulation.mutants import MUTANTS, Mutant
from simulation.world import World
from support.exploration import Exploration
from support.waiting import patience_s


def test_no_schedule_breaks_anything(
    exploration: Exploration, record_property: pytest.RecordProperty
) -> None:
    """Crashes, pauses, lost and late answers, duplicates, an emptied lock server, clock jumps;
    and in half of them workers with a former guard beside those with the new one.

    A run that never saw a stale commit refused, a second holder and an unknown outcome would
    prove nothing: each was seen often.
    """
    sees = (
        "stale commits refused",
        "second holders",
        "unknown outcomes",
        "takeovers",
        "processes killed",
        "processes paused",
        "messages duplicated",
        "ids used twice",
        "messages lost on the way",
        "lock server emptied",
        "database clock jumped",
        "keys purged",
        "transactions ended by the server",
        "leases lost",
        "reported WorkDeadError",
        "bodies that ended their process",
        "lock server's clock set back",
        "locks overruled",
        "work claimed under two guards",
        "living holders superseded",
        "reported as outdated",
    )
    schedules, seed = exploration.amount(4_500, 200_000), exploration.seed
    expect_no_failure(schedules, seed, sees=sees, one_in=400, record=record_property)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_out(mutant: Mutant, exploration: Exploration) -> None:
    """Each of the mistakes that this library could make breaks an invariant within few schedules.

    The schedule replays exactly, and a smaller one breaks the same.
    """
    seeds = range(exploration.seed, exploration.seed + 2_000)
    failure = expect_found_out(mutant, seeds)
    small = shrink(failure, within_s=1.0, mistake=mutant.mistake)
    assert small.name == failure.name
    assert sum(map(bool, small.choices)) <= sum(map(bool, failure.choices))
    assert trace(small, mistake=mutant.mistake)


def test_a_seed_gives_the_same_schedule_again() -> None:
    """Choice by choice, line by line."""
    lines: list[list[str]] = [[], []]
    counts = [run_one(7, lines=each)[1] for each in lines]
    assert lines[0] == lines[1]
    assert counts[0] == counts[1]


def test_the_first_violation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another one follows while taskguard handles the exception of the first."""

    def mistake(world: World) -> None:
        def claim(*_: object) -> None:
            world.ledger.effects += [("a", 1), ("a", 2)]
            raise ViolationError("S1", "first")

        monkeypatch.setattr(world, "claim", claim)

    failure, _ = run_one(7, mistake=mistake)
    assert failure is not None
    assert failure.text == "S1: first"


def test_an_unexpected_exception_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a failure, with the seed of its schedule and the traceback."""

    def mistake(world: World) -> None:
        def take(*_: object) -> None:
            raise RuntimeError("boom")

        monkeypatch.setattr(world.broker, "take", take)

    report = run_many([7], mistake=mistake)
    (failure,) = report.failures
    assert (failure.seed, failure.name) == (7, "RuntimeError")
    assert "in take" in failure.text


def test_a_watchdog_that_another_test_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is none of the simulated ones: it is not put off until a scheduler's time."""
    leftover, found = threading.Event(), []

    def look() -> None:
        found.append(taskguard.run.watchdog.Wakeup().wait(0.001))
        leftover.set()

    def mistake(world: World) -> None:
        fill = world._fill

        def and_look() -> None:
            fill()
            threading.Thread(target=look).start()
            assert leftover.wait(patience_s())

        monkeypatch.setattr(world, "_fill", and_look)

    failure, _ = run_one(7, mistake=mistake)
    assert failure is None
    assert found == [False]
