"""A snapshot of the whole ledger: the gauges of `metrics.py`, in one row that all viewers read.

Guarantees: a viewer that finds the row too old takes a new snapshot, and a conditional UPDATE lets
only one process do that at a time. So a hundred viewers cost the database what one costs. A process
that may not write keeps a snapshot of its own. Each question has a limit of two seconds. If it
takes longer, its old answer stays with its time, and it is asked again after five minutes. On
PostgreSQL no question reads all of `taskguard_work`: each reads an index, and at most 10,001 rows
of it.

Does not guarantee numbers of one moment: each question has a transaction of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from taskguard import metrics
from taskguard.errors import LedgerSchemaError, LedgerUnavailableError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.errors import CannotWriteError
from taskguard.ledger.lines import states
from taskguard.ledger.operations.sizes import sizes
from taskguard.ledger.tables import ACTIONS, KEYS, SNAPSHOT, WORK, WORKERS
from taskguard.metrics import Metric
from taskguard.model.claims import LEADER_TASK
from taskguard.model.history import Action, Flag
from taskguard.model.pauses import FAR_US
from taskguard.model.snapshots import SnapshotView
from taskguard.model.states import State
from taskguard.model.workers import NO_PROCESS
from taskguard.values import value

__all__ = ["MOST_COUNTED", "QUESTIONS", "snapshot"]

MOST_COUNTED = 10_001
"""At most so many rows of a kind are counted: 10,001 means more than 10,000."""

_MOST_KEYS = 1_000
_SAMPLE = 1_000  # rows at each end of the index of ids, whose oldest end is looked for
_LONGEST_S = 2.0
_LONGEST_FOR_ONE_WRITER_S = 0.2  # on SQLite a question keeps all others from writing
_LATE_AGAIN_S = 300.0
_REFUSED_AGAIN_S = 300.0  # each refused statement is a line in the database's log
_SEEN_S = 3_600.0  # a worker says three times an hour that it is there

_OPEN = (State.NEW.value, State.PROCESSING.value, State.FAILED.value)
_ENDED = (State.DONE.value, State.FAILED.value)
_ROW = SNAPSHOT.c.number == 1

Rows = list[list[Any]]
Answer = dict[Metric, Rows]


@value
class _Own:
    """The snapshot of a process that may not write.

    Attributes:
        taken_us: when it was taken.
        stored: the answers, as the row has them.
        refused_us: when the database refused to write the row.
    """

    taken_us: int
    stored: dict[str, Any]
    refused_us: int


_own: WeakKeyDictionary[Database, _Own] = WeakKeyDictionary()


def snapshot(database: Database, *, max_age_s: float) -> SnapshotView:
    """Return the latest snapshot. Take a new one if it is older, and no other process takes it."""
    with database.transaction() as db:
        now_us = database.now_us(db)
        found = db.execute(sa.select(SNAPSHOT.c.taken, SNAPSHOT.c.json).where(_ROW)).first()
    row_us, text = (0, None) if found is None else found
    taken_us, stored = row_us, json.loads(text) if text else {}
    own = _own.get(database)
    if own is not None and own.taken_us > row_us:
        taken_us, stored = own.taken_us, own.stored
    if taken_us > now_us - int(max_age_s * 1e6):
        return _view(stored, taken_us, now_us)
    refused_us = _refused_us(own, now_us)
    if refused_us is None:
        try:
            if not _may_take(database, row_us, now_us):
                return _view(stored, taken_us, now_us)
        except (LedgerSchemaError, CannotWriteError):  # a role that reads, a standby
            refused_us = now_us
    stored = {name: _asked(database, name, stored.get(name)) for name in QUESTIONS}
    if refused_us is not None:
        _own[database] = _Own(now_us, stored, refused_us)
    with database.transaction() as db:
        if refused_us is None:
            ours = _ROW, SNAPSHOT.c.taken == now_us
            db.execute(sa.update(SNAPSHOT).where(*ours).values(json=json.dumps(stored)))
        return _view(stored, now_us, max(now_us, database.now_us(db)))


def _refused_us(own: _Own | None, now_us: int) -> int | None:
    """Return when the database refused to write, if that was a moment ago."""
    if own is None or now_us - own.refused_us > _REFUSED_AGAIN_S * 1e6:
        return None
    return own.refused_us


def _may_take(database: Database, taken_us: int, now_us: int) -> bool:
    """Return True if this process takes the snapshot: no other one has taken it meanwhile."""
    with database.transaction() as db:
        missing = {"number": 1, "taken": 0, "json": None}
        if not taken_us:
            db.execute(database.dialect.insert_missing(SNAPSHOT, missing))
        ours = sa.update(SNAPSHOT).where(_ROW, SNAPSHOT.c.taken == taken_us)
        return db.execute(ours.values(taken=now_us)).rowcount == 1


def _asked(database: Database, name: str, before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the answer to a question with its time, or the answer before if it takes too long."""
    before = before or {"at": 0, "late": 0, "rows": {}}
    longest_s = _LONGEST_FOR_ONE_WRITER_S if database.dialect.one_writer else _LONGEST_S
    try:
        with database.transaction() as db:
            now_us = database.now_us(db)
            if now_us - before["late"] < _LATE_AGAIN_S * 1e6:
                return before
            with database.dialect.answering(db, longest_s):
                rows = QUESTIONS[name](db, now_us)
    except LedgerUnavailableError:
        return {**before, "late": database.clock_us()}
    return {"at": now_us, "late": 0, "rows": {metric.name: each for metric, each in rows.items()}}


