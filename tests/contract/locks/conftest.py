"""The lock servers that the contract suite runs on. A new provider is one entry in `KINDS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from support.advisory import advisory_kind
from support.consul import consul_kind
from support.etcd import etcd_kind
from support.ledger_databases import LedgerDatabases
from support.lock_servers import LockServer, connect_by_a_lock, redlock_url
from support.needs import need_redis_in_memory
from support.proxy import Mode, Proxy
from support.sentinel import Group
from support.session_locks import SessionServer, session_kind
from support.zookeeper import zookeeper_kind
from taskguard.lock_table import TableLocks
from taskguard.locks.base import LockProvider
from taskguard.locks.memory import MemoryLocks
from taskguard.locks.redis import RedisLocks
from taskguard.locks.redis.cluster import RedisClusterLocks
from taskguard.locks.redlock import RedlockLocks
from taskguard_sandbox.clusters import Cluster
from taskguard_sandbox.servers import RedisServer, SentinelOf

KINDS = [
    "memory",
    pytest.param("session", marks=pytest.mark.once),
    "fakeredis",
    "valkey",
    pytest.param("redis62", marks=pytest.mark.once),  # through the client that Valkey also uses
    "cluster",
    pytest.param("debian_redis", marks=pytest.mark.debian),
    pytest.param("sentinel", marks=pytest.mark.debian),
    pytest.param("redlock", marks=pytest.mark.once),  # so does it
    "pg_table",
    pytest.param("mariadb_table", marks=pytest.mark.debian),
    pytest.param("mysql_table", marks=pytest.mark.debian),
    pytest.param("pg_advisory", marks=pytest.mark.once),  # through the driver of "pg_table"
    pytest.param("mariadb_get_lock", marks=pytest.mark.debian),
    pytest.param("mysql_get_lock", marks=pytest.mark.debian),
    pytest.param("etcd", marks=pytest.mark.debian),
    pytest.param("newest_etcd", marks=pytest.mark.debian),
    pytest.param("consul", marks=pytest.mark.debian),
    pytest.param("zookeeper", marks=pytest.mark.debian),
]
# Fixtures of the databases' servers.
TABLES = {"pg_table": "postgres", "mariadb_table": "mariadb", "mysql_table": "mysql"}
SESSIONS = {"pg_advisory": "postgres", "mariadb_get_lock": "mariadb", "mysql_get_lock": "mysql"}


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[LockServer]:
    """Return an empty lock server."""
    if request.param == "memory":
        memory = MemoryLocks()
        yield LockServer(lambda: memory, memory.flush, lambda: list(memory.held()))
    elif request.param == "session":
        yield session_kind(SessionServer())
    elif request.param == "fakeredis":
        need_redis_in_memory()
        from fakeredis import FakeRedis

        fake = FakeRedis()
        yield _redis_kind(fake, lambda: RedisLocks(fake))
    elif request.param == "sentinel":
        group: Group = request.getfixturevalue("sentinel_group")
        with redis.Redis(port=group.master.port) as client:
            client.flushall()
            kind = _redis_kind(client, lambda: patient(group.url), url=group.url)
            yield replace(kind, deafened=lambda: _deafened_behind_sentinel(group))
    elif request.param == "cluster":
        yield _cluster_kind(request.getfixturevalue("cluster"))
    elif request.param == "redlock":
        yield _redlock_kind(request.getfixturevalue("five_valkeys"))
    elif request.param in TABLES | SESSIONS:
        request.getfixturevalue("no_certificates")
        databases: LedgerDatabases = request.getfixturevalue("ledger_databases")
        database_server = request.getfixturevalue((TABLES | SESSIONS)[request.param])
        kind_on = _table_kind if request.param in TABLES else advisory_kind
        with databases.on(database_server) as database, kind_on(database.url) as kind:
            yield kind
    elif request.param in ("etcd", "newest_etcd"):
        yield etcd_kind(request.getfixturevalue(request.param))
    elif request.param == "consul":
        yield consul_kind(request.getfixturevalue("consul"))
    elif request.param == "zookeeper":
        with zookeeper_kind(request.getfixturevalue("zookeeper")) as kind:
            yield kind
    else:
        real: RedisServer = request.getfixturevalue(request.param)
        with redis.Redis(port=real.port) as client:
            client.flushall()
            client.script_flush()
            kind = _redis_kind(client, lambda: patient(real.url), url=real.url)
            yield replace(kind, deafened=lambda: _deafened(real.port))


@contextmanager
def _table_kind(url: str) -> Iterator[LockServer]:
    """Return providers of an empty table, which exists. They are closed at the end."""
    made: list[TableLocks] = []
    engine = sa.create_engine(url, poolclass=sa.NullPool)

    def connect() -> TableLocks:
        made.append(TableLocks(url, answer_s=10.0))
        return made[-1]

    def forget() -> None:
        with engine.begin() as db:
            db.exec_driver_sql("delete from taskguard_locks")

    def leftovers() -> list[str]:
        with engine.begin() as db:
            held = db.exec_driver_sql("select owner from taskguard_locks where owner <> ''")
            return sorted(str(row.owner) for row in held)

    try:
        yield LockServer(connect, forget, leftovers, url, lambda: _deafened_table(engine.url))
    finally:
        for each in made:
            each.close()


@contextmanager
def _deafened_table(url: sa.URL) -> Iterator[LockProvider]:
    assert url.port is not None
    with (
        Proxy(url.port) as proxy,
        closing(TableLocks(url.set(port=proxy.port), answer_s=0.3)) as locks,
    ):
        connect_by_a_lock(locks)
        proxy.mode = Mode.SWALLOW
        yield locks


@contextmanager
def _deafened(port: int) -> Iterator[LockProvider]:
    with Proxy(port) as proxy:
        yield from _goes_deaf(f"redis://127.0.0.1:{proxy.port}", proxy)


@contextmanager
def _deafened_behind_sentinel(group: Group) -> Iterator[LockProvider]:
    # Use another name: the group's own sentinels would take it for one of theirs.
    with (
        Proxy(group.master.port) as proxy,
        SentinelOf(proxy.port, name="deaf", down_after_ms=60_000) as sentinel,
    ):
        yield from _goes_deaf(f"sentinel://127.0.0.1:{sentinel.port}/deaf", proxy)


def _goes_deaf(url: str, proxy: Proxy) -> Iterator[LockProvider]:
    locks = RedisLocks(url, socket_timeout_s=0.3, retries=0)
    connect_by_a_lock(locks)  # and its scripts are loaded
    proxy.mode = Mode.SWALLOW
    yield locks
    locks.close()


def _redlock_kind(servers: Sequence[RedisServer]) -> LockServer:
    """Several servers as one: a lock that remains on one of them counts as left over."""
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
        lambda: RedlockLocks(url, socket_timeout_s=5.0, connect_timeout_s=5.0),
        forget,
        leftovers,
        url,
        lambda: _all_deafened(servers),
    )


@contextmanager
def _all_deafened(servers: Sequence[RedisServer]) -> Iterator[LockProvider]:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.port)) for server in servers]
        url = redlock_url(*(proxy.port for proxy in proxies))
        locks = RedlockLocks(url, socket_timeout_s=0.3)
        connect_by_a_lock(locks)  # and its scripts are loaded
        for proxy in proxies:
            proxy.mode = Mode.SWALLOW
        yield locks
        locks.close()


def patient(url: str) -> RedisLocks:
    """Return a provider for which a busy server does not count as down."""
    return RedisLocks(url, socket_timeout_s=5.0, connect_timeout_s=5.0)


def _redis_kind(
    client: redis.Redis, connect: Callable[[], RedisLocks], *, url: str | None = None
) -> LockServer:
    def leftovers() -> list[str]:
        keys: Any = client.keys("*")
        return sorted(key.decode() for key in keys if not key.endswith(b":fence"))

    return LockServer(connect, client.flushall, leftovers, url)


def _cluster_kind(cluster: Cluster) -> LockServer:
    def masters(*words: str) -> list[Any]:
        return [cluster.ask(node, *words) for node in cluster.nodes if cluster.is_master(node)]

    def leftovers() -> list[str]:
        names = (name for names in masters("KEYS", "*") for name in names)
        return sorted(name for name in names if not name.endswith(":fence"))

    masters("FLUSHALL")
    masters("SCRIPT", "FLUSH")
    return LockServer(
        connect=lambda: RedisClusterLocks(cluster.url, socket_timeout_s=5.0, connect_timeout_s=5.0),
        forget=lambda: masters("FLUSHALL"),
        leftovers=leftovers,
        url=cluster.url,
        deafened=lambda: _deafened_cluster(cluster),
    )


@contextmanager
def _deafened_cluster(cluster: Cluster) -> Iterator[LockProvider]:
    """The provider reaches the cluster through one node, which has the tests' key and announces a
    proxy."""
    node = cluster.master_of("taskguard:{order:42}")
    with Proxy(node.port) as proxy, cluster.announcing({node: proxy.port}):
        locks = RedisClusterLocks(
            f"redis+cluster://127.0.0.1:{proxy.port}", socket_timeout_s=0.3, retries=0
        )
        connect_by_a_lock(locks, "order:42")  # and its scripts are loaded
        proxy.mode = Mode.SWALLOW
        yield locks
        locks.close()


@pytest.fixture
def locks(server: LockServer) -> LockProvider:
    """Return a provider on the server."""
    return server.connect()
