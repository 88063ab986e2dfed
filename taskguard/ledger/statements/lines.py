"""Work that waits for its key: NEW, with its message stored, in the order in which it was sent.

A parked message has been acknowledged: the record of its work is what is left of it. `rank` and
`parked` are its place in the line of its key: those of a lower rank go first, then those that were
sent before (a retry: that came before).
`due` says whether it was called: NULL while it waits, else until when its message, which was sent
again then, is expected. After that it is overdue, as any other work is (`outbox.py`). So is what
has expired while it waited, since then.

Work of `strict` requests has such a place from its enqueueing, or its first claim, until it has
ended: also while it is PROCESSING, and FAILED with a retry to come. `due` then says when its
message, which somebody else has sent, is overdue.

Guarantees: parking is one transaction, flushed before it returns; work that is parked again keeps
its place; nobody is called while the key is held, while another one that was called is expected, or
behind strict work that has not ended. A claim ends the waiting, whoever makes it.

Does not guarantee that only one is called at a time: two that look at the same moment may call two.
The claim of the key decides, and who comes second is parked again, in its old place. Nor that
nobody overtakes: what claims without looking at the line may do so.

Nothing is sent here: `taskguard/run/parking.py` does. PostgreSQL's statements give the same
answers; the contract suite compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import sqlalchemy as sa

from taskguard.errors import LineFullError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.records import Called, message_of, new_record, waiting_values
from taskguard.ledger.tables import KEYS, MESSAGES, NO_PLACE, WORK
from taskguard.model.bounds import Rate, range_of_slots
from taskguard.model.claims import Claim, ClaimRequest, sends_of
from taskguard.model.records import Waiting
from taskguard.model.states import State

__all__ = [
    "WRITE_LOCK_S",
    "Called",
    "call_next",
    "called",
    "called_of",
    "expired",
    "has_expired",
    "has_lines",
    "in_line",
    "is_behind",
    "is_on_record",
    "keep",
    "leave",
    "may_wait",
    "of_relay",
    "open_keys",
    "park",
    "place_of",
    "standing",
    "stands",
    "waiting",
]


WRITE_LOCK_S = 5.0

# Enough of a call for the number at its beginning.
_COUNTED = 60
# The place of who stands in no line: behind all of his rank.
_LAST = 2**63 - 1


def _in_order() -> tuple[sa.ColumnElement[Any], ...]:
    """By what a line is in order: who was sent in the same µs goes before or after."""
    return WORK.c.rank, WORK.c.parked


def stands(work: Any) -> sa.ColumnElement[bool]:
    """Whether it stands in the line of its key, called or not."""
    return sa.and_(work.c.parked.is_not(None), work.c.state == State.NEW.value)


def in_line(work: Any) -> sa.ColumnElement[bool]:
    """Whether it has a place: it waits, was called, or keeps it."""
    return sa.or_(stands(work), keeps(work))


def _waits(*further: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Whether it stands in line, and was not called: of all these the first one is looked for.

    That is found by the index, in order, if the planner thinks that there are many. Without
    statistics PostgreSQL takes work of a state for rare, and sorts all who wait; of a CASE that is
    not NULL it thinks nothing of the kind. MariaDB and MySQL sort them as soon as an id is in the
    order.
    """
    is_left = sa.and_(WORK.c.state == State.NEW.value, WORK.c.due.is_(None), *further)
    return sa.and_(WORK.c.parked.is_not(None), sa.case((is_left, 1)).is_not(None))


def expected(work: Any, now_us: int) -> sa.ColumnElement[bool]:
    """Whether it was called a short while ago. One that was called again holds up nobody.

    Nor does one that is strict, other than those behind it, by the place that it keeps: it may not
    have been called, but enqueued.
    """
    return sa.and_(work.c.due > now_us, work.c.strict.is_(None), _called_once(work))


def called_of(work: Any, key: Any, now_us: int) -> sa.ColumnElement[bool]:
    """Of a key's line, who was called a short while ago: few, however long the line is.

    Found by when they are due. That they have a place is said so that PostgreSQL does not see that
    the index of lines has them all, which it takes for empty by statistics from before the line.
    """
    has_place = sa.func.coalesce(work.c.parked, 0) > 0
    is_new = work.c.state == State.NEW.value
    return sa.and_(work.c.key == key, is_new, has_place, expected(work, now_us))