def _view(stored: dict[str, Any], taken_us: int, now_us: int) -> SnapshotView:
    values: dict[str, Rows] = {}
    read_s: dict[str, float] = {}
    for part in stored.values():
        values |= part["rows"]
        read_s |= dict.fromkeys(part["rows"], part["at"] / 1e6)
    return SnapshotView(taken_us / 1e6, max(0.0, (now_us - taken_us) / 1e6), values, read_s)


# -- the questions ------------------------------------------------------------------------------


def _work(db: sa.Connection, now_us: int) -> Answer:
    """Count work by task and state, by its flag."""
    late = WORK.c.due <= now_us, WORK.c.call.is_not(None), WORK.c.state.in_(_OPEN)
    left = WORK.c.flag == Flag.LEFT.value, WORK.c.due.is_(None)
    alive = _alive(now_us)
    overdue = _by_task(db, late, WORK.c.due) + _by_task(db, left, WORK.c.since)
    counted = {
        "failed": _by_task(db, [WORK.c.flag == Flag.FAILED.value], WORK.c.since),
        "dead": _by_task(db, [WORK.c.flag == Flag.DEAD.value], WORK.c.since),
        "overdue": overdue,
        "running": _by_task(db, alive, WORK.c.since),
    }
    rows = [[task, state, n] for state, found in counted.items() for task, n in found.items()]
    firsts = [_first(db, WORK.c.due, late), _first(db, WORK.c.since, left)]
    return {
        metrics.WORK: sorted(rows),
        metrics.OLDEST_OVERDUE: _age(min(filter(None, firsts), default=None), now_us),
    }


def _alive(now_us: int) -> list[sa.ColumnElement[bool]]:
    """Return conditions of work that runs long. A leader holds its key as long as it lives."""
    runs = WORK.c.flag == Flag.RUNS_LONG.value, WORK.c.lease_until > now_us
    return [*runs, WORK.c.task != LEADER_TASK]


def _by_task(
    db: sa.Connection, where: Iterable[sa.ColumnElement[bool]], order: sa.Column[Any]
) -> Counter[str]:
    some = sa.select(WORK.c.task).where(*where).order_by(order).limit(MOST_COUNTED).subquery()
    rows = db.execute(sa.select(some.c.task, sa.func.count()).group_by(some.c.task))
    return Counter(dict(map(tuple, rows)))


def _first(
    db: sa.Connection, column: sa.Column[int], where: Iterable[sa.ColumnElement[bool]]
) -> int | None:
    found: int | None = db.execute(
        sa.select(column).where(*where).order_by(column).limit(1)
    ).scalar()
    return found


def _age(since_us: int | None, now_us: int) -> Rows:
    return [[0.0 if since_us is None else max(0.0, (now_us - since_us) / 1e6)]]


