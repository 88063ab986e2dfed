"""Changes of work by an operator: drop, done, requeue, call.

Guarantees: a change, its line in `WORK.history` and its row in `taskguard_actions` are one
transaction. It is decided over locked rows by `model/operating.py`, and each UPDATE names the old
state, fence and owner. An equal call changes nothing again, and adds no second action.

A claim under two guards (`formerly=`) has several records with one fence, which `WORK.also` names.
A change of one changes the others of the same claim, too. If a worker with the former guard has
claimed the work since, only its record can be changed.

Read next: `model/operating.py`.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.errors import AlreadyEnqueuedError
from taskguard.ledger import runs, unique
from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.lines.newest import row_id
from taskguard.ledger.operations import counts
from taskguard.ledger.operations.records import MOST_ACTIONS
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.records import message_of
from taskguard.ledger.tables import ACTIONS, KEYS, MESSAGES, WORK
from taskguard.metrics import OPERATOR_ACTIONS
from taskguard.model.changes import Changed, Expected, Said
from taskguard.model.claims import RowRef
from taskguard.model.counts import Count
from taskguard.model.history import HISTORY_CHARS, Action, Happened, entry, works_of
from taskguard.model.line_states import LineState
from taskguard.model.operating import (
    TO,
    counts_instead,
    first_position,
    refusal,
    sent_anew,
    text_of,
    twins_of,
    was_made,
    written,
)
from taskguard.model.states import RowState, State
from taskguard.model.texts import shown_id

__all__ = [
    "change",
    "declared_of",
    "history_with",
    "last_actions",
    "note_action",
    "was_noted",
]

declared_of = rows.declared_of


def change(
    database: Database,
    work: str,
    action: Action,
    *,
    by: Said,
    gone_s: float,
    expected: Expected | None,
    row: RowRef | None,
) -> Changed:
    """Change work, or return why it cannot change.

    Raises:
        AlreadyEnqueuedError: it is a run, and a later run of the same work is open.
    """
    text = text_of(action, by)
    while True:
        with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            # Locked before the ledger's rows, as in every transaction.
            own = None if row is None else rows.read(db, row, lock=True)
            base = db.execute(sa.select(WORK.c.base).where(WORK.c.id == work)).scalar()
            if base is not None and action in (Action.REQUEUE, Action.REQUEUE_LEFT):
                _refuse_later_run(database, db, base, work)
            found = _locked(db, work)
            if found is None:
                continue  # a claim has added a record: look again
            if not found:
                return Changed(work=work, changed=False, why="there is no such work")
            mine, *others = found
            twins = twins_of(mine, others, action)
            also = tuple(each.id for each in twins)
            now_us, before = database.now_us(db), State(mine.state)
            known = {"work": work, "before": before, "key": mine.key, "also": also}
            again = was_made(mine, action, text)
            why = ""
            if not again:
                why = refusal(mine, action, now_us=now_us, gone_s=gone_s, expected=expected)
                why = why or counts_instead(mine, others, action)
            if not why and row is not None:
                why = _refuse_row(db, row, own, mine)  # an equal call may not have named it
            if why:
                return Changed(changed=False, why=why, **known)
            if again:
                return Changed(changed=True, then=_then(mine, action), **known)
            for each in (mine, *twins):
                _write(db, each, action, now_us=now_us, text=text)
            for each in sent_anew(mine, others, action):
                _forget_numbers(db, each)
            note_action(
                database, db, action, by=by, at_us=now_us, key=mine.key, task=mine.task, work=work
            )
            if action is Action.CALL:
                _put_first(db, mine)
            return Changed(changed=True, then=_then(mine, action), **known)


def _locked(db: sa.Connection, work: str) -> list[Any] | None:
    """Return the locked row of work, then those under its other ids. None: one was just added."""
    also = db.execute(sa.select(WORK.c.also).where(WORK.c.id == work)).scalar()
    ids = {work, *works_of(also)}
    these = sa.select(WORK).where(WORK.c.id.in_(sorted(ids))).order_by(WORK.c.id)
    found = {row.id: row for row in db.execute(these.with_for_update())}
    mine = found.pop(work, None)
    if mine is None:
        return []
    # All are locked in order, so a further one cannot be locked now.
    return [mine, *found.values()] if ids.issuperset(works_of(mine.also)) else None


def _refuse_later_run(database: Database, db: sa.Connection, base: str, work: str) -> None:
    later = runs.later_run(database, db, base, work)
    if later is not None:
        raise AlreadyEnqueuedError(
            f"{work} was not requeued: a later run of the same work is open, {later}. Its "
            "result is newer. Requeue nothing, or send the call again.",
            key=work,
            message_id=later,
            begun=True,
        )


def _refuse_row(db: sa.Connection, ref: RowRef, own: rows.Found | None, work: Any) -> str:
    """Move the user's own row to `done`, or return why it cannot move."""
    state, name = rows.state_of(ref, own, work), rows.declared_of(ref).describe(ref)
    if own is None:
        return f"there is no row {name}"
    if state in (RowState.NEW, RowState.HELD) and rows.mark_done(db, ref, own):
        return ""
    return "" if state is RowState.DONE else f"{name} is {own.state!r}"


