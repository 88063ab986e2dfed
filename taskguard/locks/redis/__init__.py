"""Locks on a Redis or Valkey server, 6.2 or later: every step one script, one round trip.

Guarantees, while the server keeps its memory: a key has one owner at a time; only its owner
renews, frees or hands it on; every call may be asked twice. Tokens are max(last + 1, the server's
clock in µs): they grow for each key, also across FLUSHALL, eviction and restarts, as long as the
server's clock does not go back. Who waits for one key gets it in the order in which they came, by
the release itself: see `lua/line.lua`. Several may share a key: each comes in while fewer than its
own limit hold it, in the same line.
Does not guarantee: exclusion across a failover or a loss of the server's memory, nor against a
paused holder. That is the ledger's part.

What stands in the server, all with an expiry (`{…}` makes one Cluster slot of it):

    taskguard:{order:42}            the lock: nonce/message of its owner; a sorted set of those who
                                    share it, by when their leases end
    taskguard:{order:42}:fence      the last token, 24 h; only where tokens are asked for

and only while somebody waits:

    taskguard:{order:42}:line           who waits, in the order in which they came
    taskguard:{order:42}:waits:<nonce>  one of them lives: 3 s after it has asked
    taskguard:{order:42}:wake:<nonce>   one element when its turn has come, for BLPOP; 1 s
    taskguard:{order:42}:look           one element for somebody else, to see whether it came; 50 ms

An expired fence is no loss, since the clock alone makes the next token higher; one that is ahead
of the clock is kept for that much longer.

The least that its user needs:

    ACL SETUSER tasks on >password ~taskguard:* +evalsha +eval +get +set +del +exists
        +pexpire +pttl +time +lpush +blpop +zadd +zcard +zrange +zrem +zscore
        (and +select for a database other than 0)

The server should run with `maxmemory-policy noeviction`: `check()` says if it does not.
A Redis Cluster is another provider, in `cluster`: a key's entries share a slot, those of several
keys do not.

Read next: `provider.py`, the steps; `link.py`, connections, time-outs and errors; `protocol.py`,
what goes over the wire; `address.py`, URLs and clients; `sentinel.py`, which server it is where
Sentinels say so.
"""

from taskguard.locks.redis.provider import RedisLocks

__all__ = ["RedisLocks"]
