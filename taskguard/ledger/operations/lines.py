"""Questions about lines: the messages that wait, one line, and the longest lines.

A long line is counted up to a maximum, because counting a million messages takes a second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.lines import states
from taskguard.ledger.operations.cursors import after_of, cursor_of
from taskguard.ledger.operations.views import WAITING, Asked, waiting_of
from taskguard.ledger.tables import FREE, KEYS, WORK
from taskguard.model.lease import Owner
from taskguard.model.line_states import LineState
from taskguard.model.states import State
from taskguard.model.views import Held, LineView, Page, WaitingView

__all__ = ["MOST_COUNTED", "MOST_LINES", "MOST_LISTED", "first_in", "line_of", "longest", "waiting"]

MOST_COUNTED = 1_000
"""A line is counted up to this number of messages."""
MOST_LINES, MOST_LISTED = 1_000, 100
_MAGNITUDES = (10, 100)  # numbers of messages that tell long lines from short ones

_PROMOTED = (LineState.PROMOTED.value, LineState.RESENT.value)
_FAILED = sa.and_(states.keeps(WORK), WORK.c.state == State.FAILED.value)
# A CASE, because planners expect few rows of a state, and sort a whole line to find its first one.
_WAITS = sa.case((sa.or_(states.is_in_line(WORK), _FAILED), 1))
_IN_LINE = (WORK.c.parked.is_not(None), _WAITS.is_not(None))
_ORDER = (WORK.c.key, *states.in_order(), WORK.c.id)


def line_of(asked: Asked, key: str) -> LineView | None:
    """Return the line of a key without its holder, or None if no message waits."""
    first = first_in(asked, key, limit=1)
    if not first:
        return None
    counted, promoted = _counted(asked, [key])[key]
    return LineView(
        key=key,
        waiting=min(counted, MOST_COUNTED),
        more=counted > MOST_COUNTED,
        oldest_s=first[0].parked_s,
        promoted=promoted,
        first=first[0],
    )


def first_in(asked: Asked, key: str, *, limit: int) -> tuple[WaitingView, ...]:
    """Return the first messages of a line with their positions."""
    select = sa.select(*WAITING).where(WORK.c.key == key, *_IN_LINE)
    rows = asked.rows(select.order_by(*states.in_order()).limit(limit))
    return tuple(waiting_of(row, number) for number, row in enumerate(rows, 1))


def _counted(asked: Asked, keys: list[str]) -> dict[str, tuple[int, int]]:
    """Return for each key how many messages wait, and how many of them were promoted."""
    each = []
    for key in keys:
        some = (
            sa.select(WORK.c.line)
            .where(WORK.c.key == key, *_IN_LINE)
            .order_by(*states.in_order())
            .limit(MOST_COUNTED + 1)
            .subquery()
        )
        promoted = sa.func.sum(sa.case((some.c.line.in_(_PROMOTED), 1), else_=0))
        columns = sa.literal(key).label("key"), sa.func.count().label("n"), promoted.label("p")
        each.append(sa.select(*columns).select_from(some))
    rows = asked.rows(sa.union_all(*each)) if each else ()
    return {row.key: (int(row.n), int(row.p or 0)) for row in rows}


def waiting(
    asked: Asked,
    *,
    key: str | None,
    task: str | None,
    older_s: float,
    limit: int,
    after: str | None,
) -> Page[WaitingView]:
    """Return messages that wait, by key and position."""
    these: list[Any] = list(_IN_LINE)
    if key is not None:
        these.append(WORK.c.key == key)
    if task is not None:
        these.append(WORK.c.task == task)
    if older_s:
        these.append(WORK.c.parked <= asked.now_us - int(older_s * 1e6))
    if after is not None:
        of, rank, parked, last = after_of(after, str, int, int, str)
        same = sa.and_(WORK.c.parked == parked, WORK.c.id > last)
        later = sa.and_(WORK.c.rank == rank, sa.or_(WORK.c.parked > parked, same))
        behind = sa.and_(WORK.c.key == of, sa.or_(WORK.c.rank > rank, later))
        these += [WORK.c.key >= of, sa.or_(WORK.c.key > of, behind)]
    rows = asked.rows(sa.select(*WAITING).where(*these).order_by(*_ORDER).limit(limit + 1))
    if len(rows) > limit:
        end = rows[limit - 1]
        more = cursor_of(end.key, end.rank, end.parked, end.id)
    else:
        more = None
    first_page = after is None and task is None and not older_s
    positions: dict[str, int] = {}
    holders = _holders(asked, list({row.key: None for row in rows[:limit]}))
    found = []
    for row in rows[:limit]:
        positions[row.key] = positions.get(row.key, 0) + 1
        view = waiting_of(row, positions[row.key] if first_page else None)
        holder = holders.pop(row.key, None)
        found.append(view if holder is None else replace(view, holder=holder))
    return Page(tuple(found), more)


def longest(asked: Asked, *, limit: int) -> Page[LineView]:
    """Return the longest of the first `MOST_LINES` lines.

    A loose index scan finds their keys: it jumps from key to key, and reads one entry of each.
    """
    sizes = _sizes(asked)
    keys = [key for key, _, _ in sorted(sizes, key=lambda each: (-each[1], each[2]))[:limit]]
    counted, firsts, holders = _counted(asked, keys), _firsts(asked, keys), _holders(asked, keys)
    found = [
        LineView(
            key=key,
            waiting=min(counted[key][0], MOST_COUNTED),
            more=counted[key][0] > MOST_COUNTED,
            oldest_s=firsts[key].parked_s,
            promoted=counted[key][1],
            first=firsts[key],
            holder=holders.get(key),
        )
        for key in keys
        if key in firsts
    ]
    found.sort(key=lambda line: (-line.waiting, line.oldest_s))
    note = ""
    if len(sizes) >= MOST_LINES:
        note = f"Only the first {MOST_LINES:,} lines were read, in the order of their keys."
    return Page(tuple(found), note=note)


def _sizes(asked: Asked) -> list[tuple[str, int, int]]:
    """Return the keys of lines, each with its order of magnitude and its first message's time."""
    parked = WORK.c.parked.is_not(None)
    first = sa.select(WORK.c.key).where(parked).order_by(WORK.c.key).limit(1)
    columns = first.scalar_subquery().label("key"), sa.literal(1).label("n")
    found = sa.select(*columns).cte("found", recursive=True)
    following = sa.select(WORK.c.key).where(parked, WORK.c.key > found.c.key)
    next_key = following.order_by(WORK.c.key).limit(1).scalar_subquery()
    going_on = found.c.key.is_not(None), found.c.n < MOST_LINES
    found = found.union_all(sa.select(next_key, found.c.n + 1).where(*going_on))
    of_line = sa.select(WORK.c.parked).where(WORK.c.key == found.c.key, parked)
    at = [
        of_line.order_by(*states.in_order()).limit(1).offset(number).scalar_subquery()
        for number in (0, *_MAGNITUDES)
    ]
    rows = asked.rows(sa.select(found.c.key, *at))
    return [
        (key, sum(each is not None for each in others), int(oldest))
        for key, oldest, *others in rows
        if key is not None and oldest is not None
    ]


def _firsts(asked: Asked, keys: list[str]) -> dict[str, WaitingView]:
    """Return the first message of each line."""
    each = []
    for key in keys:
        select = sa.select(*WAITING).where(WORK.c.key == key, *_IN_LINE)
        some = select.order_by(*states.in_order()).limit(1).subquery()
        each.append(sa.select(some))
    rows = asked.rows(sa.union_all(*each)) if each else ()
    return {row.key: waiting_of(row, 1) for row in rows}


def _holders(asked: Asked, keys: list[str]) -> dict[str, Held]:
    """Return the holders of keys that have no slots."""
    columns = (KEYS.c[name] for name in ("key", "owner", "fence", "lease_until"))
    live = KEYS.c.owner != FREE, KEYS.c.lease_until > asked.now_us
    rows = asked.rows(sa.select(*columns).where(KEYS.c.key.in_(keys), *live)) if keys else ()
    processes = asked.processes(row.owner for row in rows)
    return {
        row.key: Held(
            key=row.key,
            process=processes[row.owner],
            fence=row.fence,
            since_s=row.fence / 1e6,
            lease_until_s=row.lease_until / 1e6,
            paused=Owner.parse(row.owner).pause,
        )
        for row in rows
    }
