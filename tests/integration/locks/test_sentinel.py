"""Locks behind Sentinel: which Sentinels are queried, what it costs, users, TLS, findings.

Failovers are tested in `tests/faults/test_sentinel_failover.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from urllib.parse import quote

import pytest
import redis

import taskguard.locks.redis
from support.certificates import Certificates
from support.needs import need
from support.proxy import Mode, Proxy
from support.sentinel import Group
from support.waiting import wait_until
from taskguard.doctor import GuardedTask
from taskguard.doctor.locks import check_locks
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Level
from taskguard.locks.base import Granted, Hold, Renewal
from taskguard.locks.redis import RedisLocks
from taskguard.locks.redis.sentinel_url import SentinelUrl
from taskguard.model.lease import new_owner
from taskguard.model.policy import Policy
from taskguard_sandbox.servers import DebianRedis, SentinelOf, free_port

pytestmark = pytest.mark.debian

KEY = ("order:42",)
LOCK = "taskguard:{order:42}"
# The rights that the package's docstring lists for a user of one server.
RIGHTS = re.findall(r"(?<!\w)\+\w+", str(taskguard.locks.redis.__doc__))


@pytest.fixture
def group(sentinel_group: Group) -> Group:
    """An empty one, in which nothing has failed."""
    with redis.Redis(port=sentinel_group.master.port) as client:
        client.flushall()
    return sentinel_group


@pytest.fixture
def made() -> Iterator[Callable[..., RedisLocks]]:
    """Makes providers that are closed at the end."""
    with ExitStack() as stack:

        def make(url: str, **options: Any) -> RedisLocks:
            locks = RedisLocks(url, **options)
            stack.callback(locks.close)
            return locks

        yield make


@contextmanager
def paused(*servers: DebianRedis) -> Iterator[None]:
    for server in servers:
        server.pause()
    try:
        yield
    finally:
        for server in servers:
            server.resume()


@contextmanager
def settings(server: DebianRedis, **options: object) -> Iterator[None]:
    """Set options by CONFIG SET, and restore them."""
    with redis.Redis(port=server.port, decode_responses=True) as client:
        given = {name.replace("_", "-"): value for name, value in options.items()}
        before = {name: client.config_get(name)[name] for name in given}
        for name, value in given.items():
            client.config_set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                client.config_set(name, value)


def take(locks: RedisLocks, owner: Any = None) -> Any:
    owner = owner or new_owner("m")
    answer = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
    assert isinstance(answer, Granted)
    return owner


def cycle(locks: RedisLocks) -> None:
    assert locks.release(KEY, take(locks))


def fails(locks: RedisLocks) -> bool:
    try:
        cycle(locks)
    except LockServerUnavailableError:
        return True
    return False


def took_s(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


class TestUrls:
    def test_parts(self) -> None:
        """A URL may leave out Sentinel's port, and may be percent-encoded."""
        url = SentinelUrl.parse(
            "sentinel://us%40er:p%2F%23%3F%3A%2C@h1,h2:5000,[::1]:6000/my%20shop/3"
            "?sentinel_username=s%26&sentinel_password=a%2Bb+c&socket_timeout=7&sentinel_timeout=2",
            redis,
        )
        assert url.name == "my shop"
        assert url.sentinels == (("h1", 26379), ("h2", 5000), ("::1", 6000))
        assert url.server_options == {
            "username": "us@er", "password": "p/#?:,", "db": 3, "socket_timeout": 7.0,
        }  # fmt: skip
        assert url.sentinel_options == {"username": "s&", "password": "a+b+c"}
        assert url.timeout_s == 2.0

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("sentinel://:secret@localhost", "name of the master"),
            ("sentinel://:secret@h1,,h2/shop", "name of the master"),
            ("sentinel://:secret@h1,h2:port/shop", "name of the master"),
            ("sentinel://:secret@h1/shop/first", "name of the master"),
            ("sentinel://:se/cret@h1/shop/0", "name of the master"),
            ("sentinel://:se#cret@h1/shop/0", "name of the master"),
            ("sentinel://:se?cret@h1/shop/0", "name of the master"),
            ("sentinel://h1/shop/0?sentinel_password=se#cret", "name of the master"),
            ("sentinel://h1/shop/0?sentinel_timeout=soon", "name of the master"),
            ("sentinel://h1/shop/0?sentinel_timeout=nan", "name of the master"),
            ("sentinel://h1/shop/0?sentinelpassword=secret", "the option sentinelpassword"),
            ("sentinel://:secret@h1/shop/0?wait_replicas=1", "the option wait_replicas"),
            ("sentinels://:secret@h1/shop/0?ssl_cert_reqs=no", "Write ssl_cert_reqs=none or"),
        ],
    )
    def test_wrong(self, url: str, says: str) -> None:
        """A wrong URL raises an error that says what is wrong, and never shows a password."""
        with pytest.raises(ConfigurationError) as info:
            RedisLocks(url)
        assert says in str(info.value)
        assert info.value.__cause__ is None
        assert "secret" not in str(info.value)


