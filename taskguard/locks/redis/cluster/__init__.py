"""Locks on a Redis Cluster, of Redis or Valkey: `redis+cluster://host:port,host:port`.

Guarantees what `taskguard.locks.redis` does, while the node that has a key keeps its memory, and
for one key in the same way: one script, one round trip, at the node that has its slot. All entries
of a key share a slot, and move together.
Several keys are in several slots, which no script can take at once. They are taken in order, one by
one; where one is another's, or a node does not answer, those that were taken are given back. So
all or none holds of what `acquire` answers, while others may be refused for the moment until then
by one who is about to be refused. Their token is the highest that any of them was given, and is
written to all.
Does not guarantee: exclusion across a failover: what a master granted and its replica had not heard
of is granted again. That is the ledger's part.

In the server stands what stands in one Redis, with one difference: a key that begins with `}` or
with a backslash, or is empty, has a backslash before it there, for `{}` is no hash tag. The user
needs `+cluster|slots` (on 6.2: `+cluster`) and, for BLPOP and scripts in a slot that is moving,
`+asking`; `+cluster|nodes`, `+cluster|info`, `+config|get` and `+info` for `check()`.

While a slot is moved key by key, scripts of several entries are answered TRYAGAIN: nobody new
gets a key of that slot; who holds one renews and releases it.

Read next: `provider.py`, the steps; `nodes.py`, the way to the nodes; `health.py`, findings.
"""

from taskguard.locks.redis.cluster.provider import RedisClusterLocks

__all__ = ["RedisClusterLocks"]
