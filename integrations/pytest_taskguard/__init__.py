"""taskguard's pytest plugin: your guarded tasks, delivered twice, killed and taken over.

| fixture | what it gives |
| --- | --- |
| `taskguard_memory` | guards without servers: Redis in memory, a ledger on SQLite, and events |
| `taskguard_ledger` | the ledger's database: override it with yours; in Django it is Django's |
| `deliver_twice` | delivers one message of a task twice and returns both results |
| `lose_lease_at` | pauses a holder at a boundary until another holder has done the work |
| `explore_crashes` | kills a task at each of its boundaries and delivers its message again |

They take a Celery task, an RQ job or a function under `@tg.guarded` from your program, and run it
in the test's process. They do not test the commands, messages and timeouts of a real broker.

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
    """Load names on first use, because pytest imports every installed plugin."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pytest_taskguard' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pytest_taskguard.{_HOMES[name]}"), name)
