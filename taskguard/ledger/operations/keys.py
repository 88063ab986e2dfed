"""Questions about keys: holders, work, what happened, and how long a key is usually held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from taskguard import metrics
from taskguard.ledger.operations import lines, works
from taskguard.ledger.operations.cursors import after_of, cursor_of
from taskguard.ledger.operations.views import (
    HAPPENED,
    WORK_ITEM,
    Asked,
    begins_with,
    happenings_of,
    of_key,
    seconds,
)
from taskguard.ledger.tables import ACTIONS, COUNTS, FREE, HAPPENINGS, KEYS, WORK
from taskguard.model.bounds import is_slot, range_of_slots
from taskguard.model.claims import LEADER_TASK
from taskguard.model.history import Action, Flag, works_of
from taskguard.model.lease import Owner
from taskguard.model.pauses import FAR_US
from taskguard.model.states import State
from taskguard.model.views import Held, KeyView, Page, Past, Usual, WorkItem

__all__ = ["actions_of", "held", "key_view", "keys_beginning_with", "paused"]

_COLUMNS = ("key", "fence", "owner", "lease_until", "slots", "next_start", "works")
_KEY = tuple(KEYS.c[name] for name in _COLUMNS)
_MOST_SLOTS, _MOST_WORKS, _MOST_PAST, _MOST_WAITING = 1_000, 10, 20, 50
_MOST_ACTIONS, _MOST_PAUSES = 10_000, 1_000
_SHARE = 0.99


def key_view(asked: Asked, key: str) -> KeyView | None:
    """Return a key with everything on record, or None if nothing is."""
    rows = _rows_of(asked, key)
    line = lines.line_of(asked, key)
    if not rows and line is None:
        return None
    ids = list(dict.fromkeys(each for row in rows for each in works_of(row.works)))[:_MOST_WORKS]
    items = works.by_ids(asked, ids)
    holders = _holders(asked, rows, items)
    if line is not None:
        line = replace(line, holder=holders[0] if holders else None)
    task = next((each.task for each in holders if each.task), items[0].task if items else None)
    base = next((row for row in rows if row.key == key), None)
    return KeyView(
        key=key,
        holders=tuple(holders),
        slots=None if base is None else base.slots,
        next_start_s=None if base is None else seconds(base.next_start),
        line=line,
        waiting=() if line is None else lines.first_in(asked, key, limit=_MOST_WAITING),
        works=tuple(items),
        past=tuple(_past(asked, key, items)),
        usual=None if task is None else _usual(asked, task),
    )


def _rows_of(asked: Asked, key: str) -> Sequence[Any]:
    """Return the rows of a key and of its slots."""
    first, after = range_of_slots(key)
    select = sa.select(*_KEY)
    slots = select.where(KEYS.c.key > first, KEYS.c.key < after).limit(_MOST_SLOTS).subquery()
    found = asked.rows(sa.union_all(select.where(KEYS.c.key == key), sa.select(slots)))
    these = (row for row in found if row.key == key or is_slot(row.key, of=key))
    return sorted(these, key=lambda row: row.key)


def _holders(asked: Asked, rows: Sequence[Any], items: Sequence[WorkItem]) -> list[Held]:
    live = [row for row in rows if row.owner != FREE and row.lease_until > asked.now_us]
    processes = asked.processes(row.owner for row in live)
    runs = {
        (each.fence, each.process.owner): each
        for each in items
        if each.process is not None and each.state is State.PROCESSING
    }
    found = []
    for row in live:
        work = runs.get((row.fence, row.owner))
        found.append(
            Held(
                key=row.key,
                process=processes[row.owner],
                fence=row.fence,
                since_s=row.fence / 1e6,
                lease_until_s=row.lease_until / 1e6,
                work=None if work is None else work.id,
                task=None if work is None else work.task,
                attempt=None if work is None else work.attempts,
                paused=Owner.parse(row.owner).pause,
            )
        )
    return found


def _past(asked: Asked, key: str, items: Sequence[WorkItem]) -> list[Past]:
    """Return what happened to a key and to its last work, the newest first."""
    happened = sa.select(*HAPPENED).where(HAPPENINGS.c.key == key)
    rows = asked.rows(happened.order_by(HAPPENINGS.c.at.desc()).limit(_MOST_PAST))
    found = list(happenings_of(rows, asked.processes(row.owner for row in rows)))
    found += works.past_of(asked, [each.id for each in items])
    found += actions_of(asked, key)
    return sorted(found, key=lambda each: each.at_s, reverse=True)[: 2 * _MOST_PAST]


def actions_of(asked: Asked, key: str) -> list[Past]:
    """Return what operators did to the key itself or its slots, among the last actions."""
    last = sa.select(ACTIONS).order_by(ACTIONS.c.id.desc()).limit(_MOST_ACTIONS).subquery()
    these = sa.select(last).where(of_key(last.c.key, key), last.c.work.is_(None))
    rows = asked.rows(these.order_by(last.c.id.desc()).limit(_MOST_PAST))
    return [Past(row.at / 1e6, row.action, row.reason, actor=row.actor) for row in rows]


def _usual(asked: Asked, task: str) -> Usual | None:
    """Return how long the bodies of a task take, by the counts of all time."""
    names = metrics.HOLD.zeros()
    these = COUNTS.c.bucket == 0, COUNTS.c.task == task, COUNTS.c.what.in_(names)
    counts = {
        row.what: row.n for row in asked.rows(sa.select(COUNTS.c.what, COUNTS.c.n).where(*these))
    }
    *buckets, total = names
    n = int(sum(counts.get(each, 0) for each in buckets))
    if not n:
        return None
    seen, p99_s = 0.0, None
    for name, limit_s in zip(buckets, metrics.HOLD.buckets, strict=False):
        seen += counts.get(name, 0)
        if seen >= _SHARE * n:
            p99_s = limit_s
            break
    return Usual(task, n, counts.get(total, 0.0) / n, p99_s)


def held(asked: Asked, *, longer_s: float, limit: int, after: str | None) -> Page[Held]:
    """Return the keys of work that runs long, the longest held first."""
    before_us = asked.now_us - int(longer_s * 1e6)
    these = [
        WORK.c.flag == Flag.RUNS_LONG.value,
        WORK.c.since <= before_us,
        WORK.c.state == State.PROCESSING.value,
        WORK.c.lease_until > asked.now_us,
        WORK.c.task != LEADER_TASK,
    ]
    if after is not None:
        since, last = after_of(after, int, str)
        these += [WORK.c.since >= since, sa.or_(WORK.c.since > since, WORK.c.id > last)]
    select = sa.select(*WORK_ITEM).where(*these).order_by(WORK.c.since, WORK.c.id)
    rows = asked.rows(select.limit(limit + 1))
    more = cursor_of(rows[limit - 1].since, rows[limit - 1].id) if len(rows) > limit else None
    processes = asked.processes(row.owner for row in rows[:limit])
    found = tuple(
        Held(
            key=row.key,
            process=processes[row.owner],
            fence=row.fence,
            since_s=seconds(row.started) or row.fence / 1e6,
            lease_until_s=row.lease_until / 1e6,
            work=row.id,
            task=row.task,
            attempt=row.attempts,
        )
        for row in rows[:limit]
    )
    return Page(found, more)


def paused(asked: Asked, *, limit: int) -> Page[Held]:
    """Return the keys that operators have paused, the last paused first."""
    pauses = sa.select(ACTIONS.c.key).where(ACTIONS.c.action == Action.PAUSE.value)
    rows = asked.rows(pauses.order_by(ACTIONS.c.id.desc()).limit(_MOST_PAUSES))
    keys = list(dict.fromkeys(row.key for row in rows if row.key))
    select = sa.select(*_KEY).where(KEYS.c.key.in_(keys), KEYS.c.lease_until >= FAR_US)
    by_key = {row.key: row for row in asked.rows(select)} if keys else {}
    holders = _holders(asked, [by_key[key] for key in keys if key in by_key], ())
    found = [each for each in holders if each.paused is not None]
    note = f"Only the first {limit:,} are listed." if len(found) > limit else ""
    return Page(tuple(found[:limit]), note=note)


def keys_beginning_with(asked: Asked, prefix: str, *, limit: int) -> list[str]:
    """Return keys that begin with a text, without slots."""
    these = begins_with(KEYS.c.key, prefix)
    rows = asked.rows(sa.select(KEYS.c.key).where(*these).order_by(KEYS.c.key).limit(limit))
    return [row.key for row in rows]
