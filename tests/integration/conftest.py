"""Guarded shops: as many as a test makes, or one in PostgreSQL, or one in each database.

They are closed when their test ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from support.databases import DATABASES
from support.guarded_shop import GuardedShop


@pytest.fixture
def make_shop() -> Iterator[Callable[..., GuardedShop]]:
    """Return a function that makes the test's shops."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(closing(GuardedShop(*args, **options)))


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty database of each kind."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def shop(url: str, make_shop: Callable[..., GuardedShop]) -> GuardedShop:
    """Return a shop in a database of each kind."""
    return make_shop(url)


@pytest.fixture
def pg(pg_url: str, make_shop: Callable[..., GuardedShop]) -> GuardedShop:
    """Return a shop in PostgreSQL."""
    return make_shop(pg_url)
