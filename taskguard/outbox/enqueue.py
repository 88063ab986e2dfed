"""The transactional outbox: work is written in the user's transaction, its message sent after it.

Guarantees: after a rollback nothing is sent. After a commit this process sends the message at once.
If the process dies, or the broker is down, a sweep sends it.

`duplicate=` decides about work that is waiting or in progress. Guarantees, except for "answer": one
message of work is sent from its enqueueing to its end, and a replaced message does not run.

Does not guarantee that nothing is sent twice. The ledger answers such a duplicate.

Read next: `sweep.py`, `ledger/parts/outbox.py` for what is stored, `ledger/unique.py` for
`duplicate=`.
"""

from __future__ import annotations

import contextvars
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from taskguard.api import TaskGuard
from taskguard.combinations import refusal
from taskguard.errors import (
    AlreadyEnqueuedError,
    ConfigurationError,
    FingerprintMismatchError,
)
from taskguard.ledger.transactions.external import ExternalConnection
from taskguard.model.claims import ClaimRequest
from taskguard.model.delivery import NOT_BEFORE, Delivery, MessageRef
from taskguard.model.policy import AGAIN_AFTER_S, DAY_S, check_number
from taskguard.model.records import Existing, Once
from taskguard.run.current import guard_on

if TYPE_CHECKING:
    from taskguard.ledger.ports import LineLedger

__all__ = [
    "Duplicate",
    "OutcomeOfEnqueue",
    "Placed",
    "Send",
    "check_delay",
    "enqueue_in",
    "not_before_s",
    "outbox_of",
    "waits_s",
]

logger = logging.getLogger("taskguard")

Send = Callable[[dict[str, Any], MessageRef], None]
"""Sends a stored call again, with these numbers; raises unless the broker took it."""

Duplicate = Literal["answer", "attach", "skip", "replace", "raise"]
"""The choice for `enqueue()` if the same work is waiting or in progress."""

OutcomeOfEnqueue = Literal["stored", "sent", "attached", "skipped", "replaced"]
"""The result of `enqueue()`."""

_LONGEST_DELAY_S = 365 * DAY_S
# How long only its own process sends the message of committed work. After that a sweep does.
_DUE_IN_S = 5.0


@dataclass
class Placed:
    """The result of `enqueue_in()`. Call it after the COMMIT to send the message.

    Attributes:
        delivery: the delivery that was stored. Nothing was stored if `outcome` is "attached" or
            "skipped".
        outcome: "sent": the message is sent as soon as the transaction commits. "stored": it waits
            for a call of this object, or for a sweep. Or "attached", "skipped" or "replaced".
        first: the work that was attached to, skipped for or replaced. None: there was none.
        publish: sends the message if the transaction has committed, and returns whether it did.
            None: there is nothing to send.
    """

    delivery: Delivery
    outcome: OutcomeOfEnqueue = "sent"
    first: Existing | None = None
    publish: Callable[[], bool] | None = None

    def __call__(self) -> None:
        if self.publish is None:
            return
        sent = self.publish()
        if self.outcome in ("stored", "sent"):
            self.outcome = "sent" if sent else "stored"


def check_delay(delay_s: float | None) -> None:
    """Raise ConfigurationError unless it is None or a number of seconds, of at most a year."""
    if delay_s is not None:
        check_number("delay_s", delay_s, at_least=0, at_most=_LONGEST_DELAY_S)


def not_before_s(runtime: TaskGuard, delay_s: float) -> float:
    """Return the moment `delay_s` from now, in seconds since 1970, for the field `NOT_BEFORE`.

    The database's clock counts, because the clocks of the processes that enqueue differ.

    Raises:
        ConfigurationError: there is no ledger.
        LedgerUnavailableError: the database is down.
    """
    return outbox_of(runtime).now_us() / 1e6 + delay_s


