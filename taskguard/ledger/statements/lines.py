"""Work that waits for its key: NEW, with its message stored, in the order in which it was sent.

A parked message has been acknowledged: the record of its work is what is left of it. `parked` is
its place in the line of its key: the moment at which it was sent (of a retry, at which it came).
`due` says whether it was called: NULL while it waits, else until when its message, which was sent
again then, is expected. After that it is overdue, as any other work is (`outbox.py`).

Guarantees: parking is one transaction, flushed before it returns; work that is parked again keeps
its place; nobody is called while the key is held, or while another one that was called is expected.
A claim ends the waiting, whoever makes it.

Does not guarantee that only one is called at a time: two that look at the same moment may call two.
The claim of the key decides, and who comes second is parked again, in its old place. Nor that
nobody overtakes: what claims without looking at the line may do so.

Nothing is sent here: `taskguard/parking.py` does. PostgreSQL's statements give the same answers;
the contract suite compares the two.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.protocol import ClaimRequest, Waiting
from taskguard.ledger.records import Called, message_of, new_record, waiting_values
from taskguard.ledger.tables import KEYS, MESSAGES, WORK
from taskguard.states import State

__all__ = [
    "WRITE_LOCK_S",
    "Called",
    "call_next",
    "called",
    "is_behind",
    "open_keys",
    "park",
    "stands",
    "waiting",
]


WRITE_LOCK_S = 5.0


def stands(work: Any) -> sa.ColumnElement[bool]:
    """Whether it stands in the line of its key, called or not."""
    return sa.and_(work.c.parked.is_not(None), work.c.state == State.NEW.value)


def expected(work: Any, now_us: int) -> sa.ColumnElement[bool]:
    """Whether it was called a short while ago. One that was called again holds up nobody."""
    return sa.and_(work.c.due > now_us, sa.func.substr(work.c.call, 1, 8) != '{"sent":')


def is_behind(
    db: sa.Connection, request: ClaimRequest, now_us: int, *, but: str | None = None
) -> bool:
    """Whether somebody who came before this work waits for its key, or was called just now.

    Of any task `but` one.

    Nobody came before work that has begun: its holder is gone, and it is taken over. A place in the
    line is that of one message: another one of the same work stands behind it.
    """
    own = sa.and_(WORK.c.state == State.NEW.value, WORK.c.message == request.message.name)
    mine = sa.select(
        sa.case((WORK.c.state == State.PROCESSING.value, 0), (own, WORK.c.parked))
    ).where(WORK.c.id == request.work)
    other = WORK.alias()
    before = sa.and_(
        other.c.key == request.keys[0],
        stands(other),
        sa.or_(other.c.due.is_(None), expected(other, now_us)),
        other.c.parked < sa.func.coalesce(mine.scalar_subquery(), 2**63 - 1),
    )
    if but is not None:
        before = sa.and_(before, other.c.task != but)
    return db.execute(sa.select(sa.literal(1)).where(before).limit(1)).first() is not None


def park(database: Database, request: ClaimRequest) -> bool:
    """Store the work with its call, at the end of its key's line or in the place that it has.

    False if that is not to be: it runs, has ended for good, or another message stands for it, which
    has its own sender waiting for a result.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        now_us = database.now_us(db)
        sent_us = now_us if request.sent_us is None else min(request.sent_us, now_us)
        values = {**waiting_values(request, due=None), "parked": sent_us, "key": request.keys[0]}
        new = new_record(request, created_us=now_us, **values)
        db.execute(database.dialect.insert_missing(WORK, new))
        waits = WORK.c.state == State.NEW.value
        own = sa.and_(waits, sa.or_(WORK.c.call.is_(None), WORK.c.message == request.message.name))
        failed = sa.and_(WORK.c.state == State.FAILED.value, WORK.c.final == 0)
        later = sa.and_(
            WORK.c.message == request.message.name, WORK.c.retries > request.message.retries
        )
        place = sa.case((waits, sa.func.coalesce(WORK.c.parked, sent_us)), else_=now_us)
        # `parked` first: MariaDB and MySQL evaluate what follows with what was set before.
        changed = db.execute(
            sa.update(WORK)
            .where(WORK.c.id == request.work, sa.or_(own, failed), ~later)
            .ordered_values(
                (WORK.c.parked, place), *((n, v) for n, v in values.items() if n != "parked")
            )
        )
        return changed.rowcount == 1


