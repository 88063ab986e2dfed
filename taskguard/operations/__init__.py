"""Questions and changes of operators: `tg.operations`, for the command line and a web page.

Guarantees: `reads.py` changes nothing. Each change needs a reason and an actor, and is recorded.
"""

from __future__ import annotations

from taskguard.operations.changes import Changes
from taskguard.operations.pausing import Pauses
from taskguard.operations.reads import Reads

__all__ = ["Operations"]


class Operations(Reads, Changes, Pauses):
    """An operator's questions and changes. Safe for threads and forks."""
