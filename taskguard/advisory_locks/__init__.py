"""Locks of a database's session: advisory ones of PostgreSQL, GET_LOCK of MariaDB and MySQL.

For who may make no table there; where he may, `lock_table` knows more and passes poolers.

Guarantees, while the server runs: a key has one owner at a time, also within the process, whose one
session has all its locks and may take each as often as it likes; several keys are taken in one
order, all or none. The server ends a session that it has not heard of for as long as its longest
lease: so a frozen process, or one that is cut off, keeps no key for longer than a lease would. A
process that dies, `close()` and whatever else ends the session free its keys at once. What ends a
session ends all leases of its process: also an interrupt amid a question, and a second one, for
nobody knows then what it holds. Holders learn of it by their next renewal, which is one round trip
however many they are. A fork has a session of its own.

Does not guarantee: tokens, an order among those who wait, or several at a key. Nobody but the
process itself knows who holds a key, so nothing is handed over. A failover, or a restart of the
server, frees everything at once. A session has to be its process's own: behind a pooler of any kind
nothing is granted, nor by a server that is a replica.

What stands in the server is a number, or a name, that is made of the key by a hash (`names.py`):
keys with the same one exclude each other, and no more. Everybody else's locks of the same kind are
in the same room: on PostgreSQL those of the database, on MariaDB and MySQL of the server.

Read next: `provider.py`, the steps; `session.py`, what a session is asked; `postgresql.py` and
`mysql.py`, how; `findings.py`, what `check()` finds.
"""

from taskguard.advisory_locks.provider import AdvisoryLocks

__all__ = ["AdvisoryLocks"]
