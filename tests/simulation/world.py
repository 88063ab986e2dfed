"""A small shop: workers, their servers, their messages, and their faults.

The runner, the watchdog and the guard are the library's own, unchanged. Each worker is a process
that takes messages as a Celery worker with `acks_late` does. A schedule also chooses the number of
workers, the length of leases, and what bodies do. In some schedules a deploy changes guards, and
workers of both versions run side by side.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import taskguard.run.admission
import taskguard.run.parking
import taskguard.run.tracked
import taskguard.run.watchdog
from simulation.history import (
    CHANGED,
    BoomError,
    GaveUpError,
    History,
    OwnWordError,
    ViolationError,
)
from simulation.ledger import MemoryLedger, MemoryTransaction
from simulation.scheduler import (
    Choices,
    Crashed,
    IdleError,
    Process,
    Scheduler,
    SimClock,
    SimMutex,
    SimWakeup,
)
from simulation.servers import BrokerError, DatabaseError, PortLedger, PortLocks
from taskguard.errors import (
    TaskguardError,
    TransactionAbandonedError,
    TransactionFailedError,
)
from taskguard.events import (
    Event,
    Events,
    LockOverruled,
    Lost,
    Parked,
    Promoted,
    StaleRefused,
    Takeover,
)
from taskguard.locks.memory import MemoryLocks
from taskguard.model.claims import Claim, ClaimAnswer, Claimed, ClaimRequest, Overdue
from taskguard.model.delivery import Delivery, MessageRef, Parking
from taskguard.model.lease import Owner
from taskguard.model.policy import Policy
from taskguard.model.records import WorkView
from taskguard.run.guard import Guard
from taskguard.run.runner import Runner

__all__ = ["Message", "Task", "World"]

# Nothing, a kill, a pause, a duplicate, an emptied lock server, a clock that jumps, an ended
# transaction, a wrong clock of the lock server, a purge.
_FAULT_WEIGHTS = (300, 2, 3, 2, 1, 1, 1, 1, 2)

# After a failed attempt.
_RETRY_S = 0.5

_BODIES = (
    "transaction",
    "transaction",
    "plain",
    "atomic",
    "checkpoint",
    "fails once",
    "swallows once",
    "own word",
    "exits once",
    "always exits",
)


@dataclass(frozen=True)
class Task:
    """A kind of work: its key, what its body does, its options, and what a deploy changes in its
    guard.

    `changed` is "key", "once_per", or "" for nothing.
    """

    name: str
    key: str
    body: str
    takes_s: float
    policy: Policy
    by_message: bool
    changed: str = ""
    by_run: bool = False

    def work(self, message: str) -> str:
        """Return the work's id before the deploy. It is the base of work that has runs."""
        return self._work(self.key, message)

    def work_ids(self, message: str) -> tuple[str, ...]:
        """Return the ids of all records of a work: after and before the deploy."""
        former = self.work(message)
        return (self._work(CHANGED + self.key, message), former) if self.changed else (former,)

    def _work(self, value: str, message: str) -> str:
        return f"{self.name} {value} {message}" if self.by_message else f"{self.name} {value}"


@dataclass(frozen=True)
class Message:
    """A message in the broker."""

    id: str
    task: Task
    retries: int = 0
    deferrals: int = 0
    ready_at_s: float = 0.0
    sent_s: float | None = None
    promoted: bool = False
    rank: int = 0

    @property
    def number(self) -> tuple[int, int]:
        return self.retries, self.deferrals

    @property
    def name(self) -> tuple[str, str]:
        """Return what distinguishes the message. Another task's message may have the same id."""
        return self.id, self.task.name


@dataclass
class Taken:
    """A message in the hands of a process, not acknowledged."""

    message: Message
    process: Process
    visible_at_s: float


@dataclass
class OpenTransaction:
    """A transaction as its server knows it: its owner, and the end of its idle timeout."""

    tx: MemoryTransaction
    process: Process
    ends_at_s: float


