"""Deliveries and producers are killed at each point of runs: `once_per="run"`.

The queue delivers again what a killed process had not acknowledged. No message is lost, a run has
one effect, and a message belongs to one run. At most one run is open, and one follows it.
"""

from __future__ import annotations

import contextvars
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

from support.databases import DATABASES
from support.exploration import Exploration
from support.killing import KillAt
from support.outbox_rig import OutboxRig, killed_at
from taskguard import Guard
from taskguard.errors import WorkFailedError
from taskguard.integration import Delivery, MessageRef, enqueue_in
from taskguard.ledger.tables import MESSAGES, RUNS, WORK
from taskguard.model.policy import make_policy
from taskguard.model.runs import run_ended
from taskguard.model.states import State
from taskguard.outbox.enqueue import Duplicate

BASE = "ship order:1"


class Boom(Exception):  # noqa: N818
    """The error of a failing body."""


class FileQueue:
    """How a delivery of the rig is put off, and what happens after its failure."""

    max_delay_s = 30.0
    new_message_per_deferral = True
    longest_wait_s = 0.0

    def __init__(self, rig: RunRig, message: MessageRef) -> None:
        self._rig = rig
        self._message = message

    def retries_in_s(self, error: BaseException) -> float | None:
        del error
        return 30.0 if is_retried(self._message) else None

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        del delay_s
        self._rig.send({}, replace(self._message, deferrals=deferrals))


def is_retried(message: MessageRef) -> bool:
    """The message "again" fails once and is retried. "fails" fails, and is not."""
    return message.id == "again" and not message.retries


class RunRig(OutboxRig):
    """Messages for one key, whose work has runs. The queue is a file, and so is what it was told.

    A message is delivered until a delivery of it was acknowledged.
    """

    def __init__(self, engine: sa.Engine, queue: Path) -> None:
        super().__init__(engine, queue)
        self.policy = make_policy({}, task="ship", busy="retry")
        self.acknowledged = queue.with_name("acknowledged")
        self.in_body = lambda: None  # what happens while the body of "a" runs

    def delivery(self, message: str, ref: MessageRef, call: str | None = None) -> Delivery:
        base = super().delivery("1", ref, call)
        del message
        queue = FileQueue(self, ref) if call is None else None
        return replace(base, keys=("order:1",), work=BASE, queue=queue, by_run=True)

    def enqueue(self, message: str, duplicate: Duplicate = "answer") -> None:
        """Enqueue it in the transaction that stores an order of its name."""
        call = json.dumps({"queue": "test", "message": message})
        delivery = self.delivery(message, MessageRef(message), call)
        with orm.Session(self.engine) as session, session.begin():
            session.execute(sa.text("insert into orders values (:name)"), {"name": message})
            enqueue_in(session, self.runtime, delivery, self.send, duplicate=duplicate)

    def send(self, call: dict[str, Any], message: MessageRef) -> None:
        del call
        with self.queue.open("a") as file:
            file.write(f"{json.dumps([message.id, message.retries, message.deferrals])}\n")

    def publish(self, message: str) -> None:
        """Send it as `.delay()` does."""
        self.send({}, MessageRef(message))

    def unacknowledged(self) -> list[tuple[int, MessageRef]]:
        known = set(map(int, self.acknowledged.read_text().split()))
        sent = enumerate(self.queue.read_text().splitlines())
        return [(at, MessageRef(*json.loads(line))) for at, line in sent if at not in known]

    def acknowledge(self, number: int) -> None:
        with self.acknowledged.open("a") as file:
            file.write(f"{number}\n")

    def be_killed(self, kill: KillAt) -> None:
        super().be_killed(kill)
        self.acknowledge = kill.around(self.acknowledge)  # type: ignore[method-assign]

    def work_off(self) -> None:
        """Deliver each message that is in the queue, once."""
        for number, message in self.unacknowledged():
            try:
                delivery = self.delivery(message.id, message)
                run = contextvars.Context().run  # not within a body of the parent
                run(self.runtime.runner.deliver, delivery, partial(self._body, message))
            except Boom:
                if is_retried(message):
                    self.send({}, replace(message, retries=message.retries + 1))
            except WorkFailedError:
                pass  # its caller reads that
            self.acknowledge(number)

    def _body(self, message: MessageRef, guard: Guard) -> str:
        if message.id == "fails" or is_retried(message):
            raise Boom
        if message.id == "a":
            self.in_body()
        with guard.transaction() as db:
            db.execute(sa.text("insert into effects values (:name)"), {"name": message.id})
        return message.id

    def replace_and_deliver(self, message: str) -> None:
        """Replace the call of the work by this one, and deliver what is in the queue."""
        self.enqueue(message, "replace")
        self.work_off()

    def deliver_and_replace(self) -> None:
        """Deliver "a", whose body enqueues "b" for the run that follows. Then deliver "b"."""
        self.in_body = lambda: self.enqueue("b", "replace")
        self.work_off()
        self.work_off()

    def recover(self) -> None:
        """Let all leases end, sweep and deliver until nothing is left to do."""
        self.check()
        for _ in range(10):
            self.sweep()
            self.work_off()
            if not self.unacknowledged() and not self.overdue():
                return self.check(ended=True)
        raise AssertionError(f"{self.unacknowledged()} and {self.overdue()} are left")

    def overdue(self) -> list[str]:
        with self.engine.connect() as db:
            due = sa.select(WORK.c.id).where(WORK.c.due.is_not(None), WORK.c.call.is_not(None))
            return list(db.execute(due).scalars())

    def check(self, *, ended: bool = False) -> None:
        """Check what holds at any time, and what holds once all has `ended`."""
        members = self.members()
        with self.engine.connect() as db:
            pointers = [{each.open, each.follows} for each in db.execute(sa.select(RUNS))]
            records = db.execute(sa.select(WORK).where(WORK.c.base == BASE)).all()
        open_runs = {row.id for row in records if not run_ended(State(row.state), row.final)}
        assert len(pointers) <= 1
        assert open_runs <= set().union(*pointers)
        effects = self.rows("effects")
        of_runs = Counter(members[message] for message in effects.elements())
        assert all(count == 1 for count in of_runs.values()), of_runs
        if ended:
            assert open_runs == set()
            sent = {json.loads(line)[0] for line in self.queue.read_text().splitlines()}
            assert sent <= set(members)  # each was answered by the run that it belongs to

    def members(self) -> dict[str, str]:
        """Return the run of each message, which has one at most."""
        with self.engine.connect() as db:
            rows = db.execute(sa.select(MESSAGES.c.message, MESSAGES.c.work)).all()
        joined = [(row.message, row.work) for row in rows if " run:" in row.work]
        assert len(dict(joined)) == len(joined)
        return dict(joined)

    def state(self, message: str) -> str:
        """Return the state of the run that this message opened."""
        view = self.ledger.view(f"{BASE} run:{message}")
        return "none" if view is None else view.state.value

    def begin_again(self) -> None:
        super().begin_again()
        self.acknowledged.write_text("")
        self.in_body = lambda: None


