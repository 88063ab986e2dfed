"""An operator's changes, for the ledger in memory. They pass the contract suite of the databases.

The rules are those of `taskguard/model/operating.py`. Each change happens at one moment.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from simulation.newest import KeyRow
from simulation.stored_calls import SUPERSEDED
from taskguard.errors import AlreadyEnqueuedError
from taskguard.ledger.lines.newest import row_id
from taskguard.ledger.records import message_of
from taskguard.model.bounds import is_slot
from taskguard.model.changes import Changed, Expected, PauseTried, Said
from taskguard.model.claims import ClaimRequest
from taskguard.model.history import Action, works_of
from taskguard.model.lease import Owner
from taskguard.model.line_states import LineState
from taskguard.model.operating import (
    counts_instead,
    first_position,
    refusal,
    sent_anew,
    text_of,
    twins_of,
    was_made,
    written,
)
from taskguard.model.pauses import FAR_US
from taskguard.model.states import State

if TYPE_CHECKING:
    from simulation.ledger import Work

__all__ = ["Operated"]

_FREE = ""
_NOBODY = Said("an operator", "no reason was given")
Rows = list[tuple[str, str | None]]


def _began_us(owner: Owner) -> int:
    return 0 if owner.pause is None else round(owner.pause.since_s * 1e6)


def _position(row: Work) -> tuple[int, int]:
    return row.rank or 0, row.parked or 0


class _Ledger(Protocol):
    """The parts of the ledger that this module uses."""

    keys: dict[str, KeyRow]
    work_items: dict[str, Work]
    numbers: dict[tuple[str, str | None], tuple[int, int]]
    actions: list[tuple[Action, str | None]]
    resumes: dict[str, tuple[int, Said]]

    def now_us(self) -> int: ...
    def later_run(self, base: str, work: str) -> str | None: ...
    def _at_once(self, rows: Rows) -> AbstractContextManager[None]: ...


class Operated:
    """The part of a `DatabaseLedger` with which operators change work and keys."""

    def change(
        self: Any,
        work: str,
        action: Action,
        *,
        by: Said,
        gone_s: float = 0.0,
        expected: Expected | None = None,
    ) -> Changed:
        before = self.work_items.get(work)
        if before is None:
            return Changed(work=work, changed=False, why="there is no such work")
        pointer: Rows = [] if before.base is None else [("run", before.base)]
        locked = {work, *works_of(before.also)}
        with self._at_once([*pointer, *(("work", each) for each in sorted(locked))]):
            row = self.work_items[work]
            if locked.issuperset(works_of(row.also)):
                return self._changed(row, action, by, gone_s, expected)
        again: Changed = self.change(work, action, by=by, gone_s=gone_s, expected=expected)
        return again

    def _changed(
        self: Any, row: Work, action: Action, by: Said, gone_s: float, expected: Expected | None
    ) -> Changed:
        now_us, text = self.now_us(), text_of(action, by)
        records = (self.work_items.get(each) for each in works_of(row.also) if each != row.id)
        others = [each for each in records if each is not None]
        twins = twins_of(row, others, action)
        ids = tuple(sorted(each.id for each in twins))
        known = {"work": row.id, "before": row.state, "key": row.key, "also": ids}
        if row.base is not None and action in (Action.REQUEUE, Action.REQUEUE_LEFT):
            self._refuse_later(row)
        if was_made(row, action, text):
            return Changed(changed=True, **known)
        why = refusal(row, action, now_us=now_us, gone_s=gone_s, expected=expected)
        why = why or counts_instead(row, others, action)
        if why:
            return Changed(changed=False, why=why, **known)
        for each in (row, *twins):
            self._write_change(each, action, now_us, text)
        for each in sent_anew(row, others, action):
            self._forget_numbers(each)
        if action is Action.CALL:
            self._put_first(self.work_items[row.id])
        self.actions.append((action, row.id))
        return Changed(changed=True, **known)

    def requeue(self: Any, work: str, *, reason: str) -> bool:
        changed: Changed = self.change(work, Action.REQUEUE, by=Said(_NOBODY.actor, reason))
        return changed.changed

    def _refuse_later(self: Any, row: Work) -> None:
        later = self.later_run(row.base, row.id)
        if later is not None:
            raise AlreadyEnqueuedError(f"{later} is open", key=row.id, message_id=later, begun=True)

    def _write_change(self: _Ledger, row: Work, action: Action, now_us: int, text: str) -> None:
        values = written(row, action, now_us=now_us, text=text)
        if values.get("line") == LineState.SUPERSEDED.value:
            values["message"] = message_of(row)
        known = {each.name for each in fields(row)}
        values = {name: value for name, value in values.items() if name in known}
        if "state" in values:
            values["state"] = State(values["state"])
        if "rounds" in values:
            values["rounds"] = 0
        self.work_items[row.id] = replace(row, **values)

    def _forget_numbers(self: _Ledger, row: Work) -> None:
        self.numbers = {
            each: number if each[1] != row.id or number == SUPERSEDED else (0, 0)
            for each, number in self.numbers.items()
            if each[1] != row.id or number == SUPERSEDED or row.base is not None
        }

    def _put_first(self: _Ledger, row: Work) -> None:
        others = [
            each
            for each in self.work_items.values()
            if each.key == row.key and each.parked is not None and each.id != row.id
        ]
        head = min(others, key=_position, default=None)
        if row.line is not None and head is not None and _position(head) < _position(row):
            by_rank = row_id(row.key, row.task) in self.keys
            head = replace(head, rank=head.rank or 0)
            values: dict[str, Any] = first_position(head, by_rank=by_rank)
            self.work_items[row.id] = replace(row, **values)

    # -- keys ---------------------------------------------------------------------------------

    def release(
        self: Any, key: str, *, fence: int, owner: str, by: Said = _NOBODY
    ) -> tuple[str, ...]:
        of_claim = self._keys_of_holder(fence, owner)
        with self._at_once([("key", name) for name in sorted({key, *of_claim})]):
            names: tuple[str, ...] = self._keys_of_holder(fence, owner)
            if key not in names or owner == _FREE or Owner.parse(owner).is_pause:
                return ()
            self._end_holder(key)
            self.actions.append((Action.RELEASE, key))
            return names

    def try_pause(
        self: Any,
        key: str,
        *,
        owner: Owner,
        by: Said,
        lease_s: float = 15.0,
        now: bool = False,
        also: tuple[Owner, ...] = (),
    ) -> PauseTried:
        slots = sorted(name for name in self.keys if is_slot(name, of=key))
        with self._at_once([("key", name) for name in (key, *slots)]):
            row, now_us = self.keys.get(key, KeyRow()), self.now_us()
            mine = row.owner == str(owner)
            live = row.owner != _FREE and row.lease_until > now_us and not mine
            if live and Owner.parse(row.owner).is_pause:
                return PauseTried(False, by=Owner.parse(row.owner).pause)
            if mine and row.lease_until >= FAR_US:
                return PauseTried(True)
            resumed_us, resumed_by = self.resumes.get(key, (-1, _NOBODY))
            if resumed_us >= _began_us(owner):
                return PauseTried(False, resumed=resumed_by)
            held = [name for name in self.keys if is_slot(name, of=key) and self.is_held(name)]
            held = [*([key] if live else []), *held]
            shown = (*(Owner.parse(self.keys[name].owner) for name in held), *also)
            if live and not now:
                return PauseTried(False, shown)
            if now:
                for name in held:
                    self._end_holder(name)
                row = self.keys.get(key, KeyRow())
            paused = now or not shown
            if paused:  # a holder that was suspended until its lease expired may go on
                for name in slots:
                    slot = self.keys[name]
                    if slot.owner != _FREE:
                        higher = max(slot.fence + 1, now_us)
                        self.keys[name] = replace(
                            slot, fence=higher, owner=_FREE, lease_until=now_us
                        )
            until_us = FAR_US if paused else now_us + int(lease_s * 1e6)
            fence = row.fence if mine else max(row.fence + 1, now_us)
            self.keys[key] = replace(row, fence=fence, owner=str(owner), lease_until=until_us)
            if paused:
                self.actions.append((Action.PAUSE, key))
            return PauseTried(paused, shown, closed=not paused)

    def give_up_pause(self: Any, key: str, *, owner: Owner) -> None:
        with self._at_once([("key", key)]):
            row = self.keys.get(key)
            if row is not None and row.owner == str(owner) and row.lease_until < FAR_US:
                self.keys[key] = replace(row, owner=_FREE, lease_until=self.now_us())

    def resume(self: Any, key: str, *, owner: Owner, by: Said) -> bool:
        with self._at_once([("key", key)]):
            row, now_us = self.keys.get(key, KeyRow()), self.now_us()
            found = Owner.parse(row.owner)
            ends = found.is_pause and _began_us(found) <= _began_us(owner)
            if ends:
                self.keys[key] = replace(row, owner=_FREE, lease_until=now_us)
            self.resumes[key] = now_us, by
            self.actions.append((Action.RESUME, key))
            return ends

    def pause_with_slots(self: Any, request: ClaimRequest) -> Owner | None:
        """Return the pause of a key with slots, which has none of them itself."""
        if request.bounds is None or not request.bounds.slots:
            return None
        paused: Owner | None = self.pause_of((request.bounds.key,))
        return paused

    def pause_of(self: _Ledger, keys: tuple[str, ...]) -> Owner | None:
        held = (row for key in keys if (row := self.keys.get(key)) is not None)
        owners = [Owner.parse(row.owner) for row in held if row.lease_until > self.now_us()]
        return next((owner for owner in owners if owner.is_pause), None)

    def _keys_of_holder(self: _Ledger, fence: int, owner: str) -> tuple[str, ...]:
        """Return all keys that a holder has by one claim."""
        held = [name for name, row in self.keys.items() if (row.fence, row.owner) == (fence, owner)]
        return tuple(sorted(held))

    def _end_holder(self: Any, key: str) -> None:
        """End the lease of a key's holder on all its keys, and of its work."""
        row, now_us = self.keys[key], self.now_us()
        for name in self._keys_of_holder(row.fence, row.owner):
            self.keys[name] = replace(
                self.keys[name], fence=max(row.fence + 1, now_us), owner=_FREE, lease_until=now_us
            )
        for work in self.work_items.values():
            mine = (work.state, work.fence, work.owner)
            if mine == (State.PROCESSING, row.fence, row.owner):
                due = None if work.call is None else now_us
                self.work_items[work.id] = replace(work, lease_until=now_us, due=due)