class TestDiscovery:
    def test_names_its_place(self, group: Group, made: Any) -> None:
        """The provider's name shows the master as Sentinel names it, and the Sentinels."""
        locks = made(group.url)
        cycle(locks)
        port = group.sentinels[0].port
        assert f"shop/0 by the Sentinels 127.0.0.1:{port}," in repr(locks)

    def test_a_frozen_sentinel_costs_a_new_process_little(self, group: Group, made: Any) -> None:
        """If the first Sentinel of the URL is frozen, a new process waits for one short
        timeout."""
        with paused(group.sentinels[0]):
            assert any(took_s(lambda: cycle(made(group.url))) < 0.6 for _ in range(5))

    def test_a_silent_sentinel_is_waited_for_once(self, group: Group, made: Any) -> None:
        """A majority of the others answers each second, so the silent one is left out."""
        first, *others = group.sentinels
        with Proxy(first.port) as proxy:
            hosts = ",".join(
                f"127.0.0.1:{port}" for port in (proxy.port, *(o.port for o in others))
            )
            # Longer than the others ever take: one that is late would be left out as well.
            locks = made(f"sentinel://{hosts}/shop?sentinel_timeout=2")
            cycle(locks)
            assert proxy.connections == 1
            proxy.mode = Mode.BLACK_HOLE
            proxy.requests = 0

            def was_queried() -> bool:
                cycle(locks)
                return proxy.requests > 0

            wait_until(was_queried)
            until = time.monotonic() + 6.0  # longer than a silent Sentinel is left out
            while time.monotonic() < until:
                cycle(locks)
                time.sleep(0.01)
            assert (proxy.connections, proxy.requests) == (1, 1)

    def test_without_sentinels_the_known_master_remains(self, group: Group, made: Any) -> None:
        """If all Sentinels are silent, a provider that knows the master goes on. Another one gets
        an error that names them."""
        known = made(group.url)
        cycle(known)
        with paused(*group.sentinels):
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                cycle(known)
            known.close()
            cycle(known)
            port, fresh = group.sentinels[0].port, made(group.url)
            for _ in range(2):
                with pytest.raises(LockServerUnavailableError, match=rf"127.*:{port} gave no"):
                    cycle(fresh)
            # The second time it does not wait for them.
            assert any(took_s(lambda: fails(fresh)) < 0.1 for _ in range(20))
        wait_until(lambda: not fails(fresh), message="they are asked again")

    def test_sentinels_that_are_gone(self, group: Group, made: Any) -> None:
        """Sentinels of the URL that refuse connections, or whose name is unknown, are skipped."""
        hosts = f"127.0.0.1:1,nobody.invalid,127.0.0.1:{group.sentinels[1].port}"
        cycle(made(f"sentinel://{hosts}/shop/0"))

    def test_an_unknown_name(self, group: Group, made: Any) -> None:
        """The error names the unknown master, and the part of the URL."""
        url = group.url.replace("/shop/", "/shop2/")
        with pytest.raises(LockServerUnavailableError, match=r"no master by the name 'shop2'"):
            cycle(made(url))

    def test_warm_calls_ask_no_sentinel_more_than_once_a_second(
        self, group: Group, made: Any
    ) -> None:
        """A process asks a Sentinel at most once a second, however many calls and threads it
        has."""
        locks = made(group.url_of(group.sentinels[0]))
        cycle(locks)

        def asked() -> int:
            with redis.Redis(port=group.sentinels[0].port) as client:
                stats: Any = client.info("commandstats")
            return sum(
                each["calls"] for name, each in stats.items() if name.endswith("sentinel|master")
            )

        before, started = asked(), time.monotonic()
        for _ in range(1500):
            cycle(locks)
        assert asked() - before <= 2 + (time.monotonic() - started)

    def test_a_replica_is_not_taken_for_a_master(self, group: Group, made: Any) -> None:
        """If a Sentinel's data are wrong, the result is an error, and not a lock on a replica."""
        with SentinelOf(group.replica.port, name="wrong", down_after_ms=60_000) as sentinel:
            with pytest.raises(LockServerUnavailableError, match="is a slave"):
                cycle(made(f"sentinel://127.0.0.1:{sentinel.port}/wrong"))
            assert group.named(group.sentinels[0]) == group.master.port