def _called_once(work: Any) -> sa.ColumnElement[bool]:
    return sa.func.substr(work.c.call, 1, 8) != '{"sent":'


def keeps(work: Any) -> sa.ColumnElement[bool]:
    """Whether it is strict, and does not wait: it was sent, or has begun, and has not ended.

    It holds up all who are behind it, however late it is.
    """
    states = work.c.state.in_([State.NEW.value, State.PROCESSING.value, State.FAILED.value])
    placed = sa.and_(work.c.parked.is_not(None), work.c.strict == 1)
    return sa.and_(placed, work.c.due.is_not(None), states)


def _before(rank: int, place: int) -> sa.ColumnElement[bool]:
    """Whether it goes before that place. Said twice: databases use an index for one of the two."""
    as_tuple = sa.tuple_(WORK.c.rank, WORK.c.parked) < sa.tuple_(rank, place)
    same_rank = sa.and_(WORK.c.rank == rank, WORK.c.parked < place)
    return sa.and_(as_tuple, sa.or_(WORK.c.rank < rank, same_rank))


def is_behind(
    db: sa.Connection,
    request: ClaimRequest,
    now_us: int,
    *,
    room: int = 1,
    but: str | None = None,
) -> bool:
    """Whether somebody who goes before this work waits for its key, or has not ended.

    Nobody goes before work that has begun: its holder is gone, and it is taken over. A place in the
    line is that of one message: another one of the same work stands behind it, until it was sent
    again. `room`: for how many the key is free; fewer may have been called. `but`: of this task
    nobody counts.
    """
    columns = WORK.c.state, WORK.c.message, WORK.c.rank, WORK.c.parked
    sent_again = sa.and_(WORK.c.due.is_not(None), ~_called_once(WORK)).label("sent_again")
    ids = (str(request.work), *request.formerly)
    records = db.execute(sa.select(*columns, sent_again).where(WORK.c.id.in_(ids))).all()
    if any(mine.state == State.PROCESSING.value for mine in records):
        return False
    places = []
    for mine in records:
        if mine.parked is None:
            continue
        if mine.message == request.message.name:
            places.append((mine.rank, mine.parked))
        elif mine.state == State.NEW.value and not mine.sent_again:
            return True  # nothing else would answer that message
    rank, place = min(places, default=(request.rank, _LAST))
    waits = sa.and_(stands(WORK), sa.or_(WORK.c.due.is_(None), expected(WORK, now_us)))
    line = WORK.c.key.in_(request.lines) if request.formerly else WORK.c.key == request.line
    before = [line, _before(rank, place), sa.or_(waits, keeps(WORK))]
    if request.formerly:
        before.append(WORK.c.id.not_in(ids))
    if but is not None:
        before.append(WORK.c.task != but)
    # In order, for the first is mostly one who waits.
    first = sa.select(WORK.c.due).where(*before).order_by(WORK.c.rank, WORK.c.parked).limit(room)
    found = db.execute(first).scalars().all()
    return None in found or len(found) >= room