class Kills:
    """The points at which processes are killed, each on empty tables.

    They are those around each COMMIT, message and acknowledgement, and in `make explore` those
    around each statement. The other databases than PostgreSQL have some of them.
    """

    def __init__(self, rig: RunRig, exploration: Exploration) -> None:
        self._rig = rig
        self._whole = exploration.whole
        self._on_all = exploration.whole or rig.engine.name == "postgresql"
        self._numbers = exploration.numbers(step=1 if self._on_all else 3)
        self._seen = Counter[str]()
        self._killed = True

    def __iter__(self) -> Iterator[int]:
        """Return the numbers, until a process ends without being killed."""
        while self._killed:
            self._rig.begin_again()
            self._at = next(self._numbers)
            yield self._at

    def strike(self, what: str, *args: str) -> None:
        """Let a process do this, and be killed at the present point."""
        self._killed = killed_at(self._rig, self._at, what, *args, statements=self._whole)

    def note(self, left: str) -> None:
        """Count what the process left behind."""
        self._seen[left] += 1

    def expect(self, *expected: str) -> None:
        """Check that processes were killed in each phase, and report how often."""
        print(f"{self._seen.total() - 1} kills: {dict(self._seen)}")
        assert set(self._seen) <= set(expected)
        assert not self._on_all or set(self._seen) == set(expected)


@pytest.fixture(params=DATABASES)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunRig]:
    url = str(request.getfixturevalue(request.param))
    made = RunRig(sa.create_engine(url), tmp_path / "queue")
    made.ledger.create_schema()
    made.change(*map("create table {} (name varchar(20))".format, ("orders", "effects")))
    yield made
    made.close()


@pytest.fixture
def kills(rig: RunRig, exploration: Exploration) -> Kills:
    return Kills(rig, exploration)


