"""Whether another application takes its locks by the same names: same lock server, same namespace.

A worker that starts leaves the mark of its ledger's database at the lock server, as the holder of a
key that no call can have, for a day. Whoever finds another's there is told.

Guarantees: who only looks leaves nothing; nothing is asked but when a worker starts, and by
`taskguard doctor`.

Does not tell two applications of one ledger, nor of a ledger and its copy (a restored backup has
its mark); nor any without a ledger, on Redlock, or on Consul, whose locks end with their session;
nor two of which none has started a worker within a day.
"""

from __future__ import annotations

from typing import Any

from taskguard.doctor.configuration import named
from taskguard.errors import TaskguardError
from taskguard.findings import Finding, Level
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
    """A finding where another ledger's mark stands; with `leaves_mark` ours, where none does."""
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
        return []  # what is wrong with either is told elsewhere
    if answer.owner.nonce == mark:
        return []
    return [
        Finding(
            "namespace_shared",
            Level.WARNING,
            where=f"the lock server {named(locks)}",
            what=f"Another ledger's application takes locks there under the same names: "
            f"{answer.owner.message}.",
            why="A key of one keeps the other's waiting, though they are different things.",
            mend="A namespace of its own for each (TASKGUARD_NAMESPACE), or a lock server. After a "
            "move to another ledger this passes within a day.",
        )
    ]
