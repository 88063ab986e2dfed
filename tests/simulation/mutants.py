"""Mistakes that a library of this kind can make. The simulation must detect each of them.

A simulation that lets one of them pass proves nothing. Each mistake changes one world before its
schedule begins.
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
    """A mistake, and the invariants of which it must violate one."""

    name: str
    mistake: Callable[[World], Any]
    breaks: tuple[str, ...]


def _no_fence_check(world: World) -> None:
    """Any claim may complete work that is in progress."""

    def may_complete(claim: Claim) -> bool:
        work = world.ledger.work_items.get(claim.work or "")
        return work is not None and work.state is State.PROCESSING

    world.ledger.may_complete = may_complete  # type: ignore[method-assign]


def _at_most_for_less(world: World) -> None:
    """Compare the number of a delivery with the highest known number by `<=`, not `<`."""
    right = taskguard.model.states.is_superseded

    def is_superseded(row: Any, *, number: Any, recorded: Any, **values: Any) -> bool:
        same = recorded != (0, 0) and number <= recorded
        return same or right(row, number=number, recorded=recorded, **values)

    world.patch(taskguard.model.states, "is_superseded", is_superseded)


def _numbers_by_message(world: World) -> None:
    """All work of a message id shares one number."""
    world.ledger.numbered = lambda request, work: (request.message.id, None)  # type: ignore[method-assign]


def _release_without_compare(world: World) -> None:
    """Release deletes the key, whatever its holder."""
    right = world.locks.release

    def release(keys: tuple[str, ...], owner: Owner) -> bool:
        held = world.locks.held()
        return right(keys, held.get(keys[0], owner))

    world.locks.release = release  # type: ignore[method-assign]


def _counted_tokens(world: World) -> None:
    """The lock server counts the fences, and forgets its counter when it is emptied."""
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
    """A message is acknowledged before its body runs, as without `acks_late`."""
    world.acknowledges_first = True


def _no_nonce(world: World) -> None:
    """Every attempt of a message has the same owner."""
    world.owner = lambda message="": Owner("0" * 24, message)  # type: ignore[method-assign]


def _drop_duplicates_in_progress(world: World) -> None:
    """A delivery of work in progress is acknowledged without a deferred copy."""
    world.publishes_again = False


def _takeover_at_once(world: World) -> None:
    """The database ends leases long before their holders expect it."""
    world.ledger.lease_share = 0.05


def _any_end_is_done(world: World) -> None:
    """A body that catches the end of its transaction counts as done, as if it wrote nothing."""
    world.patch(Attempt, "refuse_end", lambda attempt: None)


def _own_word_is_believed(world: World) -> None:
    """A body that hides the end of its transaction in an error of its own counts as failed."""
    world.patch(Attempt, "said_by_ledger", None)


def _exits_uncounted(world: World) -> None:
    """A body that ends its process is given back as at a shutdown, and is not counted."""

    def crash(claim: Claim, error: str) -> bool:
        del error
        return world.ledger.give_back(claim)

    world.ledger.crash = crash  # type: ignore[method-assign]


def _believe_every_lock(world: World) -> None:
    """Trust each lease of the lock server, for any length, without a claim in the ledger."""
    world.patch(taskguard.run.admission.Admission, "_is_lease", lambda *_: True)


def _former_key_unheld(world: World) -> None:
    """A worker with the new guard holds only its new key."""
    world.holds_former_keys = False


def _former_record_unread(world: World) -> None:
    """A worker ignores the work's records from before its guard was changed."""
    right = world.ledger.records

    def records(request: ClaimRequest) -> Records:
        found = right(request)
        return found._replace(rows=(found.own, *(None for _ in found.rows[1:])))

    world.ledger.records = records  # type: ignore[method-assign]


def _former_record_unwritten(world: World) -> None:
    """A worker reads former records, but writes claims and ends under the new id only."""
    right = world.ledger._write

    def write(request: ClaimRequest, records: Records, *values: Any) -> None:
        right(replace(request, formerly=()), records._replace(rows=records.rows[:1]), *values)

    world.ledger._write = write  # type: ignore[method-assign]
    world.patch(Claim, "work_ids", property(lambda claim: (claim.work,)))


def _by_arrival(world: World) -> None:
    """The message that arrives later counts as newer, whatever its send time."""
    world.ledger.is_outdated = lambda *_: False  # type: ignore[method-assign]


def _mark_forgotten(world: World) -> None:
    """The newest message is remembered only while it holds the key."""
    right = world.ledger.is_outdated

    def is_outdated(sent_us: int, mark: KeyRow, waits: int | None) -> bool:
        held = any(
            key.fence == mark.fence and key.owner and key.stamp is None
            for key in world.ledger.keys.values()
        )
        return held and right(sent_us, mark, waits)

    world.ledger.is_outdated = is_outdated  # type: ignore[method-assign]


def _superseded_runs_again(world: World) -> None:
    """Work that lost its key to a newer message stays as it was."""
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
