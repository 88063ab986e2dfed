"""Sentinels of the system's redis-server, which promote a replica soon after its master is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from support.waiting import wait_until
from taskguard_sandbox.servers import DebianRedis, SentinelOf


@dataclass
class Group:
    """A master, its replicas and its Sentinels."""

    servers: list[DebianRedis]
    sentinels: list[SentinelOf]

    @property
    def url(self) -> str:
        """Locks behind them."""
        return self.url_of(*self.sentinels)

    def url_of(self, *sentinels: SentinelOf, credentials: str = "", options: str = "") -> str:
        """Return the URL with these Sentinels only."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in sentinels)
        return f"sentinel://{credentials}{hosts}/shop/0{options}"

    @property
    def master(self) -> DebianRedis:
        """Return the master by its own report; the first in the list if there are two."""
        return self._first("master")

    @property
    def replica(self) -> DebianRedis:
        """Return a server that is a replica now."""
        return self._first("slave")

    def _first(self, wanted: str) -> DebianRedis:
        """Return the first server with this role. Ask a late server again."""
        return wait_until(
            lambda: [each for each in self.servers if role(each) == wanted],
            message=f"a {wanted}",
        )[0]

    def ask(self, sentinel: SentinelOf, *words: object) -> Any:
        """One command to a Sentinel."""
        with redis.Redis(port=sentinel.port, decode_responses=True) as client:
            return client.execute_command("SENTINEL", *words)

    def values(self, sentinel: SentinelOf) -> dict[str, str]:
        """Return the Sentinel's data about the master."""
        return _named_values(self.ask(sentinel, "MASTER", "shop"))

    def named(self, sentinel: SentinelOf) -> int:
        """The port of the master that it names."""
        return int(self.ask(sentinel, "GET-MASTER-ADDR-BY-NAME", "shop")[1])

    def wait_for_promotion(self, of: DebianRedis) -> None:
        """Wait until this server is master, and each Sentinel that answers says so."""
        wait_until(lambda: role(of) == "master", message="the replica is promoted")
        running = [each for each in self.sentinels if each.running]
        wait_until(
            lambda: {self.named(each) for each in running} == {of.port},
            message="the Sentinels name the new master",
        )


def role(server: DebianRedis) -> str | None:
    """`master` or `slave` by its own word; None where it does not answer."""
    once = Retry(NoBackoff(), 0)
    with (
        suppress(redis.RedisError),
        redis.Redis(port=server.port, socket_timeout=5, retry=once) as client,
    ):
        return str(client.info("replication")["role"])
    return None


@contextmanager
def groups(
    *,
    sentinels: int = 3,
    replicas: int = 1,
    quorum: int = 2,
    down_after_ms: int = 2000,
    of_sentinels: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Group]:
    """A group whose members all know each other; `options` are those of its servers."""
    with ExitStack() as stack:
        start = stack.enter_context
        options = {"repl_diskless_sync_delay": 0, **options}
        master = start(DebianRedis(**options))
        behind = {**options, "replicaof": f"127.0.0.1 {master.port}"}
        servers = [start(DebianRedis(**behind)) for _ in range(replicas)]
        watchers = [
            start(
                SentinelOf(
                    master.port,
                    quorum=quorum,
                    down_after_ms=down_after_ms,
                    **(of_sentinels or {}),
                )
            )
            for _ in range(sentinels)
        ]
        group = Group([master, *servers], watchers)
        wait_until_complete(group)
        yield group


def wait_until_complete(group: Group) -> None:
    """Wait until each Sentinel knows the others and all servers, and the replicas follow."""
    wait_until(
        lambda: all(_is_complete(group, each) for each in group.sentinels),
        message="a group",
        interval_s=0.1,
    )


def _is_complete(group: Group, sentinel: SentinelOf) -> bool:
    master = group.values(sentinel)
    others = int(master["num-other-sentinels"]), int(master["num-slaves"])
    replicas = map(_named_values, group.ask(sentinel, "REPLICAS", "shop"))
    return others == (len(group.sentinels) - 1, len(group.servers) - 1) and all(
        each["master-link-status"] == "ok" and each["flags"] == "slave" for each in replicas
    )


def _named_values(reply: Any) -> dict[str, str]:
    """Older versions of redis-py leave it as it came."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
