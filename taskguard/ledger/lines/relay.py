"""Reads of lines for a relay: keys that are open, and messages that have expired.

Only messages of the relay's own namespace and queues are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.lines import states
from taskguard.ledger.lines.promotion import to_send
from taskguard.ledger.lines.room import holders
from taskguard.ledger.records import ToSend
from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.bounds import Rate
from taskguard.model.line_states import LineState

__all__ = ["expired", "has_expired", "has_lines", "of_relay", "open_keys"]

_READ = ("key", "id", "task", "line", "rank", "parked")
# A message that was promoted with its rate's delay is due within this time. Work that is due later
# was enqueued. There may be many of these, and they are not read.
_LONGEST_EXPECTED_US = 65_000_000
_KEPT = LineState.KEPT.value


def open_keys(
    db: sa.Connection,
    now_us: int,
    *,
    app: str,
    queues: Sequence[str] | None,
    ahead_us: int,
    after: str | None,
    most: int,
    rates: Mapping[str, Rate | None],
) -> tuple[list[str], str | None, list[str]]:
    """Return keys whose first waiting message may be promoted now, and the last key that was read.

    The third value has the tasks of messages that wait for a rate on record. Tasks in `rates` are
    left out, because the rate that they declare now counts.

    At most `most` messages are read, in the order of their keys, from the first key after `after`.
    The second value is None if there are no more. A key is open if it is free, and its rate allows
    a start in at most `ahead_us`. Fewer deliveries must hold its slots, and be expected, than it
    has slots. No strict work before the first message may be unfinished. The first
    message must be of this namespace and of these queues. Other relays promote other messages.
    """
    begins = [WORK.c.parked.is_not(None)] + ([] if after is None else [WORK.c.key > after])
    columns = (WORK.c[name] for name in _READ)
    page = sa.select(*columns).where(*begins).order_by(WORK.c.key, *states.in_order()).limit(most)
    last = page.with_only_columns(WORK.c.key).limit(1).offset(most - 1)
    goes_on: str | None = db.execute(last).scalar()
    read = page.subquery()
    with_keys = read.outerjoin(KEYS, KEYS.c.key == read.c.key)
    is_free = sa.func.coalesce(KEYS.c.lease_until, 0) <= now_us
    is_early = sa.func.coalesce(KEYS.c.next_start, 0) > now_us + ahead_us
    free = (
        sa.select(read, sa.func.coalesce(KEYS.c.slots, 1).label("slots"))
        .select_from(with_keys)
        .where(is_free, sa.or_(~is_early, *_outdated(read, now_us, rates)))
        .order_by(read.c.key, read.c.rank, read.c.parked)
    )
    rows = db.execute(free).all()
    unknown = sa.select(read.c.task).distinct().select_from(with_keys).where(is_early)
    early = [task for task in db.execute(unknown).scalars() if task not in rates]
    slots = {row.key: row.slots for row in rows}
    firsts = _firsts(rows)
    if (
        goes_on is not None and goes_on in slots and goes_on not in firsts
    ):  # it has more messages than were read
        first = sa.select(WORK.c.id).where(WORK.c.key == goes_on, states.waits_first()).limit(1)
        firsts[goes_on] = db.execute(first.order_by(*states.in_order())).scalar()
    ids = [first for first in firsts.values() if first is not None]
    if not ids:
        return [], goes_on, early
    mine = states.waits(WORK), of_relay(app, queues)
    ours = sa.select(WORK.c.key).where(WORK.c.id.in_(ids), *mine)
    found = sorted(db.execute(ours).scalars())
    taken = _taken(db, now_us, [key for key in found if slots[key] > 1]) if found else {}
    return [key for key in found if taken.get(key, 0) < slots[key]], goes_on, early


def _outdated(
    read: Any, now_us: int, rates: Mapping[str, Rate | None]
) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that a start on record follows from an outdated rate of its task."""
    tasks: dict[int, list[str]] = {}
    for task, rate in rates.items():
        tasks.setdefault(rate.interval_us if rate is not None else 0, []).append(task)
    return [
        sa.and_(read.c.task.in_(names), KEYS.c.next_start > now_us + interval_us)
        for interval_us, names in tasks.items()
    ]


