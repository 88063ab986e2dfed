"""Locks on ZooKeeper 3.6 or later, alone or an ensemble, by kazoo.

Guarantees: a key has one owner at a time, also across restarts and elections, for ZooKeeper does
not lose what it has committed; only its owner renews, frees or hands it on, each by one
transaction; every call may be asked twice. Tokens grow for each key, also after an election, after
the servers lost their data, and when the kind of server is changed and processes start anew, as
long as clocks do not go back. A waiter is told of the release itself.
Does not guarantee: exclusion against a paused holder, which is the ledger's part; a server that is
cut off from its leader may besides answer for a tick or two for a session that has ended.

Locks are a session's: a process has one, which holds all its keys, and a forked child has its own.
`close()` ends it, and so does a silence of its time-out. What was granted, or is to be freed,
without an answer is freed as soon as the session is connected.

What stands in the server, `order%3A42` being the key order:42:

    /taskguard/lock/order%3A42            the lock: token:time-out:nonce/message of its owner
    /taskguard/owner/nonce,order%3A42     the owner's hold on it; the two come and go together
    /taskguard/epoch                      where tokens begin: the server's clock in µs when it was
                                          last written, which is once a session that wants tokens

The first two are ephemeral. Whoever changes a lock removes the hold in the same transaction, which
therefore fails where the lock is no longer that owner's; and the session's holds, which it is told
in one answer, are all that a renewal has to see.

Where a user is in the URL, what is created can be changed by that user alone.

Read next: `provider.py`, the steps; `session.py`, the connection and what is doubtful; `wire.py`,
what goes over it; `tokens.py`; `address.py`, URLs; `findings.py`, what `check()` looks at.
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