def park(database: Database, request: ClaimRequest, *, only_new: bool = False) -> bool:
    """Store the work with its call, at the end of its key's line or in the place that it has.

    False if that is not to be: it runs, has ended for good, or another message stands for it, which
    has its own sender waiting for a result. `only_new`: nor if it, or its message, is on record.
    Raises LineFullError; two who come at once may both get the last place.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        if only_new and is_on_record(db, request):
            return False
        full = request.max_waiting is not None and _is_full(db, request)
        parked = not full and _park(database, db, request)
        if full:
            _refuse(database, db, request)
    if full:
        raise LineFullError(
            f"{request.task} {request.line}: {request.max_waiting} messages wait for this key, "
            "which is all that max_waiting= allows. Nothing was run, and this message was not "
            "stored. Send it again when fewer wait (`taskguard waiting --key …` lists them), or "
            "allow more.",
            key=request.line,
        )
    return parked


def _is_full(db: sa.Connection, request: ClaimRequest) -> bool:
    """Whether this is one too many. Who has a place, or has begun, is in no case."""
    known = sa.or_(WORK.c.parked.is_not(None), WORK.c.attempts > 0)
    ids = (str(request.work), *request.formerly)
    is_known = sa.select(WORK.c.id).where(WORK.c.id.in_(ids), known)
    if db.execute(is_known).first() is not None:
        return False
    of_lines = WORK.c.key.in_(request.lines), stands(WORK)
    standing = sa.select(sa.literal(1).label("one")).where(*of_lines)
    first = standing.limit(request.max_waiting).subquery()
    count: int = db.execute(sa.select(sa.func.count()).select_from(first)).scalar_one()
    return count >= (request.max_waiting or 0)


def _refuse(database: Database, db: sa.Connection, request: ClaimRequest) -> None:
    """NEW -> FAILED, of work that was enqueued with this message: nobody is to send it again."""
    db.execute(
        sa.update(WORK)
        .where(
            WORK.c.id == request.work,
            WORK.c.state == State.NEW.value,
            WORK.c.attempts == 0,
            WORK.c.parked.is_(None),
            WORK.c.message == request.message.name,
        )
        .values(
            state=State.FAILED.value,
            final=0,
            error="the line of its key was full",
            due=None,
            finished=database.now(),
        )
    )


def _park(database: Database, db: sa.Connection, request: ClaimRequest) -> bool:
    now_us = database.now_us(db)
    place, kept = place_of(request, now_us), None
    if request.formerly:
        former = _former_records(db, request)
        if not all(may_wait(row, request) for row in former):
            return False
        kept = min((row.parked for row in former if row.parked is not None), default=None)
        place["parked"] = place["parked"] if kept is None else kept
        _leave_former(db, former)
    values = {**waiting_values(request, due=None), **place}
    new = new_record(request, created_us=now_us, **values)
    db.execute(database.dialect.insert_missing(WORK, new))
    waits = WORK.c.state == State.NEW.value
    own = sa.and_(waits, sa.or_(WORK.c.call.is_(None), WORK.c.message == request.message.name))
    failed = sa.and_(WORK.c.state == State.FAILED.value, WORK.c.final == 0)
    # A place that was kept is its message's.
    failed = sa.and_(failed, sa.or_(WORK.c.parked.is_(None), WORK.c.message == values["message"]))
    later = sa.and_(
        WORK.c.message == request.message.name, WORK.c.retries > request.message.retries
    )
    # A retry stands at the end, unless its work has kept its place.
    keeps_place = sa.or_(waits, sa.literal(request.strict or kept is not None))
    anew = sa.case((keeps_place, place["parked"]), else_=now_us)
    parked = sa.func.coalesce(WORK.c.parked, anew)
    # In its place a message keeps the first that was said; see `expiry_of()`.
    first = sa.and_(waits, WORK.c.parked.is_not(None), WORK.c.message == request.message.name)
    if request.expires_us is not None:
        first = sa.and_(first, WORK.c.expires < request.expires_us)
    expires = sa.case((first, WORK.c.expires), else_=request.expires_us)
    # These first: MariaDB and MySQL evaluate what follows with what was set before.
    ordered = {"expires": expires, "parked": parked}
    changed = db.execute(
        sa.update(WORK)
        .where(WORK.c.id == request.work, sa.or_(own, failed), ~later)
        .ordered_values(*ordered.items(), *((n, v) for n, v in values.items() if n not in ordered))
    )
    return changed.rowcount == 1


def _former_records(db: sa.Connection, request: ClaimRequest) -> list[Any]:
    """The work's records under its former ids; they are locked in order, with the work's own."""
    ids = (str(request.work), *request.formerly)
    rows = db.execute(
        sa.select(WORK).where(WORK.c.id.in_(ids)).order_by(WORK.c.id).with_for_update()
    ).all()
    return [row for row in rows if row.id != request.work]


def may_wait(row: Any, request: ClaimRequest) -> bool:
    """Whether the work waits, or has failed and may be tried again, and no later retry of its
    message, nor another message, stands for it."""
    mine = row.message == request.message.name
    if mine and row.retries > request.message.retries:
        return False
    if row.state == State.FAILED.value:
        return not row.final and (row.parked is None or mine)
    return row.state == State.NEW.value and (row.call is None or mine)


def _leave_former(db: sa.Connection, former: list[Any]) -> None:
    """The message waits under its new id: it leaves its former line, and is not sent from there."""
    for row in former:
        same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
        left = sa.update(WORK).where(WORK.c.id == row.id, *same)
        db.execute(left.values(call=None, due=None, **NO_PLACE))


def place_of(request: ClaimRequest, now_us: int) -> dict[str, Any]:
    """The columns of a place in the line of its key, as of the moment at which it was sent.

    By a clock that is ahead it was sent now.
    """
    sent_us = now_us if request.sent_us is None else min(request.sent_us, now_us)
    place = {"rank": request.rank, "parked": sent_us, "strict": int(request.strict) or None}
    return {"key": request.line, **place}


def keep(
    database: Database, claim: Claim, *, retries: int, call: str | None, due_in_s: float
) -> bool:
    """FAILED stays FAILED, in its place: its message was sent once more, with this number.

    Copies of it with a lower one are superseded, as by its claim.
    """
    again: dict[str, Any] = {} if call is None else {"call": call}
    due = database.now() + int(due_in_s * 1e6)
    return _change_kept(database, claim, retries=retries, due=due, **again)


def leave(database: Database, claim: Claim, *, retries: int) -> bool:
    """FAILED stays FAILED, and holds up nobody any more: its message does not come again.

    A copy of it with a lower number that comes all the same is superseded: it has failed, and its
    place is another's. One with this number has been sent anew.
    """
    return _change_kept(database, claim, retries=retries, due=None, **NO_PLACE)


def _change_kept(database: Database, claim: Claim, **values: Any) -> bool:
    left = sa.and_(
        WORK.c.id == claim.work,
        WORK.c.state == State.FAILED.value,
        WORK.c.fence == claim.fence,
        WORK.c.owner == str(claim.owner),
        WORK.c.parked.is_not(None),
    )
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        changed = db.execute(sa.update(WORK).where(left).values(**values))
        return changed.rowcount == 1


def is_on_record(db: sa.Connection, request: ClaimRequest) -> bool:
    """Whether there is a record of the work, or of its message in it."""
    one, message = sa.literal(1), MESSAGES.c.message == request.message.name
    work = sa.select(one).where(WORK.c.id == request.work)
    numbers = sa.select(one).where(message, MESSAGES.c.work == request.work)
    return db.execute(sa.union_all(work, numbers).limit(1)).first() is not None


class Room(Protocol):
    """Whether somebody may be called: in how many µs his work may begin; None: nobody may be."""

    def __call__(self, db: sa.Connection, key: str, now_us: int, task: str) -> int | None: ...


def call_next(
    database: Database,
    key: str,
    *,
    app: str,
    queues: Sequence[str] | None,
    expected_s: float,
    room: Room,
) -> Called | None:
    """Note that the first who waits for the key is called, if it is free; None: nobody is.

    Nor one of another namespace than `app`, or whose call is for none of `queues`: who waits behind
    it keeps waiting. Its message is to be sent now: without a claim of its work within `expected_s`
    of the time at which it may begin it is overdue.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        now_us = database.now_us(db)
        head = (
            sa.select(WORK.c.id, WORK.c.rank, WORK.c.parked, WORK.c.call, WORK.c.task)
            .where(WORK.c.key == key, _waits())
            .order_by(*_in_order())
            .limit(1)
        )
        first = db.execute(head).first()
        if first is None or not _is_for(json.loads(first.call), app, queues):
            return None
        wait_us = room(db, key, now_us, first.task)
        if wait_us is None or _is_held_up(db, key, first):
            return None
        changed = db.execute(
            sa.update(WORK)
            .where(
                WORK.c.id == first.id,
                WORK.c.state == State.NEW.value,
                WORK.c.parked.is_not_distinct_from(first.parked),  # as in `called_of()`
                WORK.c.due.is_(None),
            )
            .values(due=now_us + wait_us + int(expected_s * 1e6))
        )
        return called(db, first.id, wait_us) if changed.rowcount == 1 else None


