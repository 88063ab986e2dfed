"""Ledgers for the tests of operators' questions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from support.databases import DATABASES
from taskguard.ledger.operations import snapshot
from taskguard.ledger.sql import SqlLedger


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a short question may take longer than the limit."""
    monkeypatch.setattr(snapshot, "_LONGEST_S", 60.0)


@pytest.fixture(params=DATABASES)
def ledger(request: pytest.FixtureRequest) -> Iterator[SqlLedger]:
    """Return an empty ledger on each kind of database."""
    with closing(SqlLedger(request.getfixturevalue(request.param))) as made:
        made.create_schema()
        yield made


@pytest.fixture
def pg(pg_url: str) -> Iterator[SqlLedger]:
    """Return an empty ledger on PostgreSQL."""
    with closing(SqlLedger(pg_url)) as made:
        made.create_schema()
        yield made
