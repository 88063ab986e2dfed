"""What a ledger has to offer: who grants fences, and the state machine of work.

Guarantees of every ledger:
* a key's fence only grows, and every claim of a key gets a higher one than the claim before;
* a claim is decided and recorded in one atomic step, and asked again by the same owner it gives
  the same grant and counts nothing;
* `complete` moves PROCESSING -> DONE only while the work *and* its keys still carry this claim's
  fence and owner, in the caller's transaction, else StaleTokenError and nothing of it stays;
* DONE and DEAD never change but by an operator, or by the owner of the user's own row, who sets
  it back to its first state;
* no call waits for a row lock longer than a short lock time-out: that is `Busy`.

Driver errors come out as LedgerUnavailableError, TransactionRetryError or LedgerSchemaError.
Times in requests are seconds, in rows µs of the *database's* clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from taskguard.bounds import NO_RATES, Bounds, Rate
from taskguard.findings import Finding
from taskguard.keys import SHORT_CHARS, shorten
from taskguard.lease import Owner
from taskguard.locks.base import Holder
from taskguard.policy import DAY_S, Newest
from taskguard.states import EXPIRED, Decision, State
from taskguard.values import value

if TYPE_CHECKING:
    import sqlalchemy as sa

    from taskguard.ledger.retention import Purged
    from taskguard.ledger.transactions.external import ExternalConnection

__all__ = [
    "LEADER_TASK",
    "SENDS",
    "Answer",
    "Busy",
    "Claim",
    "ClaimAnswer",
    "ClaimRequest",
    "Claimed",
    "DatabaseLedger",
    "DeclaredRow",
    "Ledger",
    "LedgerTransaction",
    "LineLedger",
    "MessageRef",
    "Once",
    "OperatorLedger",
    "OutboxLedger",
    "Overdue",
    "ParkedNewest",
    "RowRef",
    "Seen",
    "Standing",
    "Waiting",
    "WorkView",
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


@value
class WorkView:
    """The record of work as a person or an operator's tool sees it. Times in seconds since 1970."""

    id: str
    task: str
    key: str
    message: str
    retries: int
    state: State
    final: bool
    fence: int
    owner: str
    lease_until_s: float
    attempts: int
    crashes: int
    progress_json: str | None
    result_json: str | None
    error: str | None
    call: str | None
    created_s: float | None
    started_s: float | None
    finished_s: float | None


@value
class Seen:
    """What a relay has to do.

    Attributes:
        keys: those whose first waiting message may be called.
        after: the last key that was read; None: there are no more.
        expired: whether a message has expired while it waited.
        overdue: whether a message was called and has not come.
        early: tasks of messages that wait, by the record, for their rate; but those of `rates`.
    """

    keys: tuple[str, ...] = ()
    after: str | None = None
    expired: bool = False
    overdue: bool = False
    early: tuple[str, ...] = ()


@value
class Waiting:
    """Work in the line of its key, as a person sees it. Times in seconds since 1970.

    Attributes:
        expected_until_s: until when its message, which was sent, is expected; None: it waits.
        failed: it has begun and failed, and keeps its place until its retry has come.
        sent_again: how often its message was sent again since it was called.
    """

    key: str
    work: str
    message: str
    parked_s: float
    expected_until_s: float | None
    failed: bool = False
    sent_again: int = 0


@value
class Standing:
    """Work that somebody has enqueued or claimed before, and that has not ended.

    Attributes:
        work: its id.
        message: the name of the message that runs it, or that is to.
        call: how that message is sent again, as JSON text; None where that is not stored.
        fingerprint: the digest of the arguments that its messages have to agree on, if any.
        begun: somebody is at work on it, or was, and has noted progress.
    """

    work: str
    message: str
    call: str | None
    fingerprint: str | None
    begun: bool


@value
class Once:
    """What an enqueue does where the same work is waiting or in progress.

    Attributes:
        found: is given what stands there, and returns what is to replace its stored call, or None:
            nothing is written. What it raises goes to the caller, before anything is written.
        replaces: whether it may replace: the work's record is then locked while it is asked.
    """

    found: Callable[[Standing], ClaimRequest | None]
    replaces: bool = False


