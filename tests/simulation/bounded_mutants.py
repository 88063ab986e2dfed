"""Mistakes in orders, slots and rates. The simulation must detect each of them.

They change the ledger in memory and the requests it gets. The contract suite detects the same
mistakes in the statements of the databases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from simulation import stored_calls
from simulation.bounded_world import BoundedWorld
from simulation.ledger import KeyRow
from simulation.mutants import Mutant
from taskguard.errors import LineFullError
from taskguard.model.claims import Busy, Claim, ClaimAnswer, ClaimRequest, Overdue, ParkedNewest
from taskguard.model.delivery import Delivery
from taskguard.model.records import Seen
from taskguard.run.parking import Line

__all__ = ["BOUNDED_MUTANTS"]


def _slot_without_a_fence(world: BoundedWorld) -> None:
    """A claim of a slot counts as a holder, but gets the slot's last fence again."""
    right = world.ledger._grant

    def grant(request: ClaimRequest, *rest: Any) -> Any:
        def last(fences: Sequence[int], now_us: int) -> int:
            return max(fences) or now_us

        if request.bounds is None or not request.bounds.slots:
            return right(request, *rest)
        world.ledger.next_fence = last  # type: ignore[method-assign]
        try:
            return right(request, *rest)
        finally:
            del world.ledger.next_fence

    world.ledger._grant = grant  # type: ignore[method-assign]


def _slot_whatever_others_hold(world: BoundedWorld) -> None:
    """A free slot is granted, even if `limit` holders exist already."""
    right = world.ledger._held_up

    def held_up(request: ClaimRequest, *rest: Any) -> Busy | None:
        world.ledger._others = lambda request: []  # type: ignore[method-assign]
        try:
            return right(request, *rest)
        finally:
            del world.ledger._others

    world.ledger._held_up = held_up  # type: ignore[method-assign]


def _slot_that_is_held(world: BoundedWorld) -> None:
    """Leases of slots do not count."""
    right = world.ledger._decided

    def decided(request: ClaimRequest, *rest: Any) -> ClaimAnswer:
        if request.bounds is not None and request.bounds.slots:
            slot = request.keys[0]
            row = world.ledger.keys.get(slot, KeyRow())
            world.ledger.keys[slot] = replace(row, lease_until=0)
        return right(request, *rest)

    world.ledger._decided = decided  # type: ignore[method-assign]


def _place_given_up_at_a_retry(world: BoundedWorld) -> None:
    """Failed work leaves its line, although its retry is on its way."""

    def keep(claim: Claim, *, retries: int, **how: Any) -> bool:
        del how
        return world.ledger.leave(claim, retries=retries)

    world.ledger.keep = keep  # type: ignore[method-assign]


def _place_never_given_up(world: BoundedWorld) -> None:
    """Work that has failed for good keeps its position."""
    world.patch(Line, "gave_up", lambda *_, **how: None)


def _hint_taken_for_nobody(world: BoundedWorld) -> None:
    """A holder whose work keeps its position relies on a hint that the last holder consumed."""
    world.hints = True
    right = Line.released

    def released(line: Line, delivery: Delivery, lease: Any, **known: Any) -> None:
        known["known"] = known["known"] and delivery.bounds is not None
        right(line, delivery, lease, **known)

    world.patch(Line, "released", released)


def _no_strict_place(world: BoundedWorld) -> None:
    """Strict work that has begun blocks no other work after its holder is gone."""
    world.patch(stored_calls, "keeps", lambda row: False)


def _rank_ignored(world: BoundedWorld) -> None:
    """The message that was sent first is promoted first, whatever its rank."""
    world.patch(stored_calls, "_place", lambda row: (0, row.parked or 0))


def _rank_of_newcomers_ignored(world: BoundedWorld) -> None:
    """A message that arrives while others wait is treated as if it had the lowest rank."""
    right = world.ledger.is_behind

    def is_behind(request: ClaimRequest, *, room: int = 1) -> bool:
        return right(replace(request, rank=-1), room=room)

    world.ledger.is_behind = is_behind  # type: ignore[method-assign]


def _start_for_nothing(world: BoundedWorld) -> None:
    """A claim that is granted is not charged."""
    right = world.ledger._held_up

    def held_up(request: ClaimRequest, *rest: Any) -> Busy | None:
        key = "" if request.bounds is None else request.bounds.key
        before = world.ledger.keys.get(key, KeyRow()).next_start
        refused = right(request, *rest)
        if refused is None and key in world.ledger.keys:
            world.ledger.keys[key] = replace(world.ledger.keys[key], next_start=before)
        return refused

    world.ledger._held_up = held_up  # type: ignore[method-assign]


def _charge(world: BoundedWorld, request: ClaimRequest) -> None:
    if request.bounds is not None and request.bounds.rate is not None:
        key, rate = request.bounds.key, request.bounds.rate
        now_us, row = world.ledger.now_us(), world.ledger.keys.get(key, KeyRow())
        opens_us = rate.opens_us(row.next_start, now_us)
        charged = replace(row, next_start=rate.charged_us(opens_us, now_us))
        world.ledger.keys[key] = charged


def _lost_claims_charge(world: BoundedWorld) -> None:
    """A start is charged before it is known whether the key is free."""
    right = world.ledger._decided

    def decided(request: ClaimRequest, *rest: Any) -> ClaimAnswer:
        answer = right(request, *rest)
        if isinstance(answer, Busy) and not answer.too_early:
            _charge(world, request)
        return answer

    world.ledger._decided = decided  # type: ignore[method-assign]


