"""Mistakes with an operator's changes. The simulation must detect each of them."""

from __future__ import annotations

from typing import Any

import simulation.operated
import simulation.operator_world
from simulation.mutants import Mutant
from simulation.world import World
from taskguard.model.history import Action

__all__ = ["OPERATOR_MUTANTS"]


def _twin_stays(world: World) -> None:
    """Work that was claimed under two guards is changed under one id alone."""
    world.deploys = True
    # An operator who drops what has failed, again and again.
    world.fault_weights = (*world.fault_weights[:-1], 60)
    world.patch(simulation.operator_world, "_WEIGHTS", (1, 0, 0, 0))
    world.patch(simulation.operated, "twins_of", lambda *_: [])


def _not_final(world: World) -> None:
    """Dropped work is FAILED as after an error of its body, so that a later delivery runs it."""
    right = simulation.operated.written

    def written(row: Any, action: Action, **values: Any) -> dict[str, Any]:
        changed = right(row, action, **values)
        return {**changed, "final": 0} if action is Action.DROP else changed

    world.patch(simulation.operated, "written", written)


def _pause_expires(world: World) -> None:
    """A pause has a lease like a delivery's, which nothing renews."""
    world.patch(simulation.operated, "FAR_US", 0)


class _Forgets(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        """Keep nothing."""


def _resume_is_forgotten(world: World) -> None:
    """A resume leaves nothing on record for a pause that still waits for holders."""
    world.ledger.resumes = _Forgets()


OPERATOR_MUTANTS = (
    Mutant("the record under the other guard stays", _twin_stays, ("S16",)),
    Mutant("a drop is not final", _not_final, ("S16",)),
    Mutant("a pause expires", _pause_expires, ("S17",)),
    Mutant("a resume is forgotten", _resume_is_forgotten, ("S17",)),
)
