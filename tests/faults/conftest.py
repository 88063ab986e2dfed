"""Fixtures of the faults: rivals over one ledger, and a shop with real Celery workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.celery_shop import Shop, shops
from support.rivals import Rivals, rivals


@pytest.fixture
def make_rivals(pg_url: str) -> Iterator[Callable[..., Rivals]]:
    """Makes two callers over an empty PostgreSQL database, or over `url`."""
    with ExitStack() as stack:
        yield lambda url=pg_url, **options: stack.enter_context(rivals(url, **options))


@pytest.fixture
def make_shop(
    valkey: Any, redis_url: str, pg_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Shop]]:
    """Makes the test's shop; environment variables are given by name."""
    with shops(valkey, pg_url, tmp_path, monkeypatch) as make:
        yield make
