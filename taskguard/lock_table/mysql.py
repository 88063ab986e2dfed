"""The operations on MariaDB 10.6 and MySQL 8.0 or later with PyMySQL.

To take a single key needs one statement on MariaDB and two on MySQL; to free it needs one. Several
keys need a transaction that locks their rows in sorted order. A thousand renewals need four
statements. These databases send no notifications, so waiters poll.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from taskguard.errors import ConfigurationError
from taskguard.ledger.connections.database import Database
from taskguard.lock_table.steps import Found, Row, Steps, shares_in

__all__ = ["MySQLSteps", "ddl_statements"]

# Binary columns: equality does not depend on collations, and trailing blanks count.
_TABLE = """\
create table if not exists taskguard_locks (
    `key` varbinary(2048) not null primary key,
    owner mediumblob not null,
    until bigint not null,
    fence bigint not null,
    wanted_until bigint not null
) engine = InnoDB"""

# The time at the statement's start. Not UNIX_TIMESTAMP(): local time repeats an hour in autumn.
_NOW = "timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))"
# Each assignment sees the results of earlier ones: after a grant, `owner` is the new owner.
_TAKE = f"""\
insert into taskguard_locks (`key`, owner, until, fence, wanted_until)
values (%(key)s, %(owner)s, {_NOW} + %(ttl_us)s, if(%(fenced)s, {_NOW}, 0), 0)
on duplicate key update
    fence = if(
        not %(fenced)s or (until > {_NOW} and (owner <> %(owner)s or fence > 0)),
        fence,
        greatest(fence + 1, {_NOW})
    ),
    owner = if(until > {_NOW}, owner, %(owner)s),
    until = if(owner = %(owner)s, {_NOW} + %(ttl_us)s, until)"""
_SEEN = f"fence, owner, until - {_NOW}"
_TAKE_AND_SEE = f"{_TAKE}\nreturning {_SEEN}"
_SEE = f"select {_SEEN} from taskguard_locks where `key` = %(key)s"
_MAKE_ROWS = """\
insert into taskguard_locks (`key`, owner, until, fence, wanted_until)
values {rows} on duplicate key update `key` = `key`"""
_LOCK_ROWS = f"""\
select `key`, owner, until, fence, {_NOW} from taskguard_locks
where `key` in %(keys)s order by `key` for update"""
_TAKE_ROWS = """\
update taskguard_locks
set owner = %(owner)s, until = %(until)s, fence = greatest(fence, %(token)s)
where `key` in %(keys)s"""
_MINE = f"`key` in %(keys)s and owner = %(owner)s and until > {_NOW}"
_FREE = f"delete from taskguard_locks where {_MINE} and fence = 0"
_FREE_AND_KEEP = f"update taskguard_locks set owner = '', until = 0 where {_MINE} and fence > 0"
_HAND_OVER = f"""\
update taskguard_locks set owner = %(to)s, until = {_NOW} + %(ttl_us)s where {_MINE}"""
_COUNT = f"select count(*) from taskguard_locks where {_MINE}"
_LOOK = f"select `key`, owner, until, fence, {_NOW} from taskguard_locks where `key` in %(keys)s"
_RENEW = """\
insert into taskguard_locks (`key`, owner, until, fence, wanted_until)
values {rows} on duplicate key update until = values(until)"""
_CHANGE = """\
update taskguard_locks set owner = %(owner)s, until = %(until)s, fence = %(fence)s
where `key` = %(key)s"""
# No lock has the key x'01': keys of locks consist of printable characters.
_NOTE = f"""\
update taskguard_locks set fence = {_NOW}
where `key` = x'01' and not fence between {_NOW} - %(every_us)s and {_NOW}"""
_NOTE_FIRST = f"insert ignore into taskguard_locks values (x'01', '', 0, {_NOW}, 0)"
_OLD = f"until < {_NOW} - %(older_us)s and fence < {_NOW} - %(older_us)s"
_FIND_OLD = f"select `key` from taskguard_locks where {_OLD} limit %(most)s"
_FORGET = f"delete from taskguard_locks where `key` in %(keys)s and {_OLD}"

_TUNED = "taskguard_locks"  # a key of the `info` that SQLAlchemy keeps with a connection


def ddl_statements() -> list[str]:
    """Return the statement that creates the table."""
    return [_TABLE]


class MySQLSteps(Steps):
    """The operations as statements, on sessions with autocommit."""

    def __init__(self, database: Database, *, answer_s: float) -> None:
        if database.engine.dialect.driver != "pymysql":
            raise ConfigurationError(
                f"A lock table on MariaDB or MySQL needs PyMySQL, not {database.engine.driver}: "
                "write mariadb+pymysql:// or mysql+pymysql:// in its URL."
            )
        self._database = database
        self._answer_s = answer_s
        self._keeps_tokens = False  # whether the last lock had a token: the next probably has, too

    def take(
        self, keys: list[str], owner: str, *, ttl_us: int, fenced: bool, waits_us: int
    ) -> Found:
        del waits_us
        self._keeps_tokens = fenced
        if len(keys) > 1:
            return self._take_several(keys, owner, ttl_us=ttl_us, fenced=fenced)
        values = {"key": keys[0], "owner": owner, "ttl_us": ttl_us, "fenced": int(fenced)}
        returning = self._database.is_mariadb()
        with self._session() as cursor:
            cursor.execute(_TAKE_AND_SEE if returning else _TAKE, values)
            if not returning:
                cursor.execute(_SEE, values)
            row = cursor.fetchone()
        if row is None or row[1].decode() == owner:
            # No row: the key was taken and freed since. Only another call of this owner frees it.
            return Found(row[0] if row else 0)
        return Found(None, keys[0], row[1].decode(), row[2])

    def _take_several(self, keys: list[str], owner: str, *, ttl_us: int, fenced: bool) -> Found:
        with self._transaction() as cursor:
            rows = ", ".join(["(%s, '', 0, 0, 0)"] * len(keys))
            cursor.execute(_MAKE_ROWS.format(rows=rows), keys)
            found = _rows(cursor, _LOCK_ROWS, keys=keys)
            taken = next((row for row in found if row.is_held and row.owner != owner), None)
            if taken is not None:
                cursor.connection.rollback()
                return Found(None, taken.key, taken.owner, taken.until - taken.now_us)
            last = max(row.fence for row in found)
            again = all(row.is_held for row in found) and last > 0
            now_us = found[0].now_us
            token = (last if again else max(last + 1, now_us)) if fenced else 0
            values = {"keys": keys, "owner": owner, "until": now_us + ttl_us, "token": token}
            cursor.execute(_TAKE_ROWS, values)
            return Found(token)

    def free(self, keys: list[str], owner: str) -> int:
        freed = 0
        statements = [_FREE, _FREE_AND_KEEP]
        with self._session() as cursor:
            for statement in reversed(statements) if self._keeps_tokens else statements:
                freed += cursor.execute(statement, {"keys": keys, "owner": owner})
                if freed == len(keys):
                    break
        return freed

    def hand_over(self, keys: list[str], owner: str, *, to: str, ttl_us: int) -> int:
        with self._session() as cursor:
            cursor.execute(_HAND_OVER, {"keys": keys, "owner": owner, "to": to, "ttl_us": ttl_us})
            cursor.execute(_COUNT, {"keys": keys, "owner": to})
            return int(cursor.fetchone()[0])

    def renew(self, holds: Sequence[tuple[list[str], str, int]]) -> str:
        asked = sorted({key for keys, _, _ in holds for key in keys})
        with self._transaction() as cursor:
            locked = {
                row.key: row for row in _rows(cursor, f"{_LOCK_ROWS} skip locked", keys=asked)
            }
            others = [key for key in asked if key not in locked]
            seen = {row.key: row for row in _rows(cursor, _LOOK, keys=others)} if others else {}
            answers, renewed = [], []
            for keys, owner, ttl_us in holds:
                answer = _judged([locked.get(key) or seen.get(key) for key in keys], owner)
                if answer == "R" and not locked.keys() >= set(keys):
                    answer = "S"
                if answer == "R":
                    renewed += [(key, owner, locked[key].now_us + ttl_us, 0, 0) for key in keys]
                answers.append(answer)
            if renewed:
                rows = ", ".join(["(%s, %s, %s, %s, %s)"] * len(renewed))
                cursor.execute(_RENEW.format(rows=rows), [each for row in renewed for each in row])
        return "".join(answers)

    def see(self, key: str) -> Row | None:
        with self._session() as cursor:
            found = _rows(cursor, _LOOK, keys=[key])
        if not found:
            return None
        [row] = found
        return Row(row.owner, row.until, row.fence, row.now_us)

    def share(
        self, key: str, owner: str, *, ttl_us: int, fenced: bool, waits_us: int, most: int
    ) -> Found:
        del waits_us
        with self._transaction() as cursor:
            cursor.execute(_MAKE_ROWS.format(rows="(%s, '', 0, 0, 0)"), [key])
            [row] = _rows(cursor, _LOCK_ROWS, keys=[key])
            shares = row.shares
            if row.is_held and not shares:
                return Found(None, key, row.owner, row.until - row.now_us)
            if owner not in shares and len(shares) >= most:
                return Found(None, key, row.owner, min(shares.values()) - row.now_us)
            fence = row.fence
            if fenced and not (shares and fence):
                fence = max(fence + 1, row.now_us)
            _change(cursor, row, shares | {owner: row.now_us + ttl_us}, fence)
            return Found(fence if fenced else 0)

    def unshare(self, key: str, owner: str) -> bool:
        with self._transaction() as cursor:
            had = False
            for row in _rows(cursor, _LOCK_ROWS, keys=[key]):
                shares = row.shares
                had = shares.pop(owner, None) is not None
                if had:
                    _change(cursor, row, shares, row.fence)
            return had

    def renew_shares(self, shares: Sequence[tuple[str, str, int]]) -> str:
        asked = sorted({key for key, _, _ in shares})
        with self._transaction() as cursor:
            locked = {
                row.key: row for row in _rows(cursor, f"{_LOCK_ROWS} skip locked", keys=asked)
            }
            others = [key for key in asked if key not in locked]
            seen = {row.key: row for row in _rows(cursor, _LOOK, keys=others)} if others else {}
            held = {key: row.shares for key, row in locked.items()}
            answers = []
            for key, owner, ttl_us in shares:
                row = locked.get(key) or seen.get(key)
                if row is None or not row.is_held:
                    answers.append("G")
                elif key in seen:
                    answers.append("S")
                elif owner in held[key]:
                    held[key][owner] = row.now_us + ttl_us
                    answers.append("R")
                else:
                    answers.append("T")
            renewed = {
                key for (key, _, _), each in zip(shares, answers, strict=True) if each == "R"
            }
            for key in sorted(renewed):
                _change(cursor, locked[key], held[key], locked[key].fence)
        return "".join(answers)

    def forget(self, *, older_us: int, every_us: int, most: int) -> int:
        with self._session() as cursor:
            if every_us and not (
                cursor.execute(_NOTE, {"every_us": every_us}) or cursor.execute(_NOTE_FIRST)
            ):
                return 0
            # Two statements, because a DELETE locks each row that it reads.
            cursor.execute(_FIND_OLD, {"older_us": older_us, "most": most})
            keys = [row[0] for row in cursor.fetchall()]
            if not keys:
                return 0
            return int(cursor.execute(_FORGET, {"keys": keys, "older_us": older_us}))

    @contextmanager
    def _session(self) -> Iterator[Any]:
        """Yield a cursor with autocommit."""
        with (
            self._database.locking(self._answer_s) as (connection, kept),
            connection.cursor() as cursor,
        ):
            if _TUNED not in kept:
                connection.autocommit(True)
                cursor.execute("set session transaction isolation level read committed")
                cursor.execute("set session innodb_lock_wait_timeout = 1")
                kept[_TUNED] = True
            yield cursor

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Yield a cursor whose statements commit together at the end of the block."""
        with self._session() as cursor:
            cursor.execute("start transaction")
            try:
                yield cursor
            except BaseException:
                if cursor.connection.open:
                    cursor.connection.rollback()
                raise
            cursor.connection.commit()


