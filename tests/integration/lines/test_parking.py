"""`busy="park"` at the runner: which deliveries promote the next message, whatever their outcome.

With a real ledger on SQLite and locks in memory, and without a relay. The queue only notes its
calls.
"""

from __future__ import annotations

import contextvars
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from support.claims import request
from support.due import make_due
from support.guarded_shop import NotingQueue
from taskguard import Guard, connect
from taskguard.errors import LedgerUnavailableError, WorkDeadError
from taskguard.integration import Completed, Deferred, Delivery, Dropped, MessageRef, Relay, Sweeper
from taskguard.ledger.sql import SqlLedger
from taskguard.locks.base import Granted, Held
from taskguard.locks.memory import MemoryLocks
from taskguard.model.claims import Claimed
from taskguard.model.delivery import Answered, Parked
from taskguard.model.lease import Owner, new_owner
from taskguard.model.policy import make_policy
from taskguard.model.states import State
from taskguard.run.parking import EXPECTED_S
from taskguard.run.runner import Runner

KEY = "account:1"


class NotingParking:
    """Notes which messages are promoted."""

    queue = "test"

    def __init__(self, message: str, promoted: list[str]) -> None:
        self._message = message
        self._called = promoted

    def call(self) -> Mapping[str, Any] | None:
        return {"queue": "test"}

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        assert call["message"] == message.name
        self._called.append(message.id)


class LockedMeanwhile(MemoryLocks):
    """Calls `meanwhile` as soon as the key is taken, as if others arrived just then."""

    meanwhile: Callable[[], Any] | None = None

    def acquire(self, keys: tuple[str, ...], owner: Owner, **asked: Any) -> Granted | Held:
        found = super().acquire(keys, owner, **asked)
        then, self.meanwhile = self.meanwhile, None
        if then is not None:
            then()
        return found


class Line:
    """A runner for messages of one key, each of which is work of its own."""

    def __init__(self, url: str) -> None:
        self.engine = sa.create_engine(url)
        self.ledger = SqlLedger(url)
        self.ledger.create_schema()
        self.locks = LockedMeanwhile()
        self.runner = Runner(locks=self.locks, ledger=self.ledger)
        self.promoted: list[str] = []

    def deliver(
        self,
        message: str,
        body: Callable[[Guard], Any] = lambda guard: None,
        *,
        work: str | None = None,
        promoted: bool = False,
        **options: Any,
    ) -> Any:
        delivery = Delivery(
            keys=(KEY,),
            work=work or f"book {message}",
            task="book",
            message=MessageRef(message),
            policy=make_policy({"busy": "park", **options}, task="book"),
            queue=NotingQueue(),
            parking=NotingParking(message, self.promoted),
            promoted=promoted,
        )
        return self.runner.deliver(delivery, body)


@pytest.fixture
def line(sqlite_url: str) -> Iterator[Line]:
    made = Line(sqlite_url)
    yield made
    made.engine.dispose()
    made.ledger.close()


def test_whoever_is_done_calls_the_first(line: Line) -> None:
    """A holder that ends promotes the first message that was parked while it ran."""

    def body(guard: Guard) -> None:
        # A context of its own: otherwise this body would request its own key.
        for each in ("b", "c"):
            assert contextvars.Context().run(line.deliver, each) == Parked()

    assert isinstance(line.deliver("a", body), Completed)
    assert line.promoted == ["b"]


def holding(line: Line) -> Callable[[], object]:
    """Hold the key by a holder without a line. Return a function that releases it."""
    owner = new_owner("x")
    assert isinstance(
        line.locks.acquire((KEY,), owner, ttl_s=30.0, with_fence=False, wait_s=0.0), Granted
    )
    return lambda: line.locks.release((KEY,), owner)


def parked(line: Line, message: str, **values: Any) -> None:
    """Park a message while the key is held by a holder that promotes none."""
    let_go = holding(line)
    assert line.deliver(message, **values) == Parked()
    let_go()
    assert line.promoted == []