def called(db: sa.Connection, work: str, wait_us: int = 0) -> Called:
    """What is sent of work that was called, for a message that is to come in `wait_us`."""
    names = ("id", "task", "message", "retries", "call", "due", "attempts")
    row = db.execute(sa.select(*(WORK.c[name] for name in names)).where(WORK.c.id == work)).one()
    numbers = sa.select(MESSAGES.c.retries, MESSAGES.c.deferrals).where(
        MESSAGES.c.message == message_of(row), MESSAGES.c.work == work
    )
    found = Called(*row, *(db.execute(numbers).first() or (None, None)))
    return found._replace(wait_us=wait_us)


def _is_for(call: dict[str, Any], app: str, queues: Sequence[str] | None) -> bool:
    return call.get("app", "") == app and (queues is None or call.get("queue") in queues)


def room(db: sa.Connection, key: str, now_us: int, task: str) -> int | None:
    """Nobody may be called while the key is held, or another one is expected."""
    del task
    held = sa.select(sa.literal(1)).where(KEYS.c.key == key, KEYS.c.lease_until > now_us)
    called = sa.select(sa.literal(1)).where(called_of(WORK, key, now_us))
    return 0 if db.execute(sa.union_all(held, called).limit(1)).first() is None else None


def _is_held_up(db: sa.Connection, key: str, first: Any) -> bool:
    """Whether somebody before the first who waits keeps his place until his work has ended."""
    kept = WORK.c.key == key, keeps(WORK), _before(first.rank, first.parked)
    return db.execute(sa.select(sa.literal(1)).where(*kept).limit(1)).first() is not None


