"""Locks that a majority of several independent Redis or Valkey servers grants (Redlock).

Guarantees, while a majority of the configured servers answers and remembers: a key has one owner at
a time; only its owner renews, frees or hands it on; every call may be asked twice. A server that is
away, frozen or slow does not hold up the others. A server that has just been started has no vote
until every lease that it may have forgotten has run out, unless it writes each change to its disk
first (`appendfsync always`).
Does not guarantee: exclusion across a loss of memory without a restart (FLUSHALL, eviction), jumps
of the servers' clocks, a restart that the server's clock hides, nor against a paused holder. It has
no tokens that grow, which could tell: that is why it works beside a ledger only.

The way of a lock (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/):

* The servers of a key have an order of its own, the same for everybody. The first ones that make a
  majority are asked at once; the rest where that is not enough, and for work that lasts longer than
  a few milliseconds behind its back (`spread.py`). So a short lock costs three servers of five, and
  a longer one stands on all of them.
* Granted: a majority of those that are *configured*, in time. Otherwise what was taken is given
  back to whoever was asked, also where the answer was no, or none.
* Refused: one holder has so many servers that no majority is left. Votes that are split are asked
  for again after a short random pause; whoever has the key's first server keeps what it has
  meanwhile.
* A release and a renewal go to every server that the lock stands on.

What stands in each server is what stands in a single one: `taskguard.locks.redis`, whose scripts
these are. The user needs the same rights, and +info (and +config|get, where appendfsync is always).

Read next: `provider.py`, the steps; `election.py`, how a lock is granted; `servers.py`, who is
there; `line.py`, one connection; `spread.py`, the rest of the servers; `checks.py`, the findings.
"""

from taskguard.locks.redlock.provider import RedlockLocks

__all__ = ["RedlockLocks"]
