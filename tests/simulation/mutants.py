"""The mistakes that a library of this kind can make. Each must be found out by the simulation.

A simulation that lets one of them pass proves nothing. They exist here alone, as changes of one
world before its schedule begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import taskguard.model.states
import taskguard.run.admission
from simulation.ledger import KeyRow
from simulation.world import World
from taskguard.ledger.decisions import Records
from taskguard.model.claims import Claim, ClaimRequest
from taskguard.model.lease import Owner
from taskguard.model.states import State
from taskguard.run.attempt import Attempt

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the invariants by one of which it is found out."""

    name: str
    mistake: Callable[[World], Any]
    breaks: tuple[str, ...]


def _no_fence_check(world: World) -> None:
    """DONE by whoever comes, as long as nobody else was."""

    def stands(claim: Claim) -> bool:
        work = world.ledger.work_items.get(claim.work or "")
        return work is not None and work.state is State.PROCESSING

    world.ledger.stands = stands  # type: ignore[method-assign]


def _at_most_for_less(world: World) -> None:
    """`<=` for `<` between the number of a delivery and the highest number known."""
    right = taskguard.model.states.is_superseded

    def is_superseded(row: Any, *, number: Any, recorded: Any, **values: Any) -> bool:
        same = recorded != (0, 0) and number <= recorded
        return same or right(row, number=number, recorded=recorded, **values)

    world.patch(taskguard.model.states, "is_superseded", is_superseded)


def _numbers_by_message(world: World) -> None:
    """One number for all work that the id of a message was used for."""
    world.ledger.numbered = lambda request, work: (request.message.id, None)  # type: ignore[method-assign]


def _release_without_compare(world: World) -> None:
    """DEL, whoever holds the key."""
    right = world.locks.release

    def release(keys: tuple[str, ...], owner: Owner) -> bool:
        held = world.locks.held()
        return right(keys, held.get(keys[0], owner))

    world.locks.release = release  # type: ignore[method-assign]


def _counted_tokens(world: World) -> None:
    """INCR at the lock server, which forgets its counter with all the rest."""
    counter: list[int] = []
    empty = world.locks.flush

    def flush() -> None:
        counter.clear()
        empty()

    def next_fence(last: Sequence[int], now_us: int) -> int:
        del last, now_us
        counter.append(1)
        return len(counter)

    world.locks.flush = flush  # type: ignore[method-assign]
    world.ledger.next_fence = next_fence  # type: ignore[method-assign]


def _acknowledge_first(world: World) -> None:
    """As with acks_late off."""
    world.acknowledges_first = True


def _no_nonce(world: World) -> None:
    """Every attempt at a message is the same owner."""
    world.owner = lambda message="": Owner("0" * 24, message)  # type: ignore[method-assign]


def _drop_duplicates_in_progress(world: World) -> None:
    """Somebody is at it, so this delivery is acknowledged, and no copy is left behind."""
    world.publishes_again = False


def _takeover_at_once(world: World) -> None:
    """Leases that the database ends long before their holders think so."""
    world.ledger.lease_share = 0.05


def _any_end_is_done(world: World) -> None:
    """A body that catches what ended its transaction has nothing to write, it seems."""
    world.patch(Attempt, "refuse_end", lambda attempt: None)


def _own_word_is_believed(world: World) -> None:
    """A body that has a name of its own for what ended its transaction has failed, it seems."""
    world.patch(Attempt, "said_by_ledger", None)


def _exits_uncounted(world: World) -> None:
    """A body that ends its process is given back as at a shutdown."""

    def crash(claim: Claim, error: str) -> bool:
        del error
        return world.ledger.give_back(claim)

    world.ledger.crash = crash  # type: ignore[method-assign]


def _believe_every_lock(world: World) -> None:
    """Whatever the lock server says, for however long: the ledger is not asked."""
    world.patch(taskguard.run.admission.Admission, "_is_lease", lambda *_: True)


def _former_key_unheld(world: World) -> None:
    """A worker with the new guard holds its new key alone."""
    world.holds_former_keys = False


def _former_record_unread(world: World) -> None:
    """What a work was before its guard was changed is not looked at."""
    right = world.ledger.records

    def records(request: ClaimRequest) -> Records:
        found = right(request)
        return found._replace(rows=(found.own, *(None for _ in found.rows[1:])))

    world.ledger.records = records  # type: ignore[method-assign]


def _former_record_unwritten(world: World) -> None:
    """It is looked at, and claims and ends are written under the new id alone."""
    right = world.ledger._write

    def write(request: ClaimRequest, records: Records, *values: Any) -> None:
        right(replace(request, formerly=()), records._replace(rows=records.rows[:1]), *values)

    world.ledger._write = write  # type: ignore[method-assign]
    world.patch(Claim, "work_ids", property(lambda claim: (claim.work,)))


def _by_arrival(world: World) -> None:
    """Who comes later is the newer one, whenever it was sent."""
    world.ledger.is_outdated = lambda *_: False  # type: ignore[method-assign]


def _mark_forgotten(world: World) -> None:
    """What was newest is known as long as it holds the key."""
    right = world.ledger.is_outdated

    def is_outdated(sent_us: int, mark: KeyRow, waits: int | None) -> bool:
        held = any(
            key.fence == mark.fence and key.owner and key.stamp is None
            for key in world.ledger.keys.values()
        )
        return held and right(sent_us, mark, waits)

    world.ledger.is_outdated = is_outdated  # type: ignore[method-assign]


def _superseded_runs_again(world: World) -> None:
    """Work that has lost its key to a newer one stays as it was."""
    world.ledger.outdated = lambda work, by: work  # type: ignore[method-assign]


MUTANTS = (
    Mutant("no fence check", _no_fence_check, ("S2", "S3", "S6")),
    Mutant("<= for <", _at_most_for_less, ("L1", "S7")),
    Mutant("numbers by message alone", _numbers_by_message, ("L1", "S7")),
    Mutant("DEL without compare", _release_without_compare, ("S4",)),
    Mutant("INCR tokens", _counted_tokens, ("S1", "S6")),
    Mutant("acknowledge before commit", _acknowledge_first, ("L1",)),
    Mutant("no nonce", _no_nonce, ("L1", "S2", "S3", "S4", "S8")),
    Mutant("drop what is in progress", _drop_duplicates_in_progress, ("L1", "S7")),
    Mutant("leases too short", _takeover_at_once, ("S5",)),
    Mutant("any end is DONE", _any_end_is_done, ("S2",)),
    Mutant("own word is believed", _own_word_is_believed, ("S7",)),
    Mutant("exits are no crashes", _exits_uncounted, ("L1",)),
    Mutant("every lock is believed", _believe_every_lock, ("L1",)),
    Mutant("former key not held", _former_key_unheld, ("S1", "S3", "S5", "S6")),
    Mutant("former record not read", _former_record_unread, ("S2", "S6")),
    Mutant("superseded by arrival", _by_arrival, ("S11",)),
    Mutant("mark forgotten", _mark_forgotten, ("S11",)),
    Mutant("superseded work stays", _superseded_runs_again, ("L1", "S6", "S7", "S8")),
    Mutant("former record not written", _former_record_unwritten, ("S2",)),
)
