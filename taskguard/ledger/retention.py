"""Forgetting what is long done: work, its messages, and keys that nobody has held since.

Guarantees: only work that has ended (DONE, FAILED; DEAD if asked for) goes, and keys whose lease
ended before the cut-off (released by their holders, or run out, as after a crash), and whose rate
allowed a start by then; a burst that is used up is allowed again within `retention_s`. The
DELETE repeats that condition; a batch is a transaction of its own, and rows that somebody has
locked are left for the next time. FAILED work stays, with its attempts and what its steps have
stored, as long as it keeps its place in a strict line for a retry, or its caller has not heard that
a newer message took its place. No fence goes back: the next one of a key that is gone is the
database's clock, which is ahead of every fence from before the cut-off. A holder that sleeps for so
long, and finds its key gone, is refused as if another had it.

Does not guarantee that a message older than the cut-off is known: tasks refuse those that are older
than their `retention_s`, so a cut-off has to be at least that long ago.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sqlalchemy as sa

from taskguard.errors import ConfigurationError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.tables import KEYS, MESSAGES, WORK
from taskguard.model.policy import LEAST_PURGE_AGE_S, MOST_ROWS, check_number
from taskguard.model.records import Purged
from taskguard.model.states import State

__all__ = ["purge"]

_LOCK_TIMEOUT_S = 5.0
_ENDED = (State.DONE.value, State.FAILED.value)


def purge(database: Database, *, older_than_s: float, batch: int, dead: bool) -> Purged:
    """Delete in batches; see `SqlLedger.purge`."""
    check_number("older_than_s", older_than_s, at_least=0)
    check_number("batch", batch, at_least=1, at_most=MOST_ROWS, whole=True)
    if older_than_s < LEAST_PURGE_AGE_S:
        raise ConfigurationError(
            f"older_than_s={older_than_s:g}: at least {LEAST_PURGE_AGE_S:g}, an hour. The next "
            "token of a forgotten key comes from the clock, which may be set back by less than "
            "that."
        )
    with database.transaction() as db:
        before_us = database.now_us(db) - int(older_than_s * 1e6)
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
    keys = _in_batches(
        database,
        (KEYS.c.key,),
        lambda: sa.and_(
            KEYS.c.lease_until < before_us,
            KEYS.c.fence < before_us,
            # Else the next start would come too early.
            sa.func.coalesce(KEYS.c.next_start, 0) < before_us,
        ),
        batch,
    )
    return Purged(work_items=work_items, messages=messages, keys=keys)


def _is_over(before_us: int) -> sa.ColumnElement[bool]:
    """Whether nothing is to come of work that has ended.

    FAILED work in a place keeps that for its retry, or its caller has not heard yet that a newer
    message took it. Work whose message is to be sent is due.
    """
    is_sent_no_more = sa.or_(WORK.c.call.is_(None), sa.func.coalesce(WORK.c.due, 0) < before_us)
    return sa.and_(WORK.c.line.is_(None), is_sent_no_more)


def _in_batches(
    database: Database,
    primary_key: Sequence[sa.Column[str]],
    condition: Callable[[], sa.ColumnElement[bool]],
    batch: int,
) -> int:
    """Delete rows and return how many: one walk along the primary key, which needs no index."""
    table, deleted, after = primary_key[0].table, 0, ("",) * len(primary_key)
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


def _behind(primary_key: Sequence[sa.Column[str]], after: Sequence[str]) -> sa.ColumnElement[bool]:
    """Rows after that one, by a condition for which MariaDB and MySQL use the index, too."""
    first = primary_key[0]
    if len(primary_key) == 1:
        return first > after[0]
    return sa.and_(first >= after[0], sa.tuple_(*primary_key) > sa.tuple_(*after))


def _one_of(
    primary_key: Sequence[sa.Column[str]], found: Sequence[tuple[str, ...]]
) -> sa.ColumnElement[bool]:
    """These rows, by the index: a DELETE locks every row that it reads."""
    first = primary_key[0].in_({row[0] for row in found})
    return first if len(primary_key) == 1 else sa.and_(first, sa.tuple_(*primary_key).in_(found))
