"""Texts of a page: times, durations, numbers, CSV, and texts of users that cannot deceive.

Guarantees: what Jinja prints is escaped, and shows characters that control a terminal, reverse the
order of a text, or are invisible as escapes. A cell of CSV never begins a formula.

Does not guarantee that two texts look different: letters of two scripts may look alike.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from taskguard.integration import printable

__all__ = ["ago", "clock", "csv_of", "finalized", "iso", "lasts", "number", "printable"]

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def finalized(value: Any) -> Any:
    """Return what Jinja shall print for a value: markup as it is, other texts printably."""
    return value if not isinstance(value, str) or hasattr(value, "__html__") else printable(value)


def lasts(seconds: float | None) -> str:
    """Return a duration with two units: "12 m 31 s"."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 1:
        return f"{max(0.0, seconds):.1f} s"
    for size, unit, smaller, its_unit in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {its_unit}" if rest else "")
    return f"{whole} s"


def ago(at_s: float | None, now_s: float) -> str:
    """Return how long ago, or in how long, something was or will be."""
    if at_s is None:
        return "-"
    return f"{lasts(now_s - at_s)} ago" if at_s <= now_s else f"in {lasts(at_s - now_s)}"


def iso(at_s: float) -> str:
    """Return a time for machines."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clock(at_s: float, now_s: float) -> str:
    """Return a time in UTC for people, with its date unless that is today."""
    at, now = (datetime.fromtimestamp(each, UTC) for each in (at_s, now_s))
    return at.strftime("%H:%M:%S" if at.date() == now.date() else "%Y-%m-%d %H:%M:%S")


def number(value: float) -> str:
    """Return a number with commas."""
    return f"{value:,.0f}" if float(value).is_integer() or value >= 100 else f"{value:,.1f}"


def csv_of(names: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    """Return a table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows([_cell(each) for each in row] for row in rows)
    return text.getvalue().encode("utf-8", "replace")


def _cell(value: object) -> str:
    """Return a value for a cell. A spreadsheet runs what begins with these characters."""
    raw = "" if value is None else str(value)
    return f"'{printable(raw)}" if raw.lstrip(" ").startswith(_FORMULAS) else printable(raw)
