"""Several lock servers that know nothing of each other, for Redlock.

    with independent(5) as servers:
        locks = servers.connect()

A server that was just started has no vote for as long as a lease may last. These have one at once:
they write each change to their disk first, or a clock of a test's own says that they run for an
hour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from support import clock_shim
from support.lock_servers import redlock_url
from taskguard.locks.redlock import RedlockLocks
from taskguard_sandbox.servers import RedisServer, Valkey

__all__ = ["Independent", "independent"]

DURABLE = {"appendonly": "yes", "appendfsync": "always"}
HOUR_S = 3600.0


class Independent:
    """The servers, and access to the data of each."""

    def __init__(self, servers: Sequence[RedisServer]) -> None:
        self.servers = servers
        self.url = redlock_url(*(server.port for server in servers))
        self._made: list[RedlockLocks] = []

    def connect(self, **options: Any) -> RedlockLocks:
        """Return locks that `close()` closes."""
        made = RedlockLocks(self.url, **{"socket_timeout_s": 1.0, **options})
        self._made.append(made)
        return made

    def close(self) -> None:
        while self._made:
            self._made.pop().close()

    def owners(self, key: str) -> list[str | None]:
        """Return the holder at each server; None if there is none, or the server is down."""
        return [_owner(server, key) for server in self.servers]

    def give(self, key: str, owner: str, *numbers: int) -> None:
        """Write a lease of a vanished holder."""
        for number in numbers:
            with redis.Redis(port=self.servers[number].port) as client:
                client.set(f"taskguard:{{{key}}}", owner, px=60_000)

    def empty(self, *numbers: int) -> None:
        """Empty the servers while they run."""
        for number in numbers or range(len(self.servers)):
            with redis.Redis(port=self.servers[number].port) as client:
                client.flushall()


def _owner(server: RedisServer, key: str) -> str | None:
    once = Retry(NoBackoff(), 0)
    with redis.Redis(
        port=server.port, socket_timeout=1.0, retry=once, protocol=2, decode_responses=True
    ) as client:
        try:
            found: Any = client.get(f"taskguard:{{{key}}}")
        except (redis.ConnectionError, redis.TimeoutError):
            return None
        return None if found is None else str(found)


@contextmanager
def independent(
    count: int = 5, *, clock: clock_shim.ServerClock | None = None, **options: Any
) -> Iterator[Independent]:
    """Start new servers. With a clock they lose their data when they are killed."""
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        for _ in range(count):
            server = (
                Valkey(**{**DURABLE, **options})
                if clock is None
                else clock_shim.Valkey(clock, **options)
            )
            servers.append(stack.enter_context(server))
        if clock is not None:
            clock.jump(HOUR_S)
            for server in servers:
                assert isinstance(server, clock_shim.Valkey)
                server.jump(0.0)  # it has seen it
        with closing(Independent(servers)) as made:
            yield made
