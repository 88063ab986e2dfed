"""One delivery, as a queue's integration hands it to the runner, and how it can end.

Read next: `taskguard/run/runner.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Protocol

from taskguard.clock import Clock
from taskguard.model.bounds import Bounds
from taskguard.model.claims import Claim, ClaimRequest, MessageRef, RowRef
from taskguard.model.lease import Owner
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
    "without_delay",
]

NOT_BEFORE = "not_before_s"
"""Field of a stored call: when its message may run at the earliest, in seconds since 1970."""

NO_OWNER = Owner("", "")


def stored_call(call: Mapping[str, Any], message: MessageRef, app: str) -> str:
    """Return a call as the ledger stores it, with its message's id and application's namespace.

    The number of deferrals is stored, because `defer()` records it only after the publication.
    """
    deferred = {"deferrals": message.deferrals} if message.deferrals else {}
    owned = {"app": app} if app else {}
    return json.dumps({**call, "message": message.name, **deferred, **owned})


def without_delay(call: str | None) -> str | None:
    """Return a stored call whose message may run at once."""
    if call is None or NOT_BEFORE not in call:
        return call
    return json.dumps({name: each for name, each in json.loads(call).items() if name != NOT_BEFORE})


class Queue(Protocol):
    """How to defer a delivery.

    Attributes:
        new_message_per_deferral: whether a deferral puts another message into the broker, as with
            Celery. The ledger then records the number of deferrals, to recognise older copies.
            False if all deliveries share one record in the broker, as with RQ.
    """

    new_message_per_deferral: bool

    @property
    def max_delay_s(self) -> float:
        """Maximum delay of a message in seconds, a quarter of the visibility timeout."""
        ...

    @property
    def longest_wait_s(self) -> float:
        """For how many seconds the delivery may wait for its key in the worker.

        For that time the broker does not deliver it again, and no time limit ends it.
        """
        ...

    def retries_in_s(self, error: BaseException) -> float | None:
        """Return in at most how many seconds the queue delivers the message again after this error.

        That is the delay of the retry, and the time until the broker delivers a lost message again.
        None: the message does not come again.
        """
        ...

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        """Publish this message again with a delay, as deferred `deferrals` times.

        Must raise unless the broker accepted it: the delivery is acknowledged after this returns.
        """
        ...


class Parking(Protocol):
    """How to park a message, and to send it again: `busy="park"`.

    Attributes:
        queue: the name of the queue in the stored calls that it can send.
    """

    queue: str

    def call(self) -> Mapping[str, Any] | None:
        """Return how to send the present message again, as JSON. None: defer it instead."""
        ...

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        """Send a stored call with these numbers. Raises unless the broker accepted it.

        Raises CallWithdrawnError for a call that must not be sent any more, and StoredCallError
        for one that cannot be sent.
        """
        ...

    def failed(self, claim: Claim) -> None:
        """Note that the present message's work is FAILED, and keeps its position in its line.

        The queue then says whether the message comes again: `Runner.retried()` or `.gave_up()`.
        """
        ...


@value
class Codec:
    """How results and progress become JSON text, by the queue's own rules if it has any.

    Attributes:
        dumps: from a value to JSON text. Raises TypeError or ValueError if there is none.
        loads: from JSON text to a value.
    """

    dumps: Callable[[Any], str]
    loads: Callable[[str], Any]


@value(kw_only=True)
class Delivery:
    """A delivery, as a queue handed it over.

    Attributes:
        keys: the keys to hold, sorted, with the former ones.
        line_key: of several keys, the one whose line it joins, which is not a former one. None:
            there is one key, or no line.
        work: the id of the work. None: the plain lock.
        formerly: the ids that the work had before its guard was changed.

        task: the task's name.
        message: its identity, its retries and deferrals.
        policy: the task's options.

        published_at_s: when the message was first published, in seconds since 1970. None: unknown.
        queue: how to defer it. None: it cannot be deferred (plain functions, eager mode).
        parking: how to park it. None: it cannot be parked, or the task does not park.

        promoted: it waited in the line of its key, and was promoted.
        rank: messages of a lower rank go first in that line.
        expires_at_s: when the message expires, in seconds since 1970, and leaves that line. None:
            never.

        strict: its work keeps its position in that line until it has ended.
        app: the application's namespace, for stored calls.
        by_message: whether each message, or each tick of a schedule, is work of its own
            (`once_per="message"`, `"tick"`).
        by_run: whether the work is done anew after it has ended (`once_per="run"`). `work` is then
            the base of its runs.
        resumes: a person has sent the message again, because its run had failed.
        fingerprint: a digest of the arguments that must be equal in all messages of the work.
            None: there are none.
        call: how to send this message again, as JSON text to store with the work. None: do not
            store it.
        row: the user's own row that the work moves. None: it moves none.

        redelivered: whether the queue says that it has delivered this message before.
        is_lock: whether it is a `tg.lock()` or `tg.leader()`, so that no body of a task runs.
        limit: it gets its key while fewer holders than this have it. 1: it excludes all others.
            Above 1 only the lock server grants the key, and no ledger is involved. This is not the
            limit of a task (`policy.limit`), each of whose holders has a key of its own.

        bounds: the limit and rate of its one key, if its policy has any. With slots, `keys` is one
            of them, and it claims that one.
        timed_out: called when the process of the body has to end. Returns whether the reason is a
            hard time limit, which counts as a crash. None: the queue has no such limit.
        orders: exceptions by which a body and its queue communicate, for example Celery's Retry or
            a time limit. They take effect even if the database has ended the body's transaction.
    """

    keys: tuple[str, ...]
    work: str | None
    task: str
    message: MessageRef
    policy: Policy
    published_at_s: float | None = None
    queue: Queue | None = None
    parking: Parking | None = None
    promoted: bool = False
    rank: int = 0
    expires_at_s: float | None = None
    strict: bool = False
    line_key: str | None = None
    app: str = ""
    by_message: bool = False
    by_run: bool = False
    resumes: bool = False
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
    def is_shared(self) -> bool:
        """Whether other holders may have its key at once, which only the lock server grants."""
        return self.limit > 1

    @property
    def key(self) -> str:
        """The keys as one text, for messages."""
        return ", ".join(self.keys) if self.bounds is None else self.bounds.key

    @property
    def line(self) -> str:
        """The key whose line it joins, if it can be parked."""
        if self.bounds is not None:
            return self.bounds.key
        return self.keys[0] if self.line_key is None else self.line_key

    @property
    def lines(self) -> tuple[str, ...]:
        """The keys whose lines wait for its end, first its own, then those of former guards."""
        if self.bounds is not None:
            return (self.line,)
        return (self.line, *(key for key in self.keys if key != self.line))

    @property
    def is_first(self) -> bool:
        """True unless its message is known to have been delivered before."""
        message = self.message
        return not (self.promoted or self.redelivered or message.retries or message.deferrals)

    def request(self, owner: Owner = NO_OWNER, *, clock: Clock) -> ClaimRequest:
        """Return what it requests of a ledger as `owner`. The clock tells the age of its message.

        Without an owner the request can read, park and enqueue, but claim nothing.
        """
        policy, published_s, expires_s = self.policy, self.published_at_s, self.expires_at_s
        age_s = 0.0 if published_s is None else clock.wall_s() - published_s
        return ClaimRequest(
            keys=self.keys,
            owner=owner,
            ttl_s=policy.ttl_s,
            work=self.work,
            task=self.task,
            message=self.message,
            max_crashes=policy.max_crashes,
            may_create=age_s <= policy.retention_s,
            fingerprint=self.fingerprint,
            call=self.call,
            row=self.row,
            formerly=self.formerly,
            redelivered=self.redelivered or self.promoted,
            in_line=self.parking is not None,
            bounds=self.bounds,
            sent_us=None if published_s is None else int(published_s * 1e6),
            newest=None if self.work is None else policy.newest,
            rank=self.rank,
            expires_us=None if expires_s is None else int(expires_s * 1e6),
            strict=self.strict,
            line_key=self.line_key,
            max_waiting=policy.max_waiting,
            by_run=self.by_run,
            resumes=self.resumes,
        )


@value
class Completed:
    """The body ran and DONE is committed. `value` is its result. Acknowledge."""

    value: Any


@value
class Answered:
    """The work was done before. `value` is the stored result, or None. Acknowledge.

    `same_message`: whether another delivery of this message has done it.
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
    """The message never runs. Acknowledge without a result, once its caller can read this.

    `reason` is "superseded" if another copy of the message lives on. It is "replaced" if a newer
    `enqueue()` sent the message `by`. It is "outdated" after a newer message of its task and key.
    Others are "revoked" and "skipped". For the user's own row it is "missing" or "ineligible".
    """

    reason: str
    by: str | None = None

    def reason_for_caller(self, key: str) -> str | None:
        """Return what the caller reads: the reason, then a sentence. None: a live copy answers."""
        text = DROPPED[self.reason]
        return None if text is None else text.format(key=key)


@value
class Deferred:
    """The message was published again with a delay. Acknowledge without a result.

    `deferrals`: how often it has been deferred by now.
    """

    delay_s: float
    deferrals: int


@value
class Parked:
    """The message waits in the ledger until its key is free. Acknowledge without a result."""


Outcome = Completed | Answered | Dropped | Deferred | Parked
