"""The steps on MariaDB and MySQL."""

from __future__ import annotations

from collections.abc import Sequence

from taskguard.ledger.connections.database import Database
from taskguard.lock_table.steps import Found, Steps


def ddl_statements(*, mariadb: bool) -> list[str]:
    raise NotImplementedError


class MySQLSteps(Steps):
    def __init__(self, database: Database, *, answer_s: float) -> None:
        raise NotImplementedError

    def take(self, keys: list[str], owner: str, *, ttl_us: int, fenced: bool, waits_us: int) -> Found:
        raise NotImplementedError

    def free(self, keys: list[str], owner: str) -> int:
        raise NotImplementedError

    def hand_over(self, keys: list[str], owner: str, *, to: str, ttl_us: int) -> int:
        raise NotImplementedError

    def renew(self, holds: Sequence[tuple[list[str], str, int]]) -> str:
        raise NotImplementedError

    def is_free(self, key: str) -> bool:
        raise NotImplementedError

    def forget(self, *, older_us: int, every_us: int, most: int) -> int:
        raise NotImplementedError