_END_OF_CALL = 300  # enough for the namespace
_READ = ("key", "id", "task", "state", "due", "strict", "rank", "parked")
# How much later than now a message is expected that was called with its rate's delay. What is due
# later was enqueued. There may be a lot of that, and it is not read.
_LONGEST_EXPECTED_US = 65_000_000


def open_keys(
    db: sa.Connection,
    now_us: int,
    *,
    app: str,
    queues: Sequence[str] | None,
    ahead_us: int,
    after: str | None,
    most: int,
    rates: Mapping[str, Rate | None],
) -> tuple[list[str], str | None, list[str]]:
    """Return keys whose first waiting message may be called now, and the last key that was read.

    The third value has the tasks of messages that wait for a rate on record, but those of `rates`:
    what these declare now counts.

    At most `most` messages in lines are read, by key, those whose key comes after `after`. The
    second value is None if there are no more. A key is open if nobody holds it, its rate allows a
    start in at most `ahead_us`, fewer messages hold and are expected than it has slots, and no
    strict work before the first message has still to end. The first message must be one of this
    namespace and of these queues: other relays know where the others go.
    """
    begins = [WORK.c.parked.is_not(None)] + ([] if after is None else [WORK.c.key > after])
    columns = (WORK.c[name] for name in _READ)
    page = sa.select(*columns).where(*begins).order_by(WORK.c.key, *_in_order()).limit(most)
    last = page.with_only_columns(WORK.c.key).limit(1).offset(most - 1)
    goes_on: str | None = db.execute(last).scalar()
    read = page.subquery()
    with_keys = read.outerjoin(KEYS, KEYS.c.key == read.c.key)
    is_free = sa.func.coalesce(KEYS.c.lease_until, 0) <= now_us
    is_early = sa.func.coalesce(KEYS.c.next_start, 0) > now_us + ahead_us
    free = (
        sa.select(read, sa.func.coalesce(KEYS.c.slots, 1).label("slots"))
        .select_from(with_keys)
        .where(is_free, sa.or_(~is_early, *_outdated(read, now_us, rates)))
        .order_by(read.c.key, read.c.rank, read.c.parked)
    )
    rows = db.execute(free).all()
    unknown = sa.select(read.c.task).distinct().select_from(with_keys).where(is_early)
    early = [task for task in db.execute(unknown).scalars() if task not in rates]
    slots = {row.key: row.slots for row in rows}
    firsts = _firsts(rows)
    if (
        goes_on is not None and goes_on in slots and goes_on not in firsts
    ):  # it has more messages than were read
        first = sa.select(WORK.c.id).where(WORK.c.key == goes_on, _waits()).limit(1)
        firsts[goes_on] = db.execute(first.order_by(*_in_order())).scalar()
    ids = [first for first in firsts.values() if first is not None]
    if not ids:
        return [], goes_on, early
    ours = sa.select(WORK.c.key).where(WORK.c.id.in_(ids), _left(), of_relay(app, queues))
    found = sorted(db.execute(ours).scalars())
    taken = _taken(db, now_us, [key for key in found if slots[key] > 1]) if found else {}
    return [key for key in found if taken.get(key, 0) < slots[key]], goes_on, early