class Broker:
    """Delivers messages at least once: again after a death or after the visibility timeout."""

    def __init__(self, world: World, visibility_s: float) -> None:
        self._world = world
        self._visibility_s = visibility_s
        self.waiting: list[Message] = []
        self.taken: dict[int, Taken] = {}
        self._tags = 0

    def ready(self) -> Message | None:
        now_s = self._world.scheduler.now_s
        return next((each for each in self.waiting if each.ready_at_s <= now_s), None)

    def idle_s(self) -> float:
        """Return how long it takes until a message is ready, if none is published."""
        waiting = [each.ready_at_s for each in self.waiting]
        taken = [each.visible_at_s for each in self.taken.values()]
        return min([*waiting, *taken], default=float("inf")) - self._world.scheduler.now_s

    def take(self, process: Process) -> tuple[int, Message] | None:
        """Return the next message that is ready, with the tag to acknowledge it by."""
        message = self.ready()
        if message is None:
            return None
        self.waiting.remove(message)
        self._tags += 1
        until_s = self._world.scheduler.now_s + self._visibility_s
        self.taken[self._tags] = Taken(message, process, until_s)
        return self._tags, message

    def restore(self) -> None:
        """Put back messages that are in no worker's hands any more."""
        now_s = self._world.scheduler.now_s
        for tag, taken in list(self.taken.items()):
            if taken.process.dead:
                del self.taken[tag]
                self.waiting.append(taken.message)
            elif now_s >= taken.visible_at_s:
                taken.visible_at_s = float("inf")
                self.waiting.append(taken.message)

    def acknowledge(self, tag: int) -> None:
        self.taken.pop(tag, None)

    def reject(self, tag: int) -> None:
        taken = self.taken.pop(tag, None)
        if taken is not None:
            self.waiting.append(taken.message)

    def alive(self, message: str) -> list[Message]:
        """Return every copy of a message that a worker has or will get."""
        held = [each.message for each in self.taken.values() if not each.process.dead]
        return [each for each in [*self.waiting, *held] if each.id == message]


@dataclass
class PortQueue:
    """Defers a delivery, for the runner."""

    worker: Worker
    message: Message
    max_delay_s: float
    new_message_per_deferral: bool = True
    longest_wait_s: float = math.inf

    def retries_in_s(self, error: BaseException) -> float | None:
        """Return in at most how many seconds a retry arrives, even if the broker lost it once."""
        if isinstance(error, GaveUpError | OwnWordError):
            return None
        return _RETRY_S + self.worker.world.visibility_s

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        if not self.worker.world.publishes_again:
            return
        self.worker.publish(self.message, deferrals=deferrals, delay_s=delay_s)


