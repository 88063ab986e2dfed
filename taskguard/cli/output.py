"""How commands print: tables on a terminal, tabs in a pipe, JSON with `--json`.

Guarantees: JSON has the fields of `model/views.py`, under their names. In a pipe a row is one line,
with tabs between its cells and no colour. Texts of users are escaped by `printing.py`. Times are
UTC.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum, IntEnum
from typing import Any

from taskguard.cli.printing import printable

__all__ = [
    "NOTHING_FOUND",
    "add_json",
    "age",
    "as_data",
    "duration_s",
    "note",
    "paint",
    "print_json",
    "print_table",
    "table",
    "terminal_width",
    "when",
]

NOTHING_FOUND = 3
"""The exit status of a command that found nothing of what it was asked about."""

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_WIDEST = 48
_is_time = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ").fullmatch
_COLOURS = {"red": "31", "yellow": "33", "green": "32", "bold": "1", "dim": "2"}


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, whose fields stay")


def duration_s(text: str) -> float:
    """Parse an age such as "90s", "15m" or "12h", for argparse."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS_S or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age like 90s, 15m, 12h or 30d")
    return int(number) * _UNITS_S[unit]


def as_data(value: Any) -> Any:
    """Return a view as JSON has it: enumerations by their values, flags by their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: as_data(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {name: as_data(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [as_data(each) for each in value]
    return value


def print_json(value: Any) -> None:
    """Print a view, or a list of views."""
    print(json.dumps(as_data(value), indent=2, ensure_ascii=True))


def note(text: str) -> None:
    """Tell the reader of a table something that is no row."""
    if text:
        print(f"taskguard: {printable(text)}", file=sys.stderr)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows: with titles and in columns on a terminal, else with tabs between the cells."""
    cells = [[_cell(each) for each in row] for row in rows]
    if (width := terminal_width()) is not None:
        print("\n".join(line[:width] for line in table(titles, cells, width=width)))
    else:
        for row in cells:
            print("\t".join(row))


def table(
    titles: Sequence[str], cells: Sequence[Sequence[str]], *, width: int | None = None
) -> list[str]:
    """Return the lines of a table. All cells but the last are cut to a width.

    With the `width` of a terminal, the widest cells are cut until all columns fit.
    """
    some = [[*(_cut(each, _WIDEST) for each in row[:-1]), row[-1]] for row in cells]
    rows = [list(titles), *some]
    widths = [max(len(row[place]) for row in rows) for place in range(len(titles))]
    spare = 0 if width is None else sum(widths) + 2 * (len(widths) - 1) - width
    for _ in range(spare):
        widest = max(range(len(widths)), key=widths.__getitem__)
        widths[widest] = max(widths[widest] - 1, len(titles[widest]))
    return [
        "  ".join(
            _cut(cell, most).ljust(most) for cell, most in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def terminal_width() -> int | None:
    """Return how many characters a line of the terminal has, or None in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _cell(value: object) -> str:
    return "-" if value in (None, "") else printable(value)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    if _is_time(text):  # of a time the date is cut
        return f"…{text[1 - most :]}"
    return f"{text[: most - 1]}…"


def when(at_s: float | None) -> str:
    """Return a time as text: "2026-11-28 02:14:07Z"."""
    if not at_s:
        return "-"
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}Z"


def age(lasts_s: float | None) -> str:
    """Return a duration as text: "0.8s", "31s", "12m31s", "6h02m", "3d04h"."""
    if lasts_s is None:
        return "-"
    lasts_s = max(0.0, lasts_s)
    if lasts_s < 10:
        return f"{lasts_s:.1f}s"
    whole = int(lasts_s)
    if whole < 60:
        return f"{whole}s"
    if whole < 3_600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3_600}h{whole % 3_600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3_600:02}h"


def paint(text: str, colour: str) -> str:
    """Return the text in a colour, if the output shows colours."""
    forced = bool(os.environ.get("FORCE_COLOR"))
    if os.environ.get("NO_COLOR") or not (forced or sys.stdout.isatty()):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"
