"""Locks on a Redis or Valkey server, 6.2 or later: every step is one script and one round trip.

Guarantees, while the server keeps its memory
* A key has one owner at a time. Only its owner renews it, frees it or hands it over. Every call may
  be made twice.
* Tokens are max(last + 1, the server's clock in µs). They grow for each key, also across FLUSHALL,
  eviction and restarts, as long as the server's clock does not go back.
* Waiters for one key get it in the order in which they came, by the release itself: see
  `lua/line.lua`. Owners that share a key wait in the same order. Each gets the key while fewer than
  its own limit hold it.

Does not guarantee exclusion across a failover or a loss of the server's memory, or against a paused
holder. The ledger does.

The server holds these entries, all with an expiry (`{…}` puts them in one slot of a Cluster):

    taskguard:{order:42}            the lock: nonce/message of its owner. If it is shared, a sorted
                                    set of its owners, by the end of their leases
    taskguard:{order:42}:fence      the last token, for 24 h, if tokens are requested
    taskguard:{order:42}:hint       a message waits for the key in the ledger; for 24 h

and only while there are waiters:

    taskguard:{order:42}:line           the waiters, in the order in which they came
    taskguard:{order:42}:waits:<nonce>  one waiter is alive: for 3 s after it has asked
    taskguard:{order:42}:wake:<nonce>   one element when its turn has come, for BLPOP; 1 s
    taskguard:{order:42}:look           one element for the next waiter, to check on it; 50 ms

An expired fence is no loss, because the clock alone makes the next token higher. A fence that is
ahead of the clock is kept for longer by that difference.

These are the least rights of its user:

    ACL SETUSER tasks on >password ~taskguard:* +evalsha +eval +get +set +del +exists
        +pexpire +pttl +time +lpush +blpop +zadd +zcard +zrange +zrem +zscore
        (and +select for a database other than 0)

Run the server with `maxmemory-policy noeviction`: `check()` reports if it does not.
A Redis Cluster has another provider, in `cluster`, because several keys are in several slots.

Read next: `provider.py`, the steps; `link.py`, connections, timeouts and errors; `protocol.py`,
packed commands; `address.py`, URLs and clients; `sentinel.py`, the master that Sentinels name.
"""

from taskguard.locks.redis.provider import RedisLocks

__all__ = ["RedisLocks"]
