"""Locks on a Redis Cluster, of Redis or Valkey: `redis+cluster://host:port,host:port`.

Guarantees what `taskguard.locks.redis` does, while the node that has a key keeps its memory. One
key works in the same way: one script, one round trip, at the node that serves its slot. All entries
of a key share a slot, and move together.

Several keys are in several slots, which no script can take at once. They are taken one by one, in
order. If another owner holds a key, or a node gives no answer, the provider frees the keys that it
took. So `acquire` takes all or none, but until then it may refuse other owners. The token of the
keys is the highest token of any of them, and is written to all.

Does not guarantee exclusion across a failover: if the replica did not have a grant, it grants the
key again. The ledger protects against that.

The server has the same entries as a single Redis, with one difference. A key that begins with `}`
or a backslash, or is empty, has a backslash before it there, because `{}` is no hash tag. The user
needs `+cluster|slots` (on 6.2: `+cluster`), and `+asking` for scripts in a slot that is moving.
`check()` needs `+cluster|info`, `+config|get` and `+info`.

While a slot is moved key by key, nodes answer TRYAGAIN to scripts of several entries. No new owner
gets a key of that slot. A holder renews and releases its key.

Read next: `provider.py`, the steps; `nodes.py`, calls to the nodes; `topology.py`, slots and nodes
as redis-py finds them; `health.py`, findings.
"""

from taskguard.locks.redis.cluster.provider import RedisClusterLocks

__all__ = ["RedisClusterLocks"]
