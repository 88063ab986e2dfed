"""Locks in a table of PostgreSQL, MariaDB or MySQL: no further server is needed.

Guarantees, while the database keeps its rows: a key has one owner at a time; only its owner
renews, frees or hands it on; every call may be asked twice, is one transaction that begins and ends
with it, and goes by the database's clock. Keys are locked in their order, so that callers wait for
each other and never in a ring. Tokens are max(last + 1, the clock in µs), as on Redis: they grow
also where the kind of lock server is changed. It works behind a pooler of transactions. Several may
share a key, each as long as fewer than its own limit hold it.
Does not guarantee: exclusion where the database loses rows (an UNLOGGED table after a crash, a
replica that lacked the last ones), nor against a paused holder. That is the ledger's part.

What stands in the table `taskguard_locks`, one row for a key. It is no part of the ledger's
tables, and has no version: what changes in it is made beside the old by `taskguard locks create`.

    key, owner       as ASCII, so that no collation and no encoding has a say in what is equal;
                     of a key that is shared the owner is a JSON object: of each until when
    until            the lease's end, in µs; 0 after a release
    fence            the last token; 0: none was asked for, and the row goes with its lock
    wanted_until     until when somebody waits for it: a release then says so (PostgreSQL)

A row that nobody has held for a day goes in passing (`provider.py`), or by `taskguard purge`.

Read next: `provider.py`, what is asked; `postgresql/` and `mysql.py`, how it is asked there;
`listener.py`, how waiters are woken; `table.py`, the table; `findings.py`, what `check()` finds.

A package of its own, above `locks` and `ledger`: it is a lock provider that goes by the ledger's
connections, and the ledger knows `locks.base`.
"""

from taskguard.lock_table.provider import TableLocks

__all__ = ["TableLocks"]
