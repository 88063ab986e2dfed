"""Work that no worker runs: its holder vanished, or an operator ended the lease of its key.

Guarantees: each UPDATE names the old state, and `end_holder()` the fence and the owner of the
holder, so another claim stays. The lease ends now: the next delivery takes the work over, which
counts as a crash. `mark_left()` only sets a flag, and never lets work run again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.history import flagged
from taskguard.ledger.operations.changes import history_with
from taskguard.ledger.tables import FREE, KEYS, WORK
from taskguard.model.claims import LEADER_TASK
from taskguard.model.history import Flag, works_of
from taskguard.model.states import State

__all__ = ["end_holder", "mark_left", "refuse_commit", "run_by"]


def refuse_commit(db: sa.Connection, key: Any, *, now_us: int) -> bool:
    """Free a key and raise its fence, so that a late commit or renewal of its holder is refused.

    `key` is the row as it was read. Return False if another owner or fence has the key by now.
    """
    held = KEYS.c.key == key.key, KEYS.c.fence == key.fence, KEYS.c.owner == key.owner
    values = {"owner": FREE, "fence": max(key.fence + 1, now_us), "lease_until": now_us}
    return db.execute(sa.update(KEYS).where(*held).values(**values)).rowcount == 1


def end_holder(db: sa.Connection, key: Any, *, now_us: int, text: str) -> bool:
    """End the lease of a key's holder, and of its work. Its late commit is refused.

    `key` is the row as it was read. Return False if another owner or fence has the key by now.
    """
    if not refuse_commit(db, key, now_us=now_us):
        return False
    for row in run_by(db, [key]):
        same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
        history = history_with(row, now_us=now_us, text=text)
        due = None if row.call is None else now_us
        ended = {"lease_until": now_us, "due": due, "history": history}
        ended |= flagged(Flag.LEFT, now_us)
        db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(**ended))
    return True


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


def run_by(db: sa.Connection, keys: Iterable[Any]) -> list[Any]:
    """Return the work that the holders of these keys run, locked.

    `KEYS.works` names it. A key that was claimed by an older version has no such names: then every
    record is read.
    """
    found: dict[str, Any] = {}
    for key in keys:
        theirs = (
            WORK.c.state == State.PROCESSING.value,
            WORK.c.fence == key.fence,
            WORK.c.owner == key.owner,
        )
        named = [] if key.works is None else [WORK.c.id.in_(works_of(key.works))]
        ids = db.execute(sa.select(WORK.c.id).where(*named, *theirs)).scalars().all()
        # It locks by ids, because a scan would lock every row that it reads.
        these = sa.select(WORK).where(WORK.c.id.in_(ids), *theirs).order_by(WORK.c.id)
        found |= {row.id: row for row in db.execute(these.with_for_update())}
    return list(found.values())
