"""What the record says to people, to a relay and to an enqueue: values, and no behaviour.

Read next: `claims.py` for what it says to a delivery.
"""

from __future__ import annotations

from collections.abc import Callable

from taskguard.model.claims import ClaimRequest
from taskguard.model.states import State
from taskguard.values import value

__all__ = ["Once", "Purged", "Seen", "Standing", "Waiting", "WorkView"]


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


@value
class Purged:
    """How many rows `purge()` deleted."""

    work_items: int
    messages: int
    keys: int
