"""Make views of rows: columns to read, and the names of processes.

Nothing is decided here, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.tables import FREE, HAPPENINGS, WORK, WORKERS
from taskguard.model.bounds import range_of_slots
from taskguard.model.history import Flag
from taskguard.model.lease import Owner
from taskguard.model.line_states import LineState
from taskguard.model.states import State
from taskguard.model.texts import shown_id
from taskguard.model.views import Past, Process, WaitingView, WorkItem
from taskguard.model.workers import Worker
from taskguard.values import value

__all__ = [
    "ENDED",
    "HAPPENED",
    "WAITING",
    "WORK_ITEM",
    "Asked",
    "begins_with",
    "happenings_of",
    "item_of",
    "of_key",
    "seconds",
    "waiting_of",
]

_MOST_ERROR = 4_000
_BEFORE_SURROGATES, _AFTER_SURROGATES, _LAST = 0xD7FF, 0xE000, 0x10FFFF
# A claim leaves the end of the attempt before on record, because no index or rule reads it.
ENDED = (State.DONE.value, State.FAILED.value, State.DEAD.value)
_NAMES = ("number", "kind", "name", "host", "pid", "queues", "version")

# Not the columns that may be large, or private: arguments, results, progress, history.
# fmt: off
WORK_ITEM = (
    *(
        WORK.c[name]
        for name in (
            "id", "task", "key", "message", "state", "final", "attempts", "crashes", "retries",
            "fence", "owner", "lease_until", "flag", "since", "sends", "due", "line", "parked",
            "created", "started", "finished", "trace",
        )
    ),
    sa.func.substr(WORK.c.error, 1, _MOST_ERROR).label("error"),
    sa.case((WORK.c.call.is_not(None), 1), else_=0).label("stored"),
)
WAITING = tuple(
    WORK.c[name]
    for name in (
        "key", "id", "task", "message", "rank", "parked", "line", "state", "due", "expires",
        "sends",
    )
)
HAPPENED = tuple(
    HAPPENINGS.c[name]
    for name in ("at", "what", "key", "task", "work", "owner", "fence", "n", "detail")
)
# fmt: on


@value
class Asked:
    """An open transaction of a question, with the database's clock.

    Attributes:
        db: the connection.
        now_us: the clock at the beginning.
    """

    db: sa.Connection
    now_us: int

    def rows(self, select: Any) -> Sequence[Any]:
        """Return the rows of a statement."""
        return self.db.execute(select).all()

    def processes(self, owners: Iterable[str | None]) -> dict[str, Process]:
        """Return the processes of these owners, by the owner's text."""
        texts = {owner for owner in owners if owner}
        parsed = {text: Owner.parse(text) for text in texts}
        numbers = {each.named[0] for each in parsed.values() if each.is_ours}
        known = {}
        if numbers:
            select = sa.select(WORKERS).where(WORKERS.c.number.in_(sorted(numbers)))
            known = {row.number: row for row in self.rows(select)}
        return {text: _process(text, owner, known) for text, owner in parsed.items()}


def begins_with(column: Any, prefix: str) -> tuple[Any, ...]:
    """Return the condition that a text begins with a prefix, as a range of an index."""
    if not prefix:
        return ()
    # A text of ASCII letters stays one, because not every database can store all characters.
    last = ord(prefix[-1])
    following = _AFTER_SURROGATES if last == _BEFORE_SURROGATES else min(last + 1, _LAST)
    return column >= prefix, column < prefix[:-1] + chr(following)


def of_key(column: Any, key: str) -> Any:
    """Return the condition that a text is a key, or looks like one of its slots."""
    first, after = range_of_slots(key)
    return sa.or_(column == key, sa.and_(column > first, column < after))


def seconds(us: int | None) -> float | None:
    """Return µs as seconds. None stays None, and 0 is no time."""
    return us / 1e6 if us else None


def _process(text: str, owner: Owner, known: dict[str, Any]) -> Process:
    if not owner.process:  # a pause, or a value that another program wrote
        return Process(text, "", message=owner.message)
    number, pid = owner.named
    row = known.get(number)
    if row is None:
        return Process(text, owner.process, number, pid, shown_id(owner.message))
    worker = Worker(**{name: getattr(row, name) for name in _NAMES})
    return Process(
        text,
        f"{worker.label}, pid {pid}",
        number,
        pid,
        shown_id(owner.message),
        kind=row.kind,
        name=row.name,
        host=row.host,
        version=row.version,
        started_s=seconds(row.started),
        seen_s=seconds(row.seen),
    )


def item_of(row: Any, asked: Asked, processes: dict[str, Process], **others: Any) -> WorkItem:
    """Return the view of work from its columns in `WORK_ITEM`."""
    runs = row.state == State.PROCESSING.value
    return WorkItem(
        id=row.id,
        task=row.task,
        key=row.key,
        message=shown_id(row.message),
        state=State(row.state),
        final=row.state == State.FAILED.value and bool(row.final),
        attempts=row.attempts,
        crashes=row.crashes,
        retries=row.retries,
        process=None if row.owner == FREE else processes[row.owner],
        fence=row.fence,
        lease_until_s=seconds(row.lease_until) if runs else None,
        left=runs and row.lease_until <= asked.now_us,
        flag=None if row.flag is None else Flag(row.flag),
        since_s=seconds(row.since),
        error=row.error,
        stored=bool(row.stored),
        sends=row.sends or 0,
        due_s=seconds(row.due),
        line=None if row.line is None else LineState(row.line),
        parked_s=seconds(row.parked),
        created_s=seconds(row.created),
        started_s=seconds(row.started),
        finished_s=seconds(row.finished) if row.state in ENDED else None,
        trace=row.trace,
        **others,
    )


def waiting_of(row: Any, position: int | None = None) -> WaitingView:
    """Return the view of a message in line from its columns in `WAITING`."""
    return WaitingView(
        key=row.key,
        work=row.id,
        task=row.task,
        message=shown_id(row.message),
        parked_s=row.parked / 1e6,
        line=LineState(row.line),
        state=State(row.state),
        position=position,
        expected_until_s=seconds(row.due),
        expires_s=seconds(row.expires),
        sent_again=row.sends or 0,
    )


def happenings_of(rows: Iterable[Any], processes: dict[str, Process]) -> Iterator[Past]:
    """Return rows of `HAPPENED` as views."""
    for row in rows:
        yield Past(
            at_s=row.at / 1e6,
            what=row.what,
            text=row.detail or "",
            process=processes.get(row.owner),
            fence=row.fence,
            n=row.n,
            work=row.work,
            task=row.task or None,
        )
