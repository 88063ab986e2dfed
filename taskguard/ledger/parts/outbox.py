"""Stores calls with their work, and finds the work that is overdue: `ports.Outbox`.

Guarantees: writes of `enqueue()` are committed or rolled back with the user's transaction. Work is
overdue once its holder's lease, or the time that its message was given, has passed. It is overdue
until a delivery claims it, it ends, or a sweep notes that its message was sent again. `sends`
counts the sendings since the last claim. Reading overdue work, and noting that it was sent again,
locks one batch for a moment, and waits for no locked row.

Does not send anything: `taskguard/outbox/enqueue.py` and `taskguard/outbox/sweep.py` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import sqlalchemy as sa

from taskguard.errors import ConfigurationError
from taskguard.ledger import unique
from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.history import flagged
from taskguard.ledger.lines import relay
from taskguard.ledger.lines.park import position_of
from taskguard.ledger.lines.states import is_in_line, keeps
from taskguard.ledger.messages import is_replaced
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.parts.base import Part
from taskguard.ledger.records import (
    UNHARMED,
    message_of,
    new_record,
    overdue_from,
    waiting_values,
)
from taskguard.ledger.runs import run_of
from taskguard.ledger.tables import FREE, MESSAGES, NO_POSITION, WORK
from taskguard.ledger.transactions.external import on_external
from taskguard.model.bounds import NO_RATES, Rate
from taskguard.model.claims import ClaimRequest, Overdue
from taskguard.model.history import Flag
from taskguard.model.line_states import LineState
from taskguard.model.records import Once, Seen
from taskguard.model.runs import FAILED_RUN, Resolved
from taskguard.model.states import RowState, State

if TYPE_CHECKING:
    from taskguard.ledger.ports import LentConnection

__all__ = ["SqlOutbox"]

# FAILED work is due only if it keeps its position in the line of its key, or if its caller must be
# notified that a newer message superseded it, or that an operator dropped it. DONE work is due only
# if an operator marked it as done, and its caller must be notified.
_OPEN = (State.NEW.value, State.PROCESSING.value, State.FAILED.value, State.DONE.value)
_COLUMNS = ("id", "task", "message", "retries", "call", "due", "attempts", "sends")
# A newer message superseded it while it waited, and its caller was not notified yet.
_NOT_NOTIFIED = WORK.c.line == LineState.SUPERSEDED.value
# The channel of `taskguard/lock_table/`, by which waiters of a process listen already.
ANNOUNCEMENTS = "taskguard_locks"
_PROMOTED = (LineState.PROMOTED.value, LineState.EXPIRED.value)
_RESENT = LineState.RESENT.value
# On SQLite a body's transaction stops all writers.
_SENT_LOCK_S = 5.0


class SqlOutbox(Part):
    """Work with its call, in the user's transaction or in one of the ledger's own."""

    def now_us(self) -> int:
        """Return the database's clock in µs since 1970."""
        return self._database.clock_us()

    def mark(self, *, make: bool) -> str | None:
        """Return 24 characters that differ from those of other databases, but not of its copies.

        Return None if there are none yet, and `make` is False.
        """
        mark = self._identity.mark(make=make)
        return mark and mark[:24]

    def enqueue(
        self,
        db: sa.Connection | None,
        request: ClaimRequest,
        *,
        due_in_s: float = 5.0,
        once: Once | None = None,
    ) -> str:
        """Write work with its call as NEW, in the transaction of `db`, which is the user's.

        Work on record does not change, unless it failed, or the user's own row was set back. In
        these cases it is NEW again. Work that is NEW, or whose lease has expired, gets the call if
        it has none. Return the id of the record: that of a run, for work that has runs.
        """
        self._check_call(request)
        if db is None:
            return self._enqueue_alone(request, due_in_s=due_in_s, once=once)
        return self._enqueue_in(db, request, due_in_s=due_in_s, once=once)

    @retried
    def _enqueue_alone(self, request: ClaimRequest, *, due_in_s: float, once: Once | None) -> str:
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as own:
            return self._write(own, request, due_in_s=due_in_s, once=once)

    def _enqueue_in(
        self, db: sa.Connection, request: ClaimRequest, *, due_in_s: float, once: Once | None
    ) -> str:
        self._identity.require(db, work=str(request.work))
        return self._write(db, request, due_in_s=due_in_s, once=once)

    def _write(
        self, db: sa.Connection, request: ClaimRequest, *, due_in_s: float, once: Once | None
    ) -> str:
        if request.by_run:
            return _write_run(self._database, db, request, due_in_s=due_in_s, once=once)
        write(self._database, db, request, due_in_s=due_in_s, once=once)
        return str(request.work)

    def enqueue_external(
        self,
        external: LentConnection,
        request: ClaimRequest,
        *,
        due_in_s: float = 5.0,
        once: Once | None = None,
    ) -> str:
        """Write work as `enqueue()` does, in the transaction that another library has open.

        Raises ConfigurationError if that is another database.
        """
        if external.kind != self._database.engine.dialect.name:
            raise ConfigurationError(
                f"{request.work} was enqueued in a transaction on {external.kind}, and the ledger "
                f"is in {self._database.place}: the two do not commit together."
            )
        self._check_call(request)
        with on_external(self._database.engine, external) as db:
            return self._enqueue_in(db, request, due_in_s=due_in_s, once=once)

    @retried
    def overdue(
        self,
        *,
        limit: int = 1000,
        after: Overdue | None = None,
        work: str | None = None,
        parked: bool | None = None,
    ) -> list[Overdue]:
        """Return at most `limit` overdue work items after `after`, the longest overdue first.

        Work whose row is locked is left out: another transaction is changing it. `work` asks for
        that work alone, even if it is not yet due. `parked`: see `ports.py`.
        """
        with self._database.transaction(bounded=False) as db:
            is_new = WORK.c.state == State.NEW.value
            keeps_position = sa.case((sa.and_(keeps(WORK), is_new), 1), else_=0)
            columns = *(WORK.c[name] for name in _COLUMNS), keeps_position.label("keeps_position")
            select = sa.select(*columns).where(
                WORK.c.due.is_not(None), WORK.c.call.is_not(None), WORK.c.state.in_(_OPEN)
            )
            if work is None:
                select = select.where(WORK.c.due <= self._database.now_us(db))
                select = select.with_for_update(key_share=True, skip_locked=True)
            else:
                select = select.where(WORK.c.id == work)
            if parked is not None:
                promoted = sa.case((WORK.c.line.is_not(None), 1), else_=0)
                select = select.where(promoted == int(parked))
            if after is not None:
                last = sa.tuple_(WORK.c.due, WORK.c.id)
                select = select.where(last > sa.tuple_(after.due_us, after.work))
            found = db.execute(select.order_by(WORK.c.due, WORK.c.id).limit(limit)).all()
            messages = {row.id: message_of(row) for row in found}
            numbers = sa.select(MESSAGES).where(
                MESSAGES.c.message.in_(set(messages.values())), MESSAGES.c.work.in_(list(messages))
            )
            recorded = {
                (row.message, row.work): (row.retries, row.deferrals) for row in db.execute(numbers)
            }
        return [overdue_from(row, messages[row.id], recorded) for row in found]

    @retried
    def look(
        self,
        *,
        app: str = "",
        queues: Sequence[str] | None = None,
        ahead_s: float = 0.0,
        after: str | None = None,
        most: int = 2000,
        announce: str | None = None,
        rates: Mapping[str, Rate | None] = NO_RATES,
    ) -> Seen:
        """Return what a relay has to do, in one transaction; see `ports.py`."""
        with self._database.transaction(bounded=False) as db:
            if announce is not None:
                db.execute(sa.select(sa.func.pg_notify(ANNOUNCEMENTS, announce)))
            now_us = self._database.now_us(db)
            expired = relay.has_expired(db, now_us, app=app, queues=queues)
            promoted = sa.case((WORK.c.line.is_not(None), 1), else_=0)
            late = sa.select(sa.literal(1)).where(
                WORK.c.due <= now_us,
                WORK.c.call.is_not(None),
                WORK.c.state.in_(_OPEN),
                promoted == 1,
                sa.or_(relay.of_relay(app, queues), WORK.c.sends > 0),  # whatever its queue
            )
            overdue = db.execute(late.limit(1)).first() is not None
            keys, goes_on, early = relay.open_keys(
                db,
                now_us,
                app=app,
                queues=queues,
                ahead_us=int(ahead_s * 1e6),
                after=after,
                most=most,
                rates=rates,
            )
        return Seen(tuple(keys), goes_on, expired=expired, overdue=overdue, early=tuple(early))

    @retried
    def sent(
        self,
        items: Sequence[Overdue],
        *,
        again_after_s: float | None,
        counted: bool = True,
    ) -> int:
        """Note that the messages of these items were sent again, and return how many were noted.

        Work that was claimed or ended meanwhile is left out: its claim says when it is due. So is
        work whose row is locked. If the sending was only tried (`counted`), a message that was
        promoted is left out: it would be expected once more, and delay those behind it.
        """
        unsent = sa.and_(keeps(WORK), WORK.c.state == State.NEW.value)
        these = sa.and_(
            WORK.c.id.in_([work.work for work in items]),
            WORK.c.due.in_({work.due_us for work in items}),
            WORK.c.state.in_(_OPEN),
            *(() if counted else (~sa.func.coalesce(is_in_line(WORK), sa.false()),)),
            *(() if again_after_s is not None else (unsent,)),
        )
        with self._database.transaction(lock_timeout_s=_SENT_LOCK_S, bounded=False) as db:
            again = (
                None
                if again_after_s is None
                else self._database.now_us(db) + int(again_after_s * 1e6)
            )
            free = sa.select(WORK.c.id).where(these).order_by(WORK.c.id)
            free = free.with_for_update(key_share=True, skip_locked=True)
            ids = list(db.execute(free).scalars())
            if ids:
                values: dict[str, object] = {"due": again}
                if again is None:
                    values["line"] = LineState.WAITING.value
                elif counted:
                    line = sa.case((WORK.c.line.in_(_PROMOTED), _RESENT), else_=WORK.c.line)
                    values["line"] = line
                if counted:
                    values["sends"] = sa.func.coalesce(WORK.c.sends, 0) + 1
                db.execute(sa.update(WORK).where(WORK.c.id.in_(ids), these).values(**values))
            return len(ids)

    @retried
    def abandon(self, work: Overdue, *, error: str) -> bool:
        """Move NEW, or PROCESSING beyond its lease, -> FAILED.

        Return False if the work was claimed, ended or sent meanwhile. FAILED is not final here: if
        its message comes after all, it runs. After a requeue the sendings count anew. A claim
        raises `attempts` and moves `due`: the two identify the claim that was read as overdue, as
        its fence and owner would.
        """
        now, text = self._database.now(), self._storable(error)
        left = sa.and_(WORK.c.state == State.PROCESSING.value, WORK.c.lease_until <= now)
        superseded = WORK.c.id == work.work, WORK.c.due == work.due_us, _NOT_NOTIFIED
        with self._database.transaction(lock_timeout_s=_SENT_LOCK_S) as db:
            if db.execute(
                sa.update(WORK).where(*superseded).values(due=None, **NO_POSITION)
            ).rowcount:
                return True  # it was superseded, and its caller is not notified
            changed = db.execute(
                sa.update(WORK)
                .where(
                    WORK.c.id == work.work,
                    WORK.c.due == work.due_us,
                    WORK.c.attempts == work.attempts,
                    WORK.c.final == 0,
                    sa.or_(WORK.c.state.in_([State.NEW.value, State.FAILED.value]), left),
                )
                .values(
                    state=State.FAILED.value,
                    final=0,
                    owner=FREE,
                    lease_until=0,
                    error=text,
                    **flagged(Flag.FAILED, now),
                    sends=None,
                    due=None,
                    **NO_POSITION,
                    finished=now,
                )
            )
            return changed.rowcount == 1


