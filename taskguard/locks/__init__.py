"""Lock servers, and the public names for authors of a lock provider.

A lock server keeps most duplicates away from the database. If a ledger is configured, no guarantee
depends on a lock server. Every provider passes the contract suite on its real server.

Read next: `base.py`, what a provider does; `registry.py`, how a URL finds its provider.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from taskguard.locks.base import (
    CALLED,
    KEPT_S,
    NO_LIMIT,
    NOBODY,
    Granted,
    Held,
    HintingLocks,
    Hold,
    Holder,
    LockProvider,
    Renewal,
    SharingLocks,
    Traits,
    in_batches,
)
from taskguard.model.lease import Owner

if TYPE_CHECKING:
    from taskguard.locks.endpoints import Endpoint, Endpoints, ServerUrl, parse_url
    from taskguard.locks.findings import LOCK_SERVER_MEMBER, LOCK_SERVER_QUORUM
    from taskguard.locks.idle import IdleQueue
    from taskguard.locks.per_process import PerProcess
    from taskguard.locks.tls import Tls
    from taskguard.model.policy import check_number
    from taskguard.native import greenlets

__all__ = [
    "CALLED",
    "KEPT_S",
    "LOCK_SERVER_MEMBER",
    "LOCK_SERVER_QUORUM",
    "NOBODY",
    "NO_LIMIT",
    "Endpoint",
    "Endpoints",
    "Granted",
    "Held",
    "HintingLocks",
    "Hold",
    "Holder",
    "IdleQueue",
    "LockProvider",
    "Owner",
    "PerProcess",
    "Renewal",
    "ServerUrl",
    "SharingLocks",
    "Tls",
    "Traits",
    "check_number",
    "greenlets",
    "in_batches",
    "parse_url",
]

# Loaded when first used: most lock servers need none of them.
_LAZY = {
    "LOCK_SERVER_MEMBER": "taskguard.locks.findings",
    "LOCK_SERVER_QUORUM": "taskguard.locks.findings",
    "Endpoint": "taskguard.locks.endpoints",
    "Endpoints": "taskguard.locks.endpoints",
    "IdleQueue": "taskguard.locks.idle",
    "PerProcess": "taskguard.locks.per_process",
    "ServerUrl": "taskguard.locks.endpoints",
    "Tls": "taskguard.locks.tls",
    "check_number": "taskguard.model.policy",
    "greenlets": "taskguard.native",
    "parse_url": "taskguard.locks.endpoints",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'taskguard.locks' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return found
