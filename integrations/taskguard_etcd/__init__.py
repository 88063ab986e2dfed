"""Locks on etcd 3.4 or later, alone or a cluster, by its JSON gateway, with urllib3.

Guarantees
* A key has one owner at a time, also across restarts and fail-overs, because etcd keeps what it has
  committed. Only the owner renews, releases or hands over its key. Every call may be asked twice.
* Tokens grow for each key, also after the server lost its memory and after a change of the kind of
  lock server, as long as the members' clocks do not go back.
* A waiter learns of the release itself.

Does not guarantee exclusion against a paused holder, or across a cluster that was restored from a
snapshot or began anew. The ledger does. Leases last whole seconds, two at least.

To take a lock, the provider first grants a lease, whose id is a hash of owner and keys, so that it
may be asked for twice. One transaction then puts all keys under the lease, or reads their holders.
A release ends the lease, and with it all keys. A renewal renews the lease, and looks whether the
keys are still under it.

The server holds:

    taskguard/lock/order:42    the lock: nonce/message of its owner, under its lease
    taskguard/epoch            a token is this number plus etcd's revision: the server's clock in µs
                               less its revision, at the last grant with a token

If etcd has users, these are the least rights of taskguard's user:

    etcdctl role add locks
    etcdctl role grant-permission locks readwrite --prefix=true taskguard/

Read next: `provider.py`, the steps; `messages.py`, requests as values; `link.py`, connections and
errors; `health.py`, what `check()` finds.
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