class LedgerTransaction(Protocol):
    """One open transaction of a holder. Ends by leaving the context manager that gave it.

    Attributes:
        db: the SQLAlchemy Connection the body writes with.
    """

    db: Any

    def complete(self, claim: Claim, result_json: str | None) -> None:
        """PROCESSING -> DONE in this transaction, and end the ledger's lease. The last of a block.

        Raises StaleTokenError when the claim no longer stands; that, and all else by which it may
        fail, may also be raised at the end of the block.
        """
        ...

    def checkpoint(self, claim: Claim, progress_json: str) -> None:
        """Store progress in this transaction, fenced; the state stays PROCESSING."""
        ...


class Ledger(Protocol):
    """What deliveries ask of the record in the database. Thread-safe; usable again after a fork."""

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one atomic step, whether this delivery may run."""
        ...

    def peek(self, request: ClaimRequest) -> ClaimAnswer:
        """What a claim would find, without claiming: Answer, or Busy (also where it is free)."""
        ...

    def transaction(
        self, claim: Claim, *, look_first: bool = True, on: Any = None
    ) -> AbstractContextManager[LedgerTransaction]:
        """A transaction for the holder's writes. With `look_first`, for a holder whose lease may
        have run out, an obviously stale claim is refused before the body writes anything. `on` is
        the user's own session or connection to have it on, where it reaches this database.

        Left normally: COMMIT; by an exception: ROLLBACK. A COMMIT whose outcome is unknown is
        resolved before this returns or raises: returns if it happened; raises
        TransactionRetryError if it did not and the claim stands, StaleTokenError if it did not
        and cannot any more, CommitUnknownError if nothing can be learnt.
        """
        ...

    def complete(self, claim: Claim, result_json: str | None) -> None:
        """PROCESSING -> DONE in a transaction of its own, flushed. Raises StaleTokenError."""
        ...

    def store_result(self, claim: Claim, result_json: str) -> None:
        """Store the result of work that this claim completed; does nothing if it did not."""
        ...

    def note(self, claim: Claim, progress_json: str) -> bool:
        """Store progress of work that this claim holds, by itself. False if it does not hold it."""
        ...

    def fail(self, claim: Claim, error: str) -> bool:
        """PROCESSING -> FAILED with the attempt's retry number; ends the lease. False if stale."""
        ...

    def give_back(self, claim: Claim) -> bool:
        """PROCESSING -> NEW; ends the lease; not a crash. False if stale.

        A claim without work only ends its lease: False if its keys did not carry it any more, True
        where that cannot be told.
        """
        ...

    def crash(self, claim: Claim, error: str) -> bool:
        """A body ended its process: ends the lease, and leaves the work PROCESSING, with `error`.

        The next claim is a takeover, or makes the work DEAD, as after a lease that ran out, but
        need not wait for that. The user's own row stays as it is. False if stale.
        """
        ...

    def end_round(self, claim: Claim, reason: str, *, most: int) -> State | None:
        """PROCESSING -> NEW, because the database ended the body's transaction; ends the lease.

        The `most`th time in a row -> FAILED, with the reason. The state it has now; None if stale.
        """
        ...

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        """Renew many claims, each for its `ttl_s` from now, in one statement a batch.

        One of `RENEWED`, `SKIPPED` (the row was locked by somebody, or its work is already
        completed by this claim), `TAKEN` (another holder, or the work left PROCESSING).
        """
        ...

    def uncount_crash(self, claim: Claim) -> None:
        """A holder whose lease was taken over is alive after all: uncount its crash, once."""
        ...

    def defer(self, request: ClaimRequest, publish: Callable[[int], None]) -> bool:
        """Publish the message again and record its number of deferrals; False if superseded.

        The number is the message's in this work: it says nothing of another work that the same id
        was used for.

        Holds the message's row locked while `publish(deferrals + 1)` runs, and commits the number
        only after it returned, so that a crash in between leaves one copy too many, never one
        too few, and fifty duplicates at once leave one copy, not fifty.
        """
        ...

    def revoke(self, work: str, *, message: str) -> bool:
        """NEW, PROCESSING or FAILED of this message -> FAILED, final. False if it was none."""
        ...

    def expire(
        self,
        work: str,
        *,
        message: MessageRef,
        retries: int | None = None,
        due: bool = False,
        error: str = EXPIRED,
    ) -> bool:
        """NEW, PROCESSING beyond its lease, or FAILED in a place, of this message -> FAILED.

        Not final: the message has expired, and is sent no more; another one of the work is run.
        False if it was none, or if a later retry of the message, or another one, stands for it.

        Args:
            work: what was to be done.
            message: what has expired.
            retries: the number with which the message would come if somebody sent it anew, so that
                it is run; None: one more than its own.
            due: only if it stands in line, and its `expires_us` is over by this clock; of several
                that it was parked with, the first.
            error: why it never runs, if it has not expired.
        """
        ...

    def view(self, work: str) -> WorkView | None:
        """A work's record."""
        ...

    def holds(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Whether the owner has one of these keys, by a claim that has not ended."""
        ...

    def done_elsewhere(self, request: ClaimRequest) -> str | None:
        """Another work of the same task that this message has done; None if there is none.

        Reads every record: ask it only of messages that may have.
        """
        ...

    def check_schema(self, rows: Iterable[DeclaredRow] = ()) -> None:
        """Raise LedgerSchemaError unless the tables are there in this library's version.

        Also unless the users' own tables have what `rows` declare.
        """
        ...

    def create_schema(self) -> None:
        """Create what is missing; asked again it does nothing."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


class OperatorLedger(Ledger, Protocol):
    """What people ask of a ledger: by `taskguard work`, `ledger` and `purge`, and by the admin."""

    def list_work(self, state: State, *, limit: int = 100) -> list[WorkView]:
        """The records of all work in a state, what started last first."""
        ...

    def waiting(self, key: str | None = None, *, limit: int = 100) -> list[Waiting]:
        """Who waits in the line of a key, or of each, the first of them first."""
        ...

    def requeue(self, work: str, *, reason: str) -> bool:
        """DEAD or FAILED -> NEW: its next delivery runs it. False if it is in another state."""
        ...

    def holders(self, key: str) -> list[Holder]:
        """Return the holders of a key whose leases stand: one, or those of its slots."""
        ...

    def release(self, key: str, *, fence: int, owner: str) -> bool:
        """End the lease of a holder that is known to be gone. False if it is not the holder."""
        ...

    def purge(self, *, older_than_s: float, batch: int = 1000, dead: bool = False) -> Purged:
        """Forget work that ended so long ago, its messages, and keys whose lease ended before.

        Raises ConfigurationError where that is too early.
        """
        ...

    def check(
        self,
        rows: Iterable[DeclaredRow] = (),
        *,
        longest_body_s: float = 30.0,
        retention_s: float = 30 * DAY_S,
    ) -> list[Finding]:
        """What is wrong with the database, its settings and the tables; nothing is changed.

        Raises LedgerUnavailableError where it does not answer at all.
        """
        ...

    def now_us(self) -> int:
        """The database's clock, in µs since 1970."""
        ...

    def upgrade_schema(self) -> tuple[int, int]:
        """Bring tables of an older version to this library's. The versions before and after."""
        ...

    def upgrade_statements(self) -> list[str]:
        """The SQL that `upgrade_schema()` would run now; nothing is changed."""
        ...


class OutboxLedger(Ledger, Protocol):
    """A ledger that stores how messages are sent: `enqueue()`, `recoverable=True`, the sweep."""

    def now_us(self) -> int:
        """The database's clock, in µs since 1970: by it a delayed message is due."""
        ...

    def enqueue(
        self,
        db: sa.Connection | None,
        request: ClaimRequest,
        *,
        due_in_s: float = 5.0,
        once: Once | None = None,
    ) -> None:
        """Write work with its call as NEW, in the transaction of `db`, which is the user's.

        With `once` it decides where the same work is waiting or in progress.

        Raises CallTooLargeError or ConfigurationError.
        """
        ...

    def enqueue_external(
        self,
        external: ExternalConnection,
        request: ClaimRequest,
        *,
        due_in_s: float = 5.0,
        once: Once | None = None,
    ) -> None:
        """The same in the transaction that another library has open on `external`."""
        ...

    def overdue(
        self,
        *,
        limit: int = 1000,
        after: Overdue | None = None,
        work: str | None = None,
        parked: bool | None = None,
    ) -> list[Overdue]:
        """Work that is overdue; `outbox.py` says when it is.

        `parked`: only what was called from a line; False: all but that; None: both.
        """
        ...

    def sent(
        self, items: Sequence[Overdue], *, again_after_s: float | None, counted: bool = True
    ) -> int:
        """Note that the messages of these were sent again; not `counted`: it was only tried.

        `again_after_s`: their work is overdue again after so long; None: it waits in its place in
        a strict line until it is called, which counts as a sending.
        """
        ...

    def abandon(self, work: Overdue, *, error: str) -> bool:
        """NEW, or PROCESSING beyond its lease -> FAILED; False if it changed since it was read."""
        ...


class LineLedger(OutboxLedger, Protocol):
    """A ledger that keeps messages in line for their key: `busy="park"`.

    `ledger/statements/lines.py` says how.
    """

    def park(self, request: ClaimRequest, *, only_new: bool = False) -> bool:
        """Store the work with its call in the line of its key; False if it is not to wait.

        `only_new`: nor if there is a record of it, or of its message.

        Raises CallTooLargeError; LineFullError for work that nobody has begun, where
        `max_waiting` others wait: it is FAILED then, if it was on record.
        """
        ...

    def park_newest(
        self, request: ClaimRequest, *, only_new: bool = False
    ) -> ParkedNewest | Answer | None:
        """The same as the only one of its task that waits for the key: `request.newest`.

        An Answer: a newer one has begun, or waits, so that this one never runs. None: it is not to
        wait. Raises CallTooLargeError.
        """
        ...

    def told(self, work: str) -> None:
        """Note that the caller of work that was superseded while it waited is being told so."""
        ...

    def call_next(
        self,
        key: str,
        *,
        expected_s: float,
        app: str = "",
        queues: Sequence[str] | None = None,
        bounds: Bounds | None = None,
        ahead_s: float | None = None,
        rates: Mapping[str, Rate | None] = NO_RATES,
    ) -> Overdue | None:
        """Note that the first in line is called, if the key is free: its message is to be sent.

        Only one of the namespace `app`, and whose call is for one of `queues`; None: for any. With
        `ahead_s` the key may be bounded, by `bounds` or, if the caller knows of none, as it was
        last; and if its rate allows the next start in at most so long, then his message is to come
        at that moment (`Overdue.wait_s`). `rates`: as in `look()`, where there are no `bounds`.
        """
        ...

    def expired(
        self, *, app: str = "", queues: Sequence[str] | None = None, limit: int = 1000
    ) -> list[Overdue]:
        """Who waits in a line, and has expired: from now on overdue, so that they are sent.

        A worker that gets the message says that it has expired, and `expire()`s its work; until
        then it holds up nobody but who is behind strict work. Only those of the namespace `app`,
        and whose call is for one of `queues`; None: for any.
        """
        ...

    def keep(self, claim: Claim, *, retries: int, call: str | None, due_in_s: float) -> bool:
        """The message of FAILED work that keeps its place was sent once more, as this call.

        It is overdue in so many seconds. `retries`: the number with which it comes; copies of it
        with a lower one are superseded. False if the work is no longer what the claim left.
        """
        ...

    def leave(self, claim: Claim, *, retries: int) -> bool:
        """FAILED work that keeps its place gives it up: its message does not come again.

        `retries`: copies of it with a lower number are superseded; one with this number is run.
        """
        ...

    def standing(self, *, most: int = 10_000) -> dict[tuple[str, str], int]:
        """How many messages wait in lines, by their namespace and the kind of their queue."""
        ...

    def has_lines(self, *, app: str = "", queues: Sequence[str] | None = None) -> bool:
        """Return True if a message of this namespace, and of these queues (None: any), waits."""
        ...

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
        """What a relay has to do for a namespace and these queues (None: any), in one transaction.

        At most `most` messages in lines are read, by key, those whose key comes after `after`.
        Keys are named whose first waiting message may be called: they are free, and their rate
        allows a start in at most `ahead_s`. `announce`: what is told to those who LISTEN.
        """
        ...


class DatabaseLedger(OperatorLedger, LineLedger, Protocol):
    """A ledger for deliveries, people and the outbox, as `SqlLedger` is: what `connect()` takes."""
