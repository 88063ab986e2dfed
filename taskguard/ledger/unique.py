"""One message of a work from its enqueueing to its end: what stands there, and what replaces it.

Guarantees: what stands there is told from a committed record, or from this very transaction; two
that enqueue the same work at once wait for each other's COMMIT, and the second one is told of the
first. A call is replaced only while nobody has begun it, by one conditional statement over its
locked row. Its message is superseded in the same transaction: whenever that comes, it is answered
without running, also if its claim was under way and waited for the row.

The superseded message has the highest numbers there are, under which every delivery of it is an old
copy. A claim that reads numbers before it waits for the row reads them anew once it has that, or
leaves the decision to one that does, where the work has become another message's meanwhile.

Does not guarantee anything about messages whose call is not stored (sent without `enqueue()`, or as
a second one that is to be answered): the first that comes to waiting work runs, with its own
arguments.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.errors import TransactionRetryError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.messages import raise_deferrals
from taskguard.ledger.records import message_of
from taskguard.ledger.tables import MESSAGES, NO_PLACE, WORK
from taskguard.model.claims import ClaimRequest, MessageRef
from taskguard.model.records import Once, Standing
from taskguard.model.states import REPLACED_RETRIES, State

__all__ = ["decide", "failed_message", "not_superseded", "supersede"]

_OPEN = (State.NEW.value, State.PROCESSING.value)
_COLUMNS = ("id", "state", "message", "call", "due", "fingerprint", "progress", "attempts", "fence")


def decide(
    database: Database, db: sa.Connection, request: ClaimRequest, once: Once, *, due: Any
) -> None:
    """Ask `once` about what stands there, and replace its call if it says so."""
    row = _locked_new(db, request) if once.replaces else None
    row = row or _open(database, db, request)
    if row is None or message_of(row) == request.message.name:
        return  # it has ended, or is this request's own
    found = Standing(
        work=row.id,
        message=message_of(row),
        call=row.call,
        fingerprint=row.fingerprint,
        begun=row.state != State.NEW.value or row.progress is not None,
    )
    instead = once.found(found)
    if instead is not None:
        _replace(database, db, row, instead, due=due)


def _locked_new(db: sa.Connection, request: ClaimRequest) -> Any:
    return db.execute(_select(request, State.NEW.value).with_for_update()).first()


def _open(database: Database, db: sa.Connection, request: ClaimRequest) -> Any:
    """The open work as `db` sees it, or as it is committed: `db` may have an older snapshot.

    The holder's row is not locked: its renewals and its completion would wait for the user.
    """
    select = _select(request, *_OPEN)
    row = db.execute(select).first()
    if row is not None or db.execute(sa.select(WORK.c.id).where(_is(request))).first() is not None:
        return row
    with database.transaction() as own:
        return own.execute(select).first()


def _select(request: ClaimRequest, *states: str) -> sa.Select[Any]:
    columns = (WORK.c[name] for name in _COLUMNS)
    return sa.select(*columns).where(_is(request), WORK.c.state.in_(states))


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
            **NO_PLACE,  # it stands at the end of its key's line, when its message has come
        )
    )
    if changed.rowcount != 1:
        raise TransactionRetryError(
            f"{request.work}: its row was locked, and changed. Enqueue it again in a new "
            "transaction.",
            key=", ".join(request.keys),
        )
    supersede(database, db, request, message_of(row))


def supersede(database: Database, db: sa.Connection, request: ClaimRequest, message: str) -> None:
    """Every delivery of this message is from now on an old copy, which does not run the work."""
    if message == request.message.name:
        return
    highest = MessageRef(message, retries=REPLACED_RETRIES)
    now_us = database.now_us(db)
    raise_deferrals(database, db, highest, REPLACED_RETRIES, work=str(request.work), now_us=now_us)


def not_superseded() -> sa.ColumnElement[bool]:
    """Whether a message's numbers are those of its deliveries."""
    return MESSAGES.c.retries < REPLACED_RETRIES


def failed_message(db: sa.Connection, request: ClaimRequest) -> str | None:
    """The message of FAILED work, which the queue may yet retry; its row is locked."""
    select = sa.select(WORK.c.message).where(
        _is(request), WORK.c.state == State.FAILED.value, WORK.c.final == 0
    )
    found: str | None = db.execute(select.with_for_update()).scalar()
    return found
