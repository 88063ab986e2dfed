"""Answers of the ledger to people, to a relay and to an enqueue. Values only.

Read next: `claims.py` for the answers to a delivery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from taskguard.model.claims import ClaimRequest
from taskguard.model.line_states import LineState
from taskguard.model.states import State
from taskguard.values import value

__all__ = ["Existing", "Once", "Purged", "Seen", "StoredWork", "Waiting", "WorkView"]


class StoredWork(Protocol):
    """The columns of `taskguard_work` by which claims and operators decide. Times are in µs."""

    @property
    def state(self) -> str: ...
    @property
    def final(self) -> int: ...
    @property
    def fence(self) -> int: ...
    @property
    def owner(self) -> str: ...
    @property
    def lease_until(self) -> int: ...
    @property
    def crashes(self) -> int: ...
    @property
    def result(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...


@value
class WorkView:
    """The record of work, for people. Times are seconds since 1970."""

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
    sends: int
    line: LineState | None
    created_s: float | None
    started_s: float | None
    finished_s: float | None


@value
class Seen:
    """The tasks of a relay, as one look at the lines found them.

    Attributes:
        keys: the keys whose first waiting message may be promoted.
        after: the last key that was read. None: there are no more.
        expired: True if a message expired while it waited.
        overdue: True if a promoted message did not arrive.
        early: tasks whose messages wait for the rate on record, except tasks in `rates`.
    """

    keys: tuple[str, ...] = ()
    after: str | None = None
    expired: bool = False
    overdue: bool = False
    early: tuple[str, ...] = ()


@value
class Waiting:
    """Work in the line of its key, for people. Times are seconds since 1970.

    Attributes:
        line: the state of the work in the line.
        expected_until_s: the end of the time in which its promoted message is expected. None: the
            message waits.
        failed: True if the body has failed, and the work keeps its position for the retry.
        sent_again: how often its message was sent again since it was promoted.
        owner: the key's holder, if the message is the first of its line. "" if the key is free, or
            has slots.
    """

    key: str
    work: str
    message: str
    parked_s: float
    line: LineState
    expected_until_s: float | None
    failed: bool = False
    sent_again: int = 0
    owner: str = ""


@value
class Existing:
    """Work that was enqueued or claimed before, and has not ended.

    Attributes:
        work: its id.
        message: the name of the message that runs it or will run it.
        call: how that message is sent again, as JSON text. None: the call is not stored.
        fingerprint: the digest of the arguments that its messages must have in common, if any.
        begun: True if a body runs, or ran and stored progress.
    """

    work: str
    message: str
    call: str | None
    fingerprint: str | None
    begun: bool


@value
class Once:
    """The decision of an enqueue that finds the same work waiting or in progress.

    Attributes:
        found: called with the work that is there. It returns the request that replaces the stored
            call, or None to write nothing. If it raises, nothing is written, and the caller gets
            the error.
        replaces: True if `found` may replace the call. The record is locked while `found` runs.
    """

    found: Callable[[Existing], ClaimRequest | None]
    replaces: bool = False


@value
class Purged:
    """How many rows `purge()` deleted."""

    work_items: int
    messages: int
    keys: int
    workers: int = 0
    happenings: int = 0
    actions: int = 0
    counts: int = 0
