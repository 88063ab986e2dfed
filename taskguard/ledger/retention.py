"""Delete old records: ended work, its messages, keys that have been free since the cut-off,
workers that were not seen since then, and what operators did before it. Happenings and the counts
of single minutes have cut-offs of their own. Totals stay.

Guarantees: only ended work is deleted (DONE, FAILED, and DEAD on request). A key is deleted only if
its lease ended before the cut-off, and its rate allowed a start by then. A used burst is available
again within `retention_s`. The DELETE repeats the condition. Each batch is a transaction of its
own, and locked rows are left for the next purge.

FAILED work stays, with its attempts and the results of its steps, in two cases: it keeps its
position in a strict line for a retry, or its caller cannot read yet that a newer message superseded
it. No fence decreases: the next fence of a deleted key is the database's clock, which is ahead of
all fences before the cut-off. If a holder sleeps for that long and its key is deleted, its commit
is refused as if another holder had the key.

`purge()` also flags work that no worker runs, because a fleet without a relay has no other process
that does.

Records of messages before the cut-off are lost. Tasks refuse messages that are older than their
`retention_s`, so the cut-off must be at least that long ago.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from taskguard.errors import ConfigurationError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.operations.counts import KEPT_MINUTES, MINUTE_US
from taskguard.ledger.operations.left import mark_left
from taskguard.ledger.tables import (
    ACTIONS,
    COUNTS,
    HAPPENINGS,
    KEYS,
    MESSAGES,
    RUNS,
    WORK,
    WORKERS,
)
from taskguard.model.history import Action
from taskguard.model.pauses import FAR_US
from taskguard.model.policy import LEAST_PURGE_AGE_S, MOST_ROWS, check_number
from taskguard.model.records import Purged
from taskguard.model.states import State

__all__ = ["purge"]

_LOCK_TIMEOUT_S = 5.0
_PAGE = 10_000  # rows of work that are read at a time
_ENDED = (State.DONE.value, State.FAILED.value)


def purge(
    database: Database, *, older_than_s: float, batch: int, dead: bool, history_s: float
) -> Purged:
    """Delete old records in batches. See `SqlLedger.purge`."""
    check_number("older_than_s", older_than_s, at_least=0)
    check_number("history_s", history_s, at_least=0)
    check_number("batch", batch, at_least=1, at_most=MOST_ROWS, whole=True)
    if older_than_s < LEAST_PURGE_AGE_S:
        raise ConfigurationError(
            f"older_than_s={older_than_s:g} is too low: the next token of a deleted key comes from "
            "the clock, which may be set back by less than an hour. Set at least "
            f"{LEAST_PURGE_AGE_S:g}."
        )
    with database.transaction() as db:
        now_us = database.now_us(db)
    before_us = now_us - int(older_than_s * 1e6)
    states = (*_ENDED, State.DEAD.value) if dead else _ENDED
    work_items = _in_batches(
        database,
        (WORK.c.id,),
        lambda: sa.and_(WORK.c.state.in_(states), WORK.c.finished < before_us, _is_over(before_us)),
        batch,
    )
    messages = _in_batches(
        database,
        (MESSAGES.c.message, MESSAGES.c.work),
        lambda: sa.and_(
            MESSAGES.c.updated < before_us,
            ~sa.exists().where(WORK.c.id == MESSAGES.c.work),
        ),
        batch,
    )
    _in_batches(
        database,
        (RUNS.c.work,),
        lambda: sa.and_(
            RUNS.c.updated < before_us,
            RUNS.c.follows.is_(None),
            ~sa.exists().where(WORK.c.id == RUNS.c.open),
        ),
        batch,
    )
    keys = _in_batches(
        database,
        (KEYS.c.key,),
        lambda: sa.and_(
            KEYS.c.lease_until < before_us,
            KEYS.c.fence < before_us,
            # Otherwise the next start would be too early.
            sa.func.coalesce(KEYS.c.next_start, 0) < before_us,
        ),
        batch,
    )
    # A worker that takes a key is seen within `run/names.py`'s `SEEN_EVERY_S`, and stored again if
    # need be.
    workers = _in_batches(database, (WORKERS.c.number,), lambda: WORKERS.c.seen < before_us, batch)
    happenings = _of_time(database, HAPPENINGS, now_us - int(history_s * 1e6), batch)
    actions = _of_time(database, ACTIONS, before_us, batch, _is_not_of_paused_key())
    first_minute = now_us // MINUTE_US - KEPT_MINUTES
    counts = _in_batches(
        database,
        (COUNTS.c.bucket, COUNTS.c.task, COUNTS.c.what),
        lambda: COUNTS.c.bucket < first_minute,
        batch,
        after=(1, "", ""),  # behind the totals, whose bucket is 0
    )
    after: str | None = ""
    while after is not None:
        after = mark_left(database, after=after, page=_PAGE)
    return Purged(
        work_items=work_items,
        messages=messages,
        keys=keys,
        workers=workers,
        happenings=happenings,
        actions=actions,
        counts=counts,
    )


def _of_time(
    database: Database, table: sa.Table, before_us: int, batch: int, *conditions: Any
) -> int:
    """Delete rows that were added before this time. Later rows have higher ids."""
    return _in_batches(
        database,
        (table.c.id,),
        lambda: sa.and_(table.c.at < before_us, *conditions),
        batch,
        after=(0,),
    )


def _is_not_of_paused_key() -> sa.ColumnElement[bool]:
    """Return the condition that no list of paused keys needs this action to find one."""
    paused = sa.exists().where(KEYS.c.key == ACTIONS.c.key, KEYS.c.lease_until >= FAR_US)
    return sa.or_(ACTIONS.c.action != Action.PAUSE.value, ~paused)


def _is_over(before_us: int) -> sa.ColumnElement[bool]:
    """Return the condition that ended work is final.

    FAILED work with a position in a line waits for its retry, or its caller cannot read yet that a
    newer message superseded it. Work whose message will be sent again has a due time.
    """
    is_sent_no_more = sa.or_(WORK.c.call.is_(None), sa.func.coalesce(WORK.c.due, 0) < before_us)
    return sa.and_(WORK.c.line.is_(None), is_sent_no_more)


def _in_batches(
    database: Database,
    primary_key: Sequence[sa.Column[Any]],
    condition: Callable[[], sa.ColumnElement[bool]],
    batch: int,
    *,
    after: tuple[Any, ...] | None = None,
) -> int:
    """Delete rows in order of the primary key, which needs no other index. Return their number.

    `after`: a primary key before all these rows. By default texts that are empty.
    """
    table, deleted = primary_key[0].table, 0
    after = ("",) * len(primary_key) if after is None else after
    while True:
        page = (
            sa.select(*primary_key)
            .where(_behind(primary_key, after), condition())
            .order_by(*primary_key)
            .limit(batch)
            .with_for_update(skip_locked=True, of=table)
        )
        with database.transaction(lock_timeout_s=_LOCK_TIMEOUT_S, bounded=False) as db:
            found = [tuple(row) for row in db.execute(page)]
            if found:
                gone = db.execute(sa.delete(table).where(_one_of(primary_key, found), condition()))
                deleted += gone.rowcount
        if len(found) < batch:
            return deleted
        after = found[-1]


def _behind(primary_key: Sequence[sa.Column[Any]], after: Sequence[Any]) -> sa.ColumnElement[bool]:
    """Return the condition for rows after `after`. MariaDB and MySQL use the index for it, too."""
    first = primary_key[0]
    if len(primary_key) == 1:
        behind: sa.ColumnElement[bool] = first > after[0]
        return behind
    return sa.and_(first >= after[0], sa.tuple_(*primary_key) > sa.tuple_(*after))


def _one_of(
    primary_key: Sequence[sa.Column[Any]], found: Sequence[tuple[Any, ...]]
) -> sa.ColumnElement[bool]:
    """Return the condition for these rows. It uses the index: a DELETE locks each row it reads."""
    first = primary_key[0].in_({row[0] for row in found})
    return first if len(primary_key) == 1 else sa.and_(first, sa.tuple_(*primary_key).in_(found))
