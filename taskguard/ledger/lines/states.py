"""What the columns of a work's record say of its line: conditions that all statements share.

`rank` and `parked` are its position in the line of its key: those of a lower rank go first, then
those that were sent before (a retry: that came before).
`due` says whether it was called: NULL while it waits, else until when its message, which was sent
again then, is expected. After that it is overdue, as any other work is (`outbox.py`). So is work
that has expired while it waited, since then.

Work of `strict` requests has such a position from its enqueueing, or its first claim, until it has
ended: also while it is PROCESSING, and FAILED with a retry to come. `due` then says when its
message, which another process has sent, is overdue.

Nothing is read or written here.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.tables import WORK
from taskguard.model.states import State

__all__ = [
    "before",
    "called_of",
    "called_once",
    "expected",
    "in_line",
    "in_order",
    "keeps",
    "left",
    "stands",
    "waits",
]


def in_order() -> tuple[sa.ColumnElement[Any], ...]:
    """By what a line is in order: who was sent in the same µs goes before or after."""
    return WORK.c.rank, WORK.c.parked


def stands(work: Any) -> sa.ColumnElement[bool]:
    """Whether it stands in the line of its key, called or not."""
    return sa.and_(work.c.parked.is_not(None), work.c.state == State.NEW.value)


def in_line(work: Any) -> sa.ColumnElement[bool]:
    """Whether it has a place: it waits, was called, or keeps it."""
    return sa.or_(stands(work), keeps(work))


def waits(*further: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Whether it stands in line, and was not called: of all these the first one is looked for.

    That is found by the index, in order, if the planner thinks that there are many. Without
    statistics PostgreSQL takes work of a state for rare, and sorts all who wait; of a CASE that is
    not NULL it thinks nothing of the kind. MariaDB and MySQL sort them as soon as an id is in the
    order.
    """
    is_left = sa.and_(WORK.c.state == State.NEW.value, WORK.c.due.is_(None), *further)
    return sa.and_(WORK.c.parked.is_not(None), sa.case((is_left, 1)).is_not(None))


def expected(work: Any, now_us: int) -> sa.ColumnElement[bool]:
    """Whether it was called a short while ago. One that was called again holds up nobody.

    Nor does one that is strict, other than those behind it, by the place that it keeps: it may not
    have been called, but enqueued.
    """
    return sa.and_(work.c.due > now_us, work.c.strict.is_(None), called_once(work))


def called_of(work: Any, key: Any, now_us: int) -> sa.ColumnElement[bool]:
    """Of a key's line, who was called a short while ago: few, however long the line is.

    Found by when they are due. That they have a place is said so that PostgreSQL does not see that
    the index of lines has them all, which it takes for empty by statistics from before the line.
    """
    has_place = sa.func.coalesce(work.c.parked, 0) > 0
    is_new = work.c.state == State.NEW.value
    return sa.and_(work.c.key == key, is_new, has_place, expected(work, now_us))


def called_once(work: Any) -> sa.ColumnElement[bool]:
    return sa.func.substr(work.c.call, 1, 8) != '{"sent":'


def keeps(work: Any) -> sa.ColumnElement[bool]:
    """Whether it is strict, and does not wait: it was sent, or has begun, and has not ended.

    It holds up all who are behind it, however late it is.
    """
    states = work.c.state.in_([State.NEW.value, State.PROCESSING.value, State.FAILED.value])
    placed = sa.and_(work.c.parked.is_not(None), work.c.strict == 1)
    return sa.and_(placed, work.c.due.is_not(None), states)


def before(rank: int, place: int) -> sa.ColumnElement[bool]:
    """Whether it goes before that place. Said twice: databases use an index for one of the two."""
    as_tuple = sa.tuple_(WORK.c.rank, WORK.c.parked) < sa.tuple_(rank, place)
    same_rank = sa.and_(WORK.c.rank == rank, WORK.c.parked < place)
    return sa.and_(as_tuple, sa.or_(WORK.c.rank < rank, same_rank))


def left() -> sa.ColumnElement[bool]:
    """Whether it waits and was not called, as a condition that no index of lines is used for."""
    has_place = sa.func.coalesce(WORK.c.parked, 0) > 0  # as in `called_of()`
    return sa.and_(WORK.c.state == State.NEW.value, WORK.c.due.is_(None), has_place)
