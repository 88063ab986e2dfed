"""Park work in the line of its key: NEW, with its message stored, in the order of sending.

A parked message has been acknowledged, so the record of its work is its only copy.

Guarantees: parking is one transaction, flushed before it returns; work that is parked again keeps
its position. A claim ends the waiting, whichever process claims.

Nothing is sent here: `taskguard/run/parking.py` does. PostgreSQL's statements give the same
answers; the contract suite compares the two.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.errors import LineFullError
from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.history import flagged
from taskguard.ledger.lines import states
from taskguard.ledger.messages import is_replaced
from taskguard.ledger.records import new_record, waiting_values
from taskguard.ledger.runs import run_of
from taskguard.ledger.tables import KEYS, MESSAGES, NO_POSITION, WORK
from taskguard.model.claims import ClaimRequest
from taskguard.model.history import Flag
from taskguard.model.lease import Owner
from taskguard.model.line_states import LineState
from taskguard.model.runs import FAILED_RUN
from taskguard.model.states import State

__all__ = ["is_on_record", "may_wait", "park", "position_of"]


class _MayNotWaitError(Exception):
    """The work may not wait. Its transaction is rolled back."""


def park(database: Database, request: ClaimRequest, *, only_new: bool = False) -> bool:
    """Store the work with its call, at the end of its key's line or in the position that it has.

    Return False if the work may not wait: it is in progress, has ended for good, or another message
    is stored for it, whose own caller waits for the result. Also return False for a message whose
    call was replaced, even if the newer message has failed. With `only_new`, return False also if
    the work or its message is on record.

    Raise LineFullError if `max_waiting` is reached. If two messages arrive at once, both may get
    the last position.
    """
    try:
        with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            run = None
            if request.by_run:
                run = run_of(database, db, request)
                if run.found.waits or run.found.ends is not None:
                    return False
                request = run.request
            if only_new and is_on_record(db, request):
                return False
            full = request.max_waiting is not None and _is_full(database, db, request)
            if full:
                _refuse(database, db, request)
            else:
                _park(database, db, request)
                if run is not None:
                    run.settle(database, db)
    except _MayNotWaitError:
        return False
    if full:
        raise LineFullError(
            f"{request.task} {request.line}: {request.max_waiting} messages wait for this key, "
            "which is all that max_waiting= allows. Nothing was run, and this message was not "
            "stored. Send it again when fewer wait (`taskguard waiting --key …` lists them), or "
            "allow more.",
            key=request.line,
        )
    return True


def _is_full(database: Database, db: sa.Connection, request: ClaimRequest) -> bool:
    """Return True if `max_waiting` others wait, and the key is not paused: refuse this message.

    They never refuse work that is in line or has begun. Nor do they refuse a message that never
    runs, because its work was revoked, or its call was replaced.
    """
    known = sa.or_(WORK.c.line.is_not(None), WORK.c.attempts > 0, WORK.c.final > 0)
    ids = (str(request.work), *request.formerly)
    is_known = sa.select(WORK.c.id).where(WORK.c.id.in_(ids), known)
    if db.execute(is_known).first() is not None:
        return False
    of_lines = WORK.c.key.in_(request.lines), states.is_in_line(WORK)
    in_line = sa.select(sa.literal(1).label("one")).where(*of_lines)
    first = in_line.limit(request.max_waiting).subquery()
    count: int = db.execute(sa.select(sa.func.count()).select_from(first)).scalar_one()
    if count < (request.max_waiting or 0):
        return False
    if db.execute(sa.select(is_replaced(request))).scalar():
        return False
    return not _is_paused(database, db, request)


def _is_paused(database: Database, db: sa.Connection, request: ClaimRequest) -> bool:
    """Return True if an operator has paused a key of the line, so that it cannot drain."""
    held = KEYS.c.key.in_(request.lines), KEYS.c.lease_until > database.now()
    owners = db.execute(sa.select(KEYS.c.owner).where(*held)).scalars()
    return any(Owner.parse(each).is_pause for each in owners)


def _refuse(database: Database, db: sa.Connection, request: ClaimRequest) -> None:
    """Move work that was enqueued with this message NEW -> FAILED, so that it is not sent again."""
    db.execute(
        sa.update(WORK)
        .where(
            WORK.c.id == request.work,
            WORK.c.state == State.NEW.value,
            WORK.c.attempts == 0,
            WORK.c.line.is_(None),
            WORK.c.message == request.message.name,
        )
        .values(
            state=State.FAILED.value,
            final=0 if request.base is None else FAILED_RUN,
            error="the line of its key was full",
            **flagged(Flag.FAILED, database.now()),
            due=None,
            finished=database.now(),
        )
    )


def _park(database: Database, db: sa.Connection, request: ClaimRequest) -> None:
    """Park the message, or raise _MayNotWaitError."""
    now_us = database.now_us(db)
    position, kept = position_of(request, now_us, LineState.WAITING), None
    former: list[Any] = []
    if request.formerly:
        former = _former_records(db, request)
        if not all(may_wait(row, request) for row in former):
            raise _MayNotWaitError
        kept = min((row.parked for row in former if row.parked is not None), default=None)
        position["parked"] = position["parked"] if kept is None else kept
    values = {**waiting_values(request, due=None), **position}
    new = new_record(request, created_us=now_us, **values)
    db.execute(database.dialect.insert_missing(WORK, new))
    waits = WORK.c.state == State.NEW.value
    own = sa.and_(waits, sa.or_(WORK.c.call.is_(None), WORK.c.message == request.message.name))
    failed = sa.and_(WORK.c.state == State.FAILED.value, WORK.c.final == 0)
    # A position that was kept belongs to its message.
    failed = sa.and_(failed, sa.or_(WORK.c.line.is_(None), WORK.c.message == values["message"]))
    later = sa.and_(
        WORK.c.message == request.message.name, WORK.c.retries > request.message.retries
    )
    # A retry goes to the end, unless its work has kept its position.
    keeps_position = sa.or_(waits, sa.literal(request.strict or kept is not None))
    anew = sa.case((keeps_position, position["parked"]), else_=now_us)
    parked = sa.func.coalesce(WORK.c.parked, anew)
    # A message in line keeps its earliest expiry; see `expiry_of()`.
    first = sa.and_(waits, WORK.c.line.is_not(None), WORK.c.message == request.message.name)
    if request.expires_us is not None:
        first = sa.and_(first, WORK.c.expires < request.expires_us)
    expires = sa.case((first, WORK.c.expires), else_=request.expires_us)
    # These come first: MariaDB and MySQL evaluate an assignment with the values set before it.
    ordered = {"expires": expires, "parked": parked}
    changed = db.execute(
        sa.update(WORK)
        .where(
            WORK.c.id == request.work,
            sa.or_(own, failed),
            ~later,
            ~is_replaced(request),
        )
        .ordered_values(*ordered.items(), *((n, v) for n, v in values.items() if n not in ordered))
    )
    if changed.rowcount != 1:
        raise _MayNotWaitError
    _leave_former(db, former)


def _former_records(db: sa.Connection, request: ClaimRequest) -> list[Any]:
    """Return the records under former ids. They and the work's own are locked in order."""
    ids = (str(request.work), *request.formerly)
    rows = db.execute(
        sa.select(WORK).where(WORK.c.id.in_(ids)).order_by(WORK.c.id).with_for_update()
    ).all()
    return [row for row in rows if row.id != request.work]


