"""Locks in a table of PostgreSQL, MariaDB or MySQL: no further server is needed.

Guarantees, while the database keeps its rows:

* A key has one owner at a time. Only its owner can renew, free or hand over the key.
* Each call is one transaction, uses the database's clock, and may be repeated.
* A call locks the rows of its keys in sorted order, so calls cannot deadlock.
* A token is max(last + 1, the clock in µs), as on Redis. So tokens keep growing if an application
  changes to another kind of lock server.
* It works behind a transaction pooler.
* Several owners can share a key. An owner gets a share while fewer than its own limit hold one.

Does not guarantee exclusion if the database loses rows (an UNLOGGED table after a crash, a replica
that was behind), or against a paused holder. The ledger protects against both.

The table `taskguard_locks` has one row for each key. It is separate from the ledger's tables and
has no version: `taskguard locks create` adds new functions and keeps the old ones.

    key, owner       ASCII, so that equality does not depend on collations or encodings. The owner
                     of a shared key is a JSON object: the end of each owner's lease
    until            end of the lease, in µs; 0 after a release
    fence            the last token; 0 if no token was requested: then a release deletes the row
    wanted_until     how long a waiter is interested: a release before that notifies it (PostgreSQL)

Some releases (`provider.py`) and `taskguard purge` delete rows that had no owner for a day.

Read next: `provider.py`, the calls; `postgresql/` and `mysql.py`, their SQL; `listener.py`, how
waiters are woken; `table.py`, how the table is created; `findings.py`, the findings of `check()`.

It is a package above `locks` and `ledger` because it uses the ledger's connections, and the ledger
imports `locks.base`.
"""

from taskguard.lock_table.provider import TableLocks

__all__ = ["TableLocks"]
