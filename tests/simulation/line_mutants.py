"""The mistakes that can be made of a line. Each must be found out, most of them without a relay.

Those of the ledger itself (what `claim` asks of a line, where a place is) are changes of the ledger
in memory here; the contract suite finds the same ones in the statements of the databases.
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
    """Whoever holds the key will call us, it seems."""
    park = Line.park

    def without(line: Line, *args: Any, **values: Any) -> bool:
        line.call_next = lambda delivery: False  # type: ignore[method-assign]
        try:
            return park(line, *args, **values)
        finally:
            del line.call_next

    world.patch(Line, "park", without)


def _only_in_park(world: LineWorld, name: str) -> None:
    """Nobody is called but by who has just been parked, while this method runs."""
    right = getattr(Runner, name)

    def without(runner: Runner, *args: Any) -> Any:
        line = runner.line
        park = line.park

        def with_calls(*asked: Any, **values: Any) -> bool:
            mute, line.call_next = line.call_next, Line.call_next.__get__(line)  # type: ignore[method-assign]
            try:
                return park(*asked, **values)
            finally:
                line.call_next = mute  # type: ignore[method-assign]

        line.call_next = lambda delivery: False  # type: ignore[method-assign]
        line.park = with_calls  # type: ignore[method-assign]
        try:
            return right(runner, *args)
        finally:
            del line.call_next, line.park

    world.patch(Runner, name, without)


def _no_look_after_release(world: LineWorld) -> None:
    """Who is done goes home."""
    _only_in_park(world, "_run")


def _no_look_after_an_answer(world: LineWorld) -> None:
    """Who does not run had nothing to release, it seems."""
    _only_in_park(world, "_admit")


def _no_second_look_at_the_lock(world: LineWorld) -> None:
    """The lock server said that it is taken: so it is."""
    world.patch(Line, "_is_free", lambda *_: False)


def _probe_left_behind(world: LineWorld) -> None:
    """Whether the key is free is asked by taking it, of a lock server that keeps no hints."""
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
    """Who is parked looks whether the key is free, and tells nobody that he waits."""
    world.hints = True
    leave = world.locks.leave_hint

    def looks(key: str) -> bool:
        is_free = leave(key)
        world.locks._hints.discard(key)
        return is_free

    world.locks.leave_hint = looks  # type: ignore[method-assign]


def _hint_before_it_is_free(world: LineWorld) -> None:
    """The hint is taken, and then the key is released."""
    world.hints = True

    def taken_first(key: str, owner: Owner) -> tuple[bool, bool]:
        hint = key in world.locks._hints
        world.locks._hints.discard(key)
        world.scheduler.sleep(0.5)
        return world.release((key,), owner), hint

    world.release_and_take_hint = taken_first  # type: ignore[method-assign]


def _kept_for_nobody(world: LineWorld) -> None:
    """A key that nobody was called to is left to its expiry."""
    world.hints = True
    world.patch(Line, "_give_back", lambda *_: None)


def _trusts_who_forgets(world: LineWorld) -> None:
    """A lock server that has forgotten who held a key is believed that nobody waits for it."""
    world.hints = True
    release = world.release_and_take_hint
    world.release_and_take_hint = lambda key, owner: (True, release(key, owner)[1])  # type: ignore[method-assign]


def _acknowledge_first(world: LineWorld) -> None:
    """Before it stands in the ledger."""
    world.acknowledges_first = True


def _unflushed(world: LineWorld) -> None:
    """A message is acknowledged whose record a crash of the database takes back."""
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
    """What is written of a message that is parked, given its record before."""
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


def _stays_called(world: LineWorld) -> None:
    """Who was called and finds the key taken counts as called still."""

    def change(before: Any, after: Any) -> Any:
        if before.due is None or before.line is None:
            return after
        line = LineState.KEPT if after.strict else LineState.PROMOTED
        return replace(after, line=line, due=before.due)

    _after_park(world, change)


def _place_lost(world: LineWorld) -> None:
    """Who was called and finds the key taken stands at the end."""
    _after_park(world, lambda before, after: replace(after, parked=world.ledger.now_us()))


def _claim_ignores_the_line(world: LineWorld) -> None:
    """Who comes while the key is free has it."""
    world.ledger.is_behind = lambda request, **_: False  # type: ignore[method-assign]


def _work_has_the_place(world: LineWorld) -> None:
    """Any message of a work has the place of the one that waits."""
    right = world.ledger.is_behind

    def is_behind(request: ClaimRequest, *, room: int = 1) -> bool:
        mine = world.ledger.work_items.get(str(request.work))
        if mine is None or mine.state is not State.NEW:
            return right(request, room=room)
        in_place = replace(request.message, id=mine.message)
        return right(replace(request, message=in_place), room=room)

    world.ledger.is_behind = is_behind  # type: ignore[method-assign]


def _claim_keeps_the_place(world: LineWorld) -> None:
    """Who is at work stands in line."""
    write = world.ledger._write

    def written(request: ClaimRequest, *values: Any) -> None:
        before = world.ledger.work_items.get(str(request.work))
        write(request, *values)
        if before is not None:
            after = world.ledger.work_items[before.id]
            if before.line is not None:  # as a strict one does
                kept = replace(after, line=LineState.KEPT, parked=before.parked)
                world.ledger.work_items[before.id] = kept

    world.ledger._write = written  # type: ignore[method-assign]


def _all_are_called(world: LineWorld) -> None:
    """The next one is called while another one is on his way."""

    def is_open(ledger: Any, first: Any, now_us: int) -> bool:
        del now_us
        return not ledger.is_held(first.key)

    world.patch(stored_calls, "is_open", is_open)


def _called_for_ever(world: LineWorld) -> None:
    """Who was called and does not come holds up all who stand behind him."""

    def is_expected(row: Any, now_us: int) -> bool:
        del now_us
        return stored_calls.stands(row) and row.due is not None

    world.patch(stored_calls, "is_expected", is_expected)


def _replaced_keeps_its_place(world: LineWorld) -> None:
    """A call is replaced, and its message runs all the same."""
    world.patch(stored_calls._Enqueue, "_supersede", lambda *_: None)


def _no_look_after_an_expiry(world: LineWorld) -> None:
    """Who has expired had no turn, it seems."""
    world.patch(Line, "left", lambda *_: None)


def _expired_and_runs(world: LineWorld) -> None:
    """Its caller was told, and another copy of it runs all the same."""
    expire = world.ledger.expire

    def noting_less(work: str, *, message: MessageRef) -> bool:
        ended = expire(work, message=message)
        if ended:
            row = world.ledger.work_items[work]
            world.ledger.work_items[work] = replace(row, retries=message.retries)
        return ended

    world.ledger.expire = noting_less  # type: ignore[method-assign]


def _expired_keeps_its_place(world: LineWorld) -> None:
    """The ledger hears nothing of it: it is sent again, and again."""
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
    Mutant("a key that is kept for nobody", _kept_for_nobody, ("L6",)),
    Mutant("a server that forgets is trusted", _trusts_who_forgets, ("L6",)),
    Mutant("acknowledge before it is parked", _acknowledge_first, ("L1", "L6", "S7")),
    Mutant("parked and not flushed", _unflushed, ("L1", "S7")),
    Mutant("stays called", _stays_called, ("L6", "S9")),
    Mutant("place lost", _place_lost, ("S9",)),
    Mutant("claim ignores the line", _claim_ignores_the_line, ("S9",)),
    Mutant("a place is any message's", _work_has_the_place, ("L1", "S9")),
    Mutant("claim keeps the place", _claim_keeps_the_place, ("S9",)),
    Mutant("all are called", _all_are_called, ("S9",)),
    Mutant("called for ever", _called_for_ever, ("L1", "L6")),
    Mutant("replaced, and runs", _replaced_keeps_its_place, ("L1", "S10")),
    Mutant("no look after an expiry", _no_look_after_an_expiry, ("L6",)),
    Mutant("expired, and runs", _expired_and_runs, ("S10",)),
    Mutant("expired, and keeps its place", _expired_keeps_its_place, ("L1", "L6")),
)
