"""Mistakes in lines. The simulation must detect each of them, most of them without a relay.

Mistakes of the ledger itself (how `claim` checks a line, how positions are sorted) change the
ledger in memory. The contract suite detects the same mistakes in the statements of the databases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import taskguard.run.parking
from simulation import stored_calls
from simulation.line_world import LineWorld
from simulation.mutants import Mutant
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.base import Granted
from taskguard.model.claims import Busy, ClaimRequest, MessageRef
from taskguard.model.delivery import Delivery
from taskguard.model.lease import Owner
from taskguard.model.line_states import LineState
from taskguard.model.states import State
from taskguard.run.parking import Line
from taskguard.run.runner import Runner

__all__ = ["LINE_MUTANTS"]


def _no_look_after_parking(world: LineWorld) -> None:
    """A worker does not check the key again after it has parked a message."""
    park = Line.park

    def without(line: Line, *args: Any, **values: Any) -> bool:
        line.promote_next = lambda delivery: False  # type: ignore[method-assign]
        try:
            return park(line, *args, **values)
        finally:
            del line.promote_next

    world.patch(Line, "park", without)


def _only_in_park(world: LineWorld, name: str) -> None:
    """Only the method that has just parked a message promotes others, while `name` runs."""
    right = getattr(Runner, name)

    def without(runner: Runner, *args: Any) -> Any:
        line = runner.line
        park = line.park

        def with_calls(*asked: Any, **values: Any) -> bool:
            mute, line.promote_next = line.promote_next, Line.promote_next.__get__(line)  # type: ignore[method-assign]
            try:
                return park(*asked, **values)
            finally:
                line.promote_next = mute  # type: ignore[method-assign]

        line.promote_next = lambda delivery: False  # type: ignore[method-assign]
        line.park = with_calls  # type: ignore[method-assign]
        try:
            return right(runner, *args)
        finally:
            del line.promote_next, line.park

    world.patch(Runner, name, without)


def _no_look_after_release(world: LineWorld) -> None:
    """A holder promotes no message after its work is done."""
    _only_in_park(world, "_run")


def _no_look_after_an_answer(world: LineWorld) -> None:
    """A delivery that is refused promotes no message, as if it had held nothing."""
    _only_in_park(world, "_admit")


def _no_second_look_at_the_lock(world: LineWorld) -> None:
    """After parking, a worker trusts the lock server that the key is still taken."""
    world.patch(Line, "_is_free", lambda *_: False)


def _probe_left_behind(world: LineWorld) -> None:
    """A lock server without hints is probed by taking the key, which is not released."""
    world.hints = False

    def is_free(line: Line, delivery: Delivery, request: ClaimRequest, refused: Busy) -> bool:
        del delivery
        if line._locks is None or refused.key is None:
            return True
        owner = taskguard.run.parking.new_owner(request.message.id)
        asked = {"ttl_s": request.ttl_s, "with_fence": False, "wait_s": 0.0}
        try:
            return isinstance(line._locks.acquire(request.keys, owner, **asked), Granted)
        except LockServerUnavailableError:
            return True

    world.patch(Line, "_is_free", is_free)


def _no_hint(world: LineWorld) -> None:
    """A worker that parks a message checks whether the key is free, but leaves no hint."""
    world.hints = True
    leave = world.locks.leave_hint

    def looks(key: str) -> bool:
        is_free = leave(key)
        world.locks._hints.discard(key)
        return is_free

    world.locks.leave_hint = looks  # type: ignore[method-assign]


def _hint_before_it_is_free(world: LineWorld) -> None:
    """A holder consumes the hint before it releases the key."""
    world.hints = True

    def taken_first(key: str, owner: Owner) -> tuple[bool, bool]:
        hint = key in world.locks._hints
        world.locks._hints.discard(key)
        world.scheduler.sleep(0.5)
        return world.release((key,), owner), hint

    world.release_and_take_hint = taken_first  # type: ignore[method-assign]


def _kept_for_nobody(world: LineWorld) -> None:
    """A key that was kept for a message that was not promoted is held until its lease expires."""
    world.hints = True
    world.patch(Line, "_give_back", lambda *_: None)


def _trusts_who_forgets(world: LineWorld) -> None:
    """A lock server that has forgotten the holder of a key is trusted to have no hint for it."""
    world.hints = True
    release = world.release_and_take_hint
    world.release_and_take_hint = lambda key, owner: (True, release(key, owner)[1])  # type: ignore[method-assign]


def _acknowledge_first(world: LineWorld) -> None:
    """A message is acknowledged before it is in the ledger's line."""
    world.acknowledges_first = True


def _unflushed(world: LineWorld) -> None:
    """A message is acknowledged, and a crash of the database loses its record."""
    right = world.park

    def park(request: ClaimRequest, **how: Any) -> bool:
        rows, written = world.ledger.work_items, list(world.unflushed)
        before = rows.get(str(request.work))
        parked = right(request, **how)
        if parked:
            world.unflushed[:] = [*written, (rows[str(request.work)], before)]
        return parked

    world.park = park  # type: ignore[method-assign]


def _after_park(world: LineWorld, change: Callable[[Any, Any], Any]) -> None:
    """Change the record that a parked message leaves, given its record before."""
    ledger = world.ledger
    right = ledger.park

    def park(request: ClaimRequest, **how: Any) -> bool:
        before = ledger.work_items.get(str(request.work))
        parked = right(request, **how)
        if parked and before is not None:
            after = ledger.work_items[before.id]
            ledger.work_items[before.id] = change(before, after)
        return parked

    ledger.park = park  # type: ignore[method-assign]


