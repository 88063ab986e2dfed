"""Find the run of a message, and keep which run is open: `once_per="run"`.

Guarantees: the row of `taskguard_runs`, the pointer, is locked before a run is opened or joined,
and `model/runs.py` decides from what is read under that lock. The pointer and the membership are
written in the transaction that claims, parks, defers or enqueues. A delivery that is refused writes
neither. The order of locks is: the user's own row, the pointer, the key, the slot, the work.

A completion does not touch the pointer. So a run has ended once its record says so, whatever the
pointer says.

A membership is the row of `taskguard_messages` that also has the numbers of the message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from taskguard.errors import TransactionRetryError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.history import flagged
from taskguard.ledger.tables import FREE, MESSAGES, NO_POSITION, RUNS, WORK, processed
from taskguard.model.claims import Answer, Busy, Claim, ClaimRequest
from taskguard.model.history import Flag
from taskguard.model.lease import Owner
from taskguard.model.runs import FAILED_RUN, RUN, OpenRun, Resolved, resolve, run_ended, run_id
from taskguard.model.states import REPLACED_RETRIES, Decision, State

__all__ = ["Run", "later_run", "of_run", "run_of", "will_be_sent"]

_COLUMNS = ("id", "state", "final", "owner", "fence", "lease_until", "call", "due", "line")
# The statements of each claim are made once: SQLAlchemy takes longer to make one than to run it.
_POINTER = sa.select(RUNS).where(RUNS.c.work == sa.bindparam("base"))
_LOCKED_POINTER = _POINTER.with_for_update()
_POINT = sa.update(RUNS).where(
    RUNS.c.work == sa.bindparam("base"),
    RUNS.c.open.is_not_distinct_from(sa.bindparam("was")),
    RUNS.c.follows.is_not_distinct_from(sa.bindparam("followed")),
)
_NOBODY_CONTINUED = "no delivery continued it, and the run that follows took its place"


@dataclass(slots=True)
class Run:
    """The run of one request.

    Attributes:
        request: the request, with the id of the run as its work.
        found: what was decided.
        base: the work's id, of which the ids of its runs are made.
        pointer: the pointer's row, or None.
        open_row: the record of the open run, or None.
        follows: the run that follows it, and has not ended. None: no run does.
        now_us: the database's clock.
    """

    request: ClaimRequest
    found: Resolved
    base: str
    pointer: Any
    open_row: Any
    follows: str | None
    now_us: int

    @property
    def is_new(self) -> bool:
        """Whether the message would open a run that is not on record."""
        return self.found.opens and self.found.joins and self.found.work != self.follows

    def has_just_ended(self, database: Database, db: sa.Connection) -> bool:
        """Return whether the run has ended since it was found, before the message joined it."""
        work = self.found.work
        if self.is_new or not self.found.joins:
            return False
        return _has_ended(_committed(database, work, _records(database, db, work).get(work)))

    @property
    def busy(self) -> Busy:
        """The answer for a message whose run follows one that has not ended."""
        row = self.open_row
        after_s = max(0.0, (row.lease_until - self.now_us) / 1e6)
        holds = row.state == State.PROCESSING.value and after_s > 0
        owner = Owner.parse(row.owner) if holds else None
        return Busy(owner, after_s if holds else None, same_work=True, started=True)

    def named(self, answer: Answer) -> Answer:
        """Return the answer with the id of the run, and of a later one that is open."""
        later = None
        if answer.decision is Decision.FAILED and self.pointer is not None:
            newest = self.follows or self.pointer.open
            later = None if newest == self.request.work else newest
        return replace(answer, recorded_as=self.request.work, later=later)

    def settle(self, database: Database, db: sa.Connection) -> None:
        """Write what the claim, the parking or the enqueue means for the pointer and the member."""
        found = self.found
        if found.ends is not None:
            self._end_lapsed(db)
        if found.opens:
            self._point(db, open=found.work, follows=None)
        if found.joins:
            join(database, db, self.request, now_us=self.now_us)

    def follow(self, database: Database, db: sa.Connection, request: ClaimRequest) -> ClaimRequest:
        """Note that a run for this request follows the open one. Return the request of that run."""
        work = run_id(self.base, request.message.name)
        request = replace(request, work=work, base=self.base, by_run=False)
        self._point(db, follows=work)
        join(database, db, request, now_us=self.now_us)
        return request

    def put_off(self, db: sa.Connection, *, again_after_s: float) -> None:
        """Let a sweep send the message of the run that follows only so much later."""
        mine = WORK.c.id == self.found.work, WORK.c.state == State.NEW.value
        stored = WORK.c.due.is_not(None), WORK.c.message == self.request.message.name
        due = self.now_us + int(again_after_s * 1e6)
        db.execute(sa.update(WORK).where(*mine, *stored).values(due=due, sends=None))

    def name_in_call(self, db: sa.Connection, claim: Claim) -> None:
        """Name the message that resumes the run in its stored call. Others do not run it."""
        mine = processed(claim.work, claim.fence, str(claim.owner))
        call = db.execute(sa.select(WORK.c.call).where(mine)).scalar()
        if call is not None:
            named = json.dumps({**json.loads(call), "message": self.request.message.name})
            db.execute(sa.update(WORK).where(mine).values(call=named))

    def goes_on(self, db: sa.Connection) -> bool:
        """Return whether the run has not ended, and lock its record, so that it cannot end."""
        columns = sa.select(WORK.c.state, WORK.c.final).where(WORK.c.id == self.request.work)
        return not _has_ended(db.execute(columns.with_for_update()).first())

    def _point(self, db: sa.Connection, **values: str | None) -> None:
        was = {"base": self.base, "was": self.pointer.open, "followed": self.pointer.follows}
        if db.execute(_POINT, {**was, "updated": self.now_us, **values}).rowcount != 1:
            raise AssertionError("the pointer was locked, and changed")

    def _end_lapsed(self, db: sa.Connection) -> None:
        row = self.open_row
        ended = db.execute(
            sa.update(WORK)
            .where(
                WORK.c.id == row.id,
                WORK.c.state == row.state,
                WORK.c.fence == row.fence,
                WORK.c.owner == row.owner,
                WORK.c.lease_until <= self.now_us,
            )
            .values(
                state=State.FAILED.value,
                final=FAILED_RUN,
                owner=FREE,
                lease_until=0,
                error=_NOBODY_CONTINUED,
                **flagged(Flag.FAILED, self.now_us),
                call=None,
                due=None,
                **NO_POSITION,
                finished=self.now_us,
            )
        )
        if ended.rowcount != 1:
            raise TransactionRetryError("The open run was continued after all.")


def run_of(
    database: Database,
    db: sa.Connection,
    request: ClaimRequest,
    *,
    lock: bool = True,
    fresh: bool = False,
) -> Run:
    """Return the run of a request.

    Args:
        database: the ledger's connections.
        db: the transaction.
        request: the request, whose work is the base.
        lock: whether to lock the pointer, which is made if it is missing.
        fresh: whether `db` may have an older snapshot, because the transaction is the user's.
    """
    base, message = str(request.work), request.message
    if lock:
        pointer = _locked_pointer(database, db, base)
    else:
        pointer = db.execute(_POINTER, {"base": base}).first()
    joined, sent_before = _runs_of_message(db, base, request, lock=lock)
    runs = {} if pointer is None else {pointer.open, pointer.follows}
    known = _records(database, db, base, joined, *runs, *sent_before)
    now_us = next((row.now_us for row in known.values()), None) or database.now_us(db)
    if fresh:
        known |= {work: _committed(database, work, known.get(work)) for work in runs if work}
    open_row = None if pointer is None else known.get(pointer.open)
    follows = None if pointer is None or _has_ended(known.get(pointer.follows)) else pointer.follows
    if joined is None:
        joined = next((work for work in sent_before if _gave_up(known.get(work))), None)
        request = request if joined is None else replace(request, resumes=True)
    if joined is None and base in known and _names(db, base, message.name):
        joined = base
    found = resolve(
        run_id(base, message.name),
        member_of=joined,
        open_run=None if pointer is None else _open_run(pointer, open_row, now_us),
        follows=follows,
    )
    if request.resumes:
        found, request = _resumed(found, request, open_row, follows)
    of_run = None if found.work == base else base
    request = replace(request, work=found.work, base=of_run, by_run=False)
    run = Run(request, found, base, pointer, open_row, follows, now_us)
    if joined is not None and not found.waits:
        _of_member(run, known.get(joined))
    return run


def of_run(db: sa.Connection, request: ClaimRequest) -> ClaimRequest:
    """Return the request with the id of the run that its message has joined, if it has."""
    base = str(request.work)
    joined, _ = _runs_of_message(db, base, request, lock=False)
    if joined is None and _names(db, base, request.message.name):
        joined = base
    if joined is None:
        return request
    return replace(request, work=joined, base=None if joined == base else base, by_run=False)


def join(database: Database, db: sa.Connection, request: ClaimRequest, *, now_us: int) -> None:
    """Make the message a member of the run that is the request's work."""
    message = request.message
    numbers = {"retries": message.retries, "deferrals": message.deferrals}
    new = {"message": message.name, "work": request.work, **numbers, "updated": now_us}
    db.execute(database.once(_joining), new)


