"""Measure cases in turns, and print tables of the results."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.clocks import BusyNeighbours, flush_us

# Wide enough for the widest table if the output is a file.
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
_PARTS = ("client", "worker", "database", "Redis", "sum", "wall")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table.

    Attributes:
        name: the name of the line.
        median: the median of all rounds.
        ratio: the median of the ratios to the reference. Each round has a ratio.
        low: the lower quartile of these ratios.
        high: the upper quartile of these ratios.
        quartiles: the lower and the upper quartile of all rounds.
    """

    name: str
    median: float
    ratio: float
    low: float
    high: float
    quartiles: tuple[float, float]


def in_turns(
    cases: Mapping[str, Callable[[], object]],
    *,
    reference: str,
    rounds: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    but: Mapping[str, str] = {},
) -> list[Figure]:
    """Return µs per call of each case. In each round every case runs `repeats` times.

    The ratio is the median of the ratios of all rounds, because a slow minute is slow for both.
    With `time.process_time` as `clock`, the figures are processor time of this process. `but` has
    the cases with another reference.
    """
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-1, rounds):  # the first round warms up
        for name, used in one_round(cases, number, repeats=repeats, clocks={"": clock}).items():
            if number >= 0:
                samples[name].append(used[""])
    return figures(samples, reference=reference, but=but)


def one_round(
    cases: Mapping[str, Callable[[], object]],
    number: int,
    *,
    repeats: int,
    clocks: Mapping[str, Callable[[], float]],
) -> dict[str, dict[str, float]]:
    """µs per call of each case by each clock. Each round begins with another case.

    List the clock of this process last: then it does not count the time to read the others.
    """
    found = {}
    names = list(cases)
    at = number % len(names)
    for name in names[at:] + names[:at]:
        case = cases[name]
        gc.collect()
        gc.disable()
        began = [clock() for clock in clocks.values()]
        for _ in range(repeats):
            case()
        ended = [clock() for clock in reversed(clocks.values())][::-1]
        gc.enable()
        found[name] = {
            clock: (end - begin) / repeats * 1e6
            for clock, begin, end in zip(clocks, began, ended, strict=True)
        }
    return found


def figures(
    samples: Mapping[str, list[float]], *, reference: str, but: Mapping[str, str] = {}
) -> list[Figure]:
    """Medians, and medians of the ratios to the reference's sample of the same round."""
    base = {other: other for other in but.values()} | dict(but)
    return [
        _figure(name, values, samples[base.get(name, reference)])
        for name, values in samples.items()
    ]


def _figure(name: str, values: list[float], base: list[float]) -> Figure:
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    (low, middle, high), (least, median, most) = _quartiles(ratios), _quartiles(values)
    return Figure(name, median, middle, low, high, (least, most))


def _quartiles(values: list[float]) -> list[float]:
    if len(values) == 1:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")


_Samples = dict[str, dict[str, list[float]]]


def show(title: str, unit: str, found: list[Figure], *, notes: Mapping[str, str] = {}) -> None:
    """Print a table, with the quartiles of the ratios; `notes` adds a word to a line."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column(unit, justify="right")
    table.add_column("ratio", justify="right")
    if notes:
        table.add_column("")
    for figure in found:
        ratio = f"{figure.ratio:.2f} [{figure.low:.2f}–{figure.high:.2f}]"
        cells = [figure.name, f"{figure.median:,.0f}", ratio]
        style = "bold" if figure.name.startswith("taskguard") else ""
        table.add_row(*cells, *([notes.get(figure.name, "")] if notes else []), style=style)
    CONSOLE.print(table)
    CONSOLE.print()


class Parts:
    """µs per call of each case in each part: processor time of several processes, and wall time.

    With `beside_load`, each round is measured once more while a process on each processor never
    waits. A figure comes back if its median then is within the quartiles of the rounds without.
    `references`: the case that each other case is compared with.
    """

    def __init__(self, title: str, references: Mapping[str, str], *, beside_load: bool) -> None:
        self._title = title
        self._references = references
        self._beside_load = beside_load
        self._quiet: _Samples = {}
        self._loaded: _Samples = {}

    def measure(self, one_round: Callable[[int], dict[str, dict[str, float]]], rounds: int) -> None:
        """Collect rounds. Each part is processor time, except "wall"."""
        with ExitStack() as stack:
            if self._beside_load:
                neighbours = stack.enter_context(closing(BusyNeighbours()))
            for number in range(rounds):
                _collect(self._quiet, one_round(number))
                if self._beside_load:
                    with neighbours.running():
                        _collect(self._loaded, one_round(number))

    def show(self, *, with_flush: bool = True) -> None:
        """Print the table, and how long a flush takes on this machine."""
        CONSOLE.print(f"[bold]{self._title}[/bold]; medians, in brackets quartiles")
        if with_flush:
            low, middle, high = flush_us()
            CONSOLE.print(
                f"a flush takes {middle:,.0f} µs here, in brackets [{low:,.0f}–{high:,.0f}]"
            )
        table = Table("", "part")
        for name in ("", "beside load: ") if self._loaded else ("",):
            table.add_column(f"{name}µs", justify="right")
            table.add_column("ratio", justify="right")
        for case, parts in self._quiet.items():
            name = case
            for part in sorted(parts, key=_PARTS.index):
                quiet = self._figure(self._quiet, case, part)
                cells = _cells(quiet)
                if self._loaded:
                    cells += _cells(self._figure(self._loaded, case, part), quiet)
                style = "bold" if case.startswith("taskguard") else ""
                table.add_row(name, part, *cells, style=style, end_section=part == "wall")
                name = ""
        CONSOLE.print(table)
        if self._loaded:
            CONSOLE.print("out: the median beside load is outside of the quartiles without load")
        CONSOLE.print()

    def _figure(self, samples: _Samples, case: str, part: str) -> Figure:
        base = self._references.get(case, case)
        return _figure(case, samples[case][part], samples[base][part])


def _collect(samples: _Samples, found: dict[str, dict[str, float]]) -> None:
    for case, parts in found.items():
        used = sum(us for part, us in parts.items() if part != "wall")
        for part, us in {**parts, "sum": used}.items():
            samples.setdefault(case, {}).setdefault(part, []).append(us)


def _cells(figure: Figure, quiet: Figure | None = None) -> list[str]:
    """Return µs and ratio. A figure beside load has a mark if it did not come back."""
    low, high = figure.quartiles
    cells = [
        f"{figure.median:,.0f} [{low:,.0f}–{high:,.0f}]",
        f"{figure.ratio:.2f} [{figure.low:.2f}–{figure.high:.2f}]",
    ]
    if quiet is not None:
        low, high = quiet.quartiles
        if not low <= figure.median <= high:
            cells[0] += " out"
        if not quiet.low <= figure.ratio <= quiet.high:
            cells[1] += " out"
    return cells