class _Row:
    """A row of the table, as a statement read it."""

    __slots__ = ("fence", "is_held", "key", "now_us", "owner", "until")

    def __init__(self, key: bytes, owner: bytes, until: int, fence: int, now_us: int) -> None:
        self.key, self.owner = key.decode(), owner.decode("ascii", "replace")
        self.until, self.fence, self.now_us = until, fence, now_us
        self.is_held = until > now_us

    @property
    def shares(self) -> dict[str, int]:
        """Return each owner with a current share, and the end of its lease."""
        return {who: until for who, until in shares_in(self.owner).items() if until > self.now_us}


def _rows(cursor: Any, statement: str, *, keys: list[str]) -> list[_Row]:
    cursor.execute(statement, {"keys": keys})
    return [_Row(*row) for row in cursor.fetchall()]


def _change(cursor: Any, row: _Row, shares: dict[str, int], fence: int) -> None:
    """Write the shares of a key. The transaction has locked its row."""
    values = {"key": row.key, "until": max(shares.values(), default=0), "fence": fence}
    cursor.execute(_CHANGE, values | {"owner": json.dumps(shares) if shares else ""})


def _judged(found: list[_Row | None], owner: str) -> str:
    held = [row for row in found if row is not None and row.is_held]
    if any(row.owner != owner for row in held):
        return "T"
    return "R" if len(held) == len(found) else "G"