def later_run(database: Database, db: sa.Connection, base: str, work: str) -> str | None:
    """Return the run that keeps this one from being resumed. Lock the pointer.

    Otherwise the run becomes the open one again. If it is that still, another one may follow it,
    and waits for its end.
    """
    pointer = _locked_pointer(database, db, base)
    known = _records(database, db, pointer.follows, pointer.open)
    if pointer.open == work and not _has_ended(known.get(work)):
        return None
    for later in (pointer.follows, pointer.open):
        if later not in (None, work) and not _has_ended(known.get(later)):
            return str(later)
    now_us = database.now_us(db)
    resumed = {"open": work, "follows": None, "updated": now_us}
    db.execute(sa.update(RUNS).where(RUNS.c.work == base).values(**resumed))
    return None


def _locked_pointer(database: Database, db: sa.Connection, base: str) -> Any:
    """Return the pointer, which is made if it is missing, and lock it."""
    db.execute(database.once(_making_pointer), {"base": base})
    return db.execute(_LOCKED_POINTER, {"base": base}).one()


def _of_member(run: Run, row: Any) -> None:
    """Let a member of a purged run be too old, and one of an ended run be answered by its record.

    Its own row may have been set back since. That is for the next run.
    """
    if row is None:
        run.request = replace(run.request, may_create=False, row=None)
    elif _has_ended(row) and not run.request.resumes:
        run.request = replace(run.request, row=None)


