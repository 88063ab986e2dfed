"""Messages that wait for their key in the ledger: `busy="park"`, in the shop of `world.py`.

The runner, the line, the relay, the sweep and `enqueue()` are the library's own.

In two thirds of the schedules no process dies, no message is lost, and there is no relay. Then no
message may ever wait for a free key. The other schedules have all faults, and a relay at the end.

In addition to the shop's faults, the broker may lose its waiting messages, and the database may
lose what it has not flushed. Messages are revoked, and one may have no task any more. Some messages
expire: the worker that gets one tells its caller, as Celery's workers do.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulation.history import BoomError, GaveUpError
from simulation.ledger import MemoryTransaction, Work
from simulation.line_history import LineHistory
from simulation.scheduler import Process
from simulation.servers import BrokerError, PortLedger, PortLocks
from simulation.stored_calls import keeps
from simulation.world import Message, Task, Worker, World
from taskguard.api import TaskGuard
from taskguard.errors import LedgerUnavailableError, TaskguardError
from taskguard.events import Events
from taskguard.model.claims import (
    Answer,
    Claim,
    Claimed,
    ClaimRequest,
    Overdue,
    ParkedNewest,
)
from taskguard.model.delivery import NOT_BEFORE, Delivery, Dropped, MessageRef, stored_call
from taskguard.model.policy import Policy
from taskguard.outbox.enqueue import Duplicate, enqueue_in
from taskguard.outbox.relay import Relay
from taskguard.outbox.sweep import Sweeper
from taskguard.run.encoding import JSON

__all__ = ["QUEUE", "LineWorld"]

QUEUE = "sim"
_BODIES = ("transaction", "transaction", "plain", "atomic", "fails once", "exits once")
# In addition to the shop's faults: the broker loses its waiting messages, the database crashes, a
# message is revoked.
_ROUGH = (1, 1, 2)
# Faults that need no relay: a pause, a duplicate, an emptied lock server, an ended transaction, a
# purge, a revoked message.
_GENTLE = (300, 0, 4, 6, 3, 0, 1, 0, 2, 0, 0, 3)


@dataclass
class PortParking:
    """Parks messages and promotes others, for the runner."""

    worker: Worker
    message: Message
    queue: str = QUEUE

    def call(self) -> Mapping[str, Any] | None:
        world = self.worker.world
        assert isinstance(world, LineWorld)
        return world.call_of(self.message)

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        world = self.worker.world
        assert isinstance(world, LineWorld)
        world.send(self.worker.process, call, message, promoted=True)

    def failed(self, claim: Claim) -> None:
        """Remember the claim: the queue decides what happens to it after the delivery has ended."""
        self.worker.failed = claim


class LineWorld(World):
    """One schedule."""

    history: LineHistory

    def __init__(self, choices: Any, **values: Any) -> None:
        super().__init__(choices, **values)
        self.history = LineHistory(self)
        self.deploys = False
        weather = choices.pick((1, 1, 1))
        self.has_faults, self.is_rough = weather > 0, weather == 2
        self.fault_weights = (*self.fault_weights, *_ROUGH) if self.is_rough else _GENTLE
        self.relays = self.is_rough and choices.one_in(2)
        self.hints = choices.one_in(2)
        # Whether a fault needs a relay to repair it.
        self.needs_relay = False
        self.is_calm = False
        self.tasks: dict[str, Task] = {}
        self.bodies = _BODIES
        self.expiring: dict[tuple[str, str], float] = {}
        self.unreachable: set[str] = set()
        # Records that a crash of the database would take back: current value, flushed value.
        self.unflushed: list[tuple[Work, Work | None]] = []
        self.senders = 0
        # Keys of work that is being enqueued, or of a promoted message that is being sent.
        self.sending: Counter[str] = Counter()
        self.ledger._grant = self._granting(self.ledger._grant)  # type: ignore[method-assign]

    # -- a schedule ---------------------------------------------------------------------------

    def _fill(self) -> None:
        pick, one_in = self.choices.pick, self.choices.one_in
        keys = [f"account:{number}" for number in range(1 + pick((2, 1)))]
        for number in range(1 + pick((2, 2))):
            task = self._task(f"t{number}", keys, parks=number == 0)
            self.needs_relay = self.needs_relay or not task.policy.parks
            for copy in range(2 + pick((1, 2, 2))):
                message = self._message(f"{task.name}m{copy}", task)
                if one_in(10):
                    after_s = (0.1, 1.0, 4.0)[pick((1, 1, 1))]
                    self.expiring[message.name] = self.scheduler.now_s + after_s
                for _ in range(1 + one_in(6)):
                    self.publish(message)
                self.scheduler.now_s += 0.001
        if one_in(3):
            self._enqueue_some(keys)
        if self.relays and one_in(8):
            self.unreachable.add(next(iter(self.published))[0])
        for _ in range(2 + pick((2, 1))):
            self.start_worker()

    def _task(self, name: str, keys: list[str], *, parks: bool) -> Task:
        pick, one_in = self.choices.pick, self.choices.one_in
        body = self.bodies[pick([1.0] * len(self.bodies))]
        key = keys[pick([1.0] * len(keys))]
        task = Task(
            name=name,
            key=key,
            body=body,
            takes_s=(0.02, 0.5, 2.5)[pick((2, 2, 1))],
            policy=self._policy(
                key,
                ttl_s=(1.0, 3.0)[pick((1, 1))],
                atomic=body == "atomic",
                max_crashes=50,
                busy="park" if parks or not one_in(6) else "retry",
            ),
            by_message=not one_in(4),
        )
        self.tasks[task.name] = task
        return task

    def _policy(self, key: str, **options: Any) -> Policy:
        """Return the policy of a task of this key."""
        del key
        return Policy(**options)

    def _message(self, name: str, task: Task) -> Message:
        """Return a message that is sent now."""
        return Message(name, task, sent_s=self.scheduler.now_s)

    def _enqueue_some(self, keys: list[str]) -> None:
        """Enqueue work of a key again and again, with a choice of `duplicate=`."""
        duplicate = self._duplicate_choice()
        key = keys[self.choices.pick([1.0] * len(keys))]
        task = self.tasks["unique"] = self._unique_task(key)
        times = self._calls_of_sender()
        process = Process("sender")
        self.senders += 1

        def enqueue() -> None:
            for number in range(times):
                self.scheduler.sleep((0.0, 0.3, 2.0)[self.choices.pick((2, 1, 1))])
                self._enqueue(process, task, f"u{number}", duplicate)
            self.senders -= 1

        self.scheduler.spawn(process, enqueue)

    def _calls_of_sender(self) -> int:
        return 2 + self.choices.pick((1, 1))

    def _duplicate_choice(self) -> Duplicate:
        return ("attach", "replace")[self.choices.pick((1, 2))]

    def _unique_task(self, key: str) -> Task:
        policy = self._policy(key, ttl_s=1.0, busy="park", max_crashes=50)
        return Task("unique", key, "transaction", 0.02, policy, by_message=False)

    def _enqueue(self, process: Process, task: Task, name: str, duplicate: Any) -> None:
        message = self._message(name, task)
        values = {"call": stored_call(self.call_of(message), MessageRef(name), "")}
        delivery = Delivery(
            keys=(task.key,),
            work=task.work(name),
            task=task.name,
            message=MessageRef(name),
            policy=task.policy,
            by_run=task.by_run,
            published_at_s=message.sent_s,
            **{**self.options_of(message), **values},
        )

        def send(call: Mapping[str, Any], ref: MessageRef) -> None:
            self.send(process, call, ref, promoted=False)

        self.sending[task.key] += 1
        with contextlib.suppress(TaskguardError):  # AlreadyEnqueuedError, or no answer
            placed = enqueue_in(
                None,
                self._runtime(process),
                delivery,
                send,
                duplicate=duplicate,
                again_after_s=60.0,
            )
            self.counts[f"enqueued: {placed.outcome}"] += 1
            self.history.enqueued(task, name, duplicate)
            if placed.outcome == "replaced" and placed.first is not None:
                self.history.replaced(placed.first.message, task)
        self.sending[task.key] -= 1

    def _runtime(self, process: Process) -> TaskGuard:
        return TaskGuard(
            locks=PortLocks(self, process) if self.has_locks else None,
            ledger=PortLedger(self, process),
            events=Events(),
            codec=JSON,
            clock=self.clock,
            namespace="",
        )

    def start_worker(self) -> None:
        super().start_worker()
        if self.relays:
            self._start_relay(self.workers[-1].process)

    def replace_process(self, process: Process) -> None:
        self.needs_relay = True
        if process.name == "sender":
            self.senders -= 1
        else:
            super().replace_process(process)

    def _start_relay(self, process: Process) -> None:
        """Start a relay in a worker. There is no election: two relays at a time do no harm."""

        def send(call: Mapping[str, Any], message: MessageRef) -> None:
            self.send(process, call, message, promoted=False)

        def hand_off(call: Mapping[str, Any], message: MessageRef) -> None:
            self.send(process, call, message, promoted=True)

        def run() -> None:
            runtime = self._runtime(process)
            relay = Relay(runtime, {QUEUE: send}, {QUEUE: hand_off})
            sweeper = Sweeper(runtime, {QUEUE: send}, again_after_s=60.0)
            for number in itertools.count():
                self.scheduler.sleep(1.0)
                with contextlib.suppress(TaskguardError):
                    relay.look()
                    if number % 4 == 3:
                        sweeper.sweep()

        self.scheduler.spawn(process, run)

    def _calm(self) -> None:
        super()._calm()
        self.is_calm = True
        if self.needs_relay:
            self.need_relay()

    def most_at_once(self, key: str) -> int:
        """Return the highest limit of the key's tasks."""
        return max(self._limits(key), default=1)

    def fewest_at_once(self, key: str) -> int:
        """Return the lowest limit of the key's tasks."""
        return min(self._limits(key), default=1)

    def _limits(self, key: str) -> list[int]:
        return [task.policy.limit for task in self.tasks.values() if task.key == key]

    def need_relay(self) -> None:
        """Start a relay after the last fault, because a fault needs it."""
        self.needs_relay = True
        if self.is_calm and not self.relays:
            self.relays = True
            for worker in self.workers:
                if not worker.process.dead:
                    self._start_relay(worker.process)

    def _quiet(self) -> bool:
        return super()._quiet() and not self.senders and not self.history.awaited()

    # -- what befalls -------------------------------------------------------------------------

    def loses(self, name: str) -> str | None:
        lost = super().loses(name) if self.is_rough else None
        self.needs_relay = self.needs_relay or lost is not None
        return lost

    def strike(self, fault: int) -> None:
        if fault == 9:
            self._empty_the_broker()
        elif fault == 10:
            self._crash_the_database()
        elif fault == 11:
            self._revoke_a_message()
        else:
            super().strike(fault)

    def _empty_the_lock_server(self) -> None:
        super()._empty_the_lock_server()
        # The hints of waiting messages are lost too. A holder that releases a key relies on them.

    def _empty_the_broker(self) -> None:
        """Lose the broker's waiting messages. The ledger still delivers those in its line."""
        self.needs_relay = True
        self.counts["broker emptied"] += 1
        self.say("broker EMPTIED")
        self.history.lost(self.broker.waiting)
        self.broker.waiting.clear()

    def _crash_the_database(self) -> None:
        """Restart the database with what it had flushed."""
        self.needs_relay = True
        self.counts["database crashed"] += 1
        rows = self.ledger.work_items
        for after, before in reversed(self.unflushed):
            if rows.get(after.id) is after:  # otherwise it was written since then, and flushed
                self.say(f"database CRASHES, and forgets what it wrote of {after.id}")
                rows.pop(after.id)
                if before is not None:
                    rows[before.id] = before
        self.unflushed.clear()

    def _revoke_a_message(self) -> None:
        """Revoke a message, waiting or not."""
        names = [each.message for each in self.ledger.waiting()]
        names = names or [name for name, _ in self.published]
        name = names[self.choices.pick([1.0] * len(names))]
        for (message, _), task in list(self.published.items()):
            row = self.history.record(self.ledger.work_items, task, name)
            if message == name and row is not None and keeps(row):
                self.need_relay()  # no worker has its delivery, so none will promote the next
            if message == name:
                with contextlib.suppress(LedgerUnavailableError):  # a transaction locks its row
                    self._revoke(task, name)

    def _revoke(self, task: Task, name: str) -> None:
        for work in self.history.ids_of(task, name):
            if self.ledger.revoke(work, message=name):
                self.counts["messages revoked"] += 1
                self.history.revoked.add(name)
                self.say(f"message {name} REVOKED")

    # -- what servers do ----------------------------------------------------------------------

    def report(self, worker: Worker, message: Message, outcome: Any) -> None:
        """Tell the caller as Celery's signals do: after the retry is sent, before the
        acknowledgement."""
        claim, worker.failed = worker.failed, None
        if isinstance(outcome, GaveUpError):
            self.history.gave_up(message)
        if claim is None:
            return
        self.boundary(worker.process, f"reported {message.id}{message.number}")
        again = claim.request.message.retries + 1
        if isinstance(outcome, BoomError):
            parking = PortParking(worker, message)
            worker.runner.retried(
                claim, parking, retries=again, call=None, again=None, app="", in_s=0.5
            )
        else:
            parking = PortParking(worker, message)
            worker.runner.gave_up(claim, parking, retries=again, app="")

    def parking_of(self, worker: Worker, message: Message) -> PortParking | None:
        return PortParking(worker, message) if message.task.policy.parks else None

    def expires_at_s(self, message: Message) -> float | None:
        return self.expiring.get(message.name)

    def expire(self, work: str, message: MessageRef) -> bool:
        ended = super().expire(work, message)
        if ended:
            name = message.id, self.ledger.work_items[work].task
            self.history.expired(name, message.retries)
        return ended

    def announce(self, worker: Worker, delivery: Delivery) -> Dropped:
        """Tell the caller that the message expired; then tell the ledger, and promote the next in
        line."""
        ledger = PortLedger(self, worker.process)
        self.counts["messages expired"] += 1
        self.say(f"message {delivery.message.id} has EXPIRED")
        try:
            work = ledger.of_run(delivery.request(clock=self.clock)).work
            ended = ledger.expire(str(work), message=delivery.message)
        except TaskguardError:
            self.needs_relay = True
        else:
            if (ended or delivery.promoted) and delivery.parking is not None:
                worker.runner.never_runs(delivery)
        return Dropped("expired")

    def call_of(self, message: Message) -> dict[str, Any]:
        call = {"queue": QUEUE, "task": message.task.name, "sent_s": message.sent_s}
        return {**call, "rank": message.rank}

    def send(
        self, process: Process, call: Mapping[str, Any], ref: MessageRef, *, promoted: bool
    ) -> None:
        """Send a stored message, marked if it was promoted."""
        self.boundary(process, f"broker.send {ref.id} asked")
        lost = self.loses("broker.send")
        numbers = ref.retries, ref.deferrals
        task = self.tasks[str(call["task"])]
        message = Message(
            ref.id,
            task,
            *numbers,
            ready_at_s=call.get(NOT_BEFORE, 0.0),
            sent_s=call["sent_s"],
            promoted=promoted,
            rank=call["rank"],
        )
        if lost != "question" and ref.id not in self.unreachable:
            self.publish(message)
        self.sending[task.key] -= promoted
        self.boundary(process, f"broker.send {ref.id} done")
        if lost:
            raise BrokerError("send: no answer")

    def park(self, request: ClaimRequest, *, only_new: bool) -> bool:
        parked = self.ledger.park(request, only_new=only_new)
        self.unflushed.clear()  # this row is flushed, and with it all earlier writes
        if parked:
            self.say(f"  {request.work}: parked")
        return parked

    def park_newest(self, request: ClaimRequest, *, only_new: bool) -> ParkedNewest | Answer | None:
        found = self.ledger.park_newest(request, only_new=only_new)
        self.unflushed.clear()
        if isinstance(found, ParkedNewest):
            self.say(f"  {request.work}: parked as the newest")
            self.tells(request, found.replaced)
        return found

    def tells(self, request: ClaimRequest, replaced: Sequence[Overdue]) -> None:
        """Send the messages that were superseded, so that their callers are notified."""
        self.sending[request.line] += len(replaced)
        self.counts["superseded while they waited"] += len(replaced)

    def promote_next(self, key: str, **asked: Any) -> Overdue | None:
        rows = self.ledger.work_items
        before = dict(rows)
        found = self.ledger.promote_next(key, **asked)
        if found is not None:
            self.history.promoted(before, rows[found.work])
            self.sending[key] += 1
            self.unflushed.append((rows[found.work], before[found.work]))
            self.say(f"  {found.work}: promoted")
        return found

    def commit(self, tx: MemoryTransaction, claim: Claim) -> None:
        super().commit(tx, claim)
        self.unflushed.clear()

    def _granting(self, grant: Callable[..., Claimed]) -> Callable[..., Claimed]:
        def granting(request: ClaimRequest, *rest: Any) -> Claimed:
            self.history.granting(request)
            found = grant(request, *rest)
            self.history.granted(request)
            return found

        return granting
