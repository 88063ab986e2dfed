"""The transactional outbox: work is written in the user's transaction, its message sent after it.

Guarantees: rolled back, nothing is sent; committed, the message is sent by this process at once, or
by a sweep if this process dies, or the broker is away, in between.

Does not guarantee that nothing is sent twice: the ledger answers a duplicate, as any other.

Read next: `sweep.py`, and `ledger/outbox.py` for what is stored.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from taskguard.api import TaskGuard
from taskguard.delivery import Delivery, MessageRef
from taskguard.errors import ConfigurationError
from taskguard.guard import guard_with
from taskguard.ledger.protocol import LineLedger, OutboxLedger
from taskguard.ledger.transactions.external import ExternalConnection

__all__ = ["AGAIN_AFTER_S", "NOT_BEFORE", "Send", "enqueue_in", "outbox_of", "waits_s"]

logger = logging.getLogger("taskguard")

Send = Callable[[dict[str, Any], MessageRef], None]
"""Sends a stored call again, with these numbers; raises unless the broker took it."""

AGAIN_AFTER_S = 3_600.0
"""After so long without a claim a message that was sent counts as lost, in seconds."""

NOT_BEFORE = "not_before_s"
"""In a stored call: its message is sent, and waits until then, in seconds since 1970."""

# For so long the message of work that was just committed is its process's to send; then a sweep's.
_DUE_IN_S = 5.0


def enqueue_in(
    session: Any, runtime: TaskGuard, delivery: Delivery, send: Send
) -> Callable[[], None]:
    """Write a delivery's work as NEW in the user's transaction, and send its message after it.

    On an ORM Session, and on the connection of a guard's transaction, the message is sent as soon
    as that has committed. On a connection of the user's own nobody hears of its COMMIT: call what
    is returned after it, or leave it to the sweep. Rolled back, nothing is sent.

    Args:
        session: a SQLAlchemy Session or Connection to the ledger's database, or a
            `ExternalConnection`, whose library hears of the COMMIT; None: the work is committed by
            itself, and its message is sent at once.
        runtime: locks and ledger.
        delivery: with its `call`.
        send: how to send it.

    Raises:
        ConfigurationError: there is no ledger, or `session` is neither.
    """
    import sqlalchemy as sa
    from sqlalchemy import orm

    if isinstance(session, ExternalConnection):
        return _enqueue_external(session, runtime, delivery, send)
    if isinstance(session, orm.scoped_session):
        session = session.registry()
    if isinstance(session, orm.Session) and delivery.row is not None:
        session.flush()  # the flushed row of the user's tells whether there is anything to do
    if not isinstance(session, orm.Session | sa.Connection | None):
        raise ConfigurationError(
            f"session={session!r}: give the SQLAlchemy Session or Connection whose transaction "
            "the work is to be part of."
        )
    ledger = outbox_of(runtime)
    db = session.connection() if isinstance(session, orm.Session) else session
    ledger.enqueue(db, runtime.runner.request(delivery), due_in_s=_DUE_IN_S)

    def publish() -> None:
        _send_if_committed(ledger, delivery, send)

    if db is None:
        publish()
    elif (guard := guard_with(db)) is not None:
        guard.after_commit(publish)
    elif isinstance(session, orm.Session):
        _after_commit(session).add(session, publish)
    return publish


def _enqueue_external(
    external: ExternalConnection, runtime: TaskGuard, delivery: Delivery, send: Send
) -> Callable[[], None]:
    ledger = outbox_of(runtime)
    if not external.in_transaction:
        raise ConfigurationError(
            f"{delivery.work} was enqueued outside a transaction: begin the one that writes what "
            "it is about, and enqueue it there."
        )
    ledger.enqueue_external(external, runtime.runner.request(delivery), due_in_s=_DUE_IN_S)

    def publish() -> None:
        _send_if_committed(ledger, delivery, send)

    external.after_commit(publish)
    return publish


class _AfterCommit:
    """What a Session is to do once its outermost transaction has committed."""

    def __init__(self, session: Any) -> None:
        import sqlalchemy as sa

        # Each function stands with the transaction or savepoint in which it was registered.
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


def _send_if_committed(ledger: OutboxLedger, delivery: Delivery, send: Send) -> None:
    """Never raises: what could not be sent now is sent by a sweep."""
    try:
        found = ledger.overdue(limit=1, work=delivery.work)
        own = bool(found) and found[0].message.name == delivery.message.name
        # The work is another message's, or done: this one is answered. None: it was rolled back.
        if not own and ledger.view(str(delivery.work)) is None:
            return
        call = json.loads(delivery.call or "null")
        send(call, delivery.message)
        if own:
            ledger.sent(found, again_after_s=AGAIN_AFTER_S + waits_s(call))
    except Exception as error:  # noqa: BLE001  # committed is committed
        logger.warning("%s: not sent yet, a sweep will: %s", delivery.work, error)


def waits_s(call: Any) -> float:
    """For how many seconds nobody may take a message that is sent now: until its `eta`."""
    until_s = call.get(NOT_BEFORE) if isinstance(call, dict) else None
    return max(0.0, float(until_s) - time.time()) if until_s else 0.0


def outbox_of(runtime: TaskGuard) -> LineLedger:
    """The runtime's ledger. Raises ConfigurationError where it has none."""
    if runtime.ledger is None:
        raise ConfigurationError(
            "Calls are stored in a ledger in a database: configure one (TASKGUARD_LEDGER_URL)."
        )
    return runtime.ledger
