"""Guarded shops: as many as a test makes, or one in PostgreSQL, or one in each database.

Guarantees that they are closed when their test ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from support.databases import DATABASES
from support.guarded_shop import GuardedShop


@pytest.fixture
def make_shop() -> Iterator[Callable[..., GuardedShop]]:
    """Makes the test's shops, of what `GuardedShop` takes."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(closing(GuardedShop(*args, **options)))


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    """Of an empty database of each kind."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def shop(url: str, make_shop: Callable[..., GuardedShop]) -> GuardedShop:
    """In a database of each kind."""
    return make_shop(url)


@pytest.fixture
def pg(pg_url: str, make_shop: Callable[..., GuardedShop]) -> GuardedShop:
    """In PostgreSQL."""
    return make_shop(pg_url)
