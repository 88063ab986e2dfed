"""What deliveries ask of a ledger, and what it answers: values, and no behaviour.

Times in requests are seconds, in rows µs of the *database's* clock.

Read next: `states.py` for how a claim is decided, `ledger/ports.py` for what a ledger does.
"""

from __future__ import annotations

import re
from typing import Protocol

from taskguard.keys import SHORT_CHARS, shorten
from taskguard.model.bounds import Bounds
from taskguard.model.lease import Owner
from taskguard.model.policy import Newest
from taskguard.model.states import Decision
from taskguard.values import value

__all__ = [
    "LEADER_TASK",
    "SENDS",
    "Answer",
    "Busy",
    "Claim",
    "ClaimAnswer",
    "ClaimRequest",
    "Claimed",
    "DeclaredRow",
    "MessageRef",
    "Overdue",
    "ParkedNewest",
    "RowRef",
    "sends_of",
]

SENDS = re.compile(r'\{"sent": \[(\d+), (\d+)\], ')
"""The beginning of a stored call: how often its message was sent, and after how many claims.

A claim begins the count anew."""


LEADER_TASK = "leader"
"""Task of the records that keep what leaders remember; lists of work leave these out."""


@value
class MessageRef:
    """A delivery's message: its identity, how often it was retried and put off.

    An id of more than 200 bytes is shortened as keys are: senders may choose it, and every
    database's indexes have a limit.

    Attributes:
        id: the queue's id for the message.
        retries: how often the queue has retried it; taskguard spends none of these.
        deferrals: how often taskguard has put it off; a retry keeps the number.
        sending: what tells one sending of this id from another, where that is known: senders may
            use one twice, also for the same work. Retries and deferrals are of the same sending.
        tick: the tick that it was sent for, as `ticks.tick_name()` names it; "" if for none.
    """

    id: str
    retries: int = 0
    deferrals: int = 0
    sending: str = ""
    tick: str = ""

    def __post_init__(self) -> None:
        if len(self.id) > SHORT_CHARS:
            object.__setattr__(self, "id", shorten(self.id))

    @property
    def name(self) -> str:
        """The name of the message in the ledger: an id that is sent again is another message.

        Work with `once_per="message"` is named by the id alone.
        """
        name = f"{self.id}@{self.sending}" if self.sending else self.id
        return shorten(name) if len(name) > SHORT_CHARS else name

    @property
    def number(self) -> tuple[int, int]:
        """Deliveries of a message in their order: first by retries, then by deferrals."""
        return self.retries, self.deferrals


class DeclaredRow(Protocol):
    """What a delivery asks of a `GuardedRow`: what to do where the row does not fit.

    Attributes:
        new: the state from which the task starts.
        done: the state that it ends in.
    """

    new: object
    done: object

    @property
    def on_missing(self) -> str:
        """What to do if there is no such row: "raise", "skip" or "defer"."""
        ...

    @property
    def on_ineligible(self) -> str:
        """What to do if the row is in no state of this task's: "raise", "skip" or "defer"."""
        ...

    def describe(self, ref: RowRef) -> str:
        """The row, for messages."""
        ...


@value
class RowRef:
    """One row of the user's own: where it is declared, and its id's values."""

    declared: DeclaredRow
    id: tuple[object, ...]


@value
class ClaimRequest:
    """What a delivery asks for.

    Attributes:
        keys: sorted; at least one.
        owner: fresh for the attempt.
        work: the work's id; None claims the keys alone (the plain lock).
        task: the task's name, recorded with the work.
        ttl_s: length of the lease.
        max_crashes: holders that may vanish before the work is DEAD.
        may_create: False if the message is older than the record reaches.
        fingerprint: a digest of the arguments that have to be equal in all messages of the work;
            None: none has to be.
        call: how the work's message is sent again, if it is to be stored: JSON text.
        row: the user's own row, which says whether there is anything to do; None: the work's
            record does.
        formerly: ids under which this work may be on record as well. The claim is written under
            each of them, too, for workers that know the work by that id alone.
        redelivered: the queue says that it has delivered the message before, so that there may be
            a record: a hint about what to ask, which decides nothing.
        in_line: whether those who came before it, and wait for its one key, go first.
        sent_us: when its message was sent, in µs since 1970, which is its place in a line; None:
            when it comes to the ledger.
        newest: how a newer message of its task takes an older one's place on its one key: "latest"
            where that waits, "supersede" also where its holder is at work; None: it does not.
        held_by: whom the lock server knows as the key's holder, who may be about to claim it, or to
            end: a key that nobody holds in the ledger is not taken, unless his lease there has run
            out. None: it knows of none.
        bounds: how many may hold its one key at once, and how often it may be begun; None: one, as
            often as it is free. With slots `keys` is one of them, and a claim is of the one that
            it got.
        rank: those of a lower rank go first, whenever they were sent.
        expires_us: when its message expires, in µs since 1970, so that it waits no longer; None: it
            does not.
        max_waiting: so many may wait for its key; None: any number.
        strict: its work has a place in the line of its key from now on, and keeps it until it has
            ended: `order="strict"`. Wants one key, and a call.
        line_key: of several keys the one in whose line it stands; the others are former ones, whose
            lines it looks at, too. None: there is one key, or no line.
    """

    keys: tuple[str, ...]
    owner: Owner
    ttl_s: float
    work: str | None = None
    task: str = ""
    message: MessageRef = MessageRef("")
    max_crashes: int = 3
    may_create: bool = True
    fingerprint: str | None = None
    call: str | None = None
    row: RowRef | None = None
    formerly: tuple[str, ...] = ()
    redelivered: bool = False
    in_line: bool = False
    sent_us: int | None = None
    newest: Newest | None = None
    held_by: Owner | None = None
    bounds: Bounds | None = None
    rank: int = 0
    expires_us: int | None = None
    max_waiting: int | None = None
    strict: bool = False
    line_key: str | None = None

    @property
    def line(self) -> str:
        """The key that the work stands by on record, in whose line it waits."""
        if self.bounds is not None:
            return self.bounds.key
        return ",".join(self.keys) if self.line_key is None else self.line_key

    @property
    def lines(self) -> tuple[str, ...]:
        """The keys whose lines it stands behind: its own, then those of former guards."""
        if self.line_key is None:
            return (self.line,)
        return (self.line, *(key for key in self.keys if key != self.line))