class Worker:
    """One process that takes messages until it dies."""

    def __init__(self, world: World, name: str, *, former: bool) -> None:
        self.world = world
        self.former = former  # whether it has the guards from before the deploy
        self.process = Process(name)
        self.failed: Claim | None = None  # claim of the message in hand, which keeps its position
        locks = PortLocks(world, self.process) if world.has_locks else None
        self.runner = Runner(
            locks=locks,
            ledger=PortLedger(world, self.process),
            events=Events(self._hear),
            clock=world.clock,
            rng=random.Random(world.scheduler.choices.pick([1.0] * 8)),
        )
        world.scheduler.spawn(self.process, self._work)

    def _hear(self, event: Event) -> None:
        names = {
            StaleRefused: "stale commits refused",
            Takeover: "takeovers",
            Lost: "leases lost",
            LockOverruled: "locks overruled",
            Parked: "messages parked",
            Promoted: "messages promoted",
        }
        if type(event) in names:
            self.world.counts[names[type(event)]] += 1

    def publish(
        self, message: Message, *, deferrals: int, delay_s: float, retries: int = 0
    ) -> None:
        world = self.world
        world.boundary(self.process, "broker.publish asked")
        lost = world.loses("broker.publish")
        made = replace(
            message,
            retries=message.retries + retries,
            deferrals=deferrals,
            ready_at_s=world.scheduler.now_s + delay_s,
            promoted=False,
        )
        if lost != "question":
            world.publish(made)
        world.boundary(self.process, "broker.publish done")
        if lost:
            raise BrokerError("publish: no answer")

    def _work(self) -> None:
        world = self.world
        while True:
            world.scheduler.block(lambda: world.broker.ready() is not None, world.broker.idle_s())
            taken = world.broker.take(self.process)
            if taken is None:
                continue
            tag, message = taken
            world.boundary(self.process, f"took {message.id}{message.number}")
            if world.acknowledges_first:
                world.broker.acknowledge(tag)
            try:
                outcome: Any = self._deliver(message)
                if isinstance(outcome, BoomError):
                    # As autoretry_for: the retry is published before this message is acknowledged.
                    number = {"deferrals": message.deferrals, "retries": 1}
                    self.publish(message, delay_s=_RETRY_S, **number)
                world.report(self, message, outcome)
            except BrokerError:
                world.broker.reject(tag)
                continue
            except SystemExit:
                # A child of a pool: the broker keeps the messages it had.
                world.scheduler.kill(self.process)
                world.start_worker()
                raise Crashed from None
            world.boundary(self.process, f"acknowledging {message.id}{message.number}")
            world.history.acknowledged(message, outcome)
            world.broker.acknowledge(tag)

    def _deliver(self, message: Message) -> Any:
        task, self.failed = message.task, None
        keys, (work, *formerly) = (task.key,), task.work_ids(message.id)
        if self.former:
            work, formerly = task.work(message.id), []
        elif task.changed == "key":
            keys = (CHANGED + task.key,)
            if self.world.holds_former_keys:
                keys = (task.key, *keys)
        delivery = Delivery(
            keys=keys,
            work=work,
            formerly=tuple(formerly),
            task=task.name,
            message=MessageRef(message.id, message.retries, message.deferrals),
            policy=task.policy,
            queue=PortQueue(self, message, max_delay_s=self.world.visibility_s / 4),
            by_message=task.by_message,
            by_run=task.by_run,
            published_at_s=message.sent_s,
            parking=self.world.parking_of(self, message),
            promoted=message.promoted,
            **self.world.options_of(message),
            expires_at_s=self.world.expires_at_s(message),
        )
        if self.world.has_expired(message):
            return self.world.announce(self, delivery)
        try:
            return self.runner.deliver(delivery, lambda guard: self._body(message, guard))
        except (TransactionAbandonedError, TransactionFailedError) as error:
            return BoomError(str(error))
        except (BoomError, GaveUpError, OwnWordError, TaskguardError) as error:
            return error

    # -- bodies -------------------------------------------------------------------------------

    def _body(self, message: Message, guard: Guard) -> str:
        world, task = self.world, message.task
        work = task.work(message.id)
        if task.by_run:
            work = guard._attempt.work
        with world.history.running(work, self.process):
            world.scheduler.sleep(task.takes_s)
            if task.body == "fails once" and guard.attempt == 1:
                raise BoomError(work)
            if task.body == "gives up" and guard.attempt <= 3:
                raise GaveUpError(work)
            if task.body == "always exits" or (task.body == "exits once" and guard.attempt == 1):
                world.counts["bodies that ended their process"] += 1
                raise SystemExit(work)
            if task.body == "plain":
                return "done"
            if task.body == "atomic":
                guard.db.write((work, guard.fence))
                return "done"
            if task.body == "checkpoint" and guard.progress is None:
                with guard.checkpoint(["half"]) as db:
                    db.write((f"{work} half", guard.fence))
            try:
                with guard.transaction() as db:
                    db.write((work, guard.fence))
                    guard.result = "done"
                    if task.body == "swallows once" and guard.attempt == 1:
                        raise BoomError(work)
            except Exception as error:
                if task.body == "own word":
                    raise OwnWordError(work) from error
                if task.body != "swallows once":
                    raise
            world.scheduler.sleep(task.takes_s / 4)
            return "done"


