"""Lock servers, and the public names for authors of a lock provider.

A lock server keeps most duplicates away from the database. If a ledger is configured, no guarantee
depends on a lock server. Every provider passes the contract suite on its real server.

Read next: `base.py`, what a provider does; `registry.py`, how a URL finds its provider.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskguard.findings import Finding as Finding
    from taskguard.findings import FindingTemplate as FindingTemplate
    from taskguard.findings import Level as Level
    from taskguard.locks.base import KEPT_S as KEPT_S
    from taskguard.locks.base import NO_LIMIT as NO_LIMIT
    from taskguard.locks.base import NOBODY as NOBODY
    from taskguard.locks.base import PROMOTED as PROMOTED
    from taskguard.locks.base import Granted as Granted
    from taskguard.locks.base import Held as Held
    from taskguard.locks.base import HintingLocks as HintingLocks
    from taskguard.locks.base import Hold as Hold
    from taskguard.locks.base import Holder as Holder
    from taskguard.locks.base import LockProvider as LockProvider
    from taskguard.locks.base import Renewal as Renewal
    from taskguard.locks.base import SharingLocks as SharingLocks
    from taskguard.locks.base import Traits as Traits
    from taskguard.locks.base import in_batches as in_batches
    from taskguard.locks.endpoints import Endpoint as Endpoint
    from taskguard.locks.endpoints import Endpoints as Endpoints
    from taskguard.locks.endpoints import ServerUrl as ServerUrl
    from taskguard.locks.endpoints import parse_url as parse_url
    from taskguard.locks.findings import LOCK_SERVER_MEMBER as LOCK_SERVER_MEMBER
    from taskguard.locks.findings import LOCK_SERVER_QUORUM as LOCK_SERVER_QUORUM
    from taskguard.locks.idle import IdleQueue as IdleQueue
    from taskguard.locks.memory import MemoryLocks as MemoryLocks
    from taskguard.locks.per_process import PerProcess as PerProcess
    from taskguard.locks.redlock import RedlockLocks as RedlockLocks
    from taskguard.locks.tls import Tls as Tls
    from taskguard.model.lease import Owner as Owner
    from taskguard.model.lease import new_owner as new_owner
    from taskguard.model.policy import check_number as check_number
    from taskguard.native import greenlets as greenlets
else:
    from taskguard.lazy import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "taskguard.findings": "Finding FindingTemplate Level",
            "taskguard.locks.base": (
                "PROMOTED KEPT_S NOBODY NO_LIMIT Granted Held HintingLocks Hold Holder "
                "LockProvider Renewal SharingLocks Traits in_batches"
            ),
            "taskguard.locks.endpoints": "Endpoint Endpoints ServerUrl parse_url",
            "taskguard.locks.findings": "LOCK_SERVER_MEMBER LOCK_SERVER_QUORUM",
            "taskguard.locks.idle": "IdleQueue",
            "taskguard.locks.memory": "MemoryLocks",
            "taskguard.locks.per_process": "PerProcess",
            "taskguard.locks.redlock": "RedlockLocks",
            "taskguard.locks.tls": "Tls",
            "taskguard.model.lease": "Owner new_owner",
            "taskguard.model.policy": "check_number",
            "taskguard.native": "greenlets",
        },
    )
