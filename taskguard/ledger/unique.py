"""Enqueue a work that may be on record: report the recorded message, or replace its call.

Guarantees: the report is from a committed record, or from this transaction. If two transactions
enqueue the same work, one waits for the other's COMMIT, and then gets a report of the other's
message. A call is replaced only while no delivery has begun it, by one conditional statement on its
locked row. Its message is superseded in the same transaction. A delivery of that message is
answered without running, even if its claim was waiting for the row. A repeated enqueue of a
replaced message, whose COMMIT got no answer, replaces nothing.

A superseded message gets the highest numbers, so that each delivery of it counts as an old copy. A
claim may read the numbers before it waits for the row. Then it reads them again once it has the
row, or leaves the decision to a claim that does.

This does not apply to messages whose call is not stored: those sent without `enqueue()`, and second
messages. The first of them that reaches waiting work runs, with its own arguments.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import sqlalchemy as sa

from taskguard.errors import TransactionRetryError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.messages import raise_deferrals, was_replaced
from taskguard.ledger.records import message_of
from taskguard.ledger.tables import MESSAGES, NO_POSITION, WORK
from taskguard.model.claims import ClaimRequest, MessageRef
from taskguard.model.records import Existing, Once
from taskguard.model.states import REPLACED_RETRIES, State

__all__ = ["Sent", "decide", "failed_message", "not_superseded", "supersede"]

_OPEN = (State.NEW.value, State.PROCESSING.value)
_COLUMNS = ("id", "state", "message", "call", "due", "fingerprint", "progress", "attempts", "fence")


class Sent(NamedTuple):
    """The request whose message is sent.

    Attributes:
        request: the request.
        follows: whether nothing was written for it, because a body has begun the recorded message,
            and a run may follow that one.
    """

    request: ClaimRequest
    follows: bool = False


def decide(
    database: Database, db: sa.Connection, request: ClaimRequest, once: Once, *, due: Any
) -> Sent | None:
    """Report the recorded message to `once`, and replace its call if `once` returns a new one.

    Return what is sent, or None if nothing is.
    """
    waiting = _locked_new(db, request) if once.replaces else None
    row = waiting or _open(database, db, request)
    if row is None or message_of(row) == request.message.name:
        return Sent(request)  # the work has ended, or the record is this request's own
    if once.replaces and was_replaced(db, request):
        return Sent(request)  # the record has the newer message
    found = Existing(
        work=row.id,
        message=message_of(row),
        call=row.call,
        fingerprint=row.fingerprint,
        # If it is NEW in an older snapshot alone, a body has begun it since.
        begun=row.state != State.NEW.value
        or row.progress is not None
        or (once.replaces and waiting is None),
    )
    instead = once.found(found)
    if instead is None:
        return None
    instead = dataclasses.replace(instead, work=request.work, base=request.base, by_run=False)
    if not found.begun:
        _replace(database, db, row, instead, due=due)
    return Sent(instead, follows=found.begun)


def _locked_new(db: sa.Connection, request: ClaimRequest) -> Any:
    return db.execute(_select(request, WORK.c.state == State.NEW.value).with_for_update()).first()


def _open(database: Database, db: sa.Connection, request: ClaimRequest) -> Any:
    """Return the open work as `db` sees it, or as committed: `db` may have an older snapshot.

    Do not lock the row: the holder's renewals and completion would wait for the user's transaction.
    """
    failed = WORK.c.state == State.FAILED.value, WORK.c.lease_until > database.now()
    promised = sa.and_(*failed, WORK.c.final == 0)  # its queue retries it
    select = _select(request, sa.or_(WORK.c.state.in_(_OPEN), promised))
    row = db.execute(select).first()
    if row is not None or db.execute(sa.select(WORK.c.id).where(_is(request))).first() is not None:
        return row
    with database.transaction() as own:
        return own.execute(select).first()


def _select(request: ClaimRequest, condition: sa.ColumnElement[bool]) -> sa.Select[Any]:
    columns = (WORK.c[name] for name in _COLUMNS)
    return sa.select(*columns).where(_is(request), condition)


def _is(request: ClaimRequest) -> sa.ColumnElement[bool]:
    return WORK.c.id == request.work


def _replace(
    database: Database, db: sa.Connection, row: Any, request: ClaimRequest, *, due: Any
) -> None:
    changed = db.execute(
        sa.update(WORK)
        .where(
            WORK.c.id == row.id,
            WORK.c.state == State.NEW.value,
            WORK.c.fence == row.fence,
            WORK.c.attempts == row.attempts,
            WORK.c.message == row.message,
        )
        .values(
            message=request.message.name,
            retries=request.message.retries,
            fingerprint=request.fingerprint,
            call=request.call,
            sends=None,
            due=due,
            **NO_POSITION,  # when its message arrives, it goes to the end of its key's line
        )
    )
    if changed.rowcount != 1:
        raise TransactionRetryError(
            f"{request.work} was not enqueued: another transaction changed its row meanwhile. "
            "Enqueue it again in a new transaction.",
            key=", ".join(request.keys),
        )
    supersede(database, db, request, message_of(row))


def supersede(database: Database, db: sa.Connection, request: ClaimRequest, message: str) -> None:
    """Make every delivery of this message count as an old copy, which does not run the work."""
    if message == request.message.name:
        return
    highest = MessageRef(message, retries=REPLACED_RETRIES)
    now_us = database.now_us(db)
    raise_deferrals(database, db, highest, REPLACED_RETRIES, work=str(request.work), now_us=now_us)


def not_superseded() -> sa.ColumnElement[bool]:
    """Return the condition that a message was not superseded."""
    return MESSAGES.c.retries < REPLACED_RETRIES


def failed_message(db: sa.Connection, request: ClaimRequest) -> str | None:
    """Return the message of FAILED work that the queue may still retry, and lock its row.

    Return None if that message has replaced this one.
    """
    failed = WORK.c.state == State.FAILED.value, WORK.c.final == 0
    select = sa.select(WORK.c.message).where(_is(request), *failed)
    found: str | None = db.execute(select.with_for_update()).scalar()
    return None if found is None or was_replaced(db, request) else found
