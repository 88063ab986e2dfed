"""taskguard makes Celery and RQ tasks safe to deliver twice.

The lock server coordinates which delivery tries. The database decides which delivery wins.

Here are the public names for users. Authors of an integration import `taskguard.integration`, and
authors of a lock provider `taskguard.locks`. Everything else is private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskguard import errors as errors
    from taskguard import events as events
    from taskguard import fenced as fenced
    from taskguard.api import TaskGuard as TaskGuard
    from taskguard.api import connect as connect
    from taskguard.keys import key as key
    from taskguard.ledger.own_rows.guarded_row import GuardedRow as GuardedRow
    from taskguard.ledger.schema.creation import ddl_statements as ddl_statements
    from taskguard.ledger.schema.creation import include_name as include_name
    from taskguard.ledger.schema.upgrades import upgrade_statements as upgrade_statements
    from taskguard.ledger.sql import SqlLedger as SqlLedger
    from taskguard.model.former import Former as Former
    from taskguard.model.lease import Lease as Lease
    from taskguard.options import CallOptions as CallOptions
    from taskguard.options import TaskOptions as TaskOptions
    from taskguard.periodic.leader import Leader as Leader
    from taskguard.periodic.leader import Leadership as Leadership
    from taskguard.run.current import current_guard as current_guard
    from taskguard.run.guard import Guard as Guard
    from taskguard.run.lock import Lock as Lock
else:
    from taskguard.lazy import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "taskguard": "errors events fenced",
            "taskguard.api": "TaskGuard connect",
            "taskguard.keys": "key",
            "taskguard.ledger.own_rows.guarded_row": "GuardedRow",
            "taskguard.ledger.schema.creation": "ddl_statements include_name",
            "taskguard.ledger.schema.upgrades": "upgrade_statements",
            "taskguard.ledger.sql": "SqlLedger",
            "taskguard.model.former": "Former",
            "taskguard.model.lease": "Lease",
            "taskguard.options": "CallOptions TaskOptions",
            "taskguard.periodic.leader": "Leader Leadership",
            "taskguard.run.current": "current_guard",
            "taskguard.run.guard": "Guard",
            "taskguard.run.lock": "Lock",
        },
    )

__version__ = "0.1.0"