class World:
    """All parts of one schedule."""

    def __init__(self, choices: Choices, *, trace: Callable[[str], None] | None = None) -> None:
        self.scheduler = Scheduler(choices)
        self.choices = choices
        self.clock = SimClock(self.scheduler)
        self.database_clock = SimClock(self.scheduler)
        self.locks = MemoryLocks(self.clock)
        self.ledger = MemoryLedger(self.database_clock, wait=lambda: self.scheduler.sleep(0.02))
        self.counts: Counter[str] = Counter()
        self.history = History(self)
        # The violation that a call raised. taskguard may catch it, so the scheduler raises it.
        self.violation: ViolationError | None = None
        self.faulty = False
        self.has_faults = True
        self.open: dict[int, OpenTransaction] = {}
        self.has_locks = not choices.one_in(5)
        self.hints = True
        self.deploys = choices.one_in(2)
        self.visibility_s = (60.0, 2.0)[choices.pick((3, 1))]
        self.broker = Broker(self, self.visibility_s)
        self.servers = Process("servers")
        self._trace = trace
        self._owners = 0
        self._workers = 0
        self._idle_s = 8.0
        self.fault_weights: tuple[int, ...] = _FAULT_WEIGHTS
        # For mutants.
        self.acknowledges_first = False
        self.publishes_again = True
        self.holds_former_keys = True
        self._patches = _Patches()
        self.workers: list[Worker] = []
        self.published: dict[tuple[str, str], Task] = {}
        # Whether workers from before and after the deploy have claimed a work.
        self._claimed_by: dict[str, set[bool]] = {}

    # -- a schedule ---------------------------------------------------------------------------

    def run(self) -> None:
        """Run the schedule with faults for a while, then without, until no work is left."""
        with self._patches:
            self._replace_the_system()
            try:
                self._fill()
                many = 150 + 100 * self.choices.pick((1, 1, 1))
                self.faulty = self.has_faults
                with contextlib.suppress(IdleError):  # all threads wait until the faults end
                    self.scheduler.run(
                        after_step=self._after_step,
                        until=lambda: self.scheduler.steps >= many or self._quiet(),
                        limit=many,
                    )
                self._calm()
                # Four works of one key, each of whose five attempts ends its process, take 6,700
                # steps.
                self.scheduler.run(
                    after_step=self._after_step, until=self._quiet, limit=many + 10_000
                )
                self.history.at_the_end()
            finally:
                self.scheduler.end()

    def _fill(self) -> None:
        keys = [f"order:{number}" for number in range(1 + self.choices.pick((2, 1)))]
        ids_are_used_twice = self.choices.one_in(3)
        for number in range(1 + self.choices.pick((2, 2, 1))):
            key = keys[self.choices.pick([1.0] * len(keys))]
            ttl_s = (1.0, 3.0)[self.choices.pick((1, 1))]
            body = _BODIES[self.choices.pick([1.0] * len(_BODIES))]
            busy: Any = ("retry", "latest", "supersede")[self.choices.pick((4, 1, 2))]
            task = Task(
                name=f"t{number}",
                key=key,
                body=body,
                takes_s=(0.02, 0.5, 2.5)[self.choices.pick((2, 2, 1))],
                policy=Policy(
                    busy=busy,
                    ttl_s=ttl_s,
                    atomic=body == "atomic",
                    max_crashes=3 if body == "always exits" else (50, 2)[self.choices.pick((5, 1))],
                ),
                by_message=busy != "retry" or self.choices.one_in(4),
                changed=self._change() if self.deploys and busy == "retry" else "",
            )
            if busy == "retry" and not task.changed and self.choices.one_in(3):
                task = replace(task, by_message=False, by_run=True)
            sent_s: dict[str, float] = {}
            for copy in range(1 + self.choices.pick((1, 2, 1)) + 2 * (busy != "retry")):
                # The same message again, or another one for the same key.
                same = copy > 0 and self.choices.one_in(2)
                name = f"m{0 if same else copy}"
                name = name if ids_are_used_twice else task.name + name
                # In any order, some at the same moment.
                when_s = self.clock.wall_s() - 60.0 + self.choices.pick((1, 1, 1, 1))
                ready_s = self.scheduler.now_s + (0.0, 0.3, 1.5)[self.choices.pick((2, 1, 1))]
                ready_s = ready_s if busy != "retry" or task.by_run else 0.0
                message = Message(
                    name, task, ready_at_s=ready_s, sent_s=sent_s.setdefault(name, when_s)
                )
                self.publish(message)
        names = [name for name, _ in self.published]
        self.counts["ids used twice"] += len(names) - len(set(names))
        for _ in range(2 + self.choices.pick((2, 1))):
            self.start_worker()

    def _change(self) -> str:
        return ("key", "once_per", "")[self.choices.pick((2, 1, 1))]

    def parking_of(self, worker: Worker, message: Message) -> Parking | None:
        """Return how the message is parked; here none is."""
        del worker, message
        return None

    def options_of(self, message: Message) -> dict[str, Any]:
        """Return further options of a delivery; here none."""
        del message
        return {}

    def report(self, worker: Worker, message: Message, outcome: Any) -> None:
        """Record that the queue knows how a delivery ended, and has sent its retry, if there is
        one."""

    def expires_at_s(self, message: Message) -> float | None:
        """Return when the message expires; here none does."""
        del message
        return None

    def has_expired(self, message: Message) -> bool:
        """Return whether a worker announces the message as expired now, and does not run it."""
        expires_at_s = self.expires_at_s(message)
        return expires_at_s is not None and expires_at_s < self.scheduler.now_s

    def announce(self, worker: Worker, delivery: Delivery) -> Any:
        """Tell the queue that a message has expired."""
        raise AssertionError(f"{delivery.message.id} expires: {worker.process.name}")

    def start_worker(self) -> None:
        """Start one more worker. A deploy may be taken back, so it has either guard."""
        self._workers += 1
        former = self.deploys and self.choices.one_in(2)
        name = f"w{self._workers}" + (" (former)" if former else "")
        self.workers.append(Worker(self, name, former=former))

    def _after_step(self) -> None:
        if self.violation is not None:
            raise self.violation
        self.broker.restore()
        for each in list(self.open.values()):
            if each.process.dead:  # the server notices the closed connection
                self.close(each.tx)
        self.history.check()

    def _calm(self) -> None:
        """End all faults, and replace workers that died."""
        self.faulty = False
        self.database_clock.ahead_s = max(0.0, self.database_clock.ahead_s)
        for worker in self.workers:
            worker.process.paused_until_s = min(
                worker.process.paused_until_s, self.scheduler.now_s + 5.0
            )
        if all(worker.process.dead for worker in self.workers):
            self.start_worker()

    def _quiet(self) -> bool:
        broker = self.broker
        return not (broker.waiting or broker.taken or self.open or self.history.bodies)

    # -- what befalls -------------------------------------------------------------------------

    def boundary(self, process: Process, name: str) -> None:
        """A point at which a process may be killed or paused, and others may go on."""
        scheduler = self.scheduler
        if process.dead:
            raise Crashed
        self.say(f"{process.name} {name}")
        if self.faulty:
            fault = self.choices.pick(self.fault_weights)
            if fault == 1:
                self.counts["processes killed"] += 1
                self.say(f"{process.name} KILLED")
                scheduler.kill(process)
                self.replace_process(process)
                raise Crashed
            if fault == 2:
                paused_s = (0.5, 1.5, 4.0, 12.0)[self.choices.pick((1, 2, 2, 1))]
                self.counts["processes paused"] += 1
                self.say(f"{process.name} PAUSED for {paused_s} s")
                process.paused_until_s = scheduler.now_s + paused_s
            if fault > 2:
                self.strike(fault)
        scheduler.step()

    def replace_process(self, process: Process) -> None:
        """Start a worker in place of the killed one."""
        del process
        self.start_worker()

    def strike(self, fault: int) -> None:
        """Apply a fault to servers and messages, by its index in `_FAULT_WEIGHTS`."""
        (
            self._duplicate,
            self._empty_the_lock_server,
            self._let_the_clock_jump,
            self._abort_a_transaction,
            self._set_the_lock_servers_clock_back,
            self._purge_keys,
        )[fault - 3]()

    def _empty_the_lock_server(self) -> None:
        self.counts["lock server emptied"] += 1
        self.say("lock server EMPTIED")
        self.locks.flush()

    def _let_the_clock_jump(self) -> None:
        jump_s = (-3.0, 5.0)[self.choices.pick((1, 1))]
        if self.counts["keys purged"]:
            jump_s = abs(jump_s)  # purged rows are older than clocks are ever set back
        self.counts["database clock jumped"] += 1
        self.say(f"database clock JUMPS by {jump_s} s")
        self.database_clock.ahead_s += jump_s
        self.history.trusts_are_disjoint = False

    def _purge_keys(self) -> None:
        gone = self.ledger.purge_keys()
        self.counts["keys purged"] += gone
        self.say(f"keys PURGED: {gone}")

    def _duplicate(self) -> None:
        held = [each.message for each in self.broker.taken.values()]
        everything = [*self.broker.waiting, *held]
        if everything:
            chosen = everything[self.choices.pick([1.0] * len(everything))]
            self.counts["messages duplicated"] += 1
            self.say(f"message {chosen.id}{chosen.number} DUPLICATED")
            self.broker.waiting.append(chosen)

    def _set_the_lock_servers_clock_back(self) -> None:
        """Set it back by a day: a lease that is not renewed or released outlives all others."""
        self.counts["lock server's clock set back"] += 1
        self.say("lock server's clock SET BACK")
        for lock in self.locks._locks.values():
            lock.until_s += 86_400.0

    def _abort_a_transaction(self) -> None:
        if self.open:
            tx = list(self.open.values())[self.choices.pick([1.0] * len(self.open))].tx
            self.counts["transactions ended by the server"] += 1
            self.say("a transaction is ENDED BY THE SERVER")
            self.close(tx)

    def loses(self, name: str) -> str | None:
        """Return whether this call's request or answer gets lost."""
        if not self.faulty:
            return None
        lost = (None, "question", "answer", "late")[self.choices.pick((120, 1, 2, 1))]
        if lost is not None:
            self.counts["messages lost on the way"] += 1
            self.say(f"{name}: {lost.upper()} LOST" if lost != "late" else f"{name}: LATE")
        return lost

    def keep_open(self, tx: MemoryTransaction) -> None:
        """Keep a request that is on its way to the server: it no longer needs its process."""
        if id(tx) in self.open:
            self.open[id(tx)].process = self.servers

    def later(self, do: Callable[[], object]) -> None:
        """Let the server do a request after a while that seemed lost."""
        delay_s = (0.1, 1.0, 4.0)[self.choices.pick((1, 1, 1))]

        def run() -> None:
            self.scheduler.sleep(delay_s)
            with contextlib.suppress(TaskguardError, DatabaseError):  # no process waits for it
                do()

        self.scheduler.spawn(self.servers, run)

    def say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.scheduler.now_s - 1_000:8.3f}  {text}")

    # -- what servers do ----------------------------------------------------------------------

    def publish(self, message: Message) -> None:
        self.published.setdefault(message.name, message.task)
        self.history.published(message)
        self.broker.waiting.append(message)

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        before = self.locks.held()
        released = self.locks.release(keys, owner)
        self.history.released(owner, before, self.locks.held())
        return released

    def release_and_take_hint(self, key: str, owner: Owner) -> tuple[bool, bool]:
        before = self.locks.held()
        released = self.locks.release_and_take_hint(key, owner)
        self.history.released(owner, before, self.locks.held())
        return released

    def claim(self, process: Process, request: ClaimRequest) -> ClaimAnswer:
        found = self.ledger.claim(request)
        if isinstance(found, Claimed):
            self.say(f"  {request.work}: claimed, fence {found.claim.fence}")
            self.history.claimed(process, found)
            self._note_guard(found.claim)
        return found

    def _note_guard(self, claim: Claim) -> None:
        if claim.work is None:
            return
        guards = self._claimed_by.setdefault(claim.work_ids[-1], set())
        before = len(guards)
        guards.add(bool(claim.formerly))
        self.counts["work claimed under two guards"] += (before, len(guards)) == (1, 2)

    def enqueue(self, db: None, request: ClaimRequest, **how: Any) -> str:
        return self.ledger.enqueue(db, request, **how)

    def abandon(self, work: Overdue, *, error: str) -> bool:
        return self.ledger.abandon(work, error=error)

    def expire(self, work: str, message: MessageRef) -> bool:
        return self.ledger.expire(work, message=message)

    def begin(self, process: Process, claim: Claim, *, look_first: bool) -> MemoryTransaction:
        tx = self.ledger.begin(claim, look_first=look_first)
        until_s = self.scheduler.now_s + self._idle_s
        self.open[id(tx)] = OpenTransaction(tx, process, until_s)
        self.scheduler.spawn(self.servers, lambda: self._end_idle(tx))
        return tx

    def _end_idle(self, tx: MemoryTransaction) -> None:
        """End idle transactions, as idle_in_transaction_session_timeout does."""
        while (known := self.open.get(id(tx))) is not None and known.tx is tx:
            left_s = known.ends_at_s - self.scheduler.now_s
            if left_s <= 0:
                self.close(tx)
                return
            self.scheduler.sleep(left_s)

    def in_transaction(self, tx: MemoryTransaction, do: Callable[[], None]) -> None:
        if id(tx) not in self.open:
            raise DatabaseError("the server ended the transaction")
        self.open[id(tx)].ends_at_s = self.scheduler.now_s + self._idle_s
        try:
            do()
        finally:
            if id(tx) not in self.open:  # it has ended while the statement waited for a row
                self.ledger.unlock(tx)

    def commit(self, tx: MemoryTransaction, claim: Claim) -> None:
        if id(tx) not in self.open:
            raise DatabaseError("the server ended the transaction")
        self.history.committing(tx, claim)
        self.ledger.commit(tx)
        self.say(f"  {claim.work}: committed {[each[0] for each in tx.effects]}")
        self.close(tx)

    def close(self, tx: MemoryTransaction) -> None:
        """Close a transaction: release its locks, and drop what was not committed."""
        self.open.pop(id(tx), None)
        self.ledger.unlock(tx)

    def locked_view(self, claim: Claim) -> WorkView | None:
        by = object()
        try:
            with self.ledger.locking(by, [("work", claim.work)]):
                return self.ledger.view(claim.work or "")
        finally:
            self.ledger.unlock(by)

    # -- in place of the operating system -----------------------------------------------------

    def patch(self, module: Any, name: str, value: Any) -> None:
        """Replace an attribute for the time of this schedule."""
        self._patches.wanted.append((module, name, value))

    def _replace_the_system(self) -> None:
        """Replace native threads and locks of the watchdog, and nonces."""
        scheduler, put = self.scheduler, self._patches.put_here
        for module in (taskguard.run.tracked, taskguard.run.watchdog):
            put(module, "allocate_lock", lambda: SimMutex(scheduler))
        put(taskguard.run.watchdog, "Wakeup", lambda: SimWakeup(scheduler))
        put(
            taskguard.run.watchdog,
            "start_thread",
            lambda function: scheduler.spawn(scheduler.process, function),
        )
        for module in (taskguard.run.admission, taskguard.run.parking):
            put(module, "new_owner", lambda message="": self.owner(message))

    def owner(self, message: str = "") -> Owner:
        """Nonces in order, so that a trace reads well."""
        self._owners += 1
        return Owner(f"{self._owners:024}", message)


@dataclass
class _Patches:
    """Names of modules that are replaced for a while."""

    wanted: list[tuple[Any, str, Any]] = field(default_factory=list)
    _before: list[tuple[Any, str, Any]] = field(default_factory=list)

    def put(self, module: Any, name: str, value: Any) -> None:
        self._before.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def put_here(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        """Apply to this native thread only: a lease of another test has a watchdog that goes on."""
        before, here = getattr(module, name), threading.get_ident()

        def chosen(*args: Any, **values: Any) -> Any:
            of_ours = threading.get_ident() == here
            return (function if of_ours else before)(*args, **values)

        self.put(module, name, chosen)

    def __enter__(self) -> None:
        for module, name, value in self.wanted:
            self.put(module, name, value)

    def __exit__(self, *_: object) -> None:
        for module, name, value in reversed(self._before):
            setattr(module, name, value)
