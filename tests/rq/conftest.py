"""Invoices: their database, their queue, their workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import invoices
from support.office import Office


@pytest.fixture
def office(valkey: Any, redis_url: str, pg_url: str, tmp_path: Path) -> Iterator[Office]:
    made = Office(broker=valkey.url_of(2), locks=valkey.url_of(1), database=pg_url, folder=tmp_path)
    yield made
    made.close()


@pytest.fixture
def producer(office: Office, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test's own process enqueues, and sweeps."""
    for name, value in office.environment.items():
        monkeypatch.setenv(name, value)
    yield
    invoices.close()
