"""Locks on etcd 3.4 or later, alone or a cluster, by its JSON gateway, with urllib3.

Guarantees
* A key has one owner at a time, even across restarts and failovers, because etcd keeps committed
  data. Only the owner renews, releases or hands over its key. Every call can be repeated safely.
* A key's tokens grow, even after the server lost its data or after a change of the kind of lock
  server. The members' clocks must not go back.
* A waiter is notified of the release.

Exclusion against a paused holder is not guaranteed here, but by the ledger. The same is true if the
cluster was restored from a snapshot or lost its data. Leases last whole seconds, at least two.

To take a lock, the provider first creates a lease in etcd. Its id is a hash of owner and keys, so
that the request can be repeated. One transaction then puts all keys under the lease, or reads their
holders. A release ends the lease, and with it all keys. A renewal renews the lease and checks that
the keys are still under it.

The server holds:

    taskguard/lock/order:42    the lock: nonce/message of its owner, under its lease
    taskguard/epoch            the server's clock in µs minus etcd's revision, at the last grant
                               with a token; a token is this number plus a revision

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
