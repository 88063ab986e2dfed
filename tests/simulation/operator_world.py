"""An operator in the shop of `world.py`: at any moment work is dropped, marked as done or requeued,
and keys are released, paused and resumed.

An operator changes the record that counts, and sends the message of requeued work again by hand.
When the faults end, all pauses end.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from simulation.history import History
from simulation.violations import ViolationError
from simulation.world import _FAULT_WEIGHTS, Message, Task, World
from taskguard.errors import AlreadyEnqueuedError, LedgerUnavailableError
from taskguard.model.changes import Said
from taskguard.model.history import Action
from taskguard.model.lease import Owner
from taskguard.model.pauses import Pause, pause_names
from taskguard.model.states import State

if TYPE_CHECKING:
    from simulation.ledger import MemoryTransaction, Work
    from simulation.scheduler import Process
    from taskguard.model.claims import Claim, Claimed

__all__ = ["OperatorWorld"]

_ANN = Said("ann", "tonight")
_CHANGES = (Action.DROP, Action.DONE, Action.REQUEUE, Action.REQUEUE_LEFT)
_WEIGHTS = (3, 1, 2, 3)
_SOON_S = 3.0


class OperatorHistory(History):
    """Events of one schedule so far."""

    def __init__(self, world: OperatorWorld) -> None:
        super().__init__(world)
        self._ended: set[str] = set()
        self._changed: set[str] = set()
        self._touched: set[str] = set()

    def changed(self, action: Action, works: tuple[str, ...]) -> None:
        """Record that an operator has changed these records of one work."""
        self._changed.update(works)
        self._touched.update(works)
        if action in (Action.DROP, Action.DONE):
            self._ended.update(works)
        else:
            self._ended.difference_update(works)
            self.runs.resumed(works)

    def claimed(self, process: Process, found: Claimed) -> None:
        """S16: ended work never begins. S17: no delivery gets a paused key."""
        super().claimed(process, found)
        claim = found.claim
        if not self._ended.isdisjoint(claim.work_ids):
            raise ViolationError("S16", f"{claim.work} begins, and an operator has ended it")
        if self._paused(claim):
            raise ViolationError("S17", f"{claim.keys} were claimed while one of them is paused")

    def committing(self, tx: MemoryTransaction, claim: Claim) -> None:
        """S17: no delivery commits while its key is paused."""
        super().committing(tx, claim)
        if self._paused(claim):
            raise ViolationError("S17", f"{claim.work} commits while its key is paused")

    def _paused(self, claim: Claim) -> bool:
        return not self._world.paused.keys().isdisjoint(claim.keys)  # type: ignore[attr-defined]

    def _expect_end(self, message: Message, outcome: Any, work: Work | None) -> None:
        # Otherwise this record, or the one that was read, may have changed since.
        if self._touched.isdisjoint(self.ids_of(message.task, message.id)):
            super()._expect_end(message, outcome, work)

    def _expect_newer(self, message: Message, work: Work | None) -> None:
        if work is None or work.id not in self._touched:
            super()._expect_newer(message, work)

    def _check_work(self, task: Task, message: str) -> None:
        # An operator may have changed the one of two records that counts.
        if self._touched.isdisjoint(self.ids_of(task, message)):
            super()._check_work(task, message)

    def _check_record(self, name: str, before: Work | None, after: Work) -> None:
        if before is not None and name in self._changed:
            self._changed.discard(name)
            if before.state is State.DONE and before != after:
                raise ViolationError("S6", f"an operator changed {name}, which was DONE")
            return
        super()._check_record(name, before, after)

    def _check_end(self, task: Task, message: str) -> None:
        work = self.record(self._world.ledger.work_items, task, message)
        ended = self._ended.intersection(self.ids_of(task, message))
        if work is None or not ended:
            super()._check_end(task, message)
            return
        # A worker of the other guard copies DONE to its own record.
        name = work.id if task.by_run else task.work(message)
        if work.id in ended and self._effects[name]:
            raise ViolationError("S16", f"{name} has an effect, and an operator has ended it")


class OperatorWorld(World):
    """One schedule."""

    history: OperatorHistory

    def __init__(self, choices: Any, **values: Any) -> None:
        super().__init__(choices, **values)
        self.history = OperatorHistory(self)
        self.fault_weights = (*_FAULT_WEIGHTS, 8)
        # The keys that are paused, with their pauses.
        self.paused: dict[str, Owner] = {}
        self._waits: dict[str, Owner] = {}
        # The pauses that were resumed before they were complete.
        self._ended_waits: set[Owner] = set()

    def strike(self, fault: int) -> None:
        if fault < len(_FAULT_WEIGHTS):
            super().strike(fault)
            return
        act = (self._change_work, self._pause, self._resume, self._release)[
            self.choices.pick((4, 2, 1, 1))
        ]
        chosen = self.choices.pick((1,) * 8)
        how = self.choices.pick((1, 1))
        which = self.choices.pick(_WEIGHTS)
        # In a process of its own: it may wait for rows that another process has locked.
        self.scheduler.spawn(self.servers, lambda: self._act(act, chosen, how, which))

    @staticmethod
    def _act(act: Any, *chosen: int) -> None:
        with contextlib.suppress(LedgerUnavailableError, AlreadyEnqueuedError):
            act(*chosen)

    def _change_work(self, chosen: int, how: int, which: int) -> None:
        del how
        messages = sorted(self.published, key=str)
        message, name = messages[chosen % len(messages)]
        task, action = self.published[message, name], _CHANGES[which]
        work = self.history.record(self.ledger.work_items, task, message)
        if work is None:
            return
        found = self.ledger.change(work.id, action, by=_ANN)
        if not found.changed:
            return
        self.say(f"an operator: {action.value} {work.id} {found.also}")
        self.counts[f"operator: {action.value}"] += 1
        self.history.changed(action, (work.id, *found.also))
        if action in (Action.REQUEUE, Action.REQUEUE_LEFT):
            sent_s = self.history.sent_s[message, name]
            self.publish(Message(message, task, sent_s=sent_s))

    def _key(self, chosen: int) -> str:
        keys = sorted(key for key in self.ledger.keys if " " not in key)  # no `NewestRow`
        return keys[chosen % len(keys)] if keys else "order:0"

    def _pause(self, chosen: int, how: int, which: int) -> None:
        del which
        key = self._key(chosen)
        since_s = self.database_clock.wall_s()
        owner = self._waits.get(key) or Owner(*pause_names(Pause("ann", "tonight", since_s)))
        tried = self.ledger.try_pause(key, owner=owner, by=_ANN, lease_s=1.0, now=bool(how))
        if owner in self._ended_waits:
            return
        if tried.paused:
            self.say(f"an operator: pause {key}")
            self.counts["operator: pause"] += 1
            self._trusts_no_more(tried.holders)
            self.counts["operator: pause of a held key"] += bool(tried.holders)
            self.paused[key] = owner
            self._waits.pop(key, None)
        elif tried.by is None and tried.resumed is None:
            self._waits[key] = owner
        self.later_resume(key, owner)

    def later_resume(self, key: str, owner: Owner) -> None:
        """Resume the key soon, so that the schedule goes on."""

        def resume() -> None:
            self.scheduler.sleep(_SOON_S)
            self._end_pause(key, owner)

        self.scheduler.spawn(self.servers, lambda: self._act(resume))

    def _resume(self, chosen: int, how: int, which: int) -> None:
        del which
        if how and self._waits:
            self._end_wait(sorted(self._waits)[chosen % len(self._waits)])
        for key in sorted(self.paused)[chosen % 8 :][:1]:
            self._end_pause(key, self.paused[key])

    def _end_wait(self, key: str) -> None:
        """Resume a key whose pause still waits for holders. S17: it never completes.

        Nothing is expected while the database's clock is behind the pause's begin: the ledger
        compares both by that clock.
        """
        owner = self._waits.pop(key)
        if owner.pause is not None and self.ledger.now_us() < owner.pause.since_s * 1e6:
            return
        self._ended_waits.add(owner)
        self.ledger.resume(key, owner=owner, by=_ANN)

        def go_on() -> None:
            self.scheduler.sleep(_SOON_S)
            if self.ledger.try_pause(key, owner=owner, by=_ANN, lease_s=1.0).paused:
                raise ViolationError("S17", f"the pause of {key} completed after its resume")

        self.scheduler.spawn(self.servers, lambda: self._act(go_on))
        self.counts["operator: resume of a pause that waits"] += 1
        self.say(f"an operator: resume {key}, whose pause still waits")

    def _end_pause(self, key: str, owner: Owner) -> None:
        if self.paused.get(key) != owner:
            return
        del self.paused[key]
        if not self.ledger.resume(key, owner=owner, by=_ANN):
            raise ViolationError("S17", f"the pause of {key} was gone before its end")
        self.counts["operator: resume"] += 1
        self.say(f"an operator: resume {key}")

    def _release(self, chosen: int, how: int, which: int) -> None:
        del how, which
        key = self._key(chosen)
        row = self.ledger.keys.get(key)
        if row is None or not self.ledger.is_held(key):
            return
        if self.ledger.release(key, fence=row.fence, owner=row.owner, by=_ANN):
            self.say(f"an operator: release {key}")
            self.counts["operator: release"] += 1
            self._trusts_no_more((row.owner,))

    def _trusts_no_more(self, holders: tuple[Any, ...]) -> None:
        """Note that holders lost their leases, of which they learn later."""
        if holders:
            self.history.trusts_are_disjoint = False

    def _quiet(self) -> bool:
        keys = [key for key in self.ledger.keys if self.ledger.is_held(key)]
        return super()._quiet() and self.ledger.pause_of(tuple(keys)) is None
