"""Whether another application uses the same names for locks: same lock server, same namespace.

A starting worker leaves the id of its ledger at the lock server for a day, as the holder of a key
that no call can have. A process that finds another id there reports it.

Guarantees: `taskguard doctor` leaves no id there.

Does not find two applications of one ledger, or of a ledger and its copy (a restored backup has
the same id). Does not find any without a ledger, on Redlock, or on Consul, whose locks end with
their session. Does not find two applications that have started no worker within a day.
"""

from __future__ import annotations

from typing import Any

from taskguard.doctor import findings
from taskguard.doctor.configuration import named
from taskguard.errors import TaskguardError
from taskguard.findings import Finding
from taskguard.guarded import prefix_of
from taskguard.locks.base import Held, LockProvider
from taskguard.model.lease import Owner, new_owner
from taskguard.model.policy import DAY_S

__all__ = ["check_namespace"]

_KEY = "the ledger"  # keys of calls hold no blanks
_LOOK_S = 1.0


def check_namespace(
    locks: LockProvider, ledger: Any, namespace: str, *, leaves_mark: bool
) -> list[Finding]:
    """Find another ledger's id. With `leaves_mark`, leave this ledger's if there is none."""
    traits = locks.traits
    if traits.session or not traits.tokens or not hasattr(ledger, "mark"):
        return []
    keys = (prefix_of(namespace) + _KEY,)
    try:
        mark = ledger.mark(make=leaves_mark)
        if mark is None:
            return []  # no worker has ever started
        ours = Owner(mark, named(ledger))
        asker, ttl_s = (ours, DAY_S) if leaves_mark else (new_owner(), _LOOK_S)
        answer = locks.acquire(keys, asker, ttl_s=ttl_s, with_fence=False, wait_s=0.0)
        if not isinstance(answer, Held):
            if not leaves_mark:
                locks.release(keys, asker)
            return []
    except TaskguardError:
        return []  # other findings report the lock server and the ledger
    if answer.owner.nonce == mark:
        return []
    where = f"the lock server {named(locks)}"
    return [findings.NAMESPACE_SHARED.at(where, ledger=answer.owner.message)]
