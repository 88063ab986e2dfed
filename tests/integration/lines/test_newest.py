"""`busy="latest"` and `"supersede"` at the runner: what a holder learns, and which one has the
lock.

With a real ledger on SQLite and locks in memory, and without a relay. The queue only notes its
calls.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from support.guarded_shop import NotingQueue
from support.waiting import patience_s
from taskguard import Guard
from taskguard.errors import SupersededError
from taskguard.integration import Claim, Completed, Delivery, Dropped, MessageRef
from taskguard.ledger.sql import SqlLedger
from taskguard.locks.base import Held
from taskguard.locks.memory import MemoryLocks
from taskguard.model.delivery import Parked
from taskguard.model.lease import new_owner
from taskguard.model.policy import make_policy
from taskguard.run.runner import Runner

KEY = "index:1"


class NotingParking:
    """Notes which messages are sent."""

    queue = "test"

    def __init__(self, sent: list[str]) -> None:
        self._sent = sent

    def call(self) -> Mapping[str, Any] | None:
        return {"queue": self.queue}

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        assert call["message"] == message.name
        self._sent.append(message.id)

    def failed(self, claim: Claim) -> None:
        raise AssertionError(f"{claim.work} keeps no place")


class Index:
    """A runner for messages of one key. The name of each is its send time."""

    def __init__(self, url: str) -> None:
        self.ledger = SqlLedger(url)
        self.ledger.create_schema()
        self.locks = MemoryLocks()
        self.runner = Runner(locks=self.locks, ledger=self.ledger)
        self.sent: list[str] = []
        # Failed assertions of bodies: the runner drops the error of a superseded one.
        self.wrong: list[AssertionError] = []
        self._began_s = time.time() - 60.0

    def deliver(
        self,
        number: int,
        body: Callable[[Guard], Any] = lambda guard: None,
        *,
        busy: str = "supersede",
        task: str = "rebuild",
        queued: bool = True,
        promoted: bool = False,
    ) -> Any:
        delivery = Delivery(
            keys=(KEY,),
            work=f"{task} {number}",
            task=task,
            promoted=promoted,
            message=MessageRef(f"m{number}"),
            policy=make_policy({"busy": busy}, task=task),
            published_at_s=self._began_s + number,
            queue=NotingQueue() if queued else None,
            parking=NotingParking(self.sent) if queued else None,
        )

        def watched(guard: Guard) -> Any:
            try:
                return body(guard)
            except AssertionError as error:
                self.wrong.append(error)
                raise

        # A context of its own: otherwise it would be a body that requests its own key.
        return contextvars.Context().run(self.runner.deliver, delivery, watched)


@pytest.fixture
def index(sqlite_url: str) -> Iterator[Index]:
    made = Index(sqlite_url)
    yield made
    made.ledger.close()
    assert made.wrong == []


def test_the_lock_goes_to_the_newer_one(index: Index) -> None:
    """The lock passes to the newer message at the lock server, too, and is never free. The older
    one releases nothing."""
    owners: list[str] = []

    def newer(guard: Guard) -> None:
        owners.append(str(index.locks.held()[KEY]))
        third = index.locks.acquire((KEY,), new_owner("x"), ttl_s=9, with_fence=False, wait_s=0)
        assert isinstance(third, Held)
        assert third.owner.message == "m2"
        guard.check()

    def older(guard: Guard) -> None:
        owners.append(str(index.locks.held()[KEY]))
        assert isinstance(index.deliver(2, newer), Completed)
        index.runner.watchdog.tick()
        with guard.transaction():
            pass

    assert index.deliver(1, older) == Dropped("outdated")
    assert len(set(owners)) == 2
    assert index.locks.held() == {}


def test_the_older_one_frees_nothing(index: Index) -> None:
    """The older delivery ends while the newer one runs."""
    inside: list[Any] = []

    def newest(guard: Guard) -> None:
        inside.append(index.locks.held()[KEY].message)

    def newer(guard: Guard) -> None:
        assert isinstance(index.deliver(3, newest), Completed)
        guard.check()

    def older(guard: Guard) -> None:
        index.deliver(2, newer)

    assert index.deliver(1, older) == Dropped("outdated")
    assert inside == ["m3"]


def test_who_waits_behind_one_that_is_superseded(index: Index) -> None:
    """The newer delivery promotes the waiting message: the older one, which ends first, has
    consumed no hint."""
    began, goes_on = threading.Event(), threading.Event()

    def newer(guard: Guard) -> None:
        began.set()
        assert goes_on.wait(patience_s())

    thread = threading.Thread(target=index.deliver, args=(2, newer))

    def older(guard: Guard) -> None:
        assert index.deliver(3, task="other", busy="park") == Parked()
        thread.start()
        assert began.wait(patience_s())

    assert index.deliver(1, older) == Dropped("outdated")
    assert index.sent == []
    goes_on.set()
    thread.join(patience_s())
    assert index.sent == ["m3"]


def test_whatever_a_superseded_body_raises(index: Index) -> None:
    """No error of a superseded body reaches the queue. Its message is answered as superseded."""

    def older(guard: Guard) -> None:
        index.deliver(2)
        raise ValueError("an error of its own")

    assert index.deliver(1, older) == Dropped("outdated")
    with pytest.raises(ValueError, match="its own"):
        index.deliver(3, lambda guard: (_ for _ in ()).throw(ValueError("its own")))


def test_superseded_messages_are_sent(index: Index) -> None:
    """Superseded messages are sent, to notify their callers. The longest waiting one is not
    promoted before the newest."""

    def body(guard: Guard) -> None:
        assert index.deliver(2, busy="latest") == Parked()
        assert index.deliver(4, busy="latest") == Parked()
        assert index.sent == ["m2"]
        assert index.deliver(3, busy="latest") == Dropped("outdated")
        assert index.deliver(2, busy="latest") == Dropped("outdated")

    assert isinstance(index.deliver(1, body, busy="latest"), Completed)
    assert index.sent == ["m2", "m4"]
    assert index.ledger.overdue(parked=True) == []
    assert isinstance(index.deliver(4, busy="latest", promoted=True), Completed)


def test_a_call_without_a_queue_takes_the_place_of_a_message(index: Index) -> None:
    """A call without a queue supersedes messages, as in eager mode, and leaves their notification
    to a relay."""

    def body(guard: Guard) -> None:
        assert index.deliver(2, busy="latest") == Parked()
        assert isinstance(index.deliver(3, queued=False), Completed)

    assert index.deliver(1, body) == Dropped("outdated")
    assert index.sent == []
    [untold] = index.ledger.overdue(work="rebuild 2")
    assert untold.message.id == "m2"


def test_without_a_queue(index: Index) -> None:
    """Without a queue, as in eager mode, the caller gets the error."""
    index.deliver(2)
    with pytest.raises(SupersededError, match="It never runs"):
        index.deliver(1, queued=False)