class TestUsers:
    PASSWORD = "p@ss/w#r?d:%,&+=é"

    @pytest.fixture
    def users(self, group: Group) -> Iterator[Group]:
        """Create a user for servers and Sentinels each, with only the rights on the pages."""
        of_servers = ["~taskguard:*", *RIGHTS, "+role"]
        of_sentinels = ["+sentinel|master"]
        everybody = [(group.master, of_servers)]
        everybody += [(each, of_sentinels) for each in group.sentinels]
        for server, allowed in everybody:
            name = "locks" if server is group.master else "watch"
            with redis.Redis(port=server.port) as client:
                words = ("reset", "on", f">{self.PASSWORD}", *allowed)
                client.execute_command("ACL", "SETUSER", name, *words)
        yield group
        for server, _ in everybody:
            with redis.Redis(port=server.port) as client:
                client.execute_command("ACL", "DELUSER", "locks", "watch")

    def url(self, group: Group, *, server: str, sentinel: str) -> str:
        return group.url_of(
            *group.sentinels,
            credentials=f"locks:{quote(server, safe='')}@",
            options=f"?sentinel_username=watch&sentinel_password={quote(sentinel, safe='')}",
        )

    def test_least_rights(self, users: Group, made: Any) -> None:
        """The rights of the page are enough. Passwords may have any characters."""
        locks = made(self.url(users, server=self.PASSWORD, sentinel=self.PASSWORD))
        cycle(locks)
        locks.wait(KEY[0], new_owner(), timeout_s=0.05)
        locks.check()

    def test_wrong_passwords(self, users: Group, made: Any) -> None:
        """The error says whose password is wrong, and does not show it."""
        for server, sentinel, who in [
            ("wrong-secret", self.PASSWORD, "The lock server shop/0"),
            (self.PASSWORD, "wrong-secret", r"The Sentinel 127\.0\.0\.1"),
        ]:
            locks = made(self.url(users, server=server, sentinel=sentinel))
            with pytest.raises(LockServerUnavailableError, match=f"{who}.*refuses user") as info:
                cycle(locks)
            assert "secret" not in f"{info.value} {info.value.__cause__} {locks!r}"


class TestTls:
    def test_to_sentinels_and_servers(self, made_certificates: Certificates, made: Any) -> None:
        """Sentinels and servers can require a client's certificate, and their own are verified."""
        need(DebianRedis)
        tls, port = made_certificates.of_server(), (free_port(), free_port())
        with (
            DebianRedis(**tls, tls_port=port[0]),
            SentinelOf(port[0], **tls, tls_port=port[1]),
        ):
            url = f"sentinels://127.0.0.1:{port[1]}/shop/0"
            cycle(made(f"{url}?{made_certificates.of_client()}"))
            for wrong in (
                f"{url}?ssl_ca_certs={made_certificates.authority}",  # none is required
                url,
                f"{url.replace('sentinels', 'sentinel')}",
            ):
                with pytest.raises(LockServerUnavailableError, match=r"The Sentinel .* gave no"):
                    cycle(made(wrong))