def _resumed(
    found: Resolved, request: ClaimRequest, open_row: Any, follows: str | None
) -> tuple[Resolved, ClaimRequest]:
    """Let a message resume its FAILED run, unless a later run is open or follows."""
    is_open = open_row is not None and open_row.id == found.work
    if follows is not None or not (is_open or _has_ended(open_row)):
        return found, replace(request, resumes=False)
    return replace(found, opens=True, joins=True), request


def _has_ended(row: Any) -> bool:
    """Return whether a run has ended, or its record was purged."""
    return row is None or run_ended(State(row.state), row.final)


def _open_run(pointer: Any, row: Any, now_us: int) -> OpenRun | None:
    if pointer.open is None:
        return None
    if row is None:
        return OpenRun(pointer.open, ended=True, lapsed=True)
    lives = row.state == State.DEAD.value or row.lease_until > now_us
    lapsed = not lives and not will_be_sent(row)
    return OpenRun(pointer.open, ended=_has_ended(row), lapsed=lapsed)


def will_be_sent(row: Any) -> bool:
    """Return whether a call is stored, and the ledger sends it. After many sendings it gives up."""
    return row.call is not None and (row.due is not None or row.line is not None)


def _records(database: Database, db: sa.Connection, *works: str | None) -> dict[str, Any]:
    """Return the columns of these records that decide, and the database's clock, by their ids."""
    these = sorted({work for work in works if work is not None})
    rows = db.execute(database.once(_reading_records), {"works": these})
    return {row.id: row for row in rows}


