"""Sending messages: of works that nobody is at any more, and of those that were just committed.

    Sweeper(house, {"celery": send}).sweep()

Guarantees: a work whose call is stored is sent again until somebody claims it, ends it or revokes
it, whatever process dies in between: its message is sent first, and noted as sent only then. Two
sweeps at once send nothing twice: a lease of the house keeps them apart.

Does not guarantee that nothing is sent twice: a message that still waits in its queue is
indistinguishable from a lost one. The ledger answers such a duplicate, as any other.

Read next: `ledger/outbox.py` for what is overdue.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskguard.api import TaskGuard
from taskguard.delivery import Delivery, MessageRef
from taskguard.errors import ConfigurationError
from taskguard.guard import guard_with
from taskguard.ledger.foreign import ForeignConnection

if TYPE_CHECKING:
    from taskguard.ledger.outbox import Overdue

__all__ = ["Send", "Sweeper", "Swept", "enqueue_in"]

logger = logging.getLogger("taskguard")

Send = Callable[[dict[str, Any], MessageRef], None]
"""Sends a stored call again, with these numbers; raises unless the broker took it."""

KEY = "taskguard:sweep"
_TTL_S = 30.0
# The message of a work that was just committed is sent by its process; from then on by a sweep.
_DUE_IN_S = 5.0
# A broker that refuses so many in a row is thought to be away. What it refused goes behind the
# rest: these may be calls that can never be sent.
_REFUSALS = 10
_REFUSED_AGAIN_S = 30.0
AGAIN_AFTER_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did.

    Attributes:
        sent: messages sent.
        refused: calls that could not be sent; see the log. They are tried again in half a minute.
        strange: calls of a queue that this sweep cannot send to.
    """

    sent: int = 0
    refused: int = 0
    strange: int = 0


class Sweeper:
    """Sends the messages of overdue works again.

    Args:
        house: locks and ledger.
        senders: how to send, by the name of the queue that a stored call carries.
        again_after_s: after so many seconds without a claim a message counts as lost again, at
            least 1. Not much shorter than messages wait in their queue: each would be sent once
            more.
        batch: works read, and noted as sent, at a time.

    Raises:
        ConfigurationError: `again_after_s` is too short.
    """

    def __init__(
        self,
        house: TaskGuard,
        senders: Mapping[str, Send],
        *,
        again_after_s: float = AGAIN_AFTER_S,
        batch: int = 500,
    ) -> None:
        if again_after_s < 1:
            raise ConfigurationError(
                f"again_after_s={again_after_s!r}: a sweep would find what it has just sent."
            )
        self._house = house
        self._senders = senders
        self._again_after_s = again_after_s
        self._batch = batch

    def sweep(self) -> Swept:
        """Once over everything that is overdue now.

        Raises:
            KeyBusyError: another sweep is at it.
            LeaseLostError: this one was paused, and another may be at it.
            LedgerUnavailableError: the database is away.
        """
        ledger = _ledger_of(self._house)
        tally = _Tally()
        after: Overdue | None = None
        with self._house.lock(KEY, ttl_s=_TTL_S) as lease:
            while not tally.gave_up and (found := ledger.overdue(limit=self._batch, after=after)):
                lease.check()
                after = found[-1]
                self._send_all(ledger, found, tally)
        return Swept(tally.sent, tally.refused, tally.strange)

    def _send_all(self, ledger: Any, works: list[Overdue], tally: _Tally) -> None:
        again: dict[float, list[Overdue]] = {self._again_after_s: [], _REFUSED_AGAIN_S: []}
        for work in works:
            if tally.gave_up:
                break
            sent = self._send(work, tally)
            if sent is not None:
                again[self._again_after_s if sent else _REFUSED_AGAIN_S].append(work)
        for again_after_s, those in again.items():
            if those:
                ledger.sent(those, again_after_s=again_after_s)

    def _send(self, work: Overdue, tally: _Tally) -> bool | None:
        """Whether it was sent; None: it is another sweep's."""
        try:
            call = json.loads(work.call)
            send = self._senders.get(call["queue"])
            if send is None:
                tally.strange += 1
                return None
            send(call, work.message)
        except Exception:
            # Whatever is wrong with one call, the others are to be sent.
            logger.exception("%s could not be sent", work.work)
            tally.refused += 1
            tally.in_a_row += 1
            return False
        tally.sent += 1
        tally.in_a_row = 0
        return True


class _Tally:
    """What a sweep has done so far."""

    sent = 0
    refused = 0
    strange = 0
    in_a_row = 0

    @property
    def gave_up(self) -> bool:
        """Whether the broker is thought to be away."""
        return self.in_a_row >= _REFUSALS


