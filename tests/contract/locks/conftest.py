"""The lock servers that the contract suite runs on. A new provider is one entry in `KINDS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis

from support.lock_servers import LockServer, redlock_url
from support.needs import need_redis_in_memory
from support.proxy import Mode, Proxy
from taskguard.lease import new_owner
from taskguard.locks.base import LockProvider
from taskguard.locks.memory import MemoryLocks
from taskguard.locks.redis import RedisLocks
from taskguard.locks.redlock import RedlockLocks
from taskguard_sandbox.servers import RedisServer

KINDS = [
    "memory",
    "fakeredis",
    "valkey",
    "redis62",
    pytest.param("debian_redis", marks=pytest.mark.debian),
    "redlock",
]


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[LockServer]:
    """An empty lock server."""
    if request.param == "memory":
        memory = MemoryLocks()
        yield LockServer(lambda: memory, memory.flush, lambda: list(memory.held()))
    elif request.param == "fakeredis":
        need_redis_in_memory()
        from fakeredis import FakeRedis

        fake = FakeRedis()
        yield _redis_kind(fake, lambda: RedisLocks(fake))
    elif request.param == "redlock":
        yield _redlock_kind(request.getfixturevalue("five_valkeys"))
    else:
        real: RedisServer = request.getfixturevalue(request.param)
        with redis.Redis(port=real.port) as client:
            client.flushall()
            client.script_flush()
            kind = _redis_kind(client, lambda: RedisLocks(real.url), url=real.url)
            yield replace(kind, deafened=lambda: _deafened(real.port))


@contextmanager
def _deafened(port: int) -> Iterator[LockProvider]:
    with Proxy(port) as proxy:
        locks = RedisLocks(f"redis://127.0.0.1:{proxy.port}", socket_timeout_s=0.3, retries=0)
        locks.release(("none",), new_owner())  # it is connected, and its scripts are loaded
        proxy.mode = Mode.SWALLOW
        yield locks
        locks.close()


def _redlock_kind(servers: Sequence[RedisServer]) -> LockServer:
    """Several servers as if they were one: what stands in one of them is left over."""
    url = redlock_url(*(server.port for server in servers))

    def forget() -> None:
        for server in servers:
            with redis.Redis(port=server.port) as client:
                client.flushall()

    def leftovers() -> list[str]:
        found: set[str] = set()
        for server in servers:
            with redis.Redis(port=server.port) as client:
                keys: Any = client.keys("*")
                found |= {key.decode() for key in keys}
        return sorted(found)

    for server in servers:
        with redis.Redis(port=server.port) as client:
            client.flushall()
            client.script_flush()
    return LockServer(
        lambda: RedlockLocks(url), forget, leftovers, url, lambda: _all_deafened(servers)
    )


@contextmanager
def _all_deafened(servers: Sequence[RedisServer]) -> Iterator[LockProvider]:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.port)) for server in servers]
        url = redlock_url(*(proxy.port for proxy in proxies))
        locks = RedlockLocks(url, socket_timeout_s=0.3)
        locks.release(("none",), new_owner())  # it is connected, and its scripts are loaded
        for proxy in proxies:
            proxy.mode = Mode.SWALLOW
        yield locks
        locks.close()


def _redis_kind(
    client: redis.Redis, connect: Callable[[], RedisLocks], *, url: str | None = None
) -> LockServer:
    def leftovers() -> list[str]:
        keys: Any = client.keys("*")
        return sorted(key.decode() for key in keys if not key.endswith(b":fence"))

    return LockServer(connect, client.flushall, leftovers, url)


@pytest.fixture
def locks(server: LockServer) -> LockProvider:
    """A provider on the server."""
    return server.connect()
