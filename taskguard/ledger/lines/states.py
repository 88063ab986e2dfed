"""Conditions on the state of work in its line (`model/line_states.py`), which statements share.

`rank` and `parked` are its position in the line of its key: those of a lower rank go first, then
those that were sent before (a retry: that came before). Work in a line has a position, and no
other work has one.

`due` says until when a message that was sent is expected. After that it is overdue, as any other
work is (`outbox.py`). So is work that has expired while it waited, since then. NULL while it waits.

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
    "called_of",
    "expected",
    "in_order",
    "keeps",
    "promoted",
    "sent_again",
    "stands",
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
    """By what a line is in order: who was sent in the same µs goes before or after."""
    return WORK.c.rank, WORK.c.parked


def stands(work: Any) -> sa.ColumnElement[bool]:
    """Whether it is NEW, and in the line of its key, promoted or not."""
    is_new = work.c.state == State.NEW.value
    return sa.or_(work.c.line.in_(_BEFORE_CLAIM), sa.and_(keeps(work), is_new))


def waits(work: Any) -> sa.ColumnElement[bool]:
    """Whether its message is parked, and was not promoted."""
    return work.c.line == _WAITING  # type: ignore[no-any-return]


def waits_first() -> sa.ColumnElement[bool]:
    """`waits()`, in a query for the first one of these.

    That is found by the index, in order, if the planner thinks that there are many. Without
    statistics PostgreSQL takes work of a state for rare, and sorts all who wait; of a CASE that is
    not NULL it thinks nothing of the kind. MariaDB and MySQL sort them as soon as an id is in the
    order.
    """
    is_waiting = sa.case((waits(WORK), 1)).is_not(None)
    return sa.and_(WORK.c.parked.is_not(None), is_waiting)


def promoted() -> sa.ColumnElement[str]:
    """The state of work that waited, once its message is to be sent: strict work is kept."""
    return sa.case((WORK.c.strict == 1, _KEPT), else_=_PROMOTED)


def sent_again(work: Any) -> sa.ColumnElement[bool]:
    """Whether its message was sent once more than it was to be: another one may go first."""
    kept = sa.and_(keeps(work), sa.func.coalesce(work.c.sends, 0) > 0)
    return sa.or_(work.c.line == LineState.RESENT.value, kept)


def expected(work: Any, now_us: int) -> sa.ColumnElement[bool]:
    """Whether it was promoted a short while ago."""
    return sa.and_(work.c.line == _PROMOTED, work.c.due > now_us)


def called_of(work: Any, key: Any, now_us: int) -> sa.ColumnElement[bool]:
    """Of a key's line, what is expected: few, however long the line is.

    Found by when they are due. Nothing here implies that they have a position: PostgreSQL would see
    that the index of lines has them all, which it takes for empty by statistics from before the
    line.
    """
    return sa.and_(work.c.key == key, expected(work, now_us))


def keeps(work: Any) -> sa.ColumnElement[bool]:
    """Whether it is strict, and does not wait: it was sent, or has begun, and has not ended.

    It holds up all who are behind it, however late it is.
    """
    return work.c.line == _KEPT  # type: ignore[no-any-return]


def before(rank: int, place: int) -> sa.ColumnElement[bool]:
    """Whether it goes before that place. Said twice: databases use an index for one of the two."""
    as_tuple = sa.tuple_(WORK.c.rank, WORK.c.parked) < sa.tuple_(rank, place)
    same_rank = sa.and_(WORK.c.rank == rank, WORK.c.parked < place)
    # That it has a position is implied, which a planner has to be told for the index of lines.
    has_position = WORK.c.parked.is_not(None)
    return sa.and_(has_position, as_tuple, sa.or_(WORK.c.rank < rank, same_rank))