def test_killed_in_a_delivery_each_run_has_one_effect(kills: Kills, rig: RunRig) -> None:
    """A killed delivery is repeated in its run, and runs its body once. The next message has the
    next run."""
    for at in kills:
        rig.publish("a")
        kills.strike("work_off")
        kills.note(f"{rig.state('a')}, {len(rig.unacknowledged())} in the queue")
        rig.recover()
        assert rig.rows("effects") == Counter("a"), at
        rig.publish("b")
        rig.recover()
        assert rig.rows("effects") == Counter("ab"), at
    states = "none", "PROCESSING", "DONE"
    kills.expect(*(f"{state}, 1 in the queue" for state in states), "DONE, 0 in the queue")


def test_killed_while_it_joins_a_message_has_the_answer_or_a_run(kills: Kills, rig: RunRig) -> None:
    """A message is deferred by a process that is killed, while another one works.

    It is acknowledged only if it has joined that run. If it has not joined, it runs in the next.
    """
    for at in kills:

        def deliver_another() -> None:
            rig.acknowledge(0)
            rig.publish("b")
            kills.strike("work_off")

        rig.in_body = deliver_another
        rig.publish("a")
        rig.work_off()
        joined = rig.members().get("b") == rig.members()["a"]
        copies = len(rig.unacknowledged())
        kills.note(f"{'joined' if joined else 'is free'}, {copies} copies")
        acknowledged = 1 not in dict(rig.unacknowledged())
        assert joined or not acknowledged, at
        rig.recover()
        assert rig.rows("effects") == Counter("a" if joined else "ab"), at
    kills.expect("is free, 1 copies", "joined, 1 copies", "joined, 2 copies")


def test_killed_while_it_replaces_a_running_call_the_newest_call_runs(
    kills: Kills, rig: RunRig
) -> None:
    """A process is killed that enqueues with "replace" while a body runs, and delivers that call.

    The call runs after that body if its order was committed, and not if it was not.
    """
    for at in kills:

        def replace_it() -> None:
            rig.acknowledge(0)
            kills.strike("replace_and_deliver", "b")
            assert rig.rows("effects") == Counter()

        rig.in_body = replace_it
        rig.publish("a")
        rig.work_off()
        orders = rig.rows("orders")
        sent = len(rig.queue.read_text().splitlines()) - 1
        kills.note(f"{rig.state('b')}, {sent} sent")
        rig.recover()
        assert rig.rows("effects") == Counter("a") + orders, at
    kills.expect("none, 0 sent", "NEW, 0 sent", "NEW, 1 sent", "NEW, 2 sent")


@pytest.mark.parametrize("first", ["enqueue", "publish"])
def test_killed_in_a_run_or_in_that_which_follows_both_have_one_effect(
    kills: Kills, rig: RunRig, first: str
) -> None:
    """One process delivers a message, replaces its call while the body runs, and delivers the run
    that follows. It is killed at each point, and no call is lost."""
    for at in kills:
        getattr(rig, first)("a")
        kills.strike("deliver_and_replace")
        kills.note(f"{rig.state('a')}, then {rig.state('b')}")
        ordered = Counter(b=rig.rows("orders")["b"])
        rig.recover()
        assert rig.rows("effects") == Counter("a") + ordered, at
    kills.expect(
        f"{'NEW' if first == 'enqueue' else 'none'}, then none",
        *("PROCESSING, then none", "PROCESSING, then NEW"),
        *("DONE, then NEW", "DONE, then PROCESSING", "DONE, then DONE"),
    )


@pytest.mark.parametrize(("first", "message"), [("publish", "again"), ("enqueue", "fails")])
def test_killed_in_a_failure_a_run_goes_on_or_ends_as_its_queue_promised(
    kills: Kills, rig: RunRig, message: str, first: str
) -> None:
    """A process is killed around a failure. A promised retry continues the run, and has the effect.
    Without one the run ends as FAILED. The next message has the next run."""
    retried = message == "again"
    effects = Counter({message: 1}) if retried else Counter()
    for at in kills:
        getattr(rig, first)(message)
        kills.strike("work_off")
        kills.note(f"{rig.state(message)}, {len(rig.unacknowledged())} in the queue")
        rig.recover()
        assert rig.rows("effects") == effects, at
        assert rig.state(message) == ("DONE" if retried else "FAILED"), at
        rig.publish("b")
        rig.recover()
        assert rig.rows("effects") == effects + Counter("b"), at
    states = "none" if first == "publish" else "NEW", "PROCESSING", "FAILED"
    left = f"FAILED, {2 if retried else 0} in the queue"
    kills.expect(*(f"{state}, 1 in the queue" for state in states), left)
