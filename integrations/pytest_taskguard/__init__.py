"""taskguard's pytest plugin: your guarded tasks, delivered twice, killed and taken over.

| fixture | what it gives |
| --- | --- |
| `taskguard_memory` | guards without servers: a Redis in memory, a ledger on SQLite; their events |
| `taskguard_ledger` | the ledger's database; override it with your own; in Django it is Django's |
| `deliver_twice` | one message of a task, delivered twice; both answers |
| `lose_lease_at` | a holder that is paused at a boundary until another has done its work |
| `explore_crashes` | a task killed at each of its boundaries in turn and delivered again |

They take a Celery task, an RQ job or a function under `@tg.guarded`, as it stands in your program,
and run it in the test's own process. The commands, messages and time-outs of a real broker are not
part of it.

`lock_contract` has the tests for a lock provider of your own.

Read next: `exploring.py`, `delivering.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_taskguard.exploring import Crashed, CrashReport, EffectsError, LostLease
    from pytest_taskguard.memory import Memory

_HOMES = {
    "CrashReport": "exploring",
    "Crashed": "exploring",
    "EffectsError": "exploring",
    "LostLease": "exploring",
    "Memory": "memory",
}

__all__ = ["CrashReport", "Crashed", "EffectsError", "LostLease", "Memory"]


def __getattr__(name: str) -> Any:
    """Load names on first use: pytest imports every plugin that is installed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pytest_taskguard' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pytest_taskguard.{_HOMES[name]}"), name)
