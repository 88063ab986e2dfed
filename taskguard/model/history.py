"""What happens to work and keys other than a claim and its completion, for operators to read.

Guarantees: names here are stored, so they stay. `ledger/history.py` has the SQL that writes them.
"""

from __future__ import annotations

from enum import Enum, IntEnum

__all__ = ["Action", "Flag", "Happened"]


class Flag(IntEnum):
    """Why an operator may look for a work: `WORK.flag`."""

    RUNS_LONG = 1
    """Its lease was renewed at least once since the claim."""
    FAILED = 2
    DEAD = 3
    LEFT = 4
    """No worker runs it: it is PROCESSING, and its lease has expired."""


class Happened(Enum):
    """What happened, in `WORK.history` or in `taskguard_happenings`."""

    TAKEOVER = "takeover"
    """Another holder claimed it after the lease of this owner had expired."""
    FAILED = "failed"
    CRASHED = "crashed"
    DEAD = "dead"
    STALE = "stale"
    """The database refused the late commit of this owner."""
    LEASE_LOST = "lease_lost"
    DUPLICATE = "duplicate"
    DEFERRED = "deferred"
    SKIPPED = "skipped"
    OVERRULED = "overruled"
    """The lock server had this key for another owner, and the ledger decided."""
    OPERATOR = "operator"
    """An operator changed it. The text has the action, the actor and the reason."""


class Action(Enum):
    """What an operator did: `taskguard_actions.action`."""

    REQUEUE = "requeue"
    REQUEUE_LEFT = "requeue_left"
    DROP = "drop"
    DONE = "done"
    CALL = "call"
    RELEASE = "release"
    PAUSE = "pause"
    RESUME = "resume"
