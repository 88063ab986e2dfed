"""Processes that take plain locks at one server, of each kind that decides on a lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

import taskguard
from taskguard import SqlLedger, TaskGuard
from taskguard.lock_table import TableLocks

REDIS_OR_LEDGER = ("redis", "redis and a ledger", "a ledger alone")
TABLES = ("pg_url", "mariadb_url", "mysql_url")
COORDINATORS = ("etcd", "consul", "zookeeper")


@pytest.fixture(params=[*REDIS_OR_LEDGER, *TABLES, *COORDINATORS])
def place(request: pytest.FixtureRequest) -> Iterator[Callable[[], TaskGuard]]:
    """Return a function that connects one process more to a lock server, a ledger, or both."""
    locks, ledger = None, None
    if "redis" in request.param:
        locks = request.getfixturevalue("redis_url")
    if "ledger" in request.param:
        ledger = request.getfixturevalue("sqlite_url")
        with closing(SqlLedger(ledger)) as tables:
            tables.create_schema()
    if request.param in COORDINATORS:
        locks = request.getfixturevalue(request.param).url
    if request.param in TABLES:
        locks = request.getfixturevalue(request.param)
        with closing(TableLocks(locks)) as table:
            table.create_table()
    made: list[TaskGuard] = []

    def connect(**options: Any) -> TaskGuard:
        made.append(taskguard.connect(locks=locks, ledger=ledger, **options))
        return made[-1]

    yield connect
    for each in made:
        each.close()
