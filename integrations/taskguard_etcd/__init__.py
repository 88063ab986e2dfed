"""Locks on etcd 3.4 or later, alone or a cluster, by its JSON gateway, with urllib3.

Guarantees: a key has one owner at a time, also across restarts and fail-overs, for etcd does not
lose what it has committed; only its owner renews, frees or hands it on; every call may be asked
twice. Tokens grow for each key, also after the server lost its memory and when the kind of server
is changed, as long as the members' clocks do not go back. A waiter is told of the release itself.
Does not guarantee: exclusion against a paused holder, nor across a cluster that was restored from
a snapshot or began anew; that is the ledger's part. Leases are of whole seconds, two at least.

How a lock is taken: a lease is granted, whose id is a hash of owner and keys, so that it may be
asked for twice; then one transaction puts all keys under it, or reads who has them. A release ends
the lease, and with it all keys. A renewal renews the lease, and looks whether the keys are still
under it.

What stands in the server:

    taskguard/lock/order:42    the lock: nonce/message of its owner, under its lease
    taskguard/epoch            what a revision is added to for a token: the server's clock in µs,
                               less its revision, as of the last grant that has one

Where etcd knows users, this is the least that ours needs:

    etcdctl role add locks
    etcdctl role grant-permission locks readwrite --prefix=true taskguard/

Read next: `provider.py`, the steps; `messages.py`, what goes over the wire; `link.py`, tokens of
authentication and errors; `../http.py`, connections and time-outs; `findings.py`, what `check()`
looks at.
"""

from __future__ import annotations

from taskguard import errors

try:
    import urllib3 as _urllib3  # noqa: F401
except ModuleNotFoundError as error:
    raise errors.MissingDriverError(
        "taskguard_etcd needs the package urllib3, which is not installed: pip install "
        "'celery-taskguard[etcd]'."
    ) from error

from taskguard_etcd.provider import EtcdLocks

__all__ = ["EtcdLocks", "open_locks"]


def open_locks(url: str, *, ledger: object) -> EtcdLocks:
    """Return the locks of a URL; an entry point of the group `taskguard.locks`."""
    del ledger  # these locks have tokens of their own
    return EtcdLocks(url)
