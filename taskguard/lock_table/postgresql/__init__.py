"""The operations on PostgreSQL 14 or later with psycopg: one statement and one round trip each.

Freeing one key takes a second statement if the first guess, with or without a token, was wrong.

Most operations call a function: after it has waited for a row, it reads the row's newest version,
which a plain statement may not see. Function names end with a number, so that functions of a new
version can exist together with the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from taskguard.errors import ConfigurationError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.stored import statement
from taskguard.lock_table.steps import Found, Row, Steps

__all__ = ["CHANNEL", "PostgreSQLSteps", "array", "ddl_statements"]

CHANNEL = "taskguard_locks"

# Rows are small and change often. The low fill factor leaves space for new row versions on a page,
# so that updates need not write the index. Autovacuum is set for few rows and many changes.
_TABLE = """\
create {unlogged}table if not exists taskguard_locks (
    key text collate "C" primary key,
    owner text collate "C" not null,
    until bigint not null,
    fence bigint not null,
    wanted_until bigint not null
) with (
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
)"""
_FUNCTIONS = ("take", "hand_over", "renew", "forget", "share", "unshare", "renew_shares")

_TAKE = """\
select token, taken, holder, left_us from taskguard_locks_take_1(
    %(keys)s::text[], %(owner)s::text, %(ttl_us)s::bigint, %(fenced)s::boolean, %(waits_us)s::bigint
)"""
_FREE = statement(__package__, "free")
_FREE_ONE = statement(__package__, "free_one")
_FREE_ONE_AND_KEEP = statement(__package__, "free_one_and_keep")
_HAND_OVER = """\
select taskguard_locks_hand_over_1(
    %(keys)s::text[], %(owner)s::text, %(to)s::text, %(ttl_us)s::bigint
)"""
_RENEW = """\
select taskguard_locks_renew_1(
    %(holds)s::integer[], %(keys)s::text[], %(owners)s::text[], %(ttls_us)s::bigint[]
)"""
_FORGET = """\
select taskguard_locks_forget_1(%(older_us)s::bigint, %(every_us)s::bigint, %(most)s::integer)"""
_SHARE = """\
select token, holder, left_us from taskguard_locks_share_1(
    %(key)s::text, %(owner)s::text, %(ttl_us)s::bigint, %(fenced)s::boolean, %(waits_us)s::bigint,
    %(most)s::bigint
)"""
_UNSHARE = "select taskguard_locks_unshare_1(%(key)s::text, %(owner)s::text)"
_RENEW_SHARES = """\
select taskguard_locks_renew_shares_1(
    %(keys)s::text[], %(owners)s::text[], %(ttls_us)s::bigint[]
)"""
_SEE = """\
select l.owner, l.until, l.fence, (extract(epoch from clock_timestamp()) * 1000000)::bigint
from taskguard_locks l where l.key = %(key)s::text"""


def ddl_statements(*, unlogged: bool) -> list[str]:
    """Return the statements that create the table and its functions."""
    texts = [(files(__package__) / f"{name}.sql").read_text("utf-8") for name in _FUNCTIONS]
    table = _TABLE.format(unlogged="unlogged " if unlogged else "")
    return [table, *(text.strip() for text in texts)]


class PostgreSQLSteps(Steps):
    """The operations as calls of functions in the database."""

    def __init__(self, database: Database, *, answer_s: float) -> None:
        if database.engine.dialect.driver != "psycopg":
            raise ConfigurationError(
                f"A lock table on PostgreSQL needs psycopg 3, not {database.engine.driver}: "
                "write postgresql+psycopg:// in its URL."
            )
        self._database = database
        self._answer_s = answer_s
        self._keeps_tokens = False  # whether the last row had a token: the next probably has, too

    def take(
        self, keys: list[str], owner: str, *, ttl_us: int, fenced: bool, waits_us: int
    ) -> Found:
        [row] = self._ask(
            _TAKE,
            keys=array(keys),
            owner=owner,
            ttl_us=ttl_us,
            fenced=fenced,
            waits_us=waits_us,
        )
        found = Found(*row)
        if found.taken is None:
            self._keeps_tokens = bool(found.token)
        return found

    def free(self, keys: list[str], owner: str) -> int:
        if len(keys) == 1:
            statements = [_FREE_ONE, _FREE_ONE_AND_KEEP]
            for one in reversed(statements) if self._keeps_tokens else statements:
                if self._ask(one, key=keys[0], owner=owner):
                    return 1
            return 0
        [[freed, _]] = self._ask(_FREE, keys=array(keys), owner=owner)
        return int(freed)

    def hand_over(self, keys: list[str], owner: str, *, to: str, ttl_us: int) -> int:
        return self._number(_HAND_OVER, keys=array(keys), owner=owner, to=to, ttl_us=ttl_us)

    def renew(self, holds: Sequence[tuple[list[str], str, int]]) -> str:
        rows = [
            (number, key, owner, ttl_us)
            for number, (keys, owner, ttl_us) in enumerate(holds)
            for key in keys
        ]
        numbers, keys, owners, ttls_us = zip(*rows, strict=True)
        [[answers]] = self._ask(
            _RENEW,
            renewal=True,
            holds=array(numbers),
            keys=array(keys),
            owners=array(owners),
            ttls_us=array(ttls_us),
        )
        return str(answers)

    def see(self, key: str) -> Row | None:
        found = self._ask(_SEE, key=key)
        return Row(*found[0]) if found else None

    def share(
        self, key: str, owner: str, *, ttl_us: int, fenced: bool, waits_us: int, most: int
    ) -> Found:
        [[token, holder, left_us]] = self._ask(
            _SHARE,
            key=key,
            owner=owner,
            ttl_us=ttl_us,
            fenced=fenced,
            waits_us=waits_us,
            most=most,
        )
        return Found(token) if holder is None else Found(None, key, holder, left_us)

    def unshare(self, key: str, owner: str) -> bool:
        [[had]] = self._ask(_UNSHARE, key=key, owner=owner)
        return bool(had)

    def renew_shares(self, shares: Sequence[tuple[str, str, int]]) -> str:
        keys, owners, ttls_us = zip(*shares, strict=True)
        [[answers]] = self._ask(
            _RENEW_SHARES,
            renewal=True,
            keys=array(keys),
            owners=array(owners),
            ttls_us=array(ttls_us),
        )
        return str(answers)

    def forget(self, *, older_us: int, every_us: int, most: int) -> int:
        return self._number(_FORGET, older_us=older_us, every_us=every_us, most=most)

    def _number(self, statement: str, **values: Any) -> int:
        [[number]] = self._ask(statement, **values)
        return int(number)

    def _ask(self, statement: str, *, renewal: bool = False, **values: Any) -> list[Any]:
        return self._database.ask(statement, values, renewal=renewal, longest_s=self._answer_s)


def array(elements: Sequence[str | int]) -> str:
    """Return the elements as a PostgreSQL array literal."""
    quoted = (str(each).replace("\\", "\\\\").replace('"', '\\"') for each in elements)
    return '{"' + '","'.join(quoted) + '"}'
