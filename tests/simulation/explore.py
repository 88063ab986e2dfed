"""Runs schedules, and makes one that fails small enough to be read.

python -m simulation.explore --schedules 20000 --seed 7
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from simulation.bounded_world import BoundedWorld
from simulation.history import ViolationError
from simulation.line_world import LineWorld
from simulation.operator_world import OperatorWorld
from simulation.run_world import RunWorld
from simulation.scheduler import Choices, StuckError
from simulation.world import World

__all__ = ["Failure", "Report", "run_many", "run_one", "shrink", "trace"]

_SHRINK_S = 20.0
Mistake = Callable[[Any], object]
Kind = type[World]
"""What schedules are of."""
_KINDS: tuple[Kind, ...] = (World, LineWorld, BoundedWorld, RunWorld, OperatorWorld)
KINDS = {kind.__name__: kind for kind in _KINDS}


@dataclass
class Failure:
    """A schedule that violated an invariant: its seed, its choices, and the violation."""

    seed: int
    choices: list[int]
    name: str
    text: str


@dataclass
class Report:
    """Counts and failures of many schedules."""

    schedules: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.schedules += other.schedules
        self.counts += other.counts
        self.failures += other.failures


def run_one(
    seed: int = 0,
    *,
    kind: Kind = World,
    replay: Sequence[int] | None = None,
    lines: list[str] | None = None,
    mistake: Mistake | None = None,
) -> tuple[Failure | None, Counter[str]]:
    """Run one schedule; the same seed or the same choices give the same schedule.

    An unexpected exception is a failure of the schedule, too.
    """
    choices = Choices(seed, replay=replay)
    world = kind(choices, trace=None if lines is None else lines.append)
    failure = None
    if mistake is not None:
        mistake(world)
    try:
        world.run()
    except ViolationError as error:
        failure = Failure(seed, choices.made, error.name, str(error))
    except StuckError as error:
        failure = Failure(seed, choices.made, "L1", f"L1: {error}")
    except Exception as error:
        failure = Failure(seed, choices.made, type(error).__name__, traceback.format_exc())
    return failure, world.counts


def run_many(
    seeds: Iterable[int],
    *,
    kind: Kind = World,
    stop_at: int = 1,
    mistake: Mistake | None = None,
) -> Report:
    """Run schedules one after the other, until `stop_at` have failed."""
    report = Report()
    for seed in seeds:
        failure, counts = run_one(seed, kind=kind, mistake=mistake)
        report.schedules += 1
        report.counts += counts
        if failure is not None:
            report.failures.append(failure)
            if len(report.failures) >= stop_at:
                break
    return report


def shrink(
    failure: Failure,
    *,
    kind: Kind = World,
    within_s: float = _SHRINK_S,
    mistake: Mistake | None = None,
) -> Failure:
    """Return the same violation with fewer choices that are not 0: first clear whole stretches,
    then single choices."""
    best = failure
    until_s = time.monotonic() + within_s

    def better(choices: list[int]) -> bool:
        nonlocal best
        found, _ = run_one(failure.seed, kind=kind, replay=choices, mistake=mistake)
        if found is None or found.name != failure.name:
            return False
        made = _trimmed(found.choices)
        if _weight(made) >= _weight(best.choices):
            return False
        best = Failure(failure.seed, made, found.name, found.text)
        return True

    size = max(1, len(best.choices) // 2)
    while size and time.monotonic() < until_s:
        at = 0
        while at < len(best.choices) and time.monotonic() < until_s:
            stretch = best.choices[at : at + size]
            if any(stretch):
                better([*best.choices[:at], *[0] * len(stretch), *best.choices[at + size :]])
            at += size
        size //= 2
    return best


def _trimmed(choices: list[int]) -> list[int]:
    """Remove the zeros at the end, which a replay adds by itself."""
    end = len(choices)
    while end and not choices[end - 1]:
        end -= 1
    return choices[:end]


def _weight(choices: list[int]) -> tuple[int, int]:
    return sum(1 for each in choices if each), len(choices)


def trace(failure: Failure, *, kind: Kind = World, mistake: Mistake | None = None) -> str:
    """Return the trace of a failing schedule, one event a line."""
    lines: list[str] = []
    run_one(failure.seed, kind=kind, replay=failure.choices, lines=lines, mistake=mistake)
    return "\n".join(lines)


def explore(schedules: int, seed: int, *, processes: int, kind: Kind = World) -> Report:
    """Run many schedules on several processors, until the first failure."""
    report = Report()
    if processes == 1:
        report.add(run_many(range(seed, seed + schedules), kind=kind))
        return report
    command = [sys.executable, "-m", "simulation.explore"]
    command += ["--kind", kind.__name__, "--part"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = []
    for number in range(processes):
        asked = [str(seed + number), str(seed + schedules), str(processes)]
        running.append(
            subprocess.Popen([*command, *asked], stdout=subprocess.PIPE, text=True, env=environment)
        )
    try:
        for process in running:
            said, _ = process.communicate()
            report.add(_read(said))
            if report.failures:
                break
    finally:
        for process in running:
            process.kill()
            with process:
                pass
    return report


def _read(said: str) -> Report:
    values = json.loads(said)
    failures = [Failure(**each) for each in values["failures"]]
    return Report(values["schedules"], Counter(values["counts"]), failures)


def _part(kind: Kind, start: int, stop: int, step: int) -> int:
    report = run_many(range(start, stop, step), kind=kind)
    failures = [asdict(each) for each in report.failures]
    summary = {"schedules": report.schedules, "counts": report.counts, "failures": failures}
    print(json.dumps(summary))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kind", choices=KINDS, default=World.__name__, help="of what they are")
    parser.add_argument("--part", type=int, nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    kind = KINDS[asked.kind]
    logging.disable(logging.CRITICAL)  # workers log their faults
    if asked.part:
        return _part(kind, *asked.part)
    started_s = time.monotonic()
    report = explore(asked.schedules, asked.seed, processes=asked.processes, kind=kind)
    took_s = time.monotonic() - started_s
    print(f"{report.schedules:,} schedules in {took_s:.0f} s, seeds from {asked.seed}")
    for name, count in sorted(report.counts.items()):
        print(f"  {name:35} {count:>12,}")
    for failure in report.failures[:1]:
        small = shrink(failure, kind=kind)
        print(f"\nseed {failure.seed}: {failure.text}\n")
        print(trace(small, kind=kind))
        print(f"\nreplay: --seed {failure.seed} --schedules 1")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