@value
class Claim:
    """A granted request: what later statements of its holder name, above all fence and owner."""

    request: ClaimRequest
    fence: int

    @property
    def name(self) -> dict[str, object]:
        """The parameters that name the claim in a statement on its work: work, fence and owner."""
        return {"work": self.work, "fence": self.fence, "owner": str(self.owner)}

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it holds, sorted."""
        return self.request.keys

    @property
    def owner(self) -> Owner:
        """Who holds them."""
        return self.request.owner

    @property
    def work(self) -> str | None:
        """The work's id; None: the keys alone."""
        return self.request.work

    @property
    def row(self) -> RowRef | None:
        """The user's own row that the claim moved; None: there is none."""
        return self.request.row

    @property
    def formerly(self) -> tuple[str, ...]:
        """Other ids under which the work is on record."""
        return self.request.formerly

    @property
    def work_ids(self) -> tuple[str, ...]:
        """The ids of all records that the claim changes; none for the plain lock."""
        return () if self.work is None else (self.work, *self.formerly)


def sends_of(call: str, *, attempts: int) -> int:
    """Return how often a call was sent since the last claim, by how it begins."""
    count = SENDS.match(call)
    return int(count[1]) if count and int(count[2]) == attempts else 0


@value
class Overdue:
    """Work that is overdue: NEW and unclaimed for too long, or its holder's lease has run out.

    Attributes:
        work: its id.
        task: the task's name.
        message: the call's message, with the highest numbers that are known: a message with
            lower ones would be superseded.
        call: how the message is sent again, as JSON text.
        due_us: since when it is overdue, by the database's clock.
        attempts: how often it was claimed.
        sends: how often its message was sent since the last claim, as far as that is noted.
        wait_s: so long after it was read its message is to come, and not before.
        in_place: it is NEW, and keeps its place in a strict line.
    """

    work: str
    task: str
    message: MessageRef
    call: str
    due_us: int
    attempts: int = 0
    wait_s: float = 0.0
    in_place: bool = False

    @property
    def sends(self) -> int:
        return sends_of(self.call, attempts=self.attempts)


@value
class Claimed:
    """The claim was granted.

    Attributes:
        attempt: 1 for the first holder of this work.
        waited: a message of it stood in the line of its key.
        takeover: another holder's lease had run out; it counts as a crash.
        vanished: of a takeover that holder; else None.
        crashes: holders that vanished so far.
        progress_json: what the last holder stored, as JSON text; None if nothing.
        began_as: the former id under which the work began; None: under this one.
        over: the holder, alive or paused, whose lease this claim has superseded; None: it had none.
        replaced: work whose message waited, and whose place this one took: those messages are to be
            sent again, for their callers to be told.
    """

    claim: Claim
    attempt: int = 1
    waited: bool = False
    takeover: bool = False
    vanished: Owner | None = None
    crashes: int = 0
    progress_json: str | None = None
    began_as: str | None = None
    over: Owner | None = None
    replaced: tuple[Overdue, ...] = ()


@value
class ParkedNewest:
    """The message waits for its key, as the newest of its task; `replaced` is as of `Claimed`."""

    replaced: tuple[Overdue, ...] = ()


@value
class Busy:
    """A live lease stands in the way; nothing was changed.

    Attributes:
        owner: who holds the lease; None where a row lock hid it.
        retry_after_s: seconds until that lease ends; None where unknown.
        same_work: the holder does this very work.
        started: this work was claimed by somebody before.
        key: the key that is taken, where the lock server named it.
        unread: no record was looked at: what is said of the work is a guess.
        too_early: its rate allows the next start in `retry_after_s`, and not before; nobody need
            hold it.
    """

    owner: Owner | None
    retry_after_s: float | None
    same_work: bool
    started: bool
    key: str | None = None
    unread: bool = False
    too_early: bool = False


@value
class Answer:
    """The delivery needs no body.

    Attributes:
        decision: why: DONE, DEAD, REVOKED, SUPERSEDED (a live copy of the message has higher
            numbers), OUTDATED (a newer message took its place), TOO_OLD, MISMATCH (the work has
            another fingerprint), BURY (it has become DEAD by this very claim); of the user's own
            row also MISSING and INELIGIBLE.
        result_json: the result of DONE work, as JSON text; None where none was stored.
        crashes: how many holders of DEAD work vanished.
        error: what the record says of the work's end.
        row_state: the state of an INELIGIBLE row.
        owner: who completed the work; its body may still be about to store its result.
        same_message: the message that completed the work is this delivery's.
        age_s: seconds since the work finished.
        recorded_as: the former id whose record says so; None: the record of the work's own id.
        replaced_by: if SUPERSEDED because the message's call was replaced, the message that the
            record names now. None: a live copy of the message has higher numbers.
    """

    decision: Decision
    result_json: str | None = None
    crashes: int = 0
    error: str | None = None
    row_state: object = None
    owner: Owner | None = None
    same_message: bool = True
    age_s: float = 0.0
    recorded_as: str | None = None
    replaced_by: str | None = None


ClaimAnswer = Claimed | Busy | Answer