def _stays_promoted(world: LineWorld) -> None:
    """A promoted message that finds its key taken still counts as promoted."""

    def change(before: Any, after: Any) -> Any:
        if before.due is None or before.line is None:
            return after
        line = LineState.KEPT if after.strict else LineState.PROMOTED
        return replace(after, line=line, due=before.due)

    _after_park(world, change)


def _place_lost(world: LineWorld) -> None:
    """A promoted message that finds its key taken goes to the end of its line."""
    _after_park(world, lambda before, after: replace(after, parked=world.ledger.now_us()))


def _claim_ignores_the_line(world: LineWorld) -> None:
    """A message that arrives while the key is free claims it before those in line."""
    world.ledger.is_behind = lambda request, **_: False  # type: ignore[method-assign]


def _work_has_the_place(world: LineWorld) -> None:
    """Every message of a work has the position of the message that waits."""
    right = world.ledger.is_behind

    def is_behind(request: ClaimRequest, *, room: int = 1) -> bool:
        mine = world.ledger.work_items.get(str(request.work))
        if mine is None or mine.state is not State.NEW:
            return right(request, room=room)
        in_place = replace(request.message, id=mine.message)
        return right(replace(request, message=in_place), room=room)

    world.ledger.is_behind = is_behind  # type: ignore[method-assign]


def _claim_keeps_the_place(world: LineWorld) -> None:
    """Work that is in progress keeps its position in line."""
    write = world.ledger._write

    def written(request: ClaimRequest, *values: Any) -> None:
        before = world.ledger.work_items.get(str(request.work))
        write(request, *values)
        if before is not None:
            after = world.ledger.work_items[before.id]
            if before.line is not None:  # as strict work does
                kept = replace(after, line=LineState.KEPT, parked=before.parked)
                world.ledger.work_items[before.id] = kept

    world.ledger._write = written  # type: ignore[method-assign]


def _all_are_promoted(world: LineWorld) -> None:
    """The next message is promoted while an earlier one is on its way."""

    def is_open(ledger: Any, first: Any, now_us: int) -> bool:
        del now_us
        return not ledger.is_held(first.key)

    world.patch(stored_calls, "is_open", is_open)


def _promoted_for_ever(world: LineWorld) -> None:
    """A promoted message that never arrives blocks all messages behind it."""

    def is_expected(row: Any, now_us: int) -> bool:
        del now_us
        return stored_calls.is_in_line(row) and row.due is not None

    world.patch(stored_calls, "is_expected", is_expected)


def _replaced_keeps_its_place(world: LineWorld) -> None:
    """A message is replaced, its caller is notified, and it still runs."""
    world.patch(stored_calls._Enqueue, "_supersede", lambda *_: None)


def _no_look_after_an_expiry(world: LineWorld) -> None:
    """A message that has expired promotes no other."""
    world.patch(Line, "left", lambda *_: None)


def _expired_and_runs(world: LineWorld) -> None:
    """A message expires, its caller is notified, and another copy of it runs."""
    expire = world.ledger.expire

    def noting_less(work: str, *, message: MessageRef) -> bool:
        ended = expire(work, message=message)
        if ended:
            row = world.ledger.work_items[work]
            world.ledger.work_items[work] = replace(row, retries=message.retries)
            world.ledger.numbers[message.name, work] = message.number
        return ended

    world.ledger.expire = noting_less  # type: ignore[method-assign]


def _expired_keeps_its_place(world: LineWorld) -> None:
    """The ledger does not learn that a message has expired, and sends it again and again."""
    world.patch(stored_calls.StoredCalls, "expired", lambda *_, **__: [])
    world.ledger.expire = lambda *_, **__: False  # type: ignore[method-assign]


LINE_MUTANTS = (
    Mutant("no look after parking", _no_look_after_parking, ("L6",)),
    Mutant("no look after release", _no_look_after_release, ("L6",)),
    Mutant("no look after an answer", _no_look_after_an_answer, ("L6",)),
    Mutant("no second look at the lock", _no_second_look_at_the_lock, ("L6",)),
    Mutant("a probe that is left behind", _probe_left_behind, ("L6",)),
    Mutant("no hint", _no_hint, ("L6",)),
    Mutant("hint taken before the release", _hint_before_it_is_free, ("L6",)),
    Mutant("a key that is kept for no message", _kept_for_nobody, ("L6",)),
    Mutant("a server that forgets is trusted", _trusts_who_forgets, ("L6",)),
    Mutant("acknowledge before it is parked", _acknowledge_first, ("L1", "L6", "S7")),
    Mutant("parked and not flushed", _unflushed, ("L1", "S7")),
    Mutant("stays promoted", _stays_promoted, ("L6", "S9")),
    Mutant("place lost", _place_lost, ("S9",)),
    Mutant("claim ignores the line", _claim_ignores_the_line, ("S9",)),
    Mutant("a place is any message's", _work_has_the_place, ("L1", "S9")),
    Mutant("claim keeps the place", _claim_keeps_the_place, ("S9",)),
    Mutant("all are promoted", _all_are_promoted, ("S9",)),
    Mutant("promoted for ever", _promoted_for_ever, ("L1", "L6")),
    Mutant("replaced, and runs", _replaced_keeps_its_place, ("L1", "S10")),
    Mutant("no look after an expiry", _no_look_after_an_expiry, ("L6",)),
    Mutant("expired, and runs", _expired_and_runs, ("S10",)),
    Mutant("expired, and keeps its place", _expired_keeps_its_place, ("L1", "L6")),
)
