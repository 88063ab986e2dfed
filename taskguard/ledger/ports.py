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

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from taskguard.findings import Finding
from taskguard.locks.base import Holder
from taskguard.model.bounds import NO_RATES, Bounds, Rate
from taskguard.model.claims import (
    Answer,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    DeclaredRow,
    MessageRef,
    Overdue,
    ParkedNewest,
)
from taskguard.model.lease import Owner
from taskguard.model.policy import DAY_S
from taskguard.model.records import Once, Purged, Seen, Waiting, WorkView
from taskguard.model.states import EXPIRED, State

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = [
    "Calls",
    "Claims",
    "DatabaseLedger",
    "Effects",
    "Endings",
    "Ledger",
    "LedgerTransaction",
    "LentConnection",
    "LineLedger",
    "Lines",
    "Messages",
    "Outbox",
    "Records",
    "Tables",
    "Upkeep",
]


class Claims(Protocol):
    """Who may run: the admission asks, and the watchdog renews."""

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one atomic step, whether this delivery may run."""
        ...

    def peek(self, request: ClaimRequest) -> ClaimAnswer:
        """What a claim would find, without claiming: Answer, or Busy (also where it is free)."""
        ...

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        """Renew many claims, each for its `ttl_s` from now, in one statement a batch.

        One of `RENEWED`, `SKIPPED` (the row was locked by somebody, or its work is already
        completed by this claim), `TAKEN` (another holder, or the work left PROCESSING).
        """
        ...

    def holds(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Whether the owner has one of these keys, by a claim that has not ended."""
        ...

    def view(self, work: str) -> WorkView | None:
        """A work's record."""
        ...


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


class Effects(Protocol):
    """What a holder writes while it runs, and how its work is completed."""

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


class Endings(Protocol):
    """How a claim ends that does not complete its work."""

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

    def uncount_crash(self, claim: Claim) -> None:
        """A holder whose lease was taken over is alive after all: uncount its crash, once."""
        ...


class Messages(Protocol):
    """What the record knows of messages."""

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

    def done_elsewhere(self, request: ClaimRequest) -> str | None:
        """Another work of the same task that this message has done; None if there is none.

        Reads every record: ask it only of messages that may have.
        """
        ...


class Ledger(Claims, Effects, Endings, Messages, Protocol):
    """What deliveries ask of the record in the database. Thread-safe; usable again after a fork."""


class LentConnection(Protocol):
    """Another library's connection, in whose open transaction the ledger writes."""

    @property
    def kind(self) -> str:
        """SQLAlchemy's name for the kind of database: "postgresql", "sqlite"."""
        ...

    @property
    def driver(self) -> Any:
        """The driver's own connection; its driver is the ledger's."""
        ...


class Outbox(Protocol):
    """How messages are sent, stored with their work: `enqueue()`, `recoverable=True`, the sweep."""

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
        external: LentConnection,
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


class Lines(Protocol):
    """Messages in line for their key: what a delivery asks. Read `statements/lines.py`."""

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


class Calls(Protocol):
    """Whose turn it is in the lines: what a holder that ends, a relay and the doctor ask."""

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


class LineLedger(Ledger, Outbox, Lines, Calls, Protocol):
    """A ledger that also stores how messages are sent, and keeps them in line: `busy="park"`."""


class Records(Protocol):
    """What people ask and change: `taskguard work`, `tg.release()`, the admin."""

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


class Tables(Protocol):
    """Make, upgrade and check the ledger's tables."""

    def check_schema(self, rows: Iterable[DeclaredRow] = ()) -> None:
        """Raise LedgerSchemaError unless the tables are there in this library's version.

        Also unless the users' own tables have what `rows` declare.
        """
        ...

    def create_schema(self) -> None:
        """Create what is missing; asked again it does nothing."""
        ...

    def upgrade_schema(self) -> tuple[int, int]:
        """Bring tables of an older version to this library's. The versions before and after."""
        ...

    def upgrade_statements(self) -> list[str]:
        """The SQL that `upgrade_schema()` would run now; nothing is changed."""
        ...


class Upkeep(Protocol):
    """What is deleted, what is wrong, and the end of its connections."""

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

    def close(self) -> None:
        """Close connections."""
        ...


class DatabaseLedger(LineLedger, Records, Tables, Upkeep, Protocol):
    """All of it, as `SqlLedger` has it: what `connect()` takes."""
