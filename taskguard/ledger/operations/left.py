"""Work that no worker runs: its holder vanished, or an operator ended the lease of its key.

Guarantees: each UPDATE names the old state, and `end_holder()` the fence and the owner of the
holder, so another claim stays. The lease ends now: the next delivery takes the work over, which
counts as a crash. `mark_left()` only sets a flag, and never lets work run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.history import flagged
from taskguard.ledger.operations.changes import history_with
from taskguard.ledger.tables import FREE, KEYS, WORK
from taskguard.model.claims import LEADER_TASK
from taskguard.model.history import Flag, works_of
from taskguard.model.states import State

__all__ = ["end_holder", "keys_of_holder", "mark_left", "refuse_commit", "run_by"]


def refuse_commit(db: sa.Connection, key: Any, *, now_us: int) -> None:
    """Free a key and raise its fence, so that a late commit or renewal of its holder is refused.

    `key` is its locked row.
    """
    held = KEYS.c.key == key.key, KEYS.c.fence == key.fence, KEYS.c.owner == key.owner
    values = {"owner": FREE, "fence": max(key.fence + 1, now_us), "lease_until": now_us}
    db.execute(sa.update(KEYS).where(*held).values(**values))


def keys_of_holder(db: sa.Connection, *, fence: int, owner: str) -> list[Any]:
    """Return the rows of all keys that a holder has by one claim, locked in order."""
    same = KEYS.c.fence == fence, KEYS.c.owner == owner
    # It locks by names, because a scan would lock every row that it reads.
    names = db.execute(sa.select(KEYS.c.key).where(*same)).scalars().all()
    these = sa.select(KEYS).where(KEYS.c.key.in_(names), *same).order_by(KEYS.c.key)
    return list(db.execute(these.with_for_update()))


def end_holder(db: sa.Connection, keys: Sequence[Any], *, now_us: int, text: str) -> None:
    """End the lease of a holder on all of its keys, and of its work. Its late commit is refused.

    `keys` are their locked rows, as `keys_of_holder()` returns them.
    """
    for key in keys:
        refuse_commit(db, key, now_us=now_us)
    for row in run_by(db, keys):
        same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
        history = history_with(row, now_us=now_us, text=text)
        due = None if row.call is None else now_us
        ended = {"lease_until": now_us, "due": due, "history": history}
        ended |= flagged(Flag.LEFT, now_us)
        db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(**ended))


def mark_left(database: Database, *, after: str, page: int) -> str | None:
    """Flag the work of one page of the table whose lease has expired, so that an index has it.

    A page is read in order of the primary key, because no index has the state. A renewal or a claim
    removes the flag.

    Args:
        database: the database.
        after: the last id of the page before, or "".
        page: the number of rows to read.

    Returns:
        The last id of the page, or None if it was the last page.
    """
    behind = WORK.c.id > after
    ids = sa.select(WORK.c.id).where(behind).order_by(WORK.c.id)
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        last: str | None = db.scalar(ids.offset(page - 1).limit(1))
        of_page = behind if last is None else sa.and_(behind, WORK.c.id <= last)
        left = (
            WORK.c.state == State.PROCESSING.value,
            WORK.c.lease_until <= database.now_us(db),
            sa.func.coalesce(WORK.c.flag, int(Flag.RUNS_LONG)) == int(Flag.RUNS_LONG),
            # A leader that is gone is replaced by its followers, if there are any.
            sa.not_(sa.and_(WORK.c.task == LEADER_TASK, WORK.c.key.contains("leader:"))),
        )
        # It updates by ids, because an UPDATE of the page would lock every row that it reads.
        found = db.execute(sa.select(WORK.c.id).where(of_page, *left)).scalars().all()
        if found:
            values = flagged(Flag.LEFT, WORK.c.lease_until)
            db.execute(sa.update(WORK).where(WORK.c.id.in_(found), *left).values(**values))
    return last


def run_by(db: sa.Connection, keys: Sequence[Any]) -> list[Any]:
    """Return the work that the holders of these keys run, locked.

    `KEYS.works` names it, the newest first. The holder of a plain lock runs none.
    """
    found: dict[str, Any] = {}
    for key in keys:
        theirs = (
            WORK.c.state == State.PROCESSING.value,
            WORK.c.fence == key.fence,
            WORK.c.owner == key.owner,
        )
        named = WORK.c.id.in_(works_of(key.works))
        these = sa.select(WORK).where(named, *theirs).order_by(WORK.c.id)
        found |= {row.id: row for row in db.execute(these.with_for_update())}
    return list(found.values())
