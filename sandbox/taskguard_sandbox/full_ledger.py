"""Fill a ledger in PostgreSQL as years of work would, to measure an operator's questions.

Guarantees: DONE work, a few in a thousand that need an operator, long lines, workers, counts and
what happened. No process runs any of it.
"""

from __future__ import annotations

import sqlalchemy as sa

__all__ = ["fill"]

_NOW = "cast(extract(epoch from clock_timestamp()) * 1000000 as bigint)"
_OWNER = "'0000000a00001f' || lpad(to_hex(n), 10, '0') || '/' || md5(n::text)"
_COLUMNS = (
    "id, task, key, message, retries, state, final, fence, owner, lease_until, attempts, crashes,"
    " crashed_owner, created"
)
_DONE = f"""
insert into taskguard_work ({_COLUMNS}, started, finished)
select 'shop.task' || n % 40 || ' order:' || n, 'shop.task' || n % 40, 'order:' || n,
    md5(n::text), 0, 'DONE', 0, n, {_OWNER}, 0, 1, 0, '', {_NOW} - n, {_NOW} - n, {_NOW} - n
from generate_series(1, :works) n
"""
_TROUBLED = f"""
insert into taskguard_work ({_COLUMNS}, started, flag, since, error, history)
select 'shop.ship trouble:' || n, 'shop.ship', 'trouble:' || n, md5(n::text), 0,
    case n % 4 when 0 then 'FAILED' when 1 then 'DEAD' else 'PROCESSING' end, 0, n, {_OWNER},
    case n % 4 when 2 then {_NOW} + 60000000 when 3 then {_NOW} - 60000000 else 0 end, 3, 3, '',
    {_NOW} - n, {_NOW} - n, case n % 4 when 0 then 2 when 1 then 3 else 1 end, {_NOW} - n,
    'TimeoutError: bank', '[' || {_NOW} || ', "takeover", "", 1, ""]' || chr(10)
from generate_series(1, :troubled) n
"""
_PARKED = f"""
insert into taskguard_work ({_COLUMNS}, call, line, rank, parked, strict)
select 'shop.pay ' || md5(n::text), 'shop.pay',
    'account:' || case when n <= :longest then 0 else n % :lines end, md5(n::text), 0, 'NEW', 0, 0,
    '', 0, 0, 0, '', {_NOW} - :waiting + n, '{{}}', 'waiting', 0, {_NOW} - :waiting + n, 0
from generate_series(1, :waiting) n
"""
_DUE = f"""
insert into taskguard_work ({_COLUMNS}, call, due)
select 'shop.mail due:' || n, 'shop.mail', 'due:' || n, md5(n::text), 0, 'NEW', 0, 0, '', 0, 0, 0,
    '', {_NOW} - n, '{{}}', {_NOW} - 60000000 + n
from generate_series(1, :troubled) n
"""
_KEYS = f"""
insert into taskguard_keys (key, fence, owner, lease_until, works)
select 'order:' || n, n, '', 0, 'shop.task' || n % 40 || ' order:' || n || chr(10)
from generate_series(1, :works) n
union all
select 'trouble:' || n, n, {_OWNER}, {_NOW} + 60000000, 'shop.ship trouble:' || n || chr(10)
from generate_series(1, :troubled) n
union all
select 'account:' || n, n, {_OWNER}, {_NOW} + 60000000, null from generate_series(0, :lines) n
"""
_WORKERS = f"""
insert into taskguard_workers
select lpad(to_hex(n), 8, '0'), 'celery', 'celery@web-' || n, 'web-' || n, 31, '0.1.0', 'celery',
    {_NOW}, {_NOW}
from generate_series(1, 50) n
"""
_HAPPENINGS = f"""
insert into taskguard_happenings (at, key, task, what, owner, n)
select {_NOW} - n, 'order:' || n % 1000, 'shop.ship', 'duplicate', '', 3
from generate_series(1, :happenings) n
"""
_ACTIONS = f"""
insert into taskguard_actions (at, action, actor, reason, key)
select {_NOW} - n, case n % 2 when 0 then 'pause' else 'release' end, 'ann', 'bank', 'order:' || n
from generate_series(1, :actions) n
"""
_COUNTS = """
insert into taskguard_counts
select 0, 'shop.task' || t, 'hold/le/' || b, 7
from generate_series(0, 49) t, generate_series(1, 60) b
"""
_MESSAGES = """
insert into taskguard_messages select md5(n::text), 'shop.ship trouble:' || n, 1, 0, n
from generate_series(1, :troubled) n
"""
_ALL = (
    _DONE,
    _TROUBLED,
    _PARKED,
    _DUE,
    _KEYS,
    _WORKERS,
    _HAPPENINGS,
    _ACTIONS,
    _COUNTS,
    _MESSAGES,
)


def fill(url: str, *, works: int, waiting: int, lines: int) -> None:
    """Fill an empty ledger.

    Args:
        url: the URL of its database.
        works: how many DONE works it gets, and as many keys.
        waiting: how many messages wait. Two thirds of them wait in one line.
        lines: in how many lines the others wait.
    """
    values = {
        "works": works,
        "troubled": max(100, works // 1000),
        "waiting": waiting,
        "longest": waiting * 2 // 3,
        "lines": lines,
        "happenings": max(1000, works // 100),
        "actions": 10_000,
    }
    engine = sa.create_engine(url)
    with engine.begin() as db:
        for statement in _ALL:
            names = {name: number for name, number in values.items() if f":{name}" in statement}
            db.execute(sa.text(statement.replace("::text", "\\:\\:text")), names)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.execute(sa.text("vacuum analyze"))
    engine.dispose()
