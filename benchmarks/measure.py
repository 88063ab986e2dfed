"""Cases measured in turns, and what came out as a table."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

CONSOLE = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table.

    Attributes:
        name: of the line.
        median: of all rounds.
        ratio: the median of the rounds' own ratios to the reference.
        low: their lower quartile.
        high: their upper quartile.
    """

    name: str
    median: float
    ratio: float
    low: float
    high: float


def in_turns(
    cases: Mapping[str, Callable[[], object]],
    *,
    reference: str,
    rounds: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    but: Mapping[str, str] = {},
) -> list[Figure]:
    """µs per call of each case; in each round every case runs `repeats` times.

    The ratio is the median of the rounds' own ratios: a slow minute is slow for both. `clock`:
    `time.process_time` for the time that this process's threads have on a processor. `but`: cases
    that have another reference.
    """
    for case in cases.values():
        for _ in range(max(20, repeats // 5)):
            case()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        names = list(cases)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            case = cases[name]
            gc.collect()
            gc.disable()
            began = clock()
            for _ in range(repeats):
                case()
            samples[name].append((clock() - began) / repeats * 1e6)
            gc.enable()
    return figures(samples, reference=reference, but=but)


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
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    return Figure(name, statistics.median(values), middle, low, high)


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
