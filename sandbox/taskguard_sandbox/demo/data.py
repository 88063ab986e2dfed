"""The user's own order numbers, from a CSV file.

The column named `order_id`, or else the first one; the header may be missing. Comma, semicolon or
tab between columns, whichever the first line has most. Guarantees: what cannot be used is a
`DataError` that says what to do; a number that comes again counts once.
"""

from __future__ import annotations

import csv
from pathlib import Path

__all__ = ["COLUMN", "DataError", "read_orders"]

COLUMN = "order_id"
_MAX_CHARS = 200


class DataError(Exception):
    """The file cannot be used; the message says why."""


def read_orders(path: Path) -> list[str]:
    """The order numbers in `path`, in its order, each once."""
    rows = _rows(path)
    column, rows = _without_header(rows)
    numbers = [row[column].strip() if len(row) > column else "" for row in rows]
    found = list(dict.fromkeys(number for number in numbers if number))
    if not found:
        raise DataError(f"{path} holds no order numbers: one a line, or a column {COLUMN}.")
    for number in found:
        if len(number) > _MAX_CHARS or not number.isprintable():
            raise DataError(f"{path}: {number[:40]!r}… is no order number.")
    return found


def _rows(path: Path) -> list[list[str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text. Save it as CSV, UTF-8.") from error
    first = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    try:
        rows = list(csv.reader(text.splitlines(), delimiter=delimiter))
    except csv.Error as error:
        raise DataError(f"{path} is not CSV: {error}.") from error
    return [row for row in rows if any(cell.strip() for cell in row)]


def _without_header(rows: list[list[str]]) -> tuple[int, list[list[str]]]:
    """Which column holds the numbers, and the rows that do."""
    if not rows:
        return 0, []
    head = [cell.strip().lower() for cell in rows[0]]
    if COLUMN in head:
        return head.index(COLUMN), rows[1:]
    # A first line without a digit, over lines that all have one, names the column.
    names = len(rows) > 1 and not _has_digit(rows[0][0])
    if names and all(_has_digit(row[0]) for row in rows[1:]):
        return 0, rows[1:]
    return 0, rows


def _has_digit(text: str) -> bool:
    return any(char.isdigit() for char in text)
