"""Expectations of the schedules of each kind of world, and of the mistakes made there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from simulation.explore import Failure, Kind, explore, run_many, run_one, shrink, trace
from simulation.mutants import Mutant
from simulation.world import World

__all__ = ["expect_found_out", "expect_no_failure"]


def expect_no_failure(
    schedules: int,
    seed: int,
    *,
    sees: Iterable[str],
    one_in: int,
    record: Any,
    kind: Kind = World,
) -> None:
    """No schedule violates an invariant, and each counter in `sees` rises once in `one_in`
    schedules."""
    report = explore(schedules, seed, processes=os.cpu_count() or 1, kind=kind)
    for failure in report.failures[:1]:
        small = shrink(failure, kind=kind)
        pytest.fail(f"seed {failure.seed}: {failure.text}\n{trace(small, kind=kind)}")
    assert report.schedules == schedules
    print(dict(report.counts))
    for name in sees:
        record(name, report.counts[name])
        assert report.counts[name] >= schedules / one_in, name


def expect_found_out(mutant: Mutant, seeds: range, *, kind: Kind = World) -> Failure:
    """The mistake violates one of its expected invariants, and that schedule replays exactly."""
    report = run_many(seeds, kind=kind, mistake=mutant.mistake)
    assert report.failures, f"nothing was broken in {report.schedules} schedules"
    failure = report.failures[0]
    assert failure.name in mutant.breaks, failure.text
    again, _ = run_one(failure.seed, kind=kind, mistake=mutant.mistake)
    assert again == failure
    return failure
