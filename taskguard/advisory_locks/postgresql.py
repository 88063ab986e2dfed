"""Advisory locks of PostgreSQL 14 or later with psycopg: one round trip for each operation."""

from __future__ import annotations

from collections.abc import Sequence

from taskguard.advisory_locks.names import number_of
from taskguard.advisory_locks.session import Name, Opened, Session
from taskguard.ledger.connections.dialects.postgresql import milliseconds
from taskguard.lock_table.postgresql import array

__all__ = ["PostgreSQLSession"]

# Behind a pooler, this pid differs from the one that the connection got at its start.
_OPEN = "select pg_backend_pid(), pg_is_in_recovery()"
_LAST = "select pg_backend_pid(), set_config('idle_session_timeout', %(ms)s::text, false)"
# The try functions do not wait. The recursion stops at the first lock of another session.
_TAKE = """\
with recursive tried (number, got) as (
    select 1, pg_try_advisory_lock((%(names)s::bigint[])[1])
    union all
    select number + 1, pg_try_advisory_lock((%(names)s::bigint[])[number + 1])
    from tried where got and number < cardinality(%(names)s::bigint[])
)
select pg_backend_pid(), count(*) filter (where got) from tried"""
_FREE = """\
select pg_backend_pid(), count(*) filter (where pg_advisory_unlock(name))
from unnest(%(names)s::bigint[]) name"""
_ALIVE = "select pg_backend_pid()"
# pg_locks has the two halves of the number. objsubid is 1 for locks with one 64-bit number.
_TAKEN = """\
select pg_backend_pid(), array_to_string(array(
    select (classid::bigint << 32) | objid::bigint from pg_locks
    where locktype = 'advisory' and objsubid = 1 and granted
        and database = (select oid from pg_database where datname = current_database())
        and ((classid::bigint << 32) | objid::bigint) = any (%(names)s::bigint[])
), ' ')"""


class PostgreSQLSession(Session):
    """A session that holds advisory locks."""

    def name(self, key: str) -> Name:
        return number_of(key)

    def _open(self) -> Opened:
        greeted: int = self.connection.info.backend_pid
        [[number, replica]] = self.database.ask_alone(self, _OPEN, {}, longest_s=self._answer_s)
        return Opened(number, own=number == greeted, replica=replica)

    def _last(self, seconds: float) -> float:
        self._ask(_LAST, ms=str(milliseconds(seconds)))
        return seconds

    def _take(self, names: Sequence[Name]) -> int:
        [[_, got]] = self._ask(_TAKE, names=array(names))
        return int(got)

    def _free(self, names: Sequence[Name]) -> int:
        [[_, freed]] = self._ask(_FREE, names=array(names))
        return int(freed)

    def taken(self, names: Sequence[Name]) -> set[Name]:
        if not names:
            self._ask(_ALIVE)
            return set()
        [[_, found]] = self._ask(_TAKEN, names=array(names))
        return set(map(int, found.split()))
