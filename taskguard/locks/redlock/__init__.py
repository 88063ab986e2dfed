"""Locks that a majority of several independent Redis or Valkey servers grants (Redlock).

Guarantees, while a majority of the configured servers answers and remembers:

* A key has one owner at a time. Only its owner renews it, frees it or hands it over.
* Every call may be made twice.
* A call does not wait for a minority of servers that is down, frozen or slow.
* A server that was just started has no vote until every lease that it may have forgotten is over.
  With `appendfsync always` it votes at once.

Does not guarantee exclusion across a loss of memory without a restart (FLUSHALL, eviction), or a
jump of a server's clock, which also hides a restart. Does not stop a holder that was paused. It has
no fencing tokens, so Redlock needs a ledger.

How a lock works (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/):

* One thread sends each call to all servers, and then reads the replies. An answer counts as soon as
  a majority has given it.
* The keys are granted if a majority of the *configured* servers grants them in time. Otherwise a
  release is sent to all servers, even if they refused or have not answered.
* The keys are refused if one holder has so many servers that no majority is left. If the votes are
  split, the callers ask again after a short random pause. The caller with the first server's vote
  keeps its votes meanwhile.
* A release and a renewal go to every server.

Each server stores the same data as a single server (`taskguard.locks.redis`), and most scripts are
the same. The user needs the same rights, and +info (and +config|get for `appendfsync always`).

Read next: `provider.py`, the steps; `election.py`, how a lock is granted; `servers.py`, connections
to all servers; `channel.py`, one connection; `health.py`, the findings.
"""

from taskguard.locks.redlock.provider import RedlockLocks

__all__ = ["RedlockLocks"]