def _write(db: sa.Connection, row: Any, action: Action, *, now_us: int, text: str) -> None:
    values = written(row, action, now_us=now_us, text=text)
    values["history"] = history_with(row, now_us=now_us, text=text)
    if values.get("line") == LineState.SUPERSEDED.value:
        values["message"] = message_of(row)  # the one that is sent, and so notifies its caller
    same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
    db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(**values))


def _forget_numbers(db: sa.Connection, row: Any) -> None:
    """Forget the numbers of the messages of requeued work. Those of a run stay its members."""
    # It deletes by ids, because `work` has no index, and a scan would lock every row.
    of_work = sa.and_(MESSAGES.c.work == row.id, unique.not_superseded())
    found = db.execute(sa.select(MESSAGES.c.message).where(of_work)).scalars().all()
    these = MESSAGES.c.message.in_(found), of_work
    if row.base is not None:
        db.execute(sa.update(MESSAGES).where(*these).values(retries=0, deferrals=0))
    else:
        db.execute(sa.delete(MESSAGES).where(*these))


def _put_first(db: sa.Connection, row: Any) -> None:
    """Let a waiting message go before all others of its line. Their order stays."""
    first = sa.select(WORK.c.rank, WORK.c.parked).where(
        WORK.c.key == row.key, WORK.c.parked.is_not(None), WORK.c.id != row.id
    )
    head = db.execute(first.order_by(WORK.c.rank, WORK.c.parked).limit(1)).first()
    if row.line is None or head is None:
        return
    if (head.rank, head.parked) < (row.rank, row.parked):
        newest = sa.select(KEYS.c.key).where(KEYS.c.key == row_id(row.key, row.task))
        is_newest = db.execute(newest).first() is not None
        values = first_position(head, by_rank=is_newest)
        db.execute(sa.update(WORK).where(WORK.c.id == row.id).values(**values))


def history_with(row: Any, *, now_us: int, text: str) -> str:
    """Return the history of work with one more line. The oldest lines go if it is too long."""
    line = entry(now_us, Happened.OPERATOR, owner=row.owner, fence=row.fence, text=text)
    return ((row.history or "") + line)[-HISTORY_CHARS:]


def note_action(
    database: Database,
    db: sa.Connection,
    action: Action,
    *,
    by: Said,
    at_us: int,
    key: str | None,
    task: str | None = None,
    work: str | None = None,
    detail: str | None = None,
) -> None:
    """Record and count what an operator did, in the transaction that does it."""
    values = {"at": at_us, "action": action.value, "actor": by.actor, "reason": by.reason}
    names = {"key": key, "task": task, "work": work, "detail": detail}
    db.execute(sa.insert(ACTIONS).values(**values, **names))
    counts.add(db, database.dialect, [Count("", OPERATOR_ACTIONS.what(action.value), 1)])


def last_actions() -> sa.Subquery:
    """Return the actions that are looked through under the lock of a key, which has no index."""
    return sa.select(ACTIONS).order_by(ACTIONS.c.id.desc()).limit(MOST_ACTIONS).subquery()


def was_noted(db: sa.Connection, action: Action, *, key: str, detail: str) -> bool:
    """Return whether such an action is on record, because an equal call committed it."""
    last = last_actions()
    same = last.c.action == action.value, last.c.key == key, last.c.detail == detail
    return db.execute(sa.select(last.c.id).where(*same).limit(1)).first() is not None


def _then(row: Any, action: Action) -> str:
    """Return what happens next, in one sentence."""
    if TO.get(action) is not State.NEW:
        return (
            "" if action is not Action.CALL else "Its message is sent as soon as its key is free."
        )
    if row.call is not None:
        return "A relay or the next sweep sends its message."
    last = shown_id(row.message)
    return f"Its call is not stored: send its message again. The last one was {last}."
