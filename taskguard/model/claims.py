"""Requests of deliveries to a ledger, and its answers. Values only.

Times are seconds in requests, and µs of the *database's* clock in rows.

Read next: `states.py` for how a claim is decided, `ledger/ports.py` for what a ledger does.
"""

from __future__ import annotations

from typing import Protocol

from taskguard.keys import SHORT_CHARS, shorten
from taskguard.model.bounds import Bounds
from taskguard.model.lease import Owner
from taskguard.model.policy import Newest, replaces_holder
from taskguard.model.states import Decision
from taskguard.values import value

__all__ = [
    "LEADER_TASK",
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
]

"""The beginning of a stored call: how often its message was sent, and after how many claims.

A claim begins the count anew."""


LEADER_TASK = "leader"
"""Task of the records that keep what leaders remember; lists of work leave these out."""


@value
class MessageRef:
    """A delivery's message: its identity, and how often it was retried and deferred.

    An id of more than 200 bytes is shortened as keys are. Senders may choose ids, and the indexes
    of every database have a limit.

    Attributes:
        id: the queue's id for the message.
        retries: how often the queue has retried it. taskguard uses none of these retries.
        deferrals: how often taskguard has deferred it. A retry keeps the number.
        sending: distinguishes messages that were sent with one id, if that is known. Retries and
            deferrals belong to the same sending.
        tick: the tick for which it was sent, as `ticks.tick_name()` names it; "" if none.
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
        """The name of the message in the ledger.

        If an id is sent again, that is another message, with another name. But work with
        `once_per="message"` is named by the id alone.
        """
        name = f"{self.id}@{self.sending}" if self.sending else self.id
        return shorten(name) if len(name) > SHORT_CHARS else name

    @property
    def number(self) -> tuple[int, int]:
        """The order of a message's deliveries, first by retries, then by deferrals."""
        return self.retries, self.deferrals


class DeclaredRow(Protocol):
    """The part of a `GuardedRow` that a claim needs: what to do if the row does not fit.

    Attributes:
        new: the state from which the task starts.
        done: the state that it ends in.
    """

    new: object
    done: object

    @property
    def on_missing(self) -> str:
        """The option for a missing row: "raise", "skip" or "defer"."""
        ...

    @property
    def on_ineligible(self) -> str:
        """The option for a row in another state than the task's: "raise", "skip" or "defer"."""
        ...

    def describe(self, ref: RowRef) -> str:
        """Return the text that names the row in messages."""
        ...


@value
class RowRef:
    """One row of the user's own: its declaration, and the values of its id."""

    declared: DeclaredRow
    id: tuple[object, ...]


@value
class ClaimRequest:
    """A request to claim keys and work.

    Attributes:
        keys: the keys, sorted; at least one.
        owner: the owner, new for each attempt.
        work: the work's id. None claims only the keys (the plain lock).
        task: the task's name, recorded with the work.
        ttl_s: length of the lease.
        max_crashes: how many holders may vanish before the work is DEAD.
        may_create: False if the message is older than the record reaches.
        fingerprint: a digest of the arguments that must be equal in all messages of the work.
            None: there are none.
        call: how to send the work's message again, as JSON text. None: do not store it.
        row: the user's own row, which says whether there is anything to do. None: the work's
            record says it.
        formerly: other ids under which this work may be on record. The claim is written under each
            of them as well, for workers that know the work only by that id.
        redelivered: the queue says that it has delivered the message before, so there may be a
            record. A hint that selects a statement, and decides nothing.
        in_line: whether messages that came earlier, and wait for its one key, go first.
        sent_us: when its message was sent, in µs since 1970: its position in a line. None: the time
            when it comes to the ledger.
        newest: how a newer message of its task supersedes an older one on its one key. "latest": if
            the older one waits. "supersede": also if its body runs. None: it does not.
        held_by: the key's holder at the lock server, which may be about to claim, or to end. A key
            that is free in the ledger is granted only if this holder's lease has expired there.
            None: the lock server names none.
        bounds: the limit and rate of its one key. None: one holder at a time, without a rate. With
            slots, `keys` is one of them, and the claim names the slot that it got.
        rank: messages of a lower rank go first, whenever they were sent.
        expires_us: when its message expires, in µs since 1970, and stops waiting. None: never.
        max_waiting: how many messages may wait for its key. None: any number.
        strict: its work gets a position in the line of its key, and keeps it until it has ended:
            `order="strict"`. Needs a single key, and a call.
        line_key: of several keys, the one whose line it joins. The others are former keys, whose
            lines go first as well. None: there is one key, or no line.
        by_run: `work` is the base of runs (`once_per="run"`), and the ledger finds out to which
            run the message belongs.
        base: `work` is a run of this base. None: it is no run.
        resumes: its message was sent again after its run had failed, to resume it.
        trace: the W3C traceparent of the span that claims. None: no span is sampled.
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
    by_run: bool = False
    base: str | None = None
    resumes: bool = False
    trace: str | None = None

    @property
    def replaces_holder(self) -> bool:
        """Whether a newer message takes the key from an older message of its task at work."""
        return replaces_holder(self.newest)

    @property
    def line(self) -> str:
        """The key in whose line the work on record waits."""
        if self.bounds is not None:
            return self.bounds.key
        return ",".join(self.keys) if self.line_key is None else self.line_key

    @property
    def lines(self) -> tuple[str, ...]:
        """The keys whose lines it waits behind: its own, then those of former guards."""
        if self.line_key is None:
            return (self.line,)
        return (self.line, *(key for key in self.keys if key != self.line))


@value
class Claim:
    """A granted request. Later statements of its holder name its fence and owner."""

    request: ClaimRequest
    fence: int

    @property
    def name(self) -> dict[str, object]:
        """Work, fence and owner, by which a statement on the work names the claim."""
        return {"work": self.work, "fence": self.fence, "owner": str(self.owner)}

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it holds, sorted."""
        return self.request.keys

    @property
    def owner(self) -> Owner:
        """The holder of the keys."""
        return self.request.owner

    @property
    def message(self) -> MessageRef:
        """The message whose delivery was granted the claim."""
        return self.request.message

    @property
    def work(self) -> str | None:
        """The work's id, or None if only the keys are claimed."""
        return self.request.work

    @property
    def row(self) -> RowRef | None:
        """The user's own row that the claim moved, or None."""
        return self.request.row

    @property
    def formerly(self) -> tuple[str, ...]:
        """Other ids under which the work is on record."""
        return self.request.formerly

    @property
    def work_ids(self) -> tuple[str, ...]:
        """The ids of all records that the claim changes. Empty for the plain lock."""
        return () if self.work is None else (self.work, *self.formerly)


