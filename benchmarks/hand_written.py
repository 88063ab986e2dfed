"""Code that a careful engineer would write by hand for one task, as the optimum to compare with.

A lock script, `INSERT … ON CONFLICT` as the claim, a conditional UPDATE with the effect, a release
script; redis-py and psycopg, one connection each, every commit flushed. It renews nothing, defers
nothing, gives nothing back, and has one key and one table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import psycopg
import redis

SCHEMA = """
create table if not exists hand_works (
    id text primary key, state text not null, fence bigint not null,
    owner text not null, lease_until timestamptz not null
)
"""

if TYPE_CHECKING:
    from typing import LiteralString

_CLAIM = """
insert into hand_works as w (id, state, fence, owner, lease_until)
values (%(id)s, 'PROCESSING', (extract(epoch from clock_timestamp()) * 1000000)::bigint,
        %(owner)s, clock_timestamp() + interval '30 s')
on conflict (id) do update set
    state = 'PROCESSING', fence = greatest(w.fence + 1, excluded.fence),
    owner = excluded.owner, lease_until = excluded.lease_until
where w.state = 'NEW' or (w.state = 'PROCESSING' and w.lease_until < clock_timestamp())
returning fence
"""

_COMPLETE = """
update hand_works set state = 'DONE'
where id = %(id)s and state = 'PROCESSING' and fence = %(fence)s and owner = %(owner)s
"""

ORDERS = """
create table if not exists orders (
    id bigint primary key, status text not null, fence bigint, owner text, lease_until timestamptz
)
"""

_CLAIM_ROW = """
update orders set
    status = 'SHIPPING', owner = %(owner)s, lease_until = clock_timestamp() + interval '30 s',
    fence = greatest(fence + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
where id = %(id)s
    and (status = 'PAID' or (status = 'SHIPPING' and lease_until < clock_timestamp()))
returning fence
"""

_COMPLETE_ROW = """
update orders set status = 'SHIPPED'
where id = %(id)s and status = 'SHIPPING' and fence = %(fence)s and owner = %(owner)s
"""

_ACQUIRE = """
if redis.call('set', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return {} end
return {redis.call('get', KEYS[1]), redis.call('pttl', KEYS[1])}
"""

_RELEASE = """
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


class HandLock:
    """The lock in Redis."""

    def __init__(self, redis_url: str) -> None:
        self.redis = redis.Redis.from_url(redis_url)
        self.acquire = self.redis.register_script(_ACQUIRE)
        self.release = self.redis.register_script(_RELEASE)


class ByHand(HandLock):
    """The hand-written way of one delivery."""

    def __init__(self, redis_url: str, dsn: str, *, create: bool = True) -> None:
        super().__init__(redis_url)
        self.db = psycopg.connect(dsn, autocommit=True)
        if create:
            self.db.execute(SCHEMA)
            self.db.execute(ORDERS)

    def run(self, work: str, effect: Callable[[Any], object] | None = None) -> bool:
        """Lock, claim, effect with DONE, release. Return False if the work is held or done."""
        return self._run(work, work, effect, _CLAIM, _COMPLETE)

    def run_order(self, order: int, effect: Callable[[Any], object] | None = None) -> bool:
        """Do it by hand with the states in the order's own row, which has columns for them."""
        return self._run(f"order:{order}", order, effect, _CLAIM_ROW, _COMPLETE_ROW)

    def _run(
        self,
        key: str,
        row: object,
        effect: Callable[[Any], object] | None,
        claim: LiteralString,
        complete: LiteralString,
    ) -> bool:
        owner = os.urandom(12).hex()
        if self.acquire(keys=[f"hand:{key}"], args=[owner, 30_000]):
            return False  # whose it is, and for how long, is what a deferral has to know
        try:
            values: dict[str, Any] = {"id": row, "owner": owner}
            claimed = self.db.execute(claim, values).fetchone()
            if claimed is None:
                return False
            values["fence"] = claimed[0]
            # One statement commits by itself.
            with nullcontext() if effect is None else self.db.transaction():
                if effect is not None:
                    effect(self.db)
                if self.db.execute(complete, values).rowcount != 1:
                    raise RuntimeError("stale")
            return True
        finally:
            self.release(keys=[f"hand:{key}"], args=[owner])

    def close(self) -> None:
        self.db.close()
        self.redis.close()