def _firsts(rows: Iterable[Any]) -> dict[str, str | None]:
    """Return the first waiting message of each key. None: strict work before it must end first."""
    firsts: dict[str, str | None] = {}
    for row in rows:
        if row.line == LineState.WAITING:
            firsts.setdefault(row.key, row.id)
        elif row.line == LineState.KEPT:
            firsts.setdefault(row.key, None)
    return firsts


def _taken(db: sa.Connection, now_us: int, several: Sequence[str]) -> dict[str, int]:
    """Return how many messages of each key are expected. For keys of `several`, add held slots."""
    window = WORK.c.due > now_us, WORK.c.due < now_us + _LONGEST_EXPECTED_US
    promoted = states.expected(WORK, now_us)
    taken: dict[str, int] = {}
    for key in db.execute(sa.select(WORK.c.key).where(*window, promoted)).scalars():
        taken[key] = taken.get(key, 0) + 1
    if several:
        held = sa.select(KEYS.c.key, holders(KEYS.c.key, now_us)).where(KEYS.c.key.in_(several))
        for key, count in db.execute(held):
            taken[key] = taken.get(key, 0) + count
    return taken


def has_lines(database: Database, *, app: str, queues: Sequence[str] | None) -> bool:
    """Return True if a message of this namespace and these queues is in a line."""
    mine = sa.select(sa.literal(1)).where(WORK.c.parked.is_not(None), of_relay(app, queues))
    with database.transaction(bounded=False) as db:
        return db.execute(mine.limit(1)).first() is not None


def has_expired(db: sa.Connection, now_us: int, *, app: str, queues: Sequence[str] | None) -> bool:
    """Return True if a message of this namespace and these queues has expired while it waited."""
    past = _expired(now_us, app, queues)
    return db.execute(sa.select(sa.literal(1)).where(*past).limit(1)).first() is not None


def _expired(
    now_us: Any, app: str, queues: Sequence[str] | None
) -> tuple[sa.ColumnElement[bool], ...]:
    return WORK.c.expires <= now_us, states.waits(WORK), of_relay(app, queues)


def expired(
    database: Database, *, app: str, queues: Sequence[str] | None, limit: int
) -> list[ToSend]:
    """Return messages that expired while they waited, the longest expired first.

    They are overdue from their expiry on. So they block no message, and are sent again until their
    end is on record. Two relays that look at the same moment find each of them once. Work whose row
    is locked is left out.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        past = _expired(database.now_us(db), app, queues)
        these = sa.select(WORK.c.id).where(*past)
        these = these.order_by(WORK.c.expires, WORK.c.id).limit(limit)
        free = these.with_for_update(key_share=True, skip_locked=True)
        found = list(db.execute(free).scalars())
        if found:
            due = sa.update(WORK).where(WORK.c.id.in_(found), *past)
            line = sa.case((WORK.c.strict == 1, _KEPT), else_=LineState.EXPIRED.value)
            db.execute(due.values(line=line, due=WORK.c.expires))
        return [to_send(db, work) for work in found]


def of_relay(app: str, queues: Sequence[str] | None) -> sa.ColumnElement[bool]:
    """Return the condition that a call is of this namespace, and of one of these queues."""
    return sa.and_(_of_app(app), _of_queues(queues))


def _of_app(app: str) -> sa.ColumnElement[bool]:
    """Compare the end of the call as `stored_call()` writes it. No text in a call looks like it."""
    if app:
        return WORK.c.call.endswith(f', "app": {json.dumps(app)}}}', autoescape=True)
    return WORK.c.call.not_like('%, "app": "%"}')


def _of_queues(queues: Sequence[str] | None) -> sa.ColumnElement[bool]:
    """Compare the beginning of the call, which every integration writes like this."""
    if queues is None:
        return sa.true()
    names = [f'{{"queue": {json.dumps(queue)},' for queue in queues]
    return sa.or_(sa.false(), *(WORK.c.call.startswith(name, autoescape=True) for name in names))