def _outdated(
    read: Any, now_us: int, rates: Mapping[str, Rate | None]
) -> list[sa.ColumnElement[bool]]:
    """Conditions that a start on record is by another rate than the task has now."""
    tasks: dict[int, list[str]] = {}
    for task, rate in rates.items():
        tasks.setdefault(rate.interval_us if rate is not None else 0, []).append(task)
    return [
        sa.and_(read.c.task.in_(names), KEYS.c.next_start > now_us + interval_us)
        for interval_us, names in tasks.items()
    ]


def _firsts(rows: Iterable[Any]) -> dict[str, str | None]:
    """The first waiting message of each key; None if strict work before it has still to end."""
    kept = State.NEW.value, State.PROCESSING.value, State.FAILED.value
    firsts: dict[str, str | None] = {}
    for row in rows:
        if row.due is None and row.state == State.NEW.value:
            firsts.setdefault(row.key, row.id)
        elif row.due is not None and row.strict == 1 and row.state in kept:
            firsts.setdefault(row.key, None)
    return firsts


def _taken(db: sa.Connection, now_us: int, several: Sequence[str]) -> dict[str, int]:
    """How many messages of each key are expected; of `several`, also how many hold a slot."""
    window = WORK.c.due > now_us, WORK.c.due < now_us + _LONGEST_EXPECTED_US
    has_place = sa.func.coalesce(WORK.c.parked, 0) > 0  # as in `called_of()`
    called = sa.and_(WORK.c.state == State.NEW.value, has_place, expected(WORK, now_us))
    taken: dict[str, int] = {}
    for key in db.execute(sa.select(WORK.c.key).where(*window, called)).scalars():
        taken[key] = taken.get(key, 0) + 1
    if several:
        held = sa.select(KEYS.c.key, holders(KEYS.c.key, now_us)).where(KEYS.c.key.in_(several))
        for key, count in db.execute(held):
            taken[key] = taken.get(key, 0) + count
    return taken


def has_lines(database: Database, *, app: str, queues: Sequence[str] | None) -> bool:
    """Return True if a message of this namespace and these queues has a place in a line."""
    mine = sa.select(sa.literal(1)).where(WORK.c.parked.is_not(None), of_relay(app, queues))
    with database.transaction(bounded=False) as db:
        return db.execute(mine.limit(1)).first() is not None


def standing(database: Database, *, most: int) -> list[tuple[str, str]]:
    """The beginning and the end of the calls of messages in lines; at most `most`."""
    ends = sa.func.substr(WORK.c.call, sa.func.length(WORK.c.call) - _END_OF_CALL)
    select = sa.select(sa.func.substr(WORK.c.call, 1, _COUNTED), ends)
    waits = WORK.c.parked.is_not(None), WORK.c.call.is_not(None)
    with database.transaction(bounded=False) as db:
        return [(begin, end) for begin, end in db.execute(select.where(*waits).limit(most))]


def has_expired(db: sa.Connection, now_us: int, *, app: str, queues: Sequence[str] | None) -> bool:
    """Return True if a message of this namespace and these queues has expired while it waited."""
    past = _expired(now_us, app, queues)
    return db.execute(sa.select(sa.literal(1)).where(*past).limit(1)).first() is not None