def enqueue_in(
    session: Any,
    runtime: TaskGuard,
    delivery: Delivery,
    send: Send,
    *,
    duplicate: Duplicate = "answer",
    replacement_of: Callable[[Existing], Delivery] | None = None,
    again_after_s: float | None = None,
) -> Placed:
    """Write a delivery's work as NEW in the user's transaction, and send its message afterwards.

    taskguard sends the message as soon as the transaction has committed if it can notice the
    COMMIT: on an ORM Session, on the connection of a guard's transaction, and on an
    `ExternalConnection`. On a Connection of the user's own it cannot. Then call the returned
    object after the COMMIT, or leave the message to the sweep. After a ROLLBACK nothing is sent.

    Args:
        session: a SQLAlchemy Session or Connection to the ledger's database, or an
            `ExternalConnection`. None: the work is committed by itself, and its message is sent at
            once.
        runtime: locks and ledger.
        delivery: the delivery of the message, with its `call`.
        send: sends the message.
        duplicate: what to do if the same work is waiting or in progress. "answer" (the default):
            send this message as well; it gets the result. "attach", "skip": send nothing.
            "raise": raise AlreadyEnqueuedError. "replace": replace the waiting message by this one,
            and raise AlreadyEnqueuedError if a body has begun.
        replacement_of: returns the delivery that replaces the work that it is given. By default
            `delivery` does.
        again_after_s: in how many seconds the message counts as lost if no delivery claims its
            work, counted from its sending or from its `NOT_BEFORE`. By default an hour.

    Raises:
        ConfigurationError: there is no ledger, `session` is none of these, or the task's options
            do not go with `duplicate`.
        AlreadyEnqueuedError: as `duplicate` says. Nothing is written.
        FingerprintMismatchError: with "attach", if the work on record has other arguments.
        LedgerUnavailableError: the database is down.
    """
    _refuse_duplicates_of_messages(delivery, duplicate)
    ledger = outbox_of(runtime)  # first: without one there may be no SQLAlchemy
    session, db = _opened(session, delivery)
    placed = Placed(delivery)
    once = None
    if duplicate != "answer":
        found = partial(_found, runtime, placed, duplicate, replacement_of)
        once = Once(found, replaces=duplicate == "replace")
    request = runtime.runner.request(delivery)
    due_in_s = _DUE_IN_S
    if delivery.strict and NOT_BEFORE in (call := json.loads(delivery.call or "{}")):
        due_in_s += waits_s(call, ledger.now_us() / 1e6)
    if isinstance(session, ExternalConnection):
        work = ledger.enqueue_external(session, request, due_in_s=due_in_s, once=once)
    else:
        work = ledger.enqueue(db, request, due_in_s=due_in_s, once=once)
    if placed.outcome in ("attached", "skipped"):
        return placed

    pause_s = AGAIN_AFTER_S if again_after_s is None else again_after_s
    # Strict work stays due: a relay promotes it in its turn if its message does not arrive soon.
    in_line = delivery.strict and placed.outcome == "sent"
    # Its trace, or tenant, is that of the enqueue, wherever the COMMIT comes from.
    context = contextvars.copy_context()

    def publish() -> bool:
        sent_again_s = None if in_line else pause_s
        sending = partial(_send_if_committed, ledger, placed.delivery, work)
        return context.copy().run(sending, send, sent_again_s)

    placed.publish = publish
    if not _publish_after(session, db, placed) and placed.outcome == "sent":
        placed.outcome = "stored"
    return placed


def _opened(session: Any, delivery: Delivery) -> tuple[Any, Any]:
    """The user's session, and its connection to write by; each None where there is none."""
    import sqlalchemy as sa
    from sqlalchemy import orm

    if isinstance(session, ExternalConnection):
        if not session.in_transaction:
            raise ConfigurationError(
                f"{delivery.work} was enqueued outside a transaction. Begin the transaction that "
                "writes its data, and enqueue it there."
            )
        return session, None
    if isinstance(session, orm.scoped_session):
        session = session.registry()
    if isinstance(session, orm.Session) and delivery.row is not None:
        session.flush()  # the user's own row decides whether there is anything to do
    if not isinstance(session, orm.Session | sa.Connection | None):
        raise ConfigurationError(
            f"session={session!r} is no Session: pass the SQLAlchemy Session or Connection in "
            "whose transaction to store the work."
        )
    return session, session.connection() if isinstance(session, orm.Session) else session


def _publish_after(session: Any, db: Any, publish: Callable[[], None]) -> bool:
    """Publish when the session has committed, or now if there is none.

    Returns False for a connection of the user's own: nothing here hears of its COMMIT.
    """
    from sqlalchemy import orm

    if isinstance(session, ExternalConnection):
        session.after_commit(publish)
    elif db is None:
        publish()
    elif (guard := guard_on(db)) is not None:
        guard.after_commit(publish)
    elif isinstance(session, orm.Session):
        _after_commit(session).add(session, publish)
    else:
        return False
    return True


def _refuse_duplicates_of_messages(delivery: Delivery, duplicate: str) -> None:
    known = get_args(Duplicate)
    if duplicate not in known:
        raise ConfigurationError(f"duplicate={duplicate!r}: give one of {', '.join(known)}.")
    once_per = "message" if delivery.by_message else "run" if delivery.by_run else "key"
    reason = refusal(once_per=once_per, busy=delivery.policy.busy, duplicate=duplicate)
    if reason is not None:
        raise ConfigurationError(f"{delivery.task}: duplicate={duplicate!r}: {reason}")


