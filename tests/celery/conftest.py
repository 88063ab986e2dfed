"""A shop: its database, its app in this process as the producer, its workers."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import celery
import pytest

from support.celery_shop import Shop, shops
from taskguard_sandbox.servers import Postgres, RabbitMQ, Valkey

# For tests without kills and pauses: a machine that pauses for seconds must not end a lease.
LONG_LEASE_S = "10"


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that wait for the end of a lease."""
    monkeypatch.setenv("SHOP_TTL_S", "2")


@pytest.fixture
def make_shop(
    valkey: Any, redis_url: str, pg_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Shop]]:
    """Return a function that makes the test's shop, with environment variables by name."""
    lease_s = os.environ.get("SHOP_TTL_S", LONG_LEASE_S)
    with shops(valkey, pg_url, tmp_path, monkeypatch) as make:
        yield functools.partial(make, SHOP_TTL_S=lease_s)


@pytest.fixture
def shop(make_shop: Callable[..., Shop]) -> Shop:
    return make_shop()


@pytest.fixture
def any_rabbitmq(request: pytest.FixtureRequest) -> RabbitMQ:
    """Return the RabbitMQ of Debian's stable, or another where a test depends on the version."""
    server: RabbitMQ = request.getfixturevalue(getattr(request, "param", "rabbitmq"))
    return server


@pytest.fixture
def rabbit_shop(make_shop: Callable[..., Shop], any_rabbitmq: RabbitMQ) -> Shop:
    """Return a shop whose broker is RabbitMQ, with a queue of its own."""
    return make_shop(SHOP_BROKER=any_rabbitmq.url, SHOP_QUEUE=f"shop-{time.time_ns()}")


@pytest.fixture
def quorum_shop(make_shop: Callable[..., Shop], any_rabbitmq: RabbitMQ) -> Shop:
    """Return a shop whose queue is a quorum queue. It drops what came back twice."""
    if celery.VERSION < (5, 5):
        pytest.skip("Celery consumes from quorum queues since 5.5")
    name = f"quorum-{time.time_ns()}"
    return make_shop(SHOP_BROKER=any_rabbitmq.url, SHOP_QUEUE=name, SHOP_DELIVERY_LIMIT="2")


@pytest.fixture
def spare_valkey() -> Iterator[Valkey]:
    """Start a Valkey that may be stopped. The test uses it for locks or as its broker."""
    with Valkey() as server:
        yield server


@pytest.fixture
def database_server() -> Iterator[Postgres]:
    """Start a PostgreSQL that may be stopped."""
    with Postgres(fsync="off") as server:
        yield server