def enqueue_in(
    session: Any, house: TaskGuard, delivery: Delivery, send: Send
) -> Callable[[], None]:
    """Write a delivery's work as NEW in the user's transaction, and send its message after it.

    On an ORM Session, and on the connection of a guard's transaction, the message is sent as soon
    as that has committed. On a connection of the user's own nobody hears of its COMMIT: call what
    is returned after it, or leave it to the sweep. Rolled back, nothing is sent.

    Args:
        session: a SQLAlchemy Session or Connection to the ledger's database, or a
            `ForeignConnection`, whose library hears of the COMMIT; None: the work is committed by
            itself, and its message is sent at once.
        house: locks and ledger.
        delivery: with its `call`.
        send: how to send it.

    Raises:
        ConfigurationError: there is no ledger, or `session` is neither.
    """
    import sqlalchemy as sa
    from sqlalchemy import orm

    if isinstance(session, ForeignConnection):
        return _enqueue_in_foreign(session, house, delivery, send)
    if isinstance(session, orm.scoped_session):
        session = session.registry()
    if isinstance(session, orm.Session) and delivery.row is not None:
        session.flush()  # its own row tells whether there is anything to do
    if not isinstance(session, orm.Session | sa.Connection | None):
        raise ConfigurationError(
            f"session={session!r}: give the SQLAlchemy Session or Connection whose transaction "
            "the work is to be part of."
        )
    ledger = _ledger_of(house)
    db = session.connection() if isinstance(session, orm.Session) else session
    ledger.enqueue(db, house.runner.request(delivery), due_in_s=_DUE_IN_S)

    def publish() -> None:
        _send_if_committed(ledger, delivery, send)

    if db is None:
        publish()
    elif (guard := guard_with(db)) is not None:
        guard.after_commit(publish)
    elif isinstance(session, orm.Session):
        _after_commit(session).add(session, publish)
    return publish


def _enqueue_in_foreign(
    foreign: ForeignConnection, house: TaskGuard, delivery: Delivery, send: Send
) -> Callable[[], None]:
    ledger = _ledger_of(house)
    if not foreign.in_transaction:
        raise ConfigurationError(
            f"{delivery.work} was enqueued outside a transaction: begin the one that writes what "
            "it is about, and enqueue it there."
        )
    ledger.enqueue_in_foreign(foreign, house.runner.request(delivery), due_in_s=_DUE_IN_S)

    def publish() -> None:
        _send_if_committed(ledger, delivery, send)

    foreign.after_commit(publish)
    return publish


class _AfterCommit:
    """What a Session is to do once its outermost transaction has committed."""

    def __init__(self, session: Any) -> None:
        import sqlalchemy as sa

        # Each with the transaction or savepoint that it was said in.
        self._then: list[tuple[Any, Callable[[], None]]] = []
        self._committed = False
        # For the life of the Session: its events do not let go of a listener while they call it.
        sa.event.listen(session, "after_commit", self._note)
        sa.event.listen(session, "after_soft_rollback", self._forget)
        sa.event.listen(session, "after_transaction_end", self._end)

    def add(self, session: Any, function: Callable[[], None]) -> None:
        said_in = session.get_nested_transaction() or session.get_transaction()
        self._then.append((said_in, function))

    def _note(self, session: Any) -> None:
        """Of a savepoint, too: what it kept is committed only with the rest."""
        self._committed = not session.in_nested_transaction()

    def _forget(self, session: Any, rolled_back: Any) -> None:
        """What was said in a savepoint that is rolled back, or in one within."""
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


def _send_if_committed(ledger: Any, delivery: Delivery, send: Send) -> None:
    """Never raises: what could not be sent now is sent by a sweep."""
    try:
        found = ledger.overdue(limit=1, work=delivery.work)
        own = bool(found) and found[0].message.id == delivery.message.id
        # Somebody else's, or done: this message gets its answer all the same. None: rolled back.
        if not own and ledger.view(delivery.work) is None:
            return
        send(json.loads(delivery.call or "null"), delivery.message)
        if own:
            ledger.sent(found, again_after_s=AGAIN_AFTER_S)
    except Exception as error:  # noqa: BLE001  # committed is committed
        logger.warning("%s: not sent yet, a sweep will: %s", delivery.work, error)


def _ledger_of(house: TaskGuard) -> Any:
    ledger = house.runner.ledger
    if not hasattr(ledger, "overdue"):
        raise ConfigurationError(
            "Calls are stored in a ledger in a database: configure one (TASKGUARD_LEDGER_URL)."
        )
    return ledger
