"""The SQL that writes histories of work, the last works of keys, and flags for operators.

Each is an expression inside a statement that changes the row anyway, so that it costs no round
trip. `model/history.py` has the formats. PostgreSQL's and MariaDB's .sql files write the same.

Guarantees: a history has at most `HISTORY_CHARS` characters. Its column is not read to append to
it. Most work has no flag, and its history stays NULL.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.history import (
    HISTORY_CHARS,
    WORKS_CHARS,
    Flag,
    Happened,
    entry_after_time,
)

__all__ = ["NO_FLAG", "appended", "flagged", "happening", "line_of", "with_work"]

NO_FLAG: dict[str, None] = {"flag": None, "since": None}
"""The columns of work that no operator has to look for."""


def flagged(flag: Flag, since: Any) -> dict[str, Any]:
    """Return the columns of work that an operator may look for, since this time in µs."""
    return {"flag": int(flag), "since": since}


class _Last(FunctionElement[str]):
    """The last characters of a text: `right()`, which SQLite lacks."""

    type = sa.Text()
    inherit_cache = True
    name = "right"


@compiles(_Last)
def _last(element: Any, compiler: Any, **options: Any) -> str:
    return f"right{compiler.process(element.clause_expr, **options)}"


@compiles(_Last, "sqlite")
def _last_on_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    text, number = (compiler.process(each, **options) for each in element.clauses)
    return f"substr({text}, -{number})"


def happening(
    at_us: Any, what: Happened, *, owner: str, fence: int, text: object = ""
) -> sa.ColumnElement[str]:
    """Return one line of a history. `at_us` is a number, or an expression such as the clock."""
    rest = entry_after_time(what, owner=owner, fence=fence, text=text)
    start: sa.ColumnElement[str] = sa.literal("[", sa.Text)
    return start + sa.cast(at_us, sa.String) + sa.literal(rest, sa.Text)


def appended(line: Any) -> sa.ColumnElement[str]:
    """Return the value of `WORK.history` with one more line, without the oldest if it is full."""
    return _Last(sa.func.coalesce(WORK.c.history, "") + line, HISTORY_CHARS)


def line_of(work: str) -> str:
    """Return the line of `KEYS.works`, or of `WORK.also`, for a work."""
    return f"{work}\n"


def with_work(line: Any, chars: Any) -> sa.ColumnElement[str | None]:
    """Return the value of `KEYS.works` with this line first.

    Args:
        line: the line, a parameter.
        chars: its length, a parameter.
    """
    works = KEYS.c.works
    most = sa.case((chars > WORKS_CHARS, chars), else_=WORKS_CHARS)
    longer = sa.func.substr(line + sa.func.coalesce(works, ""), 1, most)
    return sa.case((sa.func.substr(works, 1, chars) == line, works), else_=longer)
