"""Locks on ZooKeeper 3.6 or later, alone or an ensemble, by kazoo.

Guarantees
* A key has one owner at a time, even across restarts and elections, because ZooKeeper keeps
  committed data. Only the owner renews, releases or hands over its key, each in one transaction.
  Every call can be repeated safely.
* A key's tokens grow, even after an election or a loss of the servers' data. They also grow after a
  change of the kind of lock server, if processes are restarted. Clocks must not go back.
* A waiter is notified of the release.

Exclusion against a paused holder is not guaranteed here, but by the ledger. In addition, a server
that is cut off from its leader may answer for one or two ticks for a session that has ended.

Locks belong to a session. A process has one session for all its keys, and a forked child has its
own. A session ends by `close()`, or if the process is silent for the session timeout. If a grant or
a release got no answer, its keys are released as soon as the session is connected.

The servers hold, for the key order:42, which is written `order%3A42`:

    /taskguard/lock/order%3A42            the lock: token:timeout:nonce/message of its owner
    /taskguard/owner/nonce,order%3A42     the owner's hold; created and deleted with the lock
    /taskguard/epoch                      the start of tokens: the server's clock in µs when a
                                          session that needs tokens last wrote it

The first two nodes are ephemeral. A change of a lock removes the hold in the same transaction, so
it fails if another owner has the lock. A renewal needs only the session's holds, which one request
returns.

If the URL has a user, only that user can change what taskguard creates.

Read next: `provider.py`, the steps; `session.py`, the connection, and requests without an answer;
`wire.py`, requests; `tokens.py`; `address.py`, URLs; `health.py`, what `check()` finds.
"""

from __future__ import annotations

from taskguard import errors

try:
    import kazoo as _kazoo  # noqa: F401
except ModuleNotFoundError as error:
    raise errors.MissingDriverError(
        "taskguard_zookeeper needs the package kazoo, which is not installed: pip install "
        "'celery-taskguard[zookeeper]'."
    ) from error

from taskguard_zookeeper.provider import ZooKeeperLocks

__all__ = ["ZooKeeperLocks", "open_locks"]


def open_locks(url: str, *, ledger: object) -> ZooKeeperLocks:
    """Return the locks of a URL; an entry point of the group `taskguard.locks`."""
    del ledger  # these locks have tokens of their own
    return ZooKeeperLocks(url)
