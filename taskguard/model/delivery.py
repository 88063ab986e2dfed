"""One delivery, as a queue's integration hands it to the runner, and how it can end.

Read next: `taskguard/runner.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Protocol

from taskguard.model.bounds import Bounds
from taskguard.model.claims import Claim, MessageRef, RowRef
from taskguard.model.policy import Policy
from taskguard.values import value

__all__ = [
    "DROPPED",
    "NOT_BEFORE",
    "Answered",
    "Codec",
    "Completed",
    "Deferred",
    "Delivery",
    "Dropped",
    "MessageRef",
    "Outcome",
    "Parked",
    "Parking",
    "Queue",
    "stored_call",
]

NOT_BEFORE = "not_before_s"
"""In a stored call: its message is sent, and waits until then, in seconds since 1970."""


def stored_call(call: Mapping[str, Any], message: MessageRef, app: str) -> str:
    """A call as the ledger stores it: with its message's id and its application's namespace."""
    owned = {"app": app} if app else {}
    return json.dumps({**call, "message": message.name, **owned})


class Queue(Protocol):
    """How a delivery is put off.

    Attributes:
        new_message_per_deferral: whether a message that is put off becomes another message of the
            broker's, which carries its number of deferrals; the ledger then records that number.
            False where all deliveries share one record, and the broker keeps one entry of them.
    """

    new_message_per_deferral: bool

    @property
    def max_delay_s(self) -> float:
        """No message may be delayed by more: a quarter of the visibility timeout, in seconds."""
        ...

    @property
    def longest_wait_s(self) -> float:
        """How long the delivery may wait for its key where it is.

        In seconds. So long the broker does not deliver it again, and no time limit ends it.
        """
        ...

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        """Publish this message again, as put off `deferrals` times, to come in `delay_s` seconds.

        Must raise unless the broker took it: the delivery is acknowledged once this returned.
        """
        ...


class Parking(Protocol):
    """How a message leaves its queue for the ledger, and comes back: `busy="park"`.

    Attributes:
        queue: the name that the calls carry which it can send.
    """

    queue: str

    def call(self) -> Mapping[str, Any] | None:
        """How the message in hand is sent again, as JSON; None: it cannot be, and is put off."""
        ...

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        """Send a call, with these numbers; raises unless the broker took it.

        Raises CallWithdrawnError for a call that nobody is to send any more, StoredCallError for
        one that cannot be sent.
        """
        ...

    def failed(self, claim: Claim) -> None:
        """The work of the message in hand is FAILED, and keeps its place in the line of its key.

        The queue is to say whether the message comes again: `Line.retried()` or `.gave_up()`.
        """
        ...


@value
class Codec:
    """How results and progress become JSON text, by the queue's own rules where it has some.

    Attributes:
        dumps: from a value to JSON text; raises TypeError or ValueError for what has none.
        loads: from JSON text to a value.
    """

    dumps: Callable[[Any], str]
    loads: Callable[[str], Any]


@value(kw_only=True)
class Delivery:
    """What a queue handed over.

    Attributes:
        keys: the keys to hold, sorted; the former ones, too.
        line_key: of several keys the one in whose line it stands, which is not a former one; None:
            there is one key, or no line.
        work: the id of the work; None for the plain lock.
        formerly: the ids that the work had before its guard was changed.
        task: the task's name.
        message: its identity, its retries and deferrals.
        policy: the task's options.
        published_at_s: when the message was first published, in seconds since 1970; None: unknown.
        queue: how to put it off; None where that is not possible (plain functions, eager mode).
        parking: how to park it; None where that is not possible, or not asked for.
        called: it waited in the line of its key, and was called: its turn has come.
        rank: in that line those of a lower rank go first.
        expires_at_s: when the message expires, in seconds since 1970, and waits in that line no
            longer; None: it does not.
        strict: its work keeps its place in that line from now on until it has ended.
        app: the application's namespace, which stored calls carry.
        by_message: whether each message, or each tick of a schedule, is work of its own
            (`once_per="message"`, `"tick"`).
        fingerprint: a digest of what all messages of the work have to agree on; None: of nothing.
        call: how this message is sent again, as JSON text, to be stored with the work; None: not.
        row: the user's own row that the work moves, if it is declared with one.
        redelivered: whether the queue says that it has delivered this message before.
        is_lock: whether no body of a task runs under its lease: `tg.lock()`, `tg.leader()`.
        limit: while fewer than so many hold its key it may come in; 1: it has its keys alone.
            Others share one key, which is the lock server's to grant: no ledger is asked. Not that
            of a task (`policy.limit`), whose holders have a key each.
        bounds: how many may hold its one key at once, and how often it may be begun, where its
            policy says so. With slots in it `keys` is one of them, and it asks for that.
        timed_out: tells, when the process that runs its body is told to end, that this is for the
            time that the body has taken (a hard time limit), which counts as a crash; None: the
            queue has no such limit.
        orders: exceptions by which body and queue speak with each other: Celery's Retry, a time
            limit. They are obeyed also where the database has ended the body's transaction.
    """

    keys: tuple[str, ...]
    work: str | None
    task: str
    message: MessageRef
    policy: Policy
    published_at_s: float | None = None
    queue: Queue | None = None
    parking: Parking | None = None
    called: bool = False
    rank: int = 0
    expires_at_s: float | None = None
    strict: bool = False
    line_key: str | None = None
    app: str = ""
    by_message: bool = False
    fingerprint: str | None = None
    call: str | None = None
    row: RowRef | None = None
    formerly: tuple[str, ...] = ()
    redelivered: bool = False
    is_lock: bool = False
    limit: int = 1
    bounds: Bounds | None = None
    timed_out: Callable[[], bool] | None = None
    orders: tuple[type[Exception], ...] = ()

    @property
    def key(self) -> str:
        """The keys as one text, for messages."""
        return ", ".join(self.keys) if self.bounds is None else self.bounds.key

    @property
    def line(self) -> str:
        """The key in whose line it stands, if it can be parked."""
        if self.bounds is not None:
            return self.bounds.key
        return self.keys[0] if self.line_key is None else self.line_key

    @property
    def lines(self) -> tuple[str, ...]:
        """The keys whose lines wait for it: its own, then those of former guards."""
        if self.bounds is not None:
            return (self.line,)
        return (self.line, *(key for key in self.keys if key != self.line))

    @property
    def is_first(self) -> bool:
        """Whether nobody has said that its message came before."""
        message = self.message
        return not (self.called or self.redelivered or message.retries or message.deferrals)


@value
class Completed:
    """The body ran and DONE is committed; `value` is its result. Acknowledge."""

    value: Any


@value
class Answered:
    """The work was done before; `value` is the stored result, or None. Acknowledge.

    `same_message`: this message had done it, in another delivery.
    """

    value: Any
    same_message: bool = field(default=True, compare=False, repr=False)


DROPPED: Mapping[str, str | None] = {
    "superseded": None,
    "replaced": 'replaced: a newer call of {key} took its place (duplicate="replace")',
    "outdated": "superseded: a newer message of {key} took its place",
    "revoked": "revoked: the work of {key} was revoked",
    "skipped": 'skipped: {key} was not free (busy="skip")',
    "missing": 'missing: there is no row for {key} (on_missing="skip")',
    "ineligible": 'ineligible: the row of {key} is in another state (on_ineligible="skip")',
}
"""Why a message is dropped, and what its caller reads. None: a live copy of the message answers."""


@value
class Dropped:
    """Acknowledge without a result, once the caller can read that the message never runs.

    `reason` is a key of `DROPPED`: "superseded" (by a copy of the same message), "replaced" (by the
    message `by` of a newer call), "outdated" (by a newer message of its task and key), "revoked" or
    "skipped", or, of the user's own row, "missing" or "ineligible".
    """

    reason: str
    by: str | None = None

    def told(self, key: str) -> str | None:
        """What the caller reads: the reason, then a sentence. None: a live copy answers it."""
        text = DROPPED[self.reason]
        return None if text is None else text.format(key=key)


@value
class Deferred:
    """The message is published again, to come in `delay_s` seconds. Acknowledge without a result.

    `deferrals` is how often it has been put off now.
    """

    delay_s: float
    deferrals: int


@value
class Parked:
    """The message waits in the ledger until its key is free. Acknowledge without a result."""


Outcome = Completed | Answered | Dropped | Deferred | Parked