def call_next(database: Database, key: str, *, app: str, expected_s: float) -> Called | None:
    """Note that the first who waits for the key is called, if it is free; None: nobody is.

    Nor one of another namespace than `app`. Its message is to be sent now: without a claim of its
    work within `expected_s` it is overdue.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        now_us = database.now_us(db)
        of_key = sa.and_(WORK.c.key == key, stands(WORK))
        head = (
            sa.select(WORK.c.id, WORK.c.parked, WORK.c.call)
            .where(of_key, WORK.c.due.is_(None))
            .order_by(WORK.c.parked, WORK.c.id)
            .limit(1)
        )
        first = db.execute(head).first()
        if first is None or json.loads(first.call).get("app", "") != app:
            return None
        if _is_taken(db, key, now_us):
            return None
        changed = db.execute(
            sa.update(WORK)
            .where(
                WORK.c.id == first.id,
                WORK.c.state == State.NEW.value,
                WORK.c.parked == first.parked,
                WORK.c.due.is_(None),
            )
            .values(due=now_us + int(expected_s * 1e6))
        )
        return called(db, first.id) if changed.rowcount == 1 else None


def called(db: sa.Connection, work: str) -> Called:
    """What is sent of work that was called."""
    names = ("id", "task", "message", "retries", "call", "due", "attempts")
    row = db.execute(sa.select(*(WORK.c[name] for name in names)).where(WORK.c.id == work)).one()
    numbers = sa.select(MESSAGES.c.retries, MESSAGES.c.deferrals).where(
        MESSAGES.c.message == message_of(row), MESSAGES.c.work == work
    )
    return Called(*row, *(db.execute(numbers).first() or (None, None)))


def _is_taken(db: sa.Connection, key: str, now_us: int) -> bool:
    held = sa.select(sa.literal(1)).where(KEYS.c.key == key, KEYS.c.lease_until > now_us)
    called = sa.select(sa.literal(1)).where(WORK.c.key == key, stands(WORK), expected(WORK, now_us))
    return db.execute(sa.union_all(held, called).limit(1)).first() is not None


def open_keys(database: Database, *, app: str, limit: int) -> list[str]:
    """Keys that somebody waits for, that nobody holds, and for which nobody is expected.

    Of one namespace: its relay alone knows where its messages go.
    """
    with database.transaction(bounded=False) as db:
        now_us = database.now_us(db)
        called = WORK.alias()
        waiting = (
            sa.select(WORK.c.key)
            .where(
                stands(WORK),
                WORK.c.due.is_(None),
                _of_app(app),
                ~sa.exists().where(KEYS.c.key == WORK.c.key, KEYS.c.lease_until > now_us),
                ~sa.exists().where(
                    called.c.key == WORK.c.key, stands(called), expected(called, now_us)
                ),
            )
            .distinct()
            .limit(limit)
        )
        return list(db.execute(waiting).scalars())


def _of_app(app: str) -> sa.ColumnElement[bool]:
    """By the end of the call as `stored_call()` writes it: no text in it looks like that."""
    if app:
        return WORK.c.call.endswith(f', "app": {json.dumps(app)}}}', autoescape=True)
    return WORK.c.call.not_like('%, "app": "%"}')


def waiting(database: Database, key: str | None, *, limit: int) -> list[Waiting]:
    """Who waits in the line of a key, or of each, the first of them first."""
    select = sa.select(WORK.c.key, WORK.c.id, WORK.c.message, WORK.c.parked, WORK.c.due)
    select = select.where(stands(WORK)).order_by(WORK.c.key, WORK.c.parked, WORK.c.id).limit(limit)
    if key is not None:
        select = select.where(WORK.c.key == key)
    with database.transaction(bounded=False) as db:
        return [
            Waiting(row.key, row.id, row.message, row.parked / 1e6, row.due and row.due / 1e6)
            for row in db.execute(select)
        ]
