"""Protocols of a ledger, which grants fencing tokens and keeps the state of work.

Guarantees of every ledger:
* Fencing tokens of a key only grow. Each claim of a key gets a higher one than the claim before.
* A claim is decided and recorded in one atomic step. If the same owner asks again, it gets the
  same grant, and nothing is counted twice.
* A completion moves PROCESSING -> DONE while the work *and* its keys carry this claim's fence and
  owner. Otherwise it raises StaleTokenError, and nothing stays. `complete_in_block` writes it in
  the holder's transaction, maybe in one message with its COMMIT. `complete_alone` commits it by
  itself.
* DONE and DEAD stay, unless an operator requeues the work, or the user's own row is set back to
  its first state.
* No call waits for a row lock longer than a short lock timeout. Then the answer is `Busy`.

A driver's errors become LedgerUnavailableError, TransactionRetryError or LedgerSchemaError.
Times in requests are seconds. Times in rows are µs of the *database's* clock.

One module of more than 450 lines: it has no code, and is read as one contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from taskguard.findings import Finding
from taskguard.locks.base import Holder
from taskguard.model.bounds import NO_RATES, Bounds, Rate
from taskguard.model.changes import Changed, Expected, PauseTried, Said
from taskguard.model.claims import (
    Answer,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    DeclaredRow,
    MessageRef,
    Overdue,
    ParkedNewest,
    RowRef,
)
from taskguard.model.counts import Count, Noted
from taskguard.model.history import HISTORY_S, Action, Happened
from taskguard.model.lease import Owner
from taskguard.model.pauses import Pause
from taskguard.model.policy import DAY_S
from taskguard.model.records import Once, Purged, Seen, Waiting, WorkView
from taskguard.model.snapshots import SnapshotView
from taskguard.model.states import EXPIRED, State
from taskguard.model.views import (
    ActionView,
    Held,
    KeyView,
    LineView,
    Page,
    WaitingView,
    WorkerView,
    WorkFilter,
    WorkItem,
)
from taskguard.model.workers import Worker

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = [
    "Actions",
    "Claims",
    "Counts",
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
    "Promotions",
    "Questions",
    "Records",
    "Snapshots",
    "Tables",
    "Upkeep",
]


class Claims(Protocol):
    """Decide which delivery may run. The admission asks, and the watchdog renews."""

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one atomic step, whether this delivery may run."""
        ...

    def peek(self, request: ClaimRequest) -> ClaimAnswer:
        """Return an Answer if a claim would get one, or else Busy, also for a free key."""
        ...

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        """Renew many claims, each for its `ttl_s` from now, in one statement for each batch.

        Return one of these for each claim:
        * `RENEWED`.
        * `SKIPPED`: another transaction has locked the row, or this claim has completed the work.
        * `TAKEN`: another holder has the key, or the work left PROCESSING.
        """
        ...

    def holds(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Return True if the owner has one of these keys by a claim that has not ended."""
        ...

    def view(self, work: str) -> WorkView | None:
        """Return the record of work, or None if there is none."""
        ...

    def pause_of(self, keys: tuple[str, ...]) -> Owner | None:
        """Return the owner that stands for the pause of one of these keys, complete or not."""
        ...

    def of_run(self, request: ClaimRequest) -> ClaimRequest:
        """Return the request with the id of the run that its message has joined.

        Return it unchanged if its work has no runs, or its message has joined none.
        """
        ...


class LedgerTransaction(Protocol):
    """One open transaction of a holder. It ends with the context manager that gave it.

    Attributes:
        db: the SQLAlchemy Connection that the body writes with.
    """

    db: Any

    def complete_in_block(self, claim: Claim, result_json: str | None) -> None:
        """Move PROCESSING -> DONE in this transaction, and end the ledger's lease.

        It is the last call of a block. Raise StaleTokenError if the claim is stale. That error, and
        any other, may also come at the end of the block.
        """
        ...

    def checkpoint(self, claim: Claim, progress_json: str) -> None:
        """Store progress in this transaction, fenced. The work stays PROCESSING."""
        ...


class Effects(Protocol):
    """Write a holder's effects and complete its work."""

    def transaction(
        self, claim: Claim, *, look_first: bool = True, on: Any = None
    ) -> AbstractContextManager[LedgerTransaction]:
        """Return a transaction for the holder's writes.

        The block commits if it is left normally, and rolls back if it is left by an exception. If
        COMMIT gets no answer, its outcome is looked up before the block ends. The block ends
        normally if the COMMIT happened. Otherwise it raises TransactionRetryError if the claim is
        still valid, StaleTokenError if it is stale, or CommitUnknownError if the outcome stays
        unknown.

        Args:
            claim: the holder's claim.
            look_first: refuse a stale claim before the body writes. For a holder whose lease may
                have expired.
            on: the user's own session or connection, which has to reach this database. The
                transaction is on it. None: on a connection of the ledger's.
        """
        ...

    def complete_alone(self, claim: Claim, result_json: str | None) -> None:
        """Move PROCESSING -> DONE in a transaction of its own, flushed to disk.

        Raise StaleTokenError if the claim is stale.
        """
        ...

    def store_result(self, claim: Claim, result_json: str) -> None:
        """Store the result of work that this claim completed. Otherwise do nothing."""
        ...

    def note(self, claim: Claim, progress_json: str) -> bool:
        """Store progress in a transaction of its own. Return False if this claim is stale."""
        ...


class Endings(Protocol):
    """End a claim without completing its work."""

    def fail(self, claim: Claim, error: str, *, again_in_s: float | None = 0.0) -> bool:
        """Move PROCESSING -> FAILED with the retry number of the attempt, and end the lease.

        Return False if the claim is stale. `again_in_s` counts only for a run: in at most how many
        seconds the queue delivers the message again. None: it does not, and the run ends.
        """
        ...

    def give_back(self, claim: Claim, *, happened: Happened | None = None) -> bool:
        """Move PROCESSING -> NEW, which counts as no crash, and end the lease.

        Add to the history of the work what happened to its holder, if that is given.

        Return False if the claim is stale. A claim without work only ends its lease. For it, return
        False if its keys belong to another claim, and True if that cannot be known.
        """
        ...

    def crash(self, claim: Claim, error: str) -> bool:
        """End the lease of a holder whose body ended its process, and note `error`.

        The work stays PROCESSING, and the user's own row stays as it is. The next claim is a
        takeover, or makes the work DEAD, without waiting for a lease to expire. Return False if the
        claim is stale.
        """
        ...

    def end_round(
        self, claim: Claim, reason: str, *, most: int, again_in_s: float | None = 0.0
    ) -> State | None:
        """Move PROCESSING -> NEW because the database ended the body's transaction.

        This ends the lease. If it happens `most` times in a row, move the work to FAILED with the
        reason; `again_in_s` is as in `fail()`. Return the new state, or None if the claim is stale.
        """
        ...

    def uncount_crash(self, claim: Claim, *, happened: Happened | None = None) -> None:
        """Uncount, once, the crash of a holder that was taken over and is alive.

        Add to the history of the work what happened to that holder, if that is given, even if no
        crash is counted.
        """
        ...


class Messages(Protocol):
    """Record how messages were deferred, revoked and expired."""

    def defer(self, request: ClaimRequest, publish: Callable[[int], None]) -> bool:
        """Publish the message again, and record its number of deferrals.

        Return False, without publishing, if the message is superseded. The number is recorded for
        the message in this work: an id may have been used for several works.

        The row of the message stays locked while `publish(deferrals + 1)` runs. The number is
        committed after `publish` has returned. So a crash in between leaves one copy too many,
        never one too few, and fifty simultaneous duplicates leave one copy.
        """
        ...

    def join(self, request: ClaimRequest) -> None:
        """Make the message a member of the open run of its work, if there is one.

        Do nothing if its work has no runs, or its message has joined one.
        """
        ...

    def revoke(self, work: str, *, message: str) -> bool:
        """Move NEW, PROCESSING or FAILED work of this message -> FAILED, for good.

        Return False if the work is another message's, or in another state. A run ends if this
        message opened it. Otherwise it is NEW again if the message was at work.
        """
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
        """Move work of this message -> FAILED, because the message has expired.

        The work may be NEW, PROCESSING with an expired lease, or FAILED with its position in a
        line. Its message is sent no more. Another message of the work still runs. Return False if
        the work is in another state, or if it waits for a later retry or for another message.

        Args:
            work: the id of the work.
            message: the expired message.
            retries: the retry number of a message that may still run: one that is sent anew. None:
                one more than the number of `message`.
            due: expire only work that waits in a line, and whose `expires_us` is past by this
                clock. If the message was parked several times, the first `expires_us` counts.
            error: the reason, if it is not that the message has expired.
        """
        ...

    def done_elsewhere(self, request: ClaimRequest) -> str | None:
        """Return another work of the same task that this message completed, or None.

        It reads every record. Ask only about messages that may have completed one.
        """
        ...


class Ledger(Claims, Effects, Endings, Messages, Protocol):
    """A ledger as a delivery needs it. Thread-safe, and usable again after a fork."""


class LentConnection(Protocol):
    """Another library's connection. The ledger writes in its open transaction."""

    @property
    def kind(self) -> str:
        """Return SQLAlchemy's name of the database's kind: "postgresql", "sqlite"."""
        ...

    @property
    def driver(self) -> Any:
        """Return the driver's own connection. It has to be of the ledger's driver."""
        ...


class Outbox(Protocol):
    """Store how messages are sent, with their work: `enqueue()`, `recoverable=True`, the sweep."""

    def now_us(self) -> int:
        """Return the database's clock in µs since 1970. It says when a delayed message is due."""
        ...

    def enqueue(
        self,
        db: sa.Connection | None,
        request: ClaimRequest,
        *,
        due_in_s: float = 5.0,
        once: Once | None = None,
    ) -> str:
        """Write work with its call as NEW, in the user's transaction on `db`.

        `once` decides what happens if the same work waits or is in progress. Return the id of the
        record, which is that of a run for work that has runs. Raise CallTooLargeError or
        ConfigurationError.
        """
        ...

    def enqueue_external(
        self,
        external: LentConnection,
        request: ClaimRequest,
        *,
        due_in_s: float = 5.0,
        once: Once | None = None,
    ) -> str:
        """Write work as `enqueue()` does, in the open transaction of another library."""
        ...

    def overdue(
        self,
        *,
        limit: int = 1000,
        after: Overdue | None = None,
        work: str | None = None,
        parked: bool | None = None,
    ) -> list[Overdue]:
        """Return overdue work. `ledger/parts/outbox.py` says which work is overdue.

        `parked`: True returns only work that was promoted from a line, False only other work, None
        both.
        """
        ...

    def sent(
        self, items: Sequence[Overdue], *, again_after_s: float | None, counted: bool = True
    ) -> int:
        """Note that the messages of these items were sent again, and return how many were noted.

        Args:
            items: the overdue work.
            again_after_s: seconds until the work is overdue again. None: it waits at its position
                of a strict line until it is promoted, which counts as a sending.
            counted: False if the sending was tried without success.
        """
        ...

    def abandon(self, work: Overdue, *, error: str) -> bool:
        """Move NEW work, or PROCESSING work with an expired lease, -> FAILED.

        Return False if the work has changed since it was read.
        """
        ...


class Lines(Protocol):
    """Keep messages in the line of their key. `ledger/lines/` says how."""

    def park(self, request: ClaimRequest, *, only_new: bool = False) -> bool:
        """Store the work with its call in the line of its key. Return False if it may not wait.

        A message whose call was replaced may not wait. With `only_new`, work or a message that is
        on record may not wait. Raise CallTooLargeError. Raise LineFullError if the message may
        wait, its work has never started, and `max_waiting` others wait. Work that is on record is
        FAILED then.
        """
        ...

    def park_newest(
        self, request: ClaimRequest, *, only_new: bool = False
    ) -> ParkedNewest | Answer | None:
        """Store the work as the only one of its task that waits for the key: `request.newest`.

        Return an Answer if a newer message has started or waits, so that this one never runs.
        Return None if the work may not wait. Raise CallTooLargeError.
        """
        ...

    def note_notified(self, work: str) -> None:
        """Note that the caller of work that was superseded while it waited gets its answer."""
        ...

    def keep(self, claim: Claim, *, retries: int, call: str | None, due_in_s: float) -> bool:
        """Note that FAILED work keeps its position, and that its message was sent once more.

        Return False if the work has changed since the claim ended.

        Args:
            claim: the claim that ended.
            retries: the retry number of the new message. Copies with a lower number are superseded.
            call: how the message is sent, as JSON text.
            due_in_s: seconds until the work is overdue.
        """
        ...

    def leave(self, claim: Claim, *, retries: int) -> bool:
        """Give up the position of FAILED work whose message does not come again.

        `retries`: copies with a lower retry number are superseded. A message with this number still
        runs.
        """
        ...


class Promotions(Protocol):
    """Promote messages of the lines. A holder that ends, a relay and the doctor ask."""

    def promote_next(
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
        """Note that the first message in line is promoted, if its key is free, and return it.

        Return None if no message may be promoted. The caller sends the message.

        Args:
            key: the key.
            expected_s: seconds for which the key is kept for that message.
            app: promote only messages of this namespace.
            queues: promote only messages whose call is for one of these queues. None: for any.
            bounds: the limit and rate of the key. None: as at its last claim.
            ahead_s: send a message whose rate allows its start in at most this many seconds, with a
                delay (`Overdue.wait_s`). None: the key has neither limit nor rate.
            rates: as in `look()`, if `bounds` is None.
        """
        ...

    def expired(
        self, *, app: str = "", queues: Sequence[str] | None = None, limit: int = 1000
    ) -> list[Overdue]:
        """Return messages that expired while they waited. Their work is overdue from now on.

        The caller sends them. A worker that gets such a message tells its caller, and ends its work
        by `expire()`. Until then the message delays only messages behind strict work. `app` and
        `queues` are as in `promote_next()`.
        """
        ...

    def count_waiting(self, *, most: int = 10_000) -> dict[tuple[str, str], int]:
        """Return how many messages wait, by their namespace and the kind of their queue."""
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
        """Return what a relay has to do for a namespace, from one transaction.

        Args:
            app: the namespace.
            queues: only messages whose call is for one of these queues. None: for any.
            ahead_s: name a key if its rate allows the next start in at most this many seconds.
            after: read messages whose key comes after this one.
            most: read at most this many messages, ordered by key.
            announce: the text to NOTIFY listeners with.
            rates: by task, the rate that the task has now. None: none.
        """
        ...


class LineLedger(Ledger, Outbox, Lines, Promotions, Protocol):
    """A ledger that also stores how messages are sent, and keeps lines: `busy="park"`."""


class Records(Protocol):
    """Show records to people: `taskguard work`, the admin."""

    def list_work(self, state: State, *, limit: int = 100) -> list[WorkView]:
        """Return the records of all work in a state. The newest start comes first."""
        ...

    def waiting(self, key: str | None = None, *, limit: int = 100) -> list[Waiting]:
        """Return the messages in the line of a key, or in all lines, in their order."""
        ...

    def holders(self, key: str) -> list[Holder]:
        """Return the holders of a key, or of its slots, whose leases have not expired."""
        ...


class Actions(Protocol):
    """Change work and keys for an operator: `tg.operations`, the command line, the admin.

    Each change is recorded with its actor and reason, in its own transaction.
    """

    def change(
        self,
        work: str,
        action: Action,
        *,
        by: Said,
        gone_s: float = 0.0,
        expected: Expected | None = None,
        row: RowRef | None = None,
    ) -> Changed:
        """Change work as `model/operating.py` says, or return why it cannot change.

        Raise AlreadyEnqueuedError to requeue a run of which a later run is open.

        Args:
            work: its id.
            action: DROP, DONE, REQUEUE, REQUEUE_LEFT or CALL.
            by: the actor and the reason.
            gone_s: for how many seconds the lease of left work must have expired.
            expected: what the operator saw of the work. If that has changed, nothing changes.
            row: the user's own row, which DONE moves to its last state.
        """
        ...

    def requeue(self, work: str, *, reason: str, actor: str = ...) -> bool:
        """Move DEAD or FAILED -> NEW, so that the next delivery runs the work.

        Delete the numbers of its messages, so that the same message may be sent again. Delete its
        fingerprint, so that a message with other arguments may be sent. Return False if the work is
        in another state. Raise AlreadyEnqueuedError if a later run of the same work is open.
        """
        ...

    def release(
        self, key: str, *, fence: int, owner: str, by: Said | None = None
    ) -> tuple[str, ...]:
        """End the lease of a holder that is known to be gone, and refuse its late commit.

        It ends on all keys of its claim, which are returned: none if another owner or fence has the
        key, or if the key is paused. The next delivery takes its work over, which counts as a
        crash.
        """
        ...

    def try_pause(
        self,
        key: str,
        *,
        owner: Owner,
        by: Said,
        lease_s: float = 15.0,
        now: bool = False,
        also: tuple[Owner, ...] = (),
    ) -> PauseTried:
        """Pause a key that no delivery holds. With `now`, end the leases of its holders.

        Otherwise, if slots of the key are held, or the lock server has granted it to the owners in
        `also`, keep others from it for `lease_s`. Call it again until the key is paused, or give it
        up.
        """
        ...

    def give_up_pause(self, key: str, *, owner: Owner) -> None:
        """Free a key whose pause still waited for holders. A pause that is complete stays."""
        ...

    def resume(self, key: str, *, owner: Owner, by: Said) -> bool:
        """End the pause that `owner` stands for, and each of this key that began before it.

        A pause that began before this call and still waits for holders does not complete. Return
        False if no such pause has the key.
        """
        ...

    def paused(self, *, limit: int = 100) -> list[tuple[str, Pause]]:
        """Return the keys that are paused, in order."""
        ...


class Questions(Protocol):
    """Answer the questions of operators: `operations/reads.py`. They change nothing."""

    def clock_s(self) -> float:
        """Return the database's clock in seconds since 1970."""
        ...

    def key_view(self, key: str) -> KeyView | None:
        """Return a key with everything on record, or None if nothing is."""
        ...

    def keys_beginning_with(self, prefix: str, *, limit: int) -> list[str]:
        """Return keys that begin with a text, without slots."""
        ...

    def held_keys(
        self, *, longer_s: float = 0.0, limit: int = 100, after: str | None = None
    ) -> Page[Held]:
        """Return the keys of work that runs long, the longest held first."""
        ...

    def paused_keys(self, *, limit: int = 100) -> Page[Held]:
        """Return the keys that operators have paused, the last paused first."""
        ...

    def work_item(self, work: str, *, arguments: bool = False) -> WorkItem | None:
        """Return the record of work with its history, or None."""
        ...

    def works_named(self, ids: list[str], *, prefixes: list[str], limit: int) -> list[WorkItem]:
        """Return work with one of these ids, or else with one of these beginnings of ids."""
        ...

    def tasks(self) -> list[str]:
        """Return the names of tasks that have counted something."""
        ...

    def works(
        self, only: WorkFilter, *, limit: int = 100, after: str | None = None
    ) -> Page[WorkItem]:
        """Return work by a filter."""
        ...

    def works_of_message(self, message: str, *, namespace: str = "") -> Page[WorkItem]:
        """Return the work of a message. Without an index, read records for a few seconds."""
        ...

    def waiting_messages(
        self,
        *,
        key: str | None = None,
        task: str | None = None,
        older_s: float = 0.0,
        limit: int = 100,
        after: str | None = None,
    ) -> Page[WaitingView]:
        """Return messages that wait, by key and position."""
        ...

    def longest_lines(self, *, limit: int = 50) -> Page[LineView]:
        """Return the longest lines."""
        ...

    def list_workers(self, *, limit: int = 1000) -> Page[WorkerView]:
        """Return workers, the last seen first."""
        ...

    def list_actions(
        self,
        *,
        key: str | None = None,
        work: str | None = None,
        since_s: float | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page[ActionView]:
        """Return what operators changed, the latest first."""
        ...


class Workers(Protocol):
    """Store and read the names of workers: `run/names.py`."""

    def register_worker(self, worker: Worker) -> bool:
        """Store a worker, or note that it was seen. Return False if another one has its number."""
        ...

    def worker(self, number: str) -> Worker | None:
        """Return the worker with this number, or None if it is not on record."""
        ...


class Snapshots(Protocol):
    """Read figures of the whole ledger, for the exporter, the page and `taskguard top`."""

    def snapshot(self, max_age_s: float = 15.0) -> SnapshotView:
        """Return the gauges of `metrics.py`, taken anew if they are older than `max_age_s`.

        Of several processes that find them old, one takes them, and the others get the old ones.
        """
        ...


class Counts(Protocol):
    """Add and read counts, and what happened to keys: `run/flush.py`."""

    def add_counts(
        self,
        rows: Sequence[Count],
        *,
        happened: Sequence[Noted] = (),
        committing: Callable[[], None] = ...,
    ) -> None:
        """Add numbers to the present minute and to the totals, and store happenings.

        Call `committing` directly before the COMMIT. If it was called and an error follows, the
        rows may have been added.
        """
        ...

    def note_happenings(self, rows: Sequence[Noted]) -> None:
        """Store what happened to keys."""
        ...

    def begin_counts(self, tasks: Sequence[str]) -> None:
        """Store a zero for each counter of these tasks, and of none, that has no row yet."""
        ...

    def counts(self, since_s: float | None = None) -> list[Count]:
        """Return the totals, or the numbers of each minute of the last `since_s` seconds."""
        ...


class Tables(Protocol):
    """Make, upgrade and check the ledger's tables."""

    def check_schema(self, rows: Iterable[DeclaredRow] = ()) -> None:
        """Raise LedgerSchemaError unless the tables have this library's version.

        The users' own tables must have the columns that `rows` declare.
        """
        ...

    def create_schema(self) -> None:
        """Create the tables that are missing."""
        ...

    def upgrade_schema(self) -> tuple[int, int]:
        """Upgrade older tables to this library's version. Return the versions before and after."""
        ...

    def upgrade_statements(self) -> list[str]:
        """Return the SQL that `upgrade_schema()` would run now. Change nothing."""
        ...


class Upkeep(Protocol):
    """Purge old records, check the database, and close connections."""

    def purge(
        self,
        *,
        older_than_s: float,
        batch: int = 1000,
        dead: bool = False,
        history_s: float = HISTORY_S,
    ) -> Purged:
        """Delete work that ended so long ago, its messages, and keys whose lease ended before.

        Delete operators' actions of that age, too, and happenings that are older than `history_s`.
        Raise ConfigurationError if `older_than_s` is too short to be safe.
        """
        ...

    def mark_left(self, *, after: str, page: int) -> str | None:
        """Flag work that is PROCESSING, and whose lease has expired. It does not run again by that.

        Read the next `page` records, in order of their ids, behind the id `after` ("": the first).
        Return the last id, or None at the end of the table.
        """
        ...

    def check(
        self,
        rows: Iterable[DeclaredRow] = (),
        *,
        longest_body_s: float = 30.0,
        retention_s: float = 30 * DAY_S,
    ) -> list[Finding]:
        """Return what is wrong with the database, its settings and the tables. Change nothing.

        Raise LedgerUnavailableError if the database does not answer at all.
        """
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class DatabaseLedger(
    LineLedger, Records, Questions, Actions, Workers, Snapshots, Counts, Tables, Upkeep, Protocol
):
    """A complete ledger, such as `SqlLedger`. `connect()` takes one."""
