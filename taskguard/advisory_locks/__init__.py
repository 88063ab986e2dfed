"""Locks of a database session: advisory locks of PostgreSQL, GET_LOCK of MariaDB and MySQL.

Use this if you cannot create tables. Otherwise prefer `lock_table`: it reports holders and works
behind poolers.

Guarantees, while the server runs:

* A key has one owner at a time, also within a process. One session has all locks of a process.
* Several keys are taken in sorted order, all or none.
* The server ends a session that was idle for as long as its longest lease. So a frozen or
  disconnected process keeps its keys no longer than a lease lasts.
* The end of a session frees its keys at once: when its process dies, or by `close()`.
* If a statement is interrupted or fails, taskguard ends the session, because the session's locks
  are unknown. That ends all leases of the process. Holders notice it at their next renewal.
* A renewal is one round trip, however many leases the process has. A fork has its own session.

Does not guarantee: tokens, an order of waiters, or shared keys. Other processes cannot read the
owner of a key, so keys cannot be handed over. A failover or a restart of the server frees all keys
at once. Behind a pooler of any kind, and on a replica, taskguard grants no locks.

A lock's name in the server is a hash of its key (`names.py`). Two keys with the same hash exclude
each other, without further harm. Locks of other applications share the namespace: the database on
PostgreSQL, the server on MariaDB and MySQL.

Read next: `provider.py`, the calls; `session.py`, one session; `postgresql.py` and `mysql.py`,
their SQL; `findings.py`, the findings of `check()`.
"""

from taskguard.advisory_locks.provider import AdvisoryLocks

__all__ = ["AdvisoryLocks"]
