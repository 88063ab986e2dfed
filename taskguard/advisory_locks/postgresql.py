"""Advisory locks of PostgreSQL 14 or later, by psycopg: each question is one round trip."""

from __future__ import annotations

from collections.abc import Sequence

from taskguard.advisory_locks.names import number_of
from taskguard.advisory_locks.session import Name, Opened, Session
from taskguard.ledger.connections.dialects.postgresql import milliseconds
from taskguard.lock_table.postgresql import array

__all__ = ["PostgreSQLSession"]

# A pooler greets with a number of its own.
_OPEN = "select pg_backend_pid(), pg_is_in_recovery()"
_LAST = "select pg_backend_pid(), set_config('idle_session_timeout', %(ms)s::text, false)"
# A locking function waits for nothing here, and stops at the first lock that is another session's.
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
# As the server keeps them: the two halves of the number, and 1 for a number that is not two.
_TAKEN = """\
select pg_backend_pid(), array_to_string(array(
    select (classid::bigint << 32) | objid::bigint from pg_locks
    where locktype = 'advisory' and objsubid = 1 and granted
        and database = (select oid from pg_database where datname = current_database())
        and ((classid::bigint << 32) | objid::bigint) = any (%(names)s::bigint[])
), ' ')"""


class PostgreSQLSession(Session):
    """By functions of the server's own."""

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