def _expired(
    now_us: Any, app: str, queues: Sequence[str] | None
) -> tuple[sa.ColumnElement[bool], ...]:
    return WORK.c.expires <= now_us, _left(), of_relay(app, queues)


def _left() -> sa.ColumnElement[bool]:
    """Whether it waits and was not called, as a condition that no index of lines is used for."""
    has_place = sa.func.coalesce(WORK.c.parked, 0) > 0  # as in `called_of()`
    return sa.and_(WORK.c.state == State.NEW.value, WORK.c.due.is_(None), has_place)


def expired(
    database: Database, *, app: str, queues: Sequence[str] | None, limit: int
) -> list[Called]:
    """Who waits, and has expired, the longest ago first: overdue since then, as if called in vain.

    So nobody waits for them, they are sent again until their end is known, and two that look at the
    same moment find each of them once. Work whose row is locked is left out.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        past = _expired(database.now_us(db), app, queues)
        these = sa.select(WORK.c.id).where(*past)
        these = these.order_by(WORK.c.expires, WORK.c.id).limit(limit)
        free = these.with_for_update(key_share=True, skip_locked=True)
        found = list(db.execute(free).scalars())
        if found:
            due = sa.update(WORK).where(WORK.c.id.in_(found), *past)
            db.execute(due.values(due=WORK.c.expires))
        return [called(db, work) for work in found]


def holders(key: Any, now_us: int) -> Any:
    """How many hold one of a key's slots; a key of a template with a '#' may count as one."""
    held = KEYS.alias()
    first, after = range_of_slots(key)
    slots = held.c.key > first, held.c.key < after, held.c.lease_until > now_us
    return sa.select(sa.func.count()).select_from(held).where(*slots).scalar_subquery()


def of_relay(app: str, queues: Sequence[str] | None) -> sa.ColumnElement[bool]:
    """Return the condition that a call is of this namespace, and of one of these queues."""
    return sa.and_(_of_app(app), _of_queues(queues))


def _of_app(app: str) -> sa.ColumnElement[bool]:
    """By the end of the call as `stored_call()` writes it: no text in it looks like that."""
    if app:
        return WORK.c.call.endswith(f', "app": {json.dumps(app)}}}', autoescape=True)
    return WORK.c.call.not_like('%, "app": "%"}')


def _of_queues(queues: Sequence[str] | None) -> sa.ColumnElement[bool]:
    """By the beginning of the call, which no integration writes otherwise.

    Before that may stand how often the call was sent; see `records.COUNT`.
    """
    if queues is None:
        return sa.true()
    names = [f'"queue": {json.dumps(queue)},' for queue in queues]
    begin = sa.func.substr(WORK.c.call, 1, _COUNTED + max(map(len, names), default=0))
    counted = begin.startswith('{"sent": [')
    return sa.or_(
        *(WORK.c.call.startswith("{" + name, autoescape=True) for name in names),
        *(sa.and_(counted, begin.contains(f"], {name}", autoescape=True)) for name in names),
    )


def waiting(database: Database, key: str | None, *, limit: int) -> list[Waiting]:
    """Who waits in the line of a key, or of each, the first of them first."""
    columns = ("key", "id", "message", "parked", "due", "state", "attempts")
    failed = sa.and_(keeps(WORK), WORK.c.state == State.FAILED.value)
    begin = sa.func.substr(WORK.c.call, 1, _COUNTED).label("begin")
    select = sa.select(*(WORK.c[name] for name in columns), begin)
    select = select.where(sa.or_(stands(WORK), failed))
    select = select.order_by(WORK.c.key, *_in_order(), WORK.c.id).limit(limit)
    if key is not None:
        select = select.where(WORK.c.key == key)
    with database.transaction(bounded=False) as db:
        return [
            Waiting(
                row.key,
                row.id,
                row.message,
                row.parked / 1e6,
                row.due and row.due / 1e6,
                failed=row.state == State.FAILED.value,
                sent_again=sends_of(row.begin or "", attempts=row.attempts),
            )
            for row in db.execute(select)
        ]