class TestWhoDoesNotRun:
    """A refused delivery holds the key at the lock server for a moment, in which others are parked
    behind it."""

    @pytest.fixture(autouse=True)
    def _others_come(self, line: Line) -> Iterator[None]:
        yield
        assert line.locks.meanwhile is None
        assert line.promoted == ["b"]

    def test_for_its_work_is_done(self, line: Line) -> None:
        line.deliver("a")
        line.locks.meanwhile = lambda: line.deliver("b")
        assert line.deliver("a") == Answered(None)

    def test_for_it_was_revoked(self, line: Line) -> None:
        parked(line, "a")
        line.ledger.revoke("book a", message="a")
        line.locks.meanwhile = lambda: line.deliver("b")
        assert line.deliver("a") == Dropped("revoked")

    def test_for_its_work_is_dead(self, line: Line) -> None:
        """The work is dead, which is an error."""
        claim = line.ledger.claim(request(keys=(KEY,), work="book a", message=MessageRef("a")))
        assert isinstance(claim, Claimed)
        line.ledger.crash(claim.claim, "boom")
        line.locks.meanwhile = lambda: line.deliver("b")
        with pytest.raises(WorkDeadError):
            line.deliver("a", max_crashes=1)

    def test_for_the_ledger_is_away(self, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ledger is down for its claim. Messages that arrive meanwhile get their answers."""

        def away(_: Any) -> Any:
            raise LedgerUnavailableError("away")

        monkeypatch.setattr(line.ledger, "claim", away)
        line.locks.meanwhile = lambda: line.deliver("b")
        assert isinstance(line.deliver("a"), Deferred)

    def test_for_another_message_waits_with_its_work(self, line: Line) -> None:
        """Another message waits with its work. That one is first, and its caller gets its
        answer."""
        parked(line, "b", work="book 1")
        line.locks.meanwhile = lambda: line.deliver("c")
        assert isinstance(line.deliver("a", work="book 1"), Deferred)


def test_a_recall_that_the_broker_refuses_delays_no_other_message(line: Line) -> None:
    """A promoted message that did not arrive blocks no other, even if the broker refuses to send it
    again."""
    for each in "ab":
        parked(line, each)
    app, queues = "", ["test"]
    asked = {"expected_s": 0.0, "app": app, "queues": queues}
    first = line.ledger.promote_next(KEY, **asked)
    assert first is not None
    assert first.message.id == "a"
    sent: list[str] = []

    def refuse(call: Mapping[str, Any], message: MessageRef) -> None:
        sent.append(message.id)
        raise ConnectionError("the broker is away")

    runtime = connect(locks=None, ledger=line.ledger)
    Relay(runtime, {"test": refuse}, {"test": lambda *_: None}).look()
    assert sent == ["a"]
    # The look has promoted the next message, which now claims the free key.
    assert isinstance(line.deliver("b", promoted=True), Completed)


def test_a_sweep_leaves_what_was_called_to_a_relay(line: Line) -> None:
    """A relay sends a promoted message again after a few seconds, and not an hour after a sweep."""
    parked(line, "a")
    assert line.ledger.promote_next(KEY, expected_s=0.0, app="", queues=["test"]) is not None
    sent: list[str] = []

    def send(call: Mapping[str, Any], message: MessageRef) -> None:
        sent.append(message.id)

    runtime = connect(locks=None, ledger=line.ledger)
    assert Sweeper(runtime, {"test": send}, again_after_s=3_600.0).sweep().sent == 0
    [work] = line.ledger.overdue(parked=True)
    assert sent == []
    Relay(runtime, {"test": send}).look()
    assert sent == ["a"]
    [again] = line.ledger.overdue(work=work.work)
    assert again.due_us - line.ledger.now_us() < 60 * 10**6


def test_copies_of_what_waits_in_its_queue(line: Line) -> None:
    """L1: t s after its promotion a message has at most 2 + log2(t / 5) copies, and 11 in all.
    Before five seconds there is one."""
    parked(line, "a")
    sent_us = line.ledger.now_us()
    first = line.ledger.promote_next(KEY, expected_s=EXPECTED_S, app="", queues=["test"])
    assert first is not None
    sent: list[str] = []
    senders = {"test": lambda call, message: sent.append(message.id)}
    relay = Relay(connect(locks=None, ledger=line.ledger), senders)
    after_s, copies = 0.0, 1
    while copies < 20 and (found := line.ledger.overdue(work=first.work)):
        after_s += (found[0].due_us - sent_us) / 1e6
        make_due(line)
        sent_us = line.ledger.now_us()
        relay.look()
        copies = 1 + len(sent)
        assert copies <= min(11, 2 + math.log2(after_s / 5.0))
    assert copies == 11
    view = line.ledger.view(first.work)
    assert view is not None
    assert view.state is State.FAILED


def wait_for_keys(line: Line, count: int, queues: Sequence[str], *, after: str = "") -> None:
    """In the line of each key, one message of each queue waits, in that order."""
    for number in range(count):
        for place, queue in enumerate(queues):
            name = f"{after}{number:04d}"
            message = MessageRef(f"{queue}-{name}")
            call = json.dumps({"queue": queue, "message": message.name})
            asked = request(keys=(f"key:{name}",), work=f"{queue} {name}", message=message)
            assert line.ledger.park(replace(asked, call=call, sent_us=place + 1))


def test_keys_that_cannot_be_served_starve_no_other(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys whose queue is down, or whose first message belongs to another relay, do not starve
    others.

    One look sends at most one message to a broker that is down. The keys are more than a page.
    """
    page = functools.partial(line.ledger.look, most=50)
    monkeypatch.setattr(line.ledger, "look", page)
    wait_for_keys(line, 120, ["down"])
    wait_for_keys(line, 120, ["elsewhere", "test"], after="e")
    wait_for_keys(line, 2, ["test"], after="z")
    tried: list[str] = []

    def refuse(call: Mapping[str, Any], message: MessageRef) -> None:
        tried.append(message.id)
        raise ConnectionError("the broker is down")

    def send(call: Mapping[str, Any], message: MessageRef) -> None:
        line.promoted.append(message.id)

    relay = Relay(connect(locks=None, ledger=line.ledger), {"down": refuse, "test": send})
    for _ in range(3):
        relay.look()
    assert line.promoted == ["test-z0000", "test-z0001"]
    assert tried[0] == "down-0000"
    assert len(tried) <= 3


def test_what_is_overdue_in_a_former_namespace_is_sent_into_the_present_one(line: Line) -> None:
    """A sweep sends overdue work of a former namespace into the present one, once. Other
    applications' work stays."""
    for app in ("", "eu", "us"):
        message = MessageRef(f"of {app or 'none'}")
        owned = {"app": app} if app else {}
        call = json.dumps({"queue": "test", "message": message.name, **owned})
        asked = request(keys=(app or "none",), work=message.id, message=message)
        line.ledger.enqueue(None, replace(asked, call=call), due_in_s=-1.0)
    runtime = connect(
        locks=None, ledger=line.ledger, namespace="new", formerly_namespaces=["", "eu"]
    )
    senders = {"test": lambda _, message: line.promoted.append(message.id)}
    for _ in range(2):
        Sweeper(runtime, senders).sweep()
    assert sorted(line.promoted) == ["of eu", "of none"]
    assert [each.message.id for each in line.ledger.overdue()] == ["of us"]


def drain(line: Line) -> None:
    """Take three looks with a relay whose namespace was "old" before."""
    runtime = connect(locks=None, ledger=line.ledger, namespace="new", formerly_namespaces=["old"])
    relay = Relay(runtime, {"test": lambda _, message: line.promoted.append(message.id)})
    for _ in range(3):
        relay.look()


def test_what_is_overdue_elsewhere_starves_no_former_namespace(line: Line) -> None:
    """Overdue work of another application or queue, more than a page, does not starve a former
    namespace."""
    overdue = [("us", "test", 600), ("old", "elsewhere", 600), ("old", "test", 1)]
    for app, queue, count in overdue:
        for number in range(count):
            message = MessageRef(f"{app} {queue} {number}")
            call = json.dumps({"queue": queue, "message": message.name, "app": app})
            asked = request(keys=(message.id,), work=message.id, message=message)
            asked = replace(asked, call=call, strict=True)
            line.ledger.enqueue(None, asked, due_in_s=-9.0 if count > 1 else -1.0)
    drain(line)
    assert line.promoted == ["old test 0"]


def test_lines_that_cannot_be_drained_starve_no_other(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages behind a key that a former namespace's worker holds, more than a page, do not starve
    others."""
    monkeypatch.setattr(line.ledger, "look", functools.partial(line.ledger.look, most=50))
    holder = request(keys=("a",), work="holder", message=MessageRef("holder"))
    assert isinstance(line.ledger.claim(holder), Claimed)
    for number, key in enumerate(["a"] * 60 + ["z"]):
        message = MessageRef(f"{key} {number}")
        call = json.dumps({"queue": "test", "message": message.name, "app": "old"})
        asked = request(keys=(key,), work=message.id, message=message)
        assert line.ledger.park(replace(asked, call=call, sent_us=number))
    drain(line)
    assert line.promoted == ["z 60"]


def test_a_sweep_of_a_queue_whose_broker_is_down_sends_to_the_others(line: Line) -> None:
    """If a queue's broker is down, the sweep still sends to the others, however many messages are
    overdue there."""
    for queue, count in (("down", 30), ("test", 2)):
        for number in range(count):
            message = MessageRef(f"{queue}-{number}")
            call = json.dumps({"queue": queue, "message": message.name})
            asked = request(keys=(message.id,), work=message.id, message=message)
            line.ledger.enqueue(None, replace(asked, call=call), due_in_s=-1.0 - number / 1000)

    def refuse(call: Mapping[str, Any], message: MessageRef) -> None:
        raise ConnectionError("the broker is down")

    senders = {"down": refuse, "test": lambda _, message: line.promoted.append(message.id)}
    Sweeper(connect(locks=None, ledger=line.ledger), senders, batch=5).sweep()
    assert sorted(line.promoted) == ["test-0", "test-1"]
