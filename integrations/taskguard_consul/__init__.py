"""Locks on Consul 1.8 or later, by its HTTP interface, with urllib3.

Guarantees
* A key has one owner at a time, even across restarts and failovers. Only the owner renews, releases
  or hands over its key. Every call can be repeated safely.
* A key's tokens grow, even after the server lost its data. They also grow after a change of the
  kind of lock server, if processes are restarted. Clocks must not go back.
* A waiter is notified of the release.

Exclusion against a paused holder is not guaranteed here, but by the ledger.

Locks belong to a session. A process has one session for each ttl (at least ten seconds), which
holds all keys with that ttl. `close()` ends the sessions. A session that is not renewed ends within
twice its ttl. If a grant or a release got no answer, its keys are released before the session is
renewed.

The server holds:

    taskguard/lock/order%3A42    the lock: epoch:ttl:nonce/message of its owner, under its session;
                                 =token instead of the epoch if it came from another session
    taskguard/epoch              the server's clock in µs minus Consul's index, when the youngest
                                 session began; a token is this number plus an index

The least rights of taskguard's token: `key_prefix "taskguard/" { policy = "write" }` and
`session_prefix "" { policy = "write" }`.

Read next: `provider.py`, the steps; `link.py`, connections and errors.
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
