"""Measure a guarded call with an effect on MariaDB, compared with a hand-written one.

Every commit is flushed. The hand-written call uses PyMySQL and one connection. Like taskguard, it
locks, reads and writes a key's row and a work's row in one transaction, and ends them in the
transaction of the effect. It has one key. It does not renew, defer or give back, does not number
messages, and does not notice a body that swallowed a deadlock.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pymysql

import taskguard
from benchmarks.guarded import EFFECT, by_driver, by_sqlalchemy, compare, runtime, shipping
from benchmarks.hand_written import HandLock
from benchmarks.measure import CONSOLE, show
from taskguard_sandbox.servers import MariaDB, Valkey

REFERENCE = "by hand: redis-py and PyMySQL"

_SCHEMA = (
    "create table effects (item text)",  # InnoDB, by default, as the others
    """create table hand_keys (
        id varchar(768) collate utf8mb4_nopad_bin primary key,
        fence bigint not null, owner text not null, lease_until bigint not null
    )""",
    """create table hand_works (
        id varchar(768) collate utf8mb4_nopad_bin primary key, state text not null,
        fence bigint not null, owner text not null, lease_until bigint not null
    )""",
)
_SESSION = "set session tx_isolation = 'READ-COMMITTED', innodb_lock_wait_timeout = 1"
_MAKE_KEY = "insert into hand_keys values (%s, 0, '', 0) on duplicate key update id = id"
# The statement before has locked the row: the clock is later than all waiting.
_READ_KEY = """
select fence, owner, lease_until, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
from hand_keys where id = %s for update
"""
_READ_WORK = "select state, owner, fence, lease_until from hand_works where id = %s for update"
_TAKE_KEY = "update hand_keys set fence = %s, owner = %s, lease_until = %s where id = %s"
_NEW_WORK = "insert into hand_works values (%s, 'PROCESSING', %s, %s, %s)"
_TAKE_WORK = """
update hand_works set state = 'PROCESSING', fence = %s, owner = %s, lease_until = %s where id = %s
"""
_END_KEY = """
update hand_keys set owner = '', lease_until = 0 where id = %s and fence = %s and owner = %s
"""
_COMPLETE = """
update hand_works set state = 'DONE', lease_until = 0
where id = %s and state = 'PROCESSING' and fence = %s and owner = %s
"""
_TTL_US = 30_000_000


def main(*, quick: bool) -> None:
    """Print a table; a line, where there is no MariaDB."""
    missing = MariaDB.available()
    if missing is not None:
        CONSOLE.print(f"mariadb: skipped, {missing}\n")
        return
    with Valkey() as valkey, MariaDB() as mariadb:
        url = mariadb.create_database("bench")
        by_hand = _ByHand(valkey.url, mariadb.port, "bench")
        with runtime(valkey.url, url) as tg:
            found = compare(_cases(tg, by_hand), reference=REFERENCE, quick=quick)
        by_hand.close()
    show("A guarded call on MariaDB: lock, claim, one effect with DONE, release", "µs", found)


def _cases(tg: taskguard.TaskGuard, by_hand: _ByHand) -> dict[str, Callable[[], object]]:
    numbers = itertools.count()
    as_by_hand, ship = shipping(tg, by_driver), shipping(tg, by_sqlalchemy)
    return {
        REFERENCE: lambda: by_hand.run(f"ship {next(numbers)}"),
        "taskguard, the effect by PyMySQL": lambda: as_by_hand(next(numbers)),
        "taskguard, the effect by SQLAlchemy": lambda: ship(next(numbers)),
        "by hand, a duplicate of DONE": lambda: by_hand.run("ship 0"),
        "taskguard, a duplicate of DONE": lambda: as_by_hand(1),
    }


class _ByHand(HandLock):
    """The hand-written way of one delivery."""

    def __init__(self, redis_url: str, port: int, database: str) -> None:
        super().__init__(redis_url)
        self.db = pymysql.connect(
            host="127.0.0.1",
            port=port,
            user="root",
            database=database,
            client_flag=pymysql.constants.CLIENT.FOUND_ROWS,
            init_command=_SESSION,
        )
        for each in _SCHEMA:
            self.ask(each)

    def ask(self, statement: str, *values: Any) -> Any:
        """The first row, if it has rows, or how many were changed."""
        with self.db.cursor() as cursor:
            count = cursor.execute(statement, values)
            return count if cursor.description is None else cursor.fetchone()

    def run(self, work: str) -> bool:
        """Lock, claim, effect with DONE, release. Return False if the work is held or done."""
        owner = os.urandom(12).hex()
        if self.acquire(keys=[f"hand:{work}"], args=[owner, _TTL_US // 1000]):
            return False
        try:
            fence = self._in_transaction(lambda: self._claim(work, owner))
            if fence is None:
                return False
            self._in_transaction(lambda: self._complete(work, owner, fence))
            return True
        finally:
            self.release(keys=[f"hand:{work}"], args=[owner])

    def _in_transaction(self, do: Callable[[], Any]) -> Any:
        """PyMySQL has begun one already."""
        try:
            result = do()
            self.db.commit()
        except BaseException:
            self.db.rollback()
            raise
        return result

    def _claim(self, work: str, owner: str) -> int | None:
        self.ask(_MAKE_KEY, work)
        last_fence, _, key_until, now_us = self.ask(_READ_KEY, work)
        found = self.ask(_READ_WORK, work)
        if key_until > now_us:
            return None
        if found is not None and (
            found[0] == "DONE" or (found[0] == "PROCESSING" and found[3] > now_us)
        ):
            return None
        fence = max(now_us, last_fence + 1)
        until_us = now_us + _TTL_US
        self.ask(_TAKE_KEY, fence, owner, until_us, work)
        if found is None:
            self.ask(_NEW_WORK, work, fence, owner, until_us)
        else:
            self.ask(_TAKE_WORK, fence, owner, until_us, work)
        return fence

    def _complete(self, work: str, owner: str, fence: int) -> None:
        self.ask(EFFECT)
        if self.ask(_END_KEY, work, fence, owner) != 1:
            raise RuntimeError("stale")
        if self.ask(_COMPLETE, work, fence, owner) != 1:
            raise RuntimeError("stale")

    def close(self) -> None:
        self.db.close()
        self.redis.close()
