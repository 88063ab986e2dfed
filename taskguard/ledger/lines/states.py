"""Conditions on the state of work in its line (`model/line_states.py`), which statements share.

`rank` and `parked` are its position in the line of its key. Work of a lower rank goes first. If
ranks are equal, the message that was sent first goes first. For a retry, its arrival counts. Work
in a line has a position, and no other work has one.

Until `due`, a message that was sent is expected. After that it is overdue, as any other work is
(`outbox.py`). Work that expired while it waited is overdue from its expiry on. `due` is NULL while
the message waits.

Nothing is read or written here.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.tables import WORK
from taskguard.model.line_states import LineState
from taskguard.model.states import State

__all__ = [
    "before",
    "expected",
    "expected_of",
    "in_order",
    "is_in_line",
    "keeps",
    "promoted",
    "sent_again",
    "waits",
    "waits_first",
]

_WAITING, _PROMOTED, _KEPT = (
    LineState.WAITING.value,
    LineState.PROMOTED.value,
    LineState.KEPT.value,
)
_BEFORE_CLAIM = [_WAITING, _PROMOTED, LineState.RESENT.value, LineState.EXPIRED.value]


def in_order() -> tuple[sa.ColumnElement[Any], ...]:
    """Return the order of a line. Messages that were sent in the same µs have no order."""
    return WORK.c.rank, WORK.c.parked


def is_in_line(work: Any) -> sa.ColumnElement[bool]:
    """Return the condition that work is NEW and in the line of its key, promoted or not."""
    is_new = work.c.state == State.NEW.value
    return sa.or_(work.c.line.in_(_BEFORE_CLAIM), sa.and_(keeps(work), is_new))


def waits(work: Any) -> sa.ColumnElement[bool]:
    """Return the condition that its message is parked, and was not promoted."""
    return work.c.line == _WAITING  # type: ignore[no-any-return]


def waits_first() -> sa.ColumnElement[bool]:
    """Return `waits()` for a query of the first message of a line.

    The planner reads the index in order only if it expects many rows. Without statistics PostgreSQL
    expects few rows of a state, and sorts all that wait. For a CASE that is not NULL it has no such
    estimate. MariaDB and MySQL sort them as soon as an id is in the order.
    """
    is_waiting = sa.case((waits(WORK), 1)).is_not(None)
    return sa.and_(WORK.c.parked.is_not(None), is_waiting)


def promoted() -> sa.ColumnElement[str]:
    """Return the state of work that waited, once its message is promoted: strict work is kept."""
    return sa.case((WORK.c.strict == 1, _KEPT), else_=_PROMOTED)


def sent_again(work: Any) -> sa.ColumnElement[bool]:
    """Return the condition that its message was late, and sent again: others may go first."""
    kept = sa.and_(keeps(work), sa.func.coalesce(work.c.sends, 0) > 0)
    return sa.or_(work.c.line == LineState.RESENT.value, kept)


def expected(work: Any, now_us: int) -> sa.ColumnElement[bool]:
    """Return the condition that it was promoted, and is not overdue."""
    return sa.and_(work.c.line == _PROMOTED, work.c.due > now_us)


def expected_of(work: Any, key: Any, now_us: int) -> sa.ColumnElement[bool]:
    """Return the condition that work of a key's line is expected: few, however long the line is.

    The index of `due` finds them. The condition must not imply that they have a position.
    Otherwise PostgreSQL would use the index of lines. It would take that index for empty,
    because its statistics may be older than the line.
    """
    return sa.and_(work.c.key == key, expected(work, now_us))


def keeps(work: Any) -> sa.ColumnElement[bool]:
    """Return the condition that strict work was sent or has begun, and has not ended.

    It blocks all work behind it, however late it is.
    """
    return work.c.line == _KEPT  # type: ignore[no-any-return]


def before(rank: int, parked: int) -> sa.ColumnElement[bool]:
    """Return the condition that work goes before a position.

    It is in there twice, because databases use an index for only one of the two forms.
    """
    as_tuple = sa.tuple_(WORK.c.rank, WORK.c.parked) < sa.tuple_(rank, parked)
    same_rank = sa.and_(WORK.c.rank == rank, WORK.c.parked < parked)
    # The planner uses the index of lines only if this condition is explicit.
    has_position = WORK.c.parked.is_not(None)
    return sa.and_(has_position, as_tuple, sa.or_(WORK.c.rank < rank, same_rank))