def may_wait(row: Any, request: ClaimRequest) -> bool:
    """Return True if the work is NEW, or FAILED and not final, and this message may wait for it.

    It may not if a later retry of it, or another message, is on record for the work.
    """
    mine = row.message == request.message.name
    if mine and row.retries > request.message.retries:
        return False
    if row.state == State.FAILED.value:
        return not row.final and (row.line is None or mine)
    return row.state == State.NEW.value and (row.call is None or mine)


def _leave_former(db: sa.Connection, former: list[Any]) -> None:
    """Take the message out of its former lines, because it waits under its new id."""
    for row in former:
        same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
        left = sa.update(WORK).where(WORK.c.id == row.id, *same)
        db.execute(left.values(call=None, sends=None, due=None, **NO_POSITION))


def position_of(request: ClaimRequest, now_us: int, line: LineState) -> dict[str, Any]:
    """Return the columns of a state, and of a position by the time of sending.

    If the sender's clock is ahead, that time is now.
    """
    sent_us = now_us if request.sent_us is None else min(request.sent_us, now_us)
    position = {"rank": request.rank, "parked": sent_us, "strict": int(request.strict) or None}
    return {"key": request.line, "line": line.value, **position}


def is_on_record(db: sa.Connection, request: ClaimRequest) -> bool:
    """Return True if the work, or its message for this work, is on record."""
    one, message = sa.literal(1), MESSAGES.c.message == request.message.name
    work = sa.select(one).where(WORK.c.id == request.work)
    numbers = sa.select(one).where(message, MESSAGES.c.work == request.work)
    return db.execute(sa.union_all(work, numbers).limit(1)).first() is not None