def _write_run(
    database: Database,
    db: sa.Connection,
    request: ClaimRequest,
    *,
    due_in_s: float,
    once: Once | None,
) -> str:
    """Write the work as the open run, or for the run that follows it; return that run's id.

    The message joins the run, unless `once` sends nothing. A message that has joined one before is
    enqueued once more, because an earlier COMMIT got no answer. That writes nothing.

    The run may end after it was found, because its end needs no pointer. Then the message is for
    the next run.
    """
    run = run_of(database, db, request, fresh=True)
    if not run.found.joins:
        return run.found.work
    following = None if run.found.opens else run.follows
    if following is not None:  # the newest call is that of the run that follows
        run.found = Resolved(following, joins=True)
        run.request = replace(run.request, work=following)
    sent = write(database, db, run.request, due_in_s=due_in_s, once=once)
    if sent is None:
        return run.found.work
    if not sent.follows and run.has_just_ended(database, db):
        return _write_run(database, db, request, due_in_s=due_in_s, once=once)
    run.request = sent.request
    if sent.follows:
        run.request = run.follow(database, db, sent.request)
        write(database, db, run.request, due_in_s=due_in_s)
    else:
        run.settle(database, db)
    return str(run.request.work)


def write(
    database: Database,
    db: sa.Connection,
    request: ClaimRequest,
    *,
    due_in_s: float,
    once: Once | None = None,
) -> unique.Sent | None:
    """Write the work as NEW, in the transaction of `db`. Return what is sent, or None.

    Work on record does not change, unless it failed, or the user's own row was set back. But if it
    is NEW, or its lease has expired, and no call is stored for it, it gets this call. Work with
    another fingerprint does not change: this message gets an error when it is delivered. If this
    message was replaced, the work does not change either. In that case an earlier COMMIT got no
    answer, and this is its repetition.

    `once` decides about work that is waiting or in progress.
    """
    now = database.now()
    due = now + int(due_in_s * 1e6)
    fresh = waiting_values(request, due=due)
    if request.strict:
        fresh |= position_of(request, database.now_us(db), LineState.KEPT)
    new = new_record(request, created_us=now, **fresh)
    db.execute(database.dialect.insert_missing(WORK, new))
    if _was_set_back(db, request):
        again = {"fingerprint": request.fingerprint, "result": None, "progress": None}
        ended = WORK.c.state.in_([State.DONE.value, State.DEAD.value])
        _update(db, request, ended, **fresh, **UNHARMED, **again)
    fits = WORK.c.fingerprint == request.fingerprint
    fits = sa.or_(fits, WORK.c.fingerprint.is_(None), sa.literal(request.fingerprint is None))
    named = sa.func.coalesce(WORK.c.fingerprint, request.fingerprint)
    fits = sa.and_(fits, ~is_replaced(request))
    finals = (0, FAILED_RUN) if request.resumes else (0,)
    failed = sa.and_(WORK.c.state == State.FAILED.value, WORK.c.final.in_(finals))
    if once is not None and not once.replaces:
        failed = sa.and_(failed, WORK.c.lease_until <= now)  # its message will be retried
    if once is not None and once.replaces and (older := unique.failed_message(db, request)):
        # Its queue may yet retry it, with its older arguments.
        values = {**NO_POSITION, **fresh, "fingerprint": request.fingerprint}
        _update(db, request, failed, **values)
        unique.supersede(database, db, request, older)
    else:
        _update(db, request, failed, fits, **fresh, fingerprint=named, final=0)
    # The row of a holder that is alive is left alone: this transaction would lock it.
    left = sa.and_(WORK.c.state == State.PROCESSING.value, WORK.c.lease_until <= now)
    if once is not None and once.replaces and request.base is not None:
        # Its late holder may still complete the run with older arguments. So another run follows.
        left = sa.false()
    left = sa.or_(WORK.c.state == State.NEW.value, left)
    # Work that waits for its key is not due either, because its call is sent in its turn.
    unsent = sa.or_(WORK.c.call.is_(None), sa.and_(WORK.c.due.is_(None), WORK.c.line.is_(None)))
    _update(db, request, left, fits, unsent, call=request.call, sends=None, due=due)
    if once is None:
        return unique.Sent(request)
    return unique.decide(database, db, request, once, due=due)


def _was_set_back(db: sa.Connection, request: ClaimRequest) -> bool:
    """Return True if the user's own row says that there is work to do, even after DONE."""
    if request.row is None:
        return False
    return rows.state_of(request.row, rows.read(db, request.row), None) is RowState.NEW


def _update(
    db: sa.Connection, request: ClaimRequest, *where: sa.ColumnElement[bool], **values: object
) -> None:
    db.execute(sa.update(WORK).where(WORK.c.id == request.work, *where).values(**values))
