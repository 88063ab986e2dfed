"""Locks on Consul 1.8 or later, by its HTTP interface, with urllib3.

Guarantees: a key has one owner at a time, also across restarts and fail-overs; only its owner
renews, frees or hands it on; every call may be asked twice. Tokens grow for each key, also after
the server lost its memory, and when the kind of server is changed and processes start anew, as long
as clocks do not go back. A waiter is told of the release itself.
Does not guarantee: exclusion against a paused holder, which is the ledger's part.

Locks are a session's: a process has one for each ttl, of ten seconds at least, which holds all its
keys. `close()` ends them, and they end when nobody renews them, which Consul may notice as late as
twice their ttl. What was granted, or is to be freed, without an answer is freed before a session is
renewed.

What stands in the server:

    taskguard/lock/order%3A42    the lock: epoch:ttl:nonce/message of its owner, under its session;
                                 =token instead of the epoch if it came from another session
    taskguard/epoch              what an index is added to for a token: the server's clock in µs
                                 less its index, as of the youngest session

The least that its user needs: `key_prefix "taskguard/" { policy = "write" }` and
`session_prefix "" { policy = "write" }`.

Read next: `provider.py`, the steps; `link.py`, what goes over the wire.
"""

from __future__ import annotations

from taskguard import errors

try:
    import urllib3 as _urllib3  # noqa: F401
except ModuleNotFoundError as error:
    raise errors.MissingDriverError(
        "taskguard_consul needs the package urllib3, which is not installed: pip install "
        "'celery-taskguard[consul]'."
    ) from error

from taskguard_consul.provider import ConsulLocks

__all__ = ["ConsulLocks", "open_locks"]


def open_locks(url: str, *, ledger: object) -> ConsulLocks:
    """Return the locks of a URL; an entry point of the group `taskguard.locks`."""
    del ledger  # these locks have tokens of their own
    return ConsulLocks(url)
