"""Mistakes with runs (`once_per="run"`). The simulation must detect each of them.

They change the ledger in memory, and the rules that it shares with the databases. The contract
suite detects the same mistakes in the statements of the databases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulation import runs, stored_calls
from simulation.ledger import Work
from simulation.mutants import Mutant
from simulation.world import World
from taskguard.ledger.unique import Sent
from taskguard.model.claims import Claim
from taskguard.model.runs import OpenRun, Resolved, run_id

__all__ = ["RUN_MUTANTS", "RUN_MUTANTS_OF_SHOP"]


def _membership_unread(world: World) -> None:
    """A message belongs to the open run, whichever run it has joined before."""
    world.patch(runs, "_run_joined", lambda *_: None)


def _resolving(world: World, change: Callable[..., dict[str, Any]]) -> None:
    """Change the arguments of `resolve()`."""
    right = runs.resolve

    def resolve(new: str, **known: Any) -> Resolved:
        return right(new, **{**known, **change(**known)})

    world.patch(runs, "resolve", resolve)


def _joins_the_later_run(world: World) -> None:
    """A message of an earlier run joins the run that is in progress."""

    def change(member_of: str | None, open_run: OpenRun | None, follows: str | None) -> Any:
        later = open_run is not None and not open_run.ended
        late = later and member_of not in (open_run.work, follows)  # type: ignore[union-attr]
        return {"member_of": None} if late else {}

    _resolving(world, change)


def _opens_a_new_run(world: World) -> None:
    """A message whose run has ended opens a new run."""

    def change(member_of: str | None, open_run: OpenRun | None, follows: str | None) -> Any:
        ended = open_run is None or open_run.ended or open_run.work != member_of
        return {"member_of": None} if ended and member_of != follows else {}

    _resolving(world, change)


def _begins_too_early(world: World) -> None:
    """The run that follows begins before the open one has ended."""

    def change(member_of: str | None, open_run: OpenRun | None, follows: str | None) -> Any:
        return {"open_run": None} if member_of is not None and member_of == follows else {}

    _resolving(world, change)


def _retry_forgotten(world: World) -> None:
    """A failure ends the run, although its queue retries the message."""
    right = world.ledger.fail

    def fail(claim: Claim, error: str, **how: Any) -> bool:
        return right(claim, error, **{**how, "again_in_s": None})

    world.ledger.fail = fail  # type: ignore[method-assign]


def _failed_for_ever(world: World) -> None:
    """A run stays open although its queue retries it no more."""
    right = world.ledger.fail

    def fail(claim: Claim, error: str, **how: Any) -> bool:
        return right(claim, error, **{**how, "again_in_s": 0.0})

    world.ledger.fail = fail  # type: ignore[method-assign]


def _replace_forgotten(world: World) -> None:
    """A call that comes while a body runs joins that run."""
    world.patch(stored_calls, "Sent", lambda request, follows=False: Sent(request))


def _any_message_runs(world: World) -> None:
    """A run with a stored call is granted to any message."""
    world.ledger.awaits_another = lambda request: False  # type: ignore[method-assign]


def _ended_by_a_replaced_message(world: World) -> None:
    """A run ends if the message is revoked that opened it, although a newer call replaced that."""

    def ends_run(row: Work, message: str) -> bool:
        return row.id == run_id(str(row.base), message)

    world.ledger._ends_run = ends_run  # type: ignore[method-assign]


RUN_MUTANTS_OF_SHOP = (
    Mutant("membership not read", _membership_unread, ("L1", "S14", "S8")),
    Mutant("late member joins the later run", _joins_the_later_run, ("S14",)),
    Mutant("late member opens a run", _opens_a_new_run, ("L1", "S14")),
    Mutant("promised retry forgotten", _retry_forgotten, ("L1",)),
)
RUN_MUTANTS = (
    *RUN_MUTANTS_OF_SHOP,
    Mutant("following run begins too early", _begins_too_early, ("S13",)),
    Mutant("failed run stays open", _failed_for_ever, ("L1",)),
    Mutant("replace forgotten", _replace_forgotten, ("S15",)),
    Mutant("any message runs a stored call", _any_message_runs, ("S15",)),
    Mutant("ended by a replaced message", _ended_by_a_replaced_message, ("S15",)),
)