class TestMinReplicas:
    def test_refused(self, group: Group, made: Any) -> None:
        """A master that lacks replicas to write to is unavailable for grants and renewals, which
        go on when they are back; refusals it still answers."""
        locks, owner = made(group.url), new_owner("m")
        take(locks, owner)
        with settings(group.master, min_replicas_to_write=5):
            for call in (
                lambda: locks.acquire(("x",), new_owner(), ttl_s=9, with_fence=True, wait_s=0),
                lambda: locks.renew([Hold(KEY, owner, 30.0)]),
            ):
                with pytest.raises(LockServerUnavailableError, match="NOREPLICAS"):
                    call()
            answer = locks.acquire(KEY, new_owner(), ttl_s=9.0, with_fence=True, wait_s=0.0)
            assert answer.owner == owner
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
        assert locks.release(KEY, owner) is True


class TestFindings:
    @pytest.fixture
    def sound(self, group: Group) -> Iterator[Group]:
        """Return a group without findings."""
        with ExitStack() as stack:
            for server in group.servers:
                stack.enter_context(settings(server, appendonly="yes", min_replicas_to_write=1))
            wait_until(
                lambda: names(patient(group)) == [],
                message=lambda: f"{names(patient(group))}",
            )
            yield group

    def test_of_the_master(self, sound: Group) -> None:
        """Findings of the master are those of a single server."""
        with settings(sound.master, maxmemory="1gb", maxmemory_policy="allkeys-lru"):
            assert names(patient(sound)) == ["eviction"]
        with settings(sound.master, min_replicas_to_write=0):
            assert names(patient(sound)) == ["async_replicas"]

    def test_leases_that_end_before_a_failover_has(self, sound: Group) -> None:
        """A lease is a finding if what is left of it at a renewal is shorter than a failover."""
        tell(sound, "down-after-milliseconds", 9_999)
        try:
            with closing(RedisLocks(patient(sound))) as locks:
                assert locks.traits.failover_s == 0.0  # before the first request
                tasks = [GuardedTask("ship", Policy(ttl_s=15.0)), GuardedTask("bill", Policy())]
                (finding,), _ = check_locks(locks, tasks, has_ledger=False)
        finally:
            tell(sound, "down-after-milliseconds", 60_000)
        assert (finding.name, finding.where) == ("ttl_below_failover", "the tasks ship")
        assert "about 12.999 s" in finding.what

    def test_a_silent_sentinel(self, sound: Group) -> None:
        """A Sentinel that gives no answer is a finding."""
        with paused(sound.sentinels[1]):
            (finding,) = RedisLocks(patient(sound)).check()
        assert (finding.name, finding.level) == ("lock_server_member", Level.WARNING)
        assert f"127.0.0.1:{sound.sentinels[1].port}" in finding.what

    def test_no_server_answers(self, group: Group) -> None:
        """If no server answers, check() raises."""
        with paused(*group.sentinels), pytest.raises(LockServerUnavailableError):
            RedisLocks(group.url).check()


def patient(group: Group, *sentinels: SentinelOf) -> str:
    """Return a URL with timeouts for a busy machine."""
    return group.url_of(*(sentinels or group.sentinels), options="?sentinel_timeout=3")


def names(url: str) -> list[str]:
    """Return the names of the findings."""
    return [finding.name for finding in RedisLocks(url).check()]


def tell(group: Group, option: str, value: object) -> None:
    """Run SENTINEL SET at each of them."""
    for sentinel in group.sentinels:
        group.ask(sentinel, "SET", "shop", option, value)