def _refused_starts_charge(world: BoundedWorld) -> None:
    """A claim that comes too early moves the next start."""
    right = world.ledger._held_up

    def held_up(request: ClaimRequest, *rest: Any) -> Busy | None:
        refused = right(request, *rest)
        if refused is not None and refused.too_early:
            _charge(world, request)
        return refused

    world.ledger._held_up = held_up  # type: ignore[method-assign]


def _newest_past_the_rate(world: BoundedWorld) -> None:
    """A message that supersedes others begins as soon as its key is free, whatever the rate."""
    right = world.ledger._held_up

    def held_up(request: ClaimRequest, *rest: Any) -> Busy | None:
        asked = request if request.newest is None else replace(request, bounds=None)
        return right(asked, *rest)

    world.ledger._held_up = held_up  # type: ignore[method-assign]


def _superseded_and_silent(world: BoundedWorld) -> None:
    """A superseded message is sent to no worker, and is not overdue."""
    right = world.ledger.park_newest

    def park_newest(request: ClaimRequest, **how: Any) -> Any:
        found = right(request, **how)
        if isinstance(found, ParkedNewest):
            for each in found.replaced:
                world.ledger.note_notified(each.work)
            return ParkedNewest()
        return found

    world.ledger.park_newest = park_newest  # type: ignore[method-assign]


def _never_promoted_ahead(world: BoundedWorld) -> None:
    """No message is promoted before its start, and nothing checks the line at that time."""
    right = stored_calls.room

    def at_once(*asked: Any) -> int | None:
        wait_us = right(*asked)
        return wait_us if wait_us == 0 else None

    world.patch(stored_calls, "room", at_once)


def _relay_forgets_rates(world: BoundedWorld) -> None:
    """The relay does not check a line again after it had to wait for its rate."""
    right = world.ledger.look

    def look(**asked: Any) -> Seen:
        seen = right(**asked)
        keys = (key for key in seen.keys if key not in world.ledger.keys or _unrated(key))
        return replace(seen, keys=tuple(keys))

    def _unrated(key: str) -> bool:
        return world.ledger.keys[key].next_start is None

    world.ledger.look = look  # type: ignore[method-assign]


def _one_at_a_time(world: BoundedWorld) -> None:
    """One message is promoted at a time, even if several slots are free."""
    right = world.ledger.promote_next

    def promote_next(key: str, **asked: Any) -> Overdue | None:
        if asked.get("bounds") is not None:
            asked["bounds"] = replace(asked["bounds"], limit=1)
        return right(key, **asked)

    world.ledger.promote_next = promote_next  # type: ignore[method-assign]


def _full_and_silent(world: BoundedWorld) -> None:
    """A message that a full line refuses is acknowledged as if it were parked."""
    right = world.ledger.park

    def park(request: ClaimRequest, **how: Any) -> bool:
        try:
            return right(request, **how)
        except LineFullError:
            return True

    world.ledger.park = park  # type: ignore[method-assign]


def _full_for_who_has_begun(world: BoundedWorld) -> None:
    """A full line refuses a retry or a promoted message."""
    right = stored_calls._is_full
    world.patch(stored_calls, "_is_full", lambda ledger, row, request: right(ledger, (), request))


def _full_for_the_replaced(world: BoundedWorld) -> None:
    """A full line refuses a message that was replaced."""
    right = world.ledger.park

    def park(request: ClaimRequest, **how: Any) -> bool:
        numbered = request.message.name, str(request.work)
        replaced = world.ledger.numbers.get(numbered) == stored_calls.SUPERSEDED
        row = world.ledger.work_items.get(str(request.work))
        if replaced and stored_calls._is_full(world.ledger, (row,), request):
            raise LineFullError("full", key=request.line)
        return right(request, **how)

    world.ledger.park = park  # type: ignore[method-assign]


BOUNDED_MUTANTS = (
    Mutant("slot without a fence", _slot_without_a_fence, ("S1", "S6")),
    Mutant("slot whatever others hold", _slot_whatever_others_hold, ("S5", "S9", "S12")),
    Mutant("slot that is held", _slot_that_is_held, ("S5",)),
    Mutant("place given up at a retry", _place_given_up_at_a_retry, ("L6", "S9")),
    Mutant("place never given up", _place_never_given_up, ("L1", "L6")),
    Mutant("hint taken for nobody", _hint_taken_for_nobody, ("L6",)),
    Mutant("no position for begun work", _no_strict_place, ("S9",)),
    Mutant("rank ignored", _rank_ignored, ("S9",)),
    Mutant("rank of newcomers ignored", _rank_of_newcomers_ignored, ("S9",)),
    Mutant("start for nothing", _start_for_nothing, ("S12",)),
    Mutant("lost claims charge", _lost_claims_charge, ("S12",)),
    Mutant("refused starts charge", _refused_starts_charge, ("S12",)),
    Mutant("newest past the rate", _newest_past_the_rate, ("S12",)),
    Mutant("superseded, and silent", _superseded_and_silent, ("L1",)),
    Mutant("never promoted ahead", _never_promoted_ahead, ("L6",)),
    Mutant("relay forgets rates", _relay_forgets_rates, ("L1",)),
    Mutant("one of several is promoted", _one_at_a_time, ("L6",)),
    Mutant("full, and silent", _full_and_silent, ("L1", "S7")),
    Mutant("full for begun work", _full_for_who_has_begun, ("S7",)),
    Mutant("full for a replaced message", _full_for_the_replaced, ("S7",)),
)
