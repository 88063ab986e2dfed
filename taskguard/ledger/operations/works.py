"""Questions about work: one record, and lists by state, task, key, beginning of the id or message.

No index has the state of work, because that would slow each completion down. So FAILED, DEAD and
work that runs long are found by `WORK.flag`, and other work by its key or by the beginning of its
id. Anything else is read in the order of ids, until some time has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import sqlalchemy as sa

from taskguard.keys import SHORT_CHARS
from taskguard.ledger.operations.cursors import after_of, cursor_of
from taskguard.ledger.operations.views import ENDED, WORK_ITEM, Asked, begins_with, item_of
from taskguard.ledger.tables import COUNTS, KEYS, MESSAGES, WORK
from taskguard.model.bounds import range_of_slots
from taskguard.model.claims import LEADER_TASK
from taskguard.model.history import Flag, read, works_of
from taskguard.model.states import State
from taskguard.model.views import Page, Past, Process, WorkFilter, WorkItem

__all__ = [
    "MOST_TASKS",
    "beginning_with",
    "by_ids",
    "item",
    "listed",
    "of_message",
    "past_of",
    "scanned",
    "tasks",
    "works_of_key",
]

MOST_TASKS = 500
SCAN_S = 5.0
"""For how long records are read if no index finds them, in seconds."""

_CHUNK = 5_000
_MOST_SLOTS = 1_000
_FLAG_OF = {State.FAILED: Flag.FAILED, State.DEAD: Flag.DEAD}
_Open = Callable[[], AbstractContextManager[Asked]]


def item(asked: Asked, work: str, *, arguments: bool = False) -> WorkItem | None:
    """Return work with its history, or None."""
    columns = [*WORK_ITEM, WORK.c.history]
    if arguments:
        columns += [WORK.c.call, WORK.c.result, WORK.c.progress]
    [row] = asked.rows(sa.select(*columns).where(WORK.c.id == work)) or [None]
    if row is None:
        return None
    happened = read(row.history)
    processes = asked.processes([row.owner, *(each.owner for each in happened)])
    past = _past(row, processes)
    large = (
        {"call": row.call, "result_json": row.result, "progress_json": row.progress}
        if arguments
        else {}
    )
    return item_of(row, asked, processes, history=past, **large)


def past_of(asked: Asked, ids: Sequence[str]) -> list[Past]:
    """Return the histories of work, in no order."""
    if not ids:
        return []
    columns = WORK.c.id, WORK.c.task, WORK.c.history
    rows = asked.rows(sa.select(*columns).where(WORK.c.id.in_(ids), WORK.c.history.is_not(None)))
    owners = (each.owner for row in rows for each in read(row.history))
    processes = asked.processes(owners)
    return [each for row in rows for each in _past(row, processes)]


def _past(row: Any, processes: dict[str, Process]) -> tuple[Past, ...]:
    return tuple(
        Past(
            each.at_us / 1e6,
            each.what.value,
            each.text,
            processes.get(each.owner),
            each.fence or None,
            work=row.id,
            task=row.task,
        )
        for each in read(row.history)
    )


def by_ids(asked: Asked, ids: Iterable[str], *conditions: Any) -> list[WorkItem]:
    """Return the work with these ids that is on record, in the order of the ids."""
    order = {work: number for number, work in enumerate(ids)}
    if not order:
        return []
    rows = asked.rows(sa.select(*WORK_ITEM).where(WORK.c.id.in_(list(order)), *conditions))
    return _items(asked, sorted(rows, key=lambda row: order[row.id]))


def _items(asked: Asked, rows: Sequence[Any]) -> list[WorkItem]:
    processes = asked.processes(row.owner for row in rows)
    return [item_of(row, asked, processes) for row in rows]


def tasks(asked: Asked) -> list[str]:
    """Return the tasks that have counted something, at most `MOST_TASKS`."""
    first = sa.select(sa.func.min(COUNTS.c.task)).where(COUNTS.c.bucket == 0)
    found = sa.select(first.scalar_subquery().label("task"), sa.literal(1).label("n")).cte(
        "found", recursive=True
    )
    following = sa.select(sa.func.min(COUNTS.c.task)).where(
        COUNTS.c.bucket == 0, COUNTS.c.task > found.c.task
    )
    found = found.union_all(
        sa.select(following.scalar_subquery(), found.c.n + 1).where(
            found.c.task.is_not(None), found.c.n < MOST_TASKS
        )
    )
    return [row.task for row in asked.rows(sa.select(found.c.task)) if row.task]


def works_of_key(asked: Asked, key: str) -> list[str]:
    """Return the ids of the last work of a key or of its slots, the newest of each first."""
    first, after = range_of_slots(key)
    select = sa.select(KEYS.c.works)
    slots = select.where(KEYS.c.key > first, KEYS.c.key < after).limit(_MOST_SLOTS).subquery()
    rows = asked.rows(sa.union_all(select.where(KEYS.c.key == key), sa.select(slots)))
    return list(dict.fromkeys(each for row in rows for each in works_of(row.works)))


def beginning_with(asked: Asked, prefixes: Iterable[str], *, limit: int) -> list[WorkItem]:
    """Return work whose id begins with one of these texts."""
    found: list[WorkItem] = []
    for prefix in dict.fromkeys(prefixes):
        ids = sa.select(*WORK_ITEM).where(*begins_with(WORK.c.id, prefix)).order_by(WORK.c.id)
        found += _items(asked, asked.rows(ids.limit(limit - len(found))))
        if len(found) >= limit:
            break
    return found


def listed(open_: _Open, only: WorkFilter, *, limit: int, after: str | None) -> Page[WorkItem]:
    """Return work by a filter."""
    if only.overdue:
        with open_() as asked:
            return _overdue(asked, only, limit=limit)
    if only.state in _FLAG_OF:
        with open_() as asked:
            return _flagged(asked, only, _FLAG_OF[only.state], limit=limit, after=after)
    if only.key is not None:
        with open_() as asked:
            ids = _ids_of(asked, only.key)
            found = by_ids(asked, ids, *_conditions(only))
            waiting = sa.select(*WORK_ITEM).where(
                WORK.c.key == only.key, WORK.c.parked.is_not(None), *_conditions(only)
            )
            in_line = _items(asked, asked.rows(waiting.order_by(*_IN_LINE).limit(limit)))
            every = list({each.id: each for each in (*found, *in_line)}.values())
            note = (
                "Only the last work of this key is listed, and its line. Work of several keys, or "
                "of an older time, is found by --prefix."
            )
            return Page(tuple(every[:limit]), note=note)
    prefix = only.prefix or (f"{only.task} " if only.task else "")
    return scanned(open_, *_conditions(only), prefix=prefix, limit=limit, after=after)


_IN_LINE = WORK.c.rank, WORK.c.parked


def _ids_of(asked: Asked, key: str) -> list[str]:
    """Return ids that work of a key may have: those on record, and one for each known task."""
    possible = [f"{task} {key}" for task in tasks(asked) if len(task) + len(key) < SHORT_CHARS]
    return list(dict.fromkeys([*works_of_key(asked, key), *possible]))


def _conditions(only: WorkFilter) -> list[Any]:
    """Return the conditions of a filter that no index need have."""
    found = [sa.not_(sa.and_(WORK.c.task == LEADER_TASK, WORK.c.key.contains("leader:")))]
    if only.state is not None:
        found.append(WORK.c.state == only.state.value)
    if only.task is not None:
        found.append(WORK.c.task == only.task)
    if only.prefix is not None:
        found += begins_with(WORK.c.id, only.prefix)
    if only.since_s is not None:
        # Work that was claimed again still has the end of the attempt before.
        ended = sa.case((WORK.c.state.in_(ENDED), WORK.c.finished))
        changed = sa.func.coalesce(ended, WORK.c.started, WORK.c.created)
        found.append(sa.func.coalesce(WORK.c.since, changed) >= int(only.since_s * 1e6))
    return found


def _of_key(only: WorkFilter) -> list[Any]:
    """Return the condition that work is of a key, alone or with other keys."""
    if only.key is None:
        return []
    several = sa.literal(",") + WORK.c.key + sa.literal(",")
    return [sa.or_(WORK.c.key == only.key, several.contains(f",{only.key},", autoescape=True))]


def _flagged(
    asked: Asked, only: WorkFilter, flag: Flag, *, limit: int, after: str | None
) -> Page[WorkItem]:
    """Return work with a flag, the latest first."""
    these = [WORK.c.flag == flag.value, *_conditions(only), *_of_key(only)]
    if after is not None:
        since, last = after_of(after, int, str)
        earlier = sa.or_(WORK.c.since < since, WORK.c.id < last)
        these += [WORK.c.since <= since, earlier]
    select = sa.select(*WORK_ITEM).where(*these)
    rows = asked.rows(select.order_by(WORK.c.since.desc(), WORK.c.id.desc()).limit(limit + 1))
    more = cursor_of(rows[limit - 1].since, rows[limit - 1].id) if len(rows) > limit else None
    return Page(tuple(_items(asked, rows[:limit])), more)


def _overdue(asked: Asked, only: WorkFilter, *, limit: int) -> Page[WorkItem]:
    """Return work that no worker is at, although one should be: see `WorkFilter.overdue`."""
    now_us = asked.now_us
    left = sa.and_(WORK.c.state == State.PROCESSING.value, WORK.c.lease_until <= now_us)
    new = WORK.c.state == State.NEW.value
    found: dict[str, Any] = {}
    for these in (
        (WORK.c.flag == Flag.LEFT.value, left),
        (WORK.c.flag == Flag.RUNS_LONG.value, left),
        (WORK.c.due <= now_us, sa.or_(left, new)),
    ):
        select = sa.select(*WORK_ITEM).where(*these, *_conditions(only), *_of_key(only))
        first = WORK.c.due if these[0].left is WORK.c.due else WORK.c.since
        for row in asked.rows(select.order_by(first).limit(limit + 1)):
            found.setdefault(row.id, row)
    rows = sorted(found.values(), key=_overdue_since)
    note = f"More than {limit:,} are overdue." if len(rows) > limit else ""
    return Page(tuple(_items(asked, rows[:limit])), note=note)


def _overdue_since(row: Any) -> tuple[int, str]:
    return (row.lease_until or row.due or 0, row.id)


def scanned(
    open_: _Open,
    *conditions: Any,
    prefix: str = "",
    limit: int,
    after: str | None = None,
    longest_s: float = SCAN_S,
) -> Page[WorkItem]:
    """Return work in the order of ids, from all records that can be read in some time.

    Each transaction reads few records, so that it keeps no old row versions.
    """
    started_s = time.monotonic()
    last: str | None = None
    if after is not None:
        [last] = after_of(after, str)
    found: list[WorkItem] = []
    seen = 0
    while True:
        with open_() as asked:
            ids = sa.select(WORK.c.id).where(*begins_with(WORK.c.id, prefix))
            if last is not None:
                ids = ids.where(WORK.c.id > last)
            chunk = [row.id for row in asked.rows(ids.order_by(WORK.c.id).limit(_CHUNK))]
            if not chunk:
                return Page(tuple(found))
            these = WORK.c.id >= chunk[0], WORK.c.id <= chunk[-1], *conditions
            select = sa.select(*WORK_ITEM).where(*these).order_by(WORK.c.id)
            rows = asked.rows(select.limit(limit + 1 - len(found)))
            found += _items(asked, rows)
        if len(found) > limit:
            return Page(tuple(found[:limit]), cursor_of(found[limit - 1].id))
        last, seen = chunk[-1], seen + len(chunk)
        if len(chunk) < _CHUNK:
            return Page(tuple(found))
        if time.monotonic() - started_s > longest_s:
            note = f"Only {seen:,} records were read in {longest_s:g} s, in the order of ids."
            return Page(tuple(found), cursor_of(last), note)


def of_message(open_: _Open, message: str, *, namespace: str, limit: int = 10) -> Page[WorkItem]:
    """Return the work of a message."""
    with open_() as asked:
        sent = sa.select(MESSAGES.c.work).where(_is_of(MESSAGES.c.message, message))
        ids = [row.work for row in asked.rows(sent.limit(limit))]
        found = by_ids(asked, ids)
        prefixes = [f"{task} {namespace}message:{message} " for task in tasks(asked)]
        if not found:
            found = beginning_with(asked, prefixes, limit=limit)
        if not found:
            long = WORK.c.flag == Flag.RUNS_LONG.value, _is_of(WORK.c.message, message)
            found = _items(asked, asked.rows(sa.select(*WORK_ITEM).where(*long).limit(limit)))
    if found:
        return Page(tuple(found))
    return scanned(open_, _is_of(WORK.c.message, message), limit=limit)


def _is_of(column: Any, message: str) -> Any:
    """Return the condition that a column has the message, of whichever sending of its id."""
    return sa.or_(column == message, sa.and_(*begins_with(column, f"{message}@")))
