"""Locks on ZooKeeper 3.6 or later, alone or an ensemble, by kazoo.

Guarantees
* A key has one owner at a time, also across restarts and elections, because ZooKeeper keeps what it
  has committed. Only the owner renews, releases or hands over its key, each by one transaction.
  Every call may be asked twice.
* Tokens grow for each key, also after an election, after the servers lost their data, and after a
  change of the kind of lock server if processes start anew, as long as clocks do not go back.
* A waiter learns of the release itself.

Does not guarantee exclusion against a paused holder. The ledger does. A server that is cut off from
its leader may also answer for a tick or two for a session that has ended.

Locks belong to a session. A process has one session, which holds all its keys, and a forked child
has its own. `close()` ends it, and so does a silence of its time-out. If a grant or a release got
no answer, its keys are released as soon as the session is connected.

The servers hold, for the key order:42, which is written `order%3A42`:

    /taskguard/lock/order%3A42            the lock: token:time-out:nonce/message of its owner
    /taskguard/owner/nonce,order%3A42     the owner's hold on it; the two come and go together
    /taskguard/epoch                      where tokens begin: the server's clock in µs when a
                                          session that wants tokens last wrote it

The first two nodes are ephemeral. A change of a lock removes the hold in the same transaction, so
the change fails if the lock is no longer that owner's. A renewal reads the holds of the session in
one answer, and needs nothing else.

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
