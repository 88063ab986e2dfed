"""The invariants that docs/architecture.md names: S1 to S8 and S11 after every step, L1 and L4 at
the end.

The world reports what happens. The checks read the rows, the locks and the broker themselves, and
use none of the code that they judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from simulation.ledger import KeyRow, MemoryTransaction, Work
from simulation.run_checks import RunChecks, has_ended
from simulation.scheduler import Process
from simulation.violations import ViolationError
from taskguard.errors import (
    MessageTooOldError,
    WorkDeadError,
    WorkFailedError,
    WorkRevokedError,
)
from taskguard.ledger.runs import _NOBODY_CONTINUED
from taskguard.model.claims import Claim, Claimed
from taskguard.model.delivery import Answered, Completed, Deferred, Dropped
from taskguard.model.lease import Owner
from taskguard.model.states import OUTDATED, TRANSITIONS, State
from taskguard.run.tracked import TrackedLease

if TYPE_CHECKING:
    from simulation.world import Message, Task, World

__all__ = [
    "CHANGED",
    "BoomError",
    "GaveUpError",
    "History",
    "OwnWordError",
    "ViolationError",
    "is_outdated",
    "thing_of",
]

_FAILING = ("fails once", "swallows once", "gives up")
_FINAL = (State.DONE, State.DEAD, State.FAILED)

# Prefix of the keys that a deploy introduces.
CHANGED = "shop:"


def thing_of(key: str) -> str:
    """Return the subject of a key: it is the same before and after a deploy."""
    return key.removeprefix(CHANGED)


class BoomError(Exception):
    """An error that a failing body raises on purpose."""


class GaveUpError(Exception):
    """An error that a body raises if its message must not be retried."""


class OwnWordError(Exception):
    """An error by which a body hides the end of its transaction. It never reaches the queue."""


class History:
    """Events of one schedule so far."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.runs = RunChecks(world)
        self._fences: dict[str, int] = {}
        self._owners: dict[str, Owner] = {}
        self._work_items: dict[str, Work] = {}
        self._keys: dict[str, KeyRow] = {}
        self._published: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._effects: Counter[Any] = Counter()
        self._seen = 0
        # Send time of the newest message that has begun, by task and key.
        self._newest: dict[tuple[str, str], float] = {}
        self.sent_s: dict[tuple[str, str], float] = {}
        self.bodies: dict[int, tuple[str, Process]] = {}
        self.trusts_are_disjoint = True

    # -- what happens -------------------------------------------------------------------------

    def claimed(self, process: Process, found: Claimed) -> None:
        """S1: the fences of a key grow. S5: no other process trusts a lease on it."""
        claim = found.claim
        self.runs.claimed(claim)
        things = set(map(thing_of, claim.keys))
        for key in claim.keys:
            thing = thing_of(key)
            last = self._fences.get(thing, 0)
            again = claim.fence == last and self._owners.get(thing) == claim.owner
            if claim.fence <= last and not again:
                raise ViolationError("S1", f"{key} was claimed with {claim.fence} after {last}")
            self._fences[thing], self._owners[thing] = claim.fence, claim.owner
        if claim.request.newest is not None:
            self._newest_begins(claim)
        for worker in self._world.workers:
            for tracked in list(worker.runner.watchdog._tracked.values()):
                shared = things & set(map(thing_of, tracked.lease.keys))
                if shared and not worker.process.dead:
                    self._check_trust(claim, tracked)
        for work, holder in self.bodies.values():
            if work in claim.work_ids and holder is not process and not holder.dead:
                self._world.counts["second holders"] += 1

    def _check_trust(self, claim: Claim, tracked: TrackedLease) -> None:
        """S5: no live process trusts a lease on a key that another one claims."""
        lease = tracked.lease
        if tracked.claim is None or lease.owner == claim.owner:
            return
        if _supersedes(claim, tracked.claim):
            self._world.counts["living holders superseded"] += 1
        elif not any(self._was_held_by(lease.owner, key) for key in lease.keys):
            pass  # another worker has just done its work, which this one does not know yet
        elif lease.remaining_s > 0 and self.trusts_are_disjoint:
            raise ViolationError("S5", f"{lease.key} was claimed while its lease was trusted")

    def _newest_begins(self, claim: Claim) -> None:
        """S11: no message begins after a newer one that supersedes it."""
        family = claim.request.task, claim.keys[0]
        sent_s = self.sent_s[claim.request.message.name, claim.request.task]
        if sent_s < self._newest.get(family, 0.0):
            raise ViolationError("S11", f"{claim.work} began after a newer one")
        self._newest[family] = sent_s

    def _was_held_by(self, owner: Owner, key: str) -> bool:
        """Return whether it was the holder before this step."""
        row = self._keys.get(key)
        return row is not None and row.owner == str(owner)

    def committing(self, tx: MemoryTransaction, claim: Claim) -> None:
        """S3: no commit follows a claim with a higher fence."""
        if not any(work.state is State.DONE for work in tx.work_items.values()):
            return
        for key in claim.keys:
            if self._fences.get(thing_of(key), 0) > claim.fence:
                raise ViolationError(
                    "S3", f"{key}: commit with {claim.fence} after a claim with more"
                )

    def released(self, owner: Owner, before: dict[str, Owner], after: dict[str, Owner]) -> None:
        """S4: no process frees another one's lease."""
        for key in before.keys() - after.keys():
            if before[key] != owner:
                raise ViolationError("S4", f"{owner} freed {key}, which was {before[key]}'s")

    def published(self, message: Message) -> None:
        self.sent_s[message.name] = message.sent_s or 0.0
        self._published.setdefault(message.name, []).append(message.number)

    @contextmanager
    def running(self, work: str, process: Process) -> Iterator[None]:
        """Record that a body runs."""
        self._world.counts["bodies"] += 1
        number = max(self.bodies, default=0) + 1
        self.bodies[number] = (work, process)
        try:
            yield
        finally:
            del self.bodies[number]

    def acknowledged(self, message: Message, outcome: Any) -> None:
        """S7: only done work is acknowledged. S8: each report to the queue is true."""
        work = self.record(self._world.ledger.work_items, message.task, message.id)
        state = None if work is None else work.state
        self._world.counts[f"reported {type(outcome).__name__}"] += 1
        if isinstance(outcome, Completed | Answered):
            if state is not State.DONE:
                raise ViolationError("S8", f"{message.id} was reported as done, and it is {state}")
            if outcome.value not in ("done", None):
                raise ViolationError("S8", f"{message.id} was reported as {outcome.value!r}")
        elif isinstance(outcome, Deferred):
            self._expect_later(message)
        elif isinstance(outcome, Dropped):
            if outcome.reason == "superseded":
                self._expect_later(message)
            elif outcome.reason == "outdated":
                self._world.counts["reported as outdated"] += 1
                self._expect_newer(message, work)
        elif isinstance(outcome, WorkDeadError | WorkFailedError):
            self._expect_end(message, outcome, work)
        elif isinstance(outcome, WorkRevokedError | MessageTooOldError | BoomError | GaveUpError):
            pass
        elif state is not State.DONE:
            raise ViolationError("S7", f"{message.id} was acknowledged with {outcome!r}, {state}")

    def _expect_end(self, message: Message, outcome: Any, work: Work | None) -> None:
        """Check that work that was reported as DEAD is DEAD, and that a FAILED run has ended."""
        if isinstance(outcome, WorkFailedError):
            true = work is not None and work.state is State.FAILED and has_ended(work)
        else:
            true = work is not None and work.state is State.DEAD
        if not true:
            name = type(outcome).__name__
            raise ViolationError("S8", f"{message.id} was reported as {name}, and it is {work}")

    def _expect_later(self, message: Message) -> None:
        if not any(number > message.number for number in self._published[message.name]):
            raise ViolationError("S7", f"{message.id}{message.number} went without a later copy")

    def _expect_newer(self, message: Message, work: Work | None) -> None:
        """Check that a message that was sent later or at the same moment has begun, and that the
        record says so."""
        if work is not None and work.final and work.error == "revoked":
            return  # since its caller was notified
        if not self._has_newer(message.id, message.task, work):
            raise ViolationError("S7", f"{message.id} is superseded by none that has begun")
        if work is None or not is_outdated(work):
            raise ViolationError("S8", f"{message.id} was reported as superseded, it is {work}")

    def _has_newer(self, message: str, task: Task, work: Work | None) -> bool:
        """Return whether a message that was sent later, or at the same moment, has begun."""
        del work
        return self._newest.get((task.name, task.key), 0.0) >= self.sent_s[message, task.name]

    # -- what is ------------------------------------------------------------------------------

    def check(self) -> None:
        """Check all rows after a step."""
        ledger = self._world.ledger
        if ledger.work_items != self._work_items:
            for name, work in ledger.work_items.items():
                self._check_record(name, self._work_items.get(name), work)
            for (message, _), task in self._world.published.items():
                self._check_work(task, message)
            self._work_items = dict(ledger.work_items)
            self.runs.check()
        if ledger.keys != self._keys:
            for key, row in ledger.keys.items():
                if key in self._keys and row.fence < self._keys[key].fence:
                    raise ViolationError("S6", f"the fence of {key} went back to {row.fence}")
            self._keys = dict(ledger.keys)
        while self._seen < len(ledger.effects):
            work, fence = ledger.effects[self._seen]
            self._seen += 1
            self._effects[work] += 1
            if self._effects[work] > 1:
                raise ViolationError("S2", f"{work} has two effects, the second with fence {fence}")

    def _check_record(self, name: str, before: Work | None, after: Work) -> None:
        """Check the rules for every record, also for one that another id has overtaken and that is
        now a copy."""
        if before is None or before == after:
            return
        if after.fence < before.fence:
            raise ViolationError("S6", f"the fence of {name} went back to {after.fence}")
        if before.state in (State.DONE, State.DEAD) and before.state is not after.state:
            raise ViolationError("S6", f"{name} left {before.state.value}")

    def _check_work(self, task: Task, message: str) -> None:
        before = self.record(self._work_items, task, message)
        after = self.record(self._world.ledger.work_items, task, message)
        if before is None or after is None or before.state is after.state:
            return
        if (before.state, after.state) not in TRANSITIONS:
            said = f"{before.state.value} -> {after.state.value}"
            raise ViolationError("S6", f"{task.work(message)}: {said}")

    def at_the_end(self) -> None:
        """L1: all work was done, once. L4: nothing is left behind."""
        for (message, _), task in self._world.published.items():
            if not self._is_excused(message, task):
                self._check_end(task, message)
        self._check_leases()

    def _check_end(self, task: Task, message: str) -> None:
        work = self.record(self._world.ledger.work_items, task, message)
        name = work.id if work is not None and task.by_run else task.work(message)
        if work is None or work.state not in _FINAL:
            state = None if work is None else work.state.value
            raise ViolationError("L1", f"{name} was lost: {state}")
        writes = task.body != "plain"
        expected = int(work.state is State.DONE and writes)
        if self._effects[name] != expected:
            raise ViolationError(
                "S2", f"{name} is {work.state.value}, {self._effects[name]} effects"
            )
        if is_outdated(work):
            if not self._has_newer(message, task, work):
                raise ViolationError("L1", f"{name} was superseded, and nothing is newer")
            return
        if task.by_run:
            self._check_end_of_run(task, work)
        if work.final or (work.error and "Transaction" in work.error):
            return  # revoked; or the server ended its transactions again and again
        if task.body == "always exits" and work.state is not State.DEAD:
            raise ViolationError("L1", f"{name} is {work.state.value}, and it never returns")
        if work.state is State.FAILED and task.body not in _FAILING:
            raise ViolationError("L1", f"{name} is FAILED, and its body did not raise")

    def _check_end_of_run(self, task: Task, run: Work) -> None:
        """L1: no run is left FAILED and open, and none has ended although its queue retried it."""
        if run.state is not State.FAILED or run.final == 1:
            return
        if not run.final:
            raise ViolationError("L1", f"{run.id} is FAILED, and is still open")
        if task.body != "gives up" and run.error != _NOBODY_CONTINUED:
            raise ViolationError("L1", f"{run.id} has ended, and its message was retried")

    def ids_of(self, task: Task, message: str) -> tuple[str, ...]:
        """Return the ids of all records of a message's work. With runs, that is one run or none."""
        return self.runs.of_message(task, message) if task.by_run else task.work_ids(message)

    def record(self, work_items: dict[str, Work], task: Task, message: str) -> Work | None:
        """Return the work's record: DONE under any of its ids, else the one written last."""
        ids = self.ids_of(task, message)
        found = [work_items[name] for name in ids if name in work_items]
        said = [(work.state is State.DONE, work.fence, work.state in _FINAL) for work in found]
        return found[said.index(max(said))] if found else None

    def _check_leases(self) -> None:
        world = self._world
        for worker in world.workers:
            if not worker.process.dead and len(worker.runner.watchdog):
                raise ViolationError("L4", f"{worker.process.name} keeps leases of nothing")
        now_us, counts = world.ledger.now_us(), world.counts
        if counts["messages lost on the way"]:
            return
        unclaimed = (
            counts["messages revoked"] or counts["messages expired"] or counts["broker emptied"]
        )
        if unclaimed and counts["processes killed"]:
            # No process takes over what a dead holder had of finished work, or of a lost message.
            return
        for key, row in world.ledger.keys.items():
            if key.startswith("taskguard"):
                continue  # a lease of a relay, which goes on
            if row.fence < self._fences.get(thing_of(key), 0):
                continue  # the lease of a former key, which expires by itself
            if row.owner and row.lease_until > now_us:
                raise ViolationError("L4", f"{key} is held by {row.owner}")

    def _is_excused(self, message: str, task: Task) -> bool:
        """Return whether the message may be lost."""
        del message, task
        return False


def _supersedes(claim: Claim, other: Claim | None) -> bool:
    """Return whether one claim may be granted while the other's lease is trusted."""
    if claim.request.newest != "supersede" or other is None:
        return False
    return other.request.newest is not None and other.request.task == claim.request.task


def is_outdated(work: Work) -> bool:
    """Return whether a newer message has superseded it for good."""
    return work.final and work.state is State.FAILED and (work.error or "").startswith(OUTDATED)
