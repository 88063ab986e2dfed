"""Code that a careful engineer would write by hand for one task, as the optimum to compare with.

A lock script, `INSERT … ON CONFLICT` as the claim, a conditional UPDATE with the effect, a release
script; redis-py and the database's driver, one connection each, every commit flushed. It renews
nothing, defers nothing, gives nothing back, and has one key and one table.

This is PostgreSQL by psycopg. `hand_written_others.py` has MariaDB and SQLite.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import psycopg
import redis

EFFECT = "insert into effects values ('order')"
EFFECTS = "create table if not exists effects (item text)"
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


class ByHand(ABC):
    """The hand-written way of one delivery. Each database has a subclass."""

    claim: LiteralString
    complete: LiteralString

    def __init__(self, redis_url: str) -> None:
        self.redis = redis.Redis.from_url(redis_url)
        self.acquire = self.redis.register_script(_ACQUIRE)
        self.release = self.redis.register_script(_RELEASE)

    @abstractmethod
    def execute(self, statement: LiteralString, values: dict[str, Any] | None = None) -> Any:
        """Run a statement, which commits by itself outside of a transaction."""

    @abstractmethod
    def first(self, statement: LiteralString, values: dict[str, Any]) -> Any:
        """Return the first row, or None."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[object]:
        """Commit at the end."""

    @abstractmethod
    def close(self) -> None:
        """Close both connections."""

    def run(self, work: str, *, effect: bool = False) -> bool:
        """Lock, claim, effect with DONE, release. Return False if the work is held or done."""
        return self._run(work, work, self.claim, self.complete, effect=effect)

    def _run(
        self,
        key: str,
        row: object,
        claim: LiteralString,
        complete: LiteralString,
        *,
        effect: bool,
    ) -> bool:
        owner = os.urandom(12).hex()
        if self.acquire(keys=[f"hand:{key}"], args=[owner, 30_000]):
            return False  # whose it is, and for how long, is what a deferral has to know
        try:
            values: dict[str, Any] = {"id": row, "owner": owner}
            claimed = self.first(claim, values)
            if claimed is None:
                return False
            values["fence"] = claimed[0]
            # One statement commits by itself.
            with self.transaction() if effect else nullcontext():
                if effect:
                    self.execute(EFFECT)
                if self.execute(complete, values).rowcount != 1:
                    raise RuntimeError("stale")
            return True
        finally:
            self.release(keys=[f"hand:{key}"], args=[owner])


class PostgresByHand(ByHand):
    """PostgreSQL by psycopg, which prepares statements itself."""

    claim = _CLAIM
    complete = _COMPLETE

    def __init__(self, redis_url: str, url: str, *, create: bool = True) -> None:
        super().__init__(redis_url)
        self.db = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)
        for each in (SCHEMA, ORDERS, EFFECTS) if create else ():
            self.db.execute(each)

    def execute(self, statement: LiteralString, values: dict[str, Any] | None = None) -> Any:
        return self.db.execute(statement, values)

    def first(self, statement: LiteralString, values: dict[str, Any]) -> Any:
        return self.db.execute(statement, values).fetchone()

    def transaction(self) -> AbstractContextManager[object]:
        return self.db.transaction()

    def run_order(self, order: int, *, effect: bool = False) -> bool:
        """Do it by hand with the states in the order's own row, which has columns for them."""
        return self._run(f"order:{order}", order, _CLAIM_ROW, _COMPLETE_ROW, effect=effect)

    def close(self) -> None:
        self.db.close()
        self.redis.close()