def _committed(database: Database, work: str, found: Any) -> Any:
    """Return the record as others have committed it, if that shows more than `found` does.

    The user's transaction may have an older snapshot. There is no lock, because the holder would
    wait for that transaction.
    """
    if database.dialect.one_writer or (found is not None and _has_ended(found)):
        return found
    with database.transaction() as own:
        committed = _records(database, own, work).get(work)
    shows_more = committed is not None and (found is None or _has_ended(committed))
    return committed if shows_more else found


def _runs_of_message(
    db: sa.Connection, base: str, request: ClaimRequest, *, lock: bool
) -> tuple[str | None, list[str]]:
    """Return the run that the message has joined, and those of other messages with its id."""
    name, id_ = request.message.name, request.message.id
    values = {"name": name, "first": f"{base}{RUN}", "last": f"{base}{RUN[:-1]};"}
    if request.message.sending:
        values |= {"id": id_, "sent": f"{id_}@", "after": f"{id_}A"}
    rows = db.execute(_MEMBERSHIPS[bool(request.message.sending), lock], values).all()
    mine = next((row.work for row in rows if row.message == name), None)
    return mine, [row.work for row in rows if row.message != name]


def _memberships(*, sending: bool, lock: bool) -> sa.Select[Any]:
    """Make the statement that reads the runs of a message, and of others with its id."""
    same = MESSAGES.c.message == sa.bindparam("name")
    if sending:
        sent = (
            MESSAGES.c.message >= sa.bindparam("sent"),
            MESSAGES.c.message < sa.bindparam("after"),
        )
        same = sa.or_(same, sa.and_(*sent), MESSAGES.c.message == sa.bindparam("id"))
    select = sa.select(MESSAGES.c.message, MESSAGES.c.work).where(
        same, MESSAGES.c.work >= sa.bindparam("first"), MESSAGES.c.work < sa.bindparam("last")
    )
    # MariaDB and MySQL read rows that are newer than the snapshot only with a lock.
    return select.with_for_update(read=True, key_share=True) if lock else select


_MEMBERSHIPS = {
    (sending, lock): _memberships(sending=sending, lock=lock)
    for sending in (False, True)
    for lock in (False, True)
}


def _making_pointer(database: Database) -> Any:
    new = {"work": sa.bindparam("base"), "open": None, "follows": None, "updated": database.now()}
    return database.dialect.insert_missing(RUNS, new)


def _joining(database: Database) -> Any:
    names = ("message", "work", "retries", "deferrals", "updated")
    return database.dialect.insert_missing(MESSAGES, {name: sa.bindparam(name) for name in names})


def _reading_records(database: Database) -> sa.Select[Any]:
    columns = database.now().label("now_us"), *(WORK.c[name] for name in _COLUMNS)
    these = sa.bindparam("works", expanding=True, type_=WORK.c.id.type)
    return sa.select(*columns).where(WORK.c.id.in_(these))


def _gave_up(row: Any) -> bool:
    """Return whether the run of this record has failed, and is retried no more."""
    return row is not None and row.state == State.FAILED.value and row.final == FAILED_RUN


def _names(db: sa.Connection, base: str, message: str) -> bool:
    """Return whether a record from before `once_per="run"` names this message, or replaced it."""
    noted = MESSAGES.c.message == message, MESSAGES.c.work == base
    replaced = sa.exists().where(*noted, MESSAGES.c.retries == REPLACED_RETRIES)
    theirs = sa.or_(WORK.c.message == message, replaced)
    select = sa.select(WORK.c.id).where(WORK.c.id == base, theirs)
    return db.execute(select).first() is not None