def _found(
    runtime: TaskGuard,
    placed: Placed,
    duplicate: Duplicate,
    replacement_of: Callable[[Existing], Delivery] | None,
    existing: Existing,
) -> ClaimRequest | None:
    """Decide about the work on record, and note the decision in `placed`."""
    asked = placed.delivery
    placed.first = existing
    if duplicate == "replace" and existing.begun and asked.by_run:
        return runtime.runner.request(asked)  # for the run that follows
    if duplicate == "raise" or (duplicate == "replace" and existing.begun):
        raise _already(asked, existing, duplicate)
    if duplicate == "replace":
        placed.delivery = asked if replacement_of is None else replacement_of(existing)
        placed.outcome = "replaced"
        return runtime.runner.request(placed.delivery)
    digests = asked.fingerprint, existing.fingerprint
    if duplicate == "attach" and None not in digests and digests[0] != digests[1]:
        raise FingerprintMismatchError(
            f"{asked.task} {asked.key} is on record with other arguments (the task's fingerprint= "
            "differs), so its result is not that of these. Nothing was written. If it is other "
            'work, name it by once_per=; if these are the right ones, say duplicate="replace".',
            key=asked.key,
        )
    placed.outcome = "attached" if duplicate == "attach" else "skipped"
    return None


def _already(asked: Delivery, existing: Existing, duplicate: str) -> AlreadyEnqueuedError:
    how = "is in progress" if existing.begun else "is enqueued"
    if duplicate == "raise":
        then = 'Wait for its result (duplicate="attach"), or leave it at that ("skip").'
    else:
        then = (
            "Somebody has begun it with its older arguments, which cannot be replaced any more. "
            "Enqueue this again when it has ended, or let the body read what is newest."
        )
    return AlreadyEnqueuedError(
        f"{asked.task} {asked.key} {how}, by message {existing.message}. Nothing was written. "
        f"{then}",
        key=asked.key,
        message_id=existing.message,
        begun=existing.begun,
    )


class _AfterCommit:
    """The functions of a Session for the COMMIT of its outermost transaction."""

    def __init__(self, session: Any) -> None:
        import sqlalchemy as sa

        # Each function with the transaction or savepoint in which it was registered.
        self._then: list[tuple[Any, Callable[[], None]]] = []
        self._committed = False
        # For the life of the Session: a listener cannot be removed while it is called.
        sa.event.listen(session, "after_commit", self._note)
        sa.event.listen(session, "after_soft_rollback", self._forget)
        sa.event.listen(session, "after_transaction_end", self._end)

    def add(self, session: Any, function: Callable[[], None]) -> None:
        said_in = session.get_nested_transaction() or session.get_transaction()
        self._then.append((said_in, function))

    def _note(self, session: Any) -> None:
        """A savepoint has ended, too: what was registered in it is committed only with the rest."""
        self._committed = not session.in_nested_transaction()

    def _forget(self, session: Any, rolled_back: Any) -> None:
        """Forget what was registered in a savepoint that is rolled back, or in one within it."""
        del session
        self._then = [each for each in self._then if not _is_within(each[0], rolled_back)]

    def _end(self, session: Any, transaction: Any) -> None:
        del session
        if transaction.parent is not None:
            return
        then, self._then = self._then, []
        committed, self._committed = self._committed, False
        if committed:
            for _, function in then:
                function()


def _is_within(transaction: Any, outer: Any) -> bool:
    while transaction is not None and transaction is not outer:
        transaction = transaction.parent
    return transaction is not None


def _after_commit(session: Any) -> _AfterCommit:
    found = session.info.get(_AfterCommit)
    if found is None:
        found = session.info[_AfterCommit] = _AfterCommit(session)
    return found  # type: ignore[no-any-return]


def _send_if_committed(
    ledger: LineLedger, delivery: Delivery, work: str, send: Send, again_after_s: float | None
) -> bool:
    """Return whether it was sent. Never raises: what could not be sent now is sent by a sweep.

    `again_after_s`: None: the message counts as lost when its work is due, as that is written.
    """
    try:
        found = ledger.overdue(limit=1, work=work)
        own = bool(found) and found[0].message.name == delivery.message.name
        # The work is another message's, or done: this one is answered. None: it was rolled back.
        if not own and ledger.view(work) is None:
            return False
        call = json.loads(delivery.call or "{}")
        wait_s = waits_s(call, ledger.now_us() / 1e6) if NOT_BEFORE in call else 0.0
        send(call, delivery.message)
        if own and again_after_s is not None:
            ledger.sent(found, again_after_s=again_after_s + wait_s)
    except Exception as error:  # noqa: BLE001  # committed is committed
        logger.warning("%s: not sent yet; a sweep sends it: %s", work, error)
        return False
    return True


def waits_s(call: dict[str, Any], now_s: float) -> float:
    """Return for how many seconds from now no worker may take the message: until its `NOT_BEFORE`.

    `now_s`: by the database's clock. If `NOT_BEFORE` is past, it is removed from the call. So its
    sender, whose own clock may be behind, sends the message at once.
    """
    wait_s = max(0.0, float(call.get(NOT_BEFORE, 0.0)) - now_s)
    if not wait_s:
        call.pop(NOT_BEFORE, None)
    return wait_s


def outbox_of(runtime: TaskGuard) -> LineLedger:
    """The runtime's ledger. Raises ConfigurationError where it has none."""
    if runtime.ledger is None:
        raise ConfigurationError(
            "Calls are stored in a ledger in a database: configure one (TASKGUARD_LEDGER_URL)."
        )
    return runtime.ledger
