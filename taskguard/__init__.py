"""taskguard makes Celery and RQ tasks safe to deliver twice.

The lock server coordinates which delivery tries. The database decides which delivery wins.

Users and integrations import the names below, and lock providers those of `taskguard.locks`. The
names are loaded when first used, so that `import taskguard` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskguard import errors, events, fenced
    from taskguard.api import TaskGuard, connect
    from taskguard.decorated import Decorator
    from taskguard.doctor import Configuration, GuardedTask, Report, examine, log_findings
    from taskguard.findings import Finding, FindingTemplate, Level
    from taskguard.guarded import GuardedFunction
    from taskguard.keys import key
    from taskguard.ledger.own_rows.guarded_row import GuardedRow
    from taskguard.ledger.schema.creation import ddl_statements, include_name
    from taskguard.ledger.schema.upgrades import upgrade_statements
    from taskguard.ledger.sql import SqlLedger
    from taskguard.ledger.transactions.external import ExternalConnection
    from taskguard.locks.memory import MemoryLocks
    from taskguard.model.claims import Claim
    from taskguard.model.delivery import (
        NOT_BEFORE,
        Answered,
        Codec,
        Completed,
        Deferred,
        Delivery,
        Dropped,
        MessageRef,
        Outcome,
        Parked,
        Parking,
        Queue,
    )
    from taskguard.model.former import Former
    from taskguard.model.lease import Lease
    from taskguard.model.policy import Policy
    from taskguard.model.records import Standing
    from taskguard.model.states import EXPIRED
    from taskguard.outbox.enqueue import (
        Duplicate,
        OutcomeOfEnqueue,
        Placed,
        check_delay,
        enqueue_in,
    )
    from taskguard.outbox.sweep import Sweeper, Swept
    from taskguard.overrides import Overrides, overridden
    from taskguard.periodic.leader import Leader, Leadership
    from taskguard.periodic.ticks import interval_due_at, tick_name
    from taskguard.run.guard import Guard, current_guard
    from taskguard.run.runner import Runner
    from taskguard.settings import UNSET, set_defaults

__version__ = "0.1.0"

_HOMES = {
    "Answered": "model.delivery",
    "Claim": "model.claims",
    "Codec": "model.delivery",
    "Completed": "model.delivery",
    "Configuration": "doctor",
    "Decorator": "decorated",
    "Deferred": "model.delivery",
    "Delivery": "model.delivery",
    "Dropped": "model.delivery",
    "ExternalConnection": "ledger.transactions.external",
    "EXPIRED": "model.states",
    "Former": "model.former",
    "Guard": "run.guard",
    "GuardedFunction": "guarded",
    "GuardedTask": "doctor",
    "GuardedRow": "ledger.own_rows.guarded_row",
    "Finding": "findings",
    "FindingTemplate": "findings",
    "Level": "findings",
    "Leader": "periodic.leader",
    "Leadership": "periodic.leader",
    "Lease": "model.lease",
    "MemoryLocks": "locks.memory",
    "MessageRef": "model.delivery",
    "NOT_BEFORE": "model.delivery",
    "Duplicate": "outbox.enqueue",
    "OutcomeOfEnqueue": "outbox.enqueue",
    "Placed": "outbox.enqueue",
    "Standing": "model.records",
    "check_delay": "outbox.enqueue",
    "not_before_s": "outbox.enqueue",
    "Outcome": "model.delivery",
    "Parked": "model.delivery",
    "Parking": "model.delivery",
    "Policy": "model.policy",
    "Queue": "model.delivery",
    "Relay": "outbox.relay",
    "RelayProcess": "outbox.relay_process",
    "Report": "doctor",
    "Runner": "run.runner",
    "SqlLedger": "ledger.sql",
    "Overrides": "overrides",
    "Sweeper": "outbox.sweep",
    "Swept": "outbox.sweep",
    "TaskGuard": "api",
    "UNSET": "settings",
    "connect": "api",
    "ddl_statements": "ledger.schema.creation",
    "set_defaults": "settings",
    "enqueue_in": "outbox.enqueue",
    "examine": "doctor",
    "log_findings": "doctor",
    "include_name": "ledger.schema.creation",
    "interval_due_at": "periodic.ticks",
    "tick_name": "periodic.ticks",
    "current_guard": "run.guard",
    "key": "keys",
    "overridden": "overrides",
    "upgrade_statements": "ledger.schema.upgrades",
}

__all__ = [
    "EXPIRED",
    "NOT_BEFORE",
    "UNSET",
    "Answered",
    "Claim",
    "Codec",
    "Completed",
    "Configuration",
    "Decorator",
    "Deferred",
    "Delivery",
    "Dropped",
    "Duplicate",
    "ExternalConnection",
    "Finding",
    "FindingTemplate",
    "Former",
    "Guard",
    "GuardedFunction",
    "GuardedRow",
    "GuardedTask",
    "Leader",
    "Leadership",
    "Lease",
    "Level",
    "MemoryLocks",
    "MessageRef",
    "Outcome",
    "OutcomeOfEnqueue",
    "Overrides",
    "Parked",
    "Parking",
    "Placed",
    "Policy",
    "Queue",
    "Relay",
    "RelayProcess",
    "Report",
    "Runner",
    "SqlLedger",
    "Standing",
    "Sweeper",
    "Swept",
    "TaskGuard",
    "check_delay",
    "connect",
    "current_guard",
    "ddl_statements",
    "enqueue_in",
    "errors",
    "events",
    "examine",
    "fenced",
    "include_name",
    "interval_due_at",
    "key",
    "log_findings",
    "overridden",
    "set_defaults",
    "tick_name",
    "upgrade_statements",
]


def __getattr__(name: str) -> Any:
    if name in ("errors", "events", "fenced"):
        return importlib.import_module(f"taskguard.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'taskguard' has no attribute {name!r}")
    from taskguard.drivers import extras_named

    with extras_named(f"taskguard.{name}"):
        value = getattr(importlib.import_module(f"taskguard.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