@value
class Overdue:
    """Overdue work: NEW and unclaimed for too long, or with a holder whose lease has expired.

    Attributes:
        work: its id.
        task: the task's name.
        message: the call's message, with the highest numbers that are known. A message with lower
            numbers would be superseded.
        call: how to send the message again, as JSON text.
        due_us: since when it is overdue, by the database's clock.
        attempts: how often it was claimed.
        sends: how often its message was sent again since the last claim.
        wait_s: the delay with which to send its message.
        keeps_position: it is NEW, and keeps its position in a strict line.
    """

    work: str
    task: str
    message: MessageRef
    call: str
    due_us: int
    attempts: int = 0
    sends: int = 0
    wait_s: float = 0.0
    keeps_position: bool = False


@value
class Claimed:
    """The claim was granted.

    Attributes:
        attempt: 1 for the first holder of this work.
        waited: a message of it was in the line of its key.
        takeover: another holder's lease had expired. It counts as a crash.
        vanished: that holder. None without a takeover.
        crashes: how many holders have vanished so far.
        progress_json: the last holder's progress, as JSON text. None: it stored none.
        began_as: the former id under which the work began. None: its present id.
        over: the holder, alive or paused, whose lease this claim superseded. None: there was none.
        replaced: work whose waiting messages this one superseded. Send those messages again, so
            that their callers are notified.
        trace: the traceparent of the vanished holder's claim. None: there is none.
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
    trace: str | None = None


@value
class ParkedNewest:
    """The message waits for its key, as the newest of its task. `replaced`: see `Claimed`."""

    replaced: tuple[Overdue, ...] = ()


@value
class Busy:
    """The claim was refused because of a live lease or a rate. Nothing was changed.

    Attributes:
        owner: the holder of the lease. None: a row lock hid it.
        retry_after_s: seconds until that lease ends. None: unknown.
        same_work: the holder does this very work.
        started: this work was claimed before.
        key: the key that is taken, if the lock server named it.
        unread: no record was read: what this says of the work is a guess.
        too_early: the rate allows the next start in `retry_after_s`. The key may be free.
        trace: the traceparent of the holder's claim, if it does this very work. None: unknown.
    """

    owner: Owner | None
    retry_after_s: float | None
    same_work: bool
    started: bool
    key: str | None = None
    unread: bool = False
    too_early: bool = False
    trace: str | None = None


@value
class Answer:
    """The delivery needs no body.

    Attributes:
        decision: the reason: DONE, DEAD, REVOKED, FAILED (its run gave up), SUPERSEDED (a live copy
            of the message has higher numbers), OUTDATED (a newer message superseded it), TOO_OLD,
            MISMATCH (the work has another fingerprint), BURY (this claim made it DEAD). For the
            user's own row also MISSING and INELIGIBLE.
        result_json: the result of DONE work, as JSON text. None: none was stored.
        crashes: how many holders of DEAD work vanished.
        error: the reason on record for the work's end.
        row_state: the state of an INELIGIBLE row.
        owner: the holder that completed the work. It may be about to store its result.
        same_message: the message that completed the work is this delivery's.
        age_s: seconds since the work finished.
        recorded_as: the id of the record that counts, if it is a former one, or that of a run.
            None: the work's own id.
        later: the run that is open now, if the message's own run has ended. None: there is none.
        replaced_by: if SUPERSEDED because the message's call was replaced, the message that the
            record names now. None: a live copy of the message has higher numbers.
        trace: the traceparent of the last claim of the work. None: unknown.
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
    later: str | None = None
    replaced_by: str | None = None
    trace: str | None = None


ClaimAnswer = Claimed | Busy | Answer
