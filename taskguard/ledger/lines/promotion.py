"""Promotes the first message of a line whose key has room.

Guarantees: no message is promoted while the key is held, while another one that was promoted is
expected, or behind strict work that has not ended.

Does not guarantee that only one is promoted at a time: two processes that look at the same moment
may promote two. The claim of the key decides, and the second one is parked again, in its old
position.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.lines import states
from taskguard.ledger.lines.room import Room
from taskguard.ledger.lines.turn import is_held_up
from taskguard.ledger.records import ToSend, message_of
from taskguard.ledger.tables import MESSAGES, WORK

__all__ = ["promote_next", "to_send"]


def promote_next(
    database: Database,
    key: str,
    *,
    app: str,
    queues: Sequence[str] | None,
    expected_s: float,
    room: Room,
) -> ToSend | None:
    """Promote the first message that waits for the key, if the key has room. Return None if not.

    A message of another namespace than `app`, or of another queue than `queues`, is not promoted,
    and the messages behind it keep waiting. The caller sends the message now. It is overdue if its
    work is not claimed within `expected_s` of the time at which it may begin.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        now_us = database.now_us(db)
        head = (
            sa.select(WORK.c.id, WORK.c.rank, WORK.c.parked, WORK.c.call, WORK.c.task)
            .where(WORK.c.key == key, states.waits_first())
            .order_by(*states.in_order())
            .limit(1)
        )
        first = db.execute(head).first()
        if first is None or not _is_for(json.loads(first.call), app, queues):
            return None
        wait_us = room(db, key, now_us, first.task)
        if wait_us is None or is_held_up(db, key, first):
            return None
        changed = db.execute(
            sa.update(WORK)
            .where(
                WORK.c.id == first.id,
                states.waits(WORK),
                WORK.c.parked.is_not_distinct_from(first.parked),  # as in `states.expected_of()`
            )
            .values(line=states.promoted(), due=now_us + wait_us + int(expected_s * 1e6))
        )
        return to_send(db, first.id, wait_us) if changed.rowcount == 1 else None


def to_send(db: sa.Connection, work: str, wait_us: int = 0) -> ToSend:
    """Return what is sent of promoted work, whose message is to arrive in `wait_us`."""
    names = ("id", "task", "message", "retries", "call", "due", "attempts", "sends")
    row = db.execute(sa.select(*(WORK.c[name] for name in names)).where(WORK.c.id == work)).one()
    numbers = sa.select(MESSAGES.c.retries, MESSAGES.c.deferrals).where(
        MESSAGES.c.message == message_of(row), MESSAGES.c.work == work
    )
    found = ToSend(*row, *(db.execute(numbers).first() or (None, None)))
    return found._replace(wait_us=wait_us)


def _is_for(call: dict[str, Any], app: str, queues: Sequence[str] | None) -> bool:
    return call.get("app", "") == app and (queues is None or call.get("queue") in queues)
