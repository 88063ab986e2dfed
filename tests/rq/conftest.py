"""Invoices: their database, their queue, their workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.office import Office


@pytest.fixture
def office(valkey: Any, redis_url: str, pg_url: str, tmp_path: Path) -> Iterator[Office]:
    made = Office(broker=valkey.url_of(2), locks=valkey.url_of(1), database=pg_url, folder=tmp_path)
    yield made
    made.close()