def _waiting(db: sa.Connection, _now_us: int) -> Answer:
    """Count messages that wait, by task, in the order of their lines."""
    place = (WORK.c.key, *states.in_order())
    some = sa.select(WORK.c.task).where(states.waits_first()).order_by(*place)
    read = some.limit(MOST_COUNTED).subquery()
    rows = db.execute(sa.select(read.c.task, sa.func.count()).group_by(read.c.task))
    return {metrics.WAITING: sorted([task, n] for task, n in rows)}


def _lines(db: sa.Connection, now_us: int) -> Answer:
    """Count the keys that messages wait for, and find the message that waits longest.

    Each step of the recursion finds the next key by the index of lines. The first message of a line
    is the oldest of the highest priority.
    """
    waits = WORK.c.parked.is_not(None)
    begin = sa.select(sa.func.min(WORK.c.key).label("key"), sa.literal(1).label("n")).where(waits)
    lines = begin.cte("lines", recursive=True)
    following = sa.select(sa.func.min(WORK.c.key)).where(waits, WORK.c.key > lines.c.key)
    step = sa.select(following.scalar_subquery(), lines.c.n + 1)
    lines = lines.union_all(step.where(lines.c.key.is_not(None), lines.c.n < _MOST_KEYS))
    first = sa.select(WORK.c.parked).where(WORK.c.key == lines.c.key, states.waits_first())
    oldest = first.order_by(*states.in_order()).limit(1).scalar_subquery()
    each = sa.select(oldest.label("parked")).where(lines.c.key.is_not(None)).subquery()
    keys, parked = db.execute(
        sa.select(sa.func.count(each.c.parked), sa.func.min(each.c.parked))
    ).one()
    return {metrics.WAITING_KEYS: [[keys]], metrics.OLDEST_WAIT: _age(parked, now_us)}


def _held(db: sa.Connection, now_us: int) -> Answer:
    """Find the work that has run longest, among work whose lease was renewed."""
    alive = _alive(now_us)
    longest = sa.select(WORK.c.started).where(*alive).order_by(WORK.c.since).limit(1)
    return {metrics.LONGEST_HOLD: _age(db.execute(longest).scalar(), now_us)}


def _paused(db: sa.Connection, _now_us: int) -> Answer:
    """Count keys that operators have paused. The record of actions names them."""
    paused = sa.select(ACTIONS.c.key).where(ACTIONS.c.action == Action.PAUSE.value).distinct()
    of_operator = KEYS.c.owner.startswith(NO_PROCESS), KEYS.c.lease_until >= FAR_US
    keys = sa.select(sa.func.count()).where(KEYS.c.key.in_(paused), *of_operator)
    return {metrics.PAUSED_KEYS: [[db.execute(keys).scalar_one()]]}


def _workers(db: sa.Connection, now_us: int) -> Answer:
    seen = WORKERS.c.seen > now_us - int(_SEEN_S * 1e6)
    kinds = sa.select(WORKERS.c.kind, sa.func.count()).where(seen).group_by(WORKERS.c.kind)
    return {metrics.WORKERS: sorted([kind, n] for kind, n in db.execute(kinds))}


def _sizes(db: sa.Connection, _now_us: int) -> Answer:
    found = sizes(db)
    return {
        metrics.LEDGER_ROWS: [[table, rows] for table, rows, _ in found if rows is not None],
        metrics.LEDGER_BYTES: [[table, size] for table, _, size in found if size is not None],
    }


def _ended(db: sa.Connection, now_us: int) -> Answer:
    """Find when the oldest work ended, in a sample: no index has `finished`."""
    ends = (
        sa.select(WORK.c.state, WORK.c.finished).order_by(order).limit(_SAMPLE)
        for order in (WORK.c.id, WORK.c.id.desc())
    )
    oldest = []
    for end in ends:
        some = end.subquery()
        first = sa.select(sa.func.min(some.c.finished)).where(some.c.state.in_(_ENDED))
        oldest.append(db.execute(first).scalar())
    return {metrics.OLDEST_ENDED: _age(min(filter(None, oldest), default=None), now_us)}


QUESTIONS: dict[str, Callable[[sa.Connection, int], Answer]] = {
    "work": _work,
    "waiting": _waiting,
    "lines": _lines,
    "held": _held,
    "paused": _paused,
    "workers": _workers,
    "sizes": _sizes,
    "ended": _ended,
}
"""What a snapshot asks."""
