"""Locks inside a Redis server: keys, expiries, round trips, scripts, a full server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

import taskguard.locks.redis
from support.waiting import patience_s, wait_until
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.base import Granted, Held, Hold, Renewal
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import Owner, new_owner
from taskguard_sandbox.servers import RedisServer

KEY = ("order:42",)
LOCK, FENCE = "taskguard:{order:42}", "taskguard:{order:42}:fence"
LINE, LOOK = "taskguard:{order:42}:line", "taskguard:{order:42}:look"
DAY_MS = 86_400_000


@pytest.fixture(
    params=[
        "valkey",
        pytest.param("redis62", marks=pytest.mark.once),
        pytest.param("debian_redis", marks=pytest.mark.debian),
    ]
)
def server(request: pytest.FixtureRequest) -> RedisServer:
    found: RedisServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    """A plain client of the empty server."""
    with redis.Redis(port=server.port, decode_responses=True, protocol=2) as client:
        client.flushall()
        client.script_flush()
        client.config_resetstat()
        yield client


@pytest.fixture
def locks(server: RedisServer, client: Any) -> RedisLocks:
    return RedisLocks(server.url)


def take(
    locks: RedisLocks, owner: Owner | None = None, *, wait_s: float = 0.0, with_fence: bool = True
) -> Any:
    owner = owner or new_owner("m")
    answer = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=with_fence, wait_s=wait_s)
    return owner if isinstance(answer, Granted) else answer


def taken(locks: RedisLocks) -> Owner | None:
    found = take(locks)
    return found if isinstance(found, Owner) else None


def beside(what: str, owner: Owner) -> str:
    return f"{LOCK}:{what}:{owner.nonce}"


def calls(client: Any, *commands: str) -> int:
    """Return how often the server was called; commands inside scripts count too."""
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{command}", {}).get("calls", 0) for command in commands)


class TestKeys:
    def test_layout(self, client: Any, locks: RedisLocks) -> None:
        """A lock's entries are those of the documentation, each with an expiry."""
        owner, waiter = take(locks), new_owner("n")
        assert isinstance(take(locks, waiter, wait_s=2.0), Held)
        waits, wake = beside("waits", waiter), beside("wake", waiter)
        assert sorted(client.keys()) == [LOCK, FENCE, LINE, waits]
        assert client.get(LOCK) == str(owner)
        assert 29_000 < client.pttl(LOCK) <= 30_000
        assert DAY_MS - 5_000 < client.pttl(FENCE) <= DAY_MS
        assert client.zrange(LINE, 0, -1) == [str(waiter)]
        assert 1_500 < client.pttl(LINE) <= 3_000
        assert 1_500 < client.pttl(waits) <= 3_000
        locks.release(KEY, owner)
        assert set(client.keys()) - {LOCK} == {FENCE, LINE, waits, wake}
        assert client.llen(wake) == 1
        assert 0 < client.pttl(wake) <= 1_000
        assert take(locks, waiter) == waiter
        assert sorted(client.keys()) == [LOCK, FENCE]

    def test_no_litter(self, client: Any, locks: RedisLocks) -> None:
        """Without tokens and waiters, a release leaves nothing."""
        owner = take(locks, with_fence=False)
        assert client.keys() == [LOCK]
        assert isinstance(take(locks), Held)
        locks.release(KEY, owner)
        assert client.keys() == []

    def test_wake_up_calls_do_not_pile_up(self, client: Any, locks: RedisLocks) -> None:
        """If the first waiter never comes, one wake-up at most is stored for it."""
        owner, waiter = take(locks), new_owner("n")
        for _ in range(5):
            assert isinstance(take(locks, waiter, wait_s=30.0), Held)
            locks.release(KEY, owner)
            assert client.llen(beside("wake", waiter)) == 1  # it expires within a second
            owner = wait_until(lambda: taken(locks))
        wait_until(lambda: client.exists(beside("wake", waiter)) == 0)

    def test_who_waits_no_longer_is_forgotten(self, client: Any, locks: RedisLocks) -> None:
        """A waiter that has ended leaves nothing."""
        owner = take(locks, with_fence=False)
        take(locks, wait_s=30.0)
        wait_until(lambda: client.keys() == [LOCK])
        assert locks.release(KEY, owner) is True
        assert client.keys() == []

    @pytest.mark.parametrize(("count", "lookers"), [(1, 0), (4, 1), (25, 0)])
    def test_one_waiter_is_woken(
        self,
        client: Any,
        server: RedisServer,
        locks: RedisLocks,
        count: int,
        lookers: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A release wakes the first waiter. One other waiter checks that it came, and the rest
        sleep on."""
        # No wait ends by itself before all wait, nor before the woken ones have come.
        monkeypatch.setattr("taskguard.locks.redis.provider.WAIT_SLICE_S", 30.0)
        owner, waiters = take(locks), [new_owner("w") for _ in range(count)]
        for waiter in waiters:
            take(locks, waiter, wait_s=30.0)
        ended: list[Owner] = []

        def wait(waiter: Owner) -> None:
            RedisLocks(server.url).wait(KEY[0], waiter, timeout_s=30.0)
            ended.append(waiter)

        threads = [threading.Thread(target=wait, args=(waiter,)) for waiter in waiters]
        for thread in threads:
            thread.start()
        wait_until(lambda: client.info("clients")["blocked_clients"] == count)
        locks.release(KEY, owner)
        try:
            wait_until(lambda: len(ended) > lookers)
            time.sleep(0.5)
            woken = list(ended)
        finally:
            for waiter in waiters:
                client.lpush(beside("wake", waiter), "")
            for thread in threads:
                thread.join(patience_s())
        assert waiters[0] in woken
        assert len(woken) == 1 + lookers

    def test_namespaces(self, client: Any, server: RedisServer, locks: RedisLocks) -> None:
        """Two namespaces have no keys in common."""
        take(locks)
        other = RedisLocks(server.url, namespace="shop:prod")
        assert isinstance(
            other.acquire(KEY, new_owner(), ttl_s=5, with_fence=False, wait_s=0), Granted
        )
        assert client.exists("shop:prod:{order:42}")

    def test_foreign_value(self, client: Any, locks: RedisLocks) -> None:
        """A key that was set by hand blocks the lock until it is deleted."""
        client.set(LOCK, "maintenance")
        answer = take(locks)
        assert isinstance(answer, Held)
        assert (answer.owner.nonce, answer.remaining_s) == ("maintenance", 86_400.0)

    def test_wrong_type(self, client: Any, locks: RedisLocks) -> None:
        """A key of another type raises an error that says so, and the lock is not taken."""
        client.lpush(LOCK, "x")
        with pytest.raises(LockServerUnavailableError, match="WRONGTYPE"):
            take(locks)


class TestTokens:
    def test_fence_ahead_of_the_clock(self, client: Any, locks: RedisLocks) -> None:
        """After the server's clock was set back, tokens go on by one, and the fence is kept until
        the clock has caught up."""
        ahead = int(time.time() * 1e6) + 48 * 3600 * 1_000_000
        client.set(FENCE, ahead, px=60_000)
        owner = take(locks)
        assert client.get(FENCE) == str(ahead + 1)
        assert 2.99 * DAY_MS < client.pttl(FENCE) <= 3 * DAY_MS
        locks.release(KEY, owner)

    @pytest.mark.parametrize("rubbish", ["", "x", "1.5e300x", "-7"])
    def test_rubbish_fence(self, client: Any, locks: RedisLocks, rubbish: str) -> None:
        """A fence that is no number does not stop the lock; the clock decides."""
        client.set(FENCE, rubbish)
        take(locks)
        assert int(client.get(FENCE)) == pytest.approx(time.time() * 1e6, abs=60e6)

    def test_one_clock(self, client: Any, locks: RedisLocks) -> None:
        """An acquire reads the server's clock once, so that all keys get one token."""
        keys = ("a", "b", "c")
        locks.acquire(keys, new_owner(), ttl_s=30.0, with_fence=True, wait_s=0.0)
        assert calls(client, "time") == 1
        assert len({client.get(f"taskguard:{{{key}}}:fence") for key in keys}) == 1


class TestRoundTrips:
    def test_cycle(self, client: Any, locks: RedisLocks) -> None:
        """An acquire with a token and a release take one round trip each, also for several keys."""
        for keys in (KEY, ("a", "b", "c")):
            owner = new_owner("m")
            for warm in (True, False):  # the scripts are loaded in the first turn
                client.config_resetstat()
                locks.acquire(keys, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
                locks.release(keys, owner)
                asked = calls(client, "evalsha", "eval", "script|load", "script")
                assert asked == 2 or warm
        assert calls(client, "ping", "hello", "client|setinfo", "client") == 0

    def test_contended_cycle(self, client: Any, server: RedisServer, locks: RedisLocks) -> None:
        """A waiter needs four commands: acquire, wait, acquire, release."""
        for warm in (True, False):
            owner, waiter = take(locks), new_owner("n")
            client.config_resetstat()
            assert isinstance(take(locks, waiter, wait_s=30.0), Held)
            locks.release(KEY, owner)
            locks.wait(KEY[0], waiter, timeout_s=30.0)
            assert take(locks, waiter) == waiter
            locks.release(KEY, waiter)
            asked = calls(client, "evalsha", "eval", "script|load", "script", "blpop")
            assert asked == 5 or warm  # one of them is the first holder's release

    def test_ten_thousand_renewals(self, client: Any, locks: RedisLocks) -> None:
        """10,000 leases are renewed in at most 100 round trips, none of which keeps the server
        from others for long."""
        owner = new_owner("m")
        keys = [f"order:{i}" for i in range(10_000)]
        with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.set(f"taskguard:{{{key}}}", str(owner), px=120_000)
            pipeline.execute()
        locks.renew([Hold(("first",), owner, 30.0)])

        def usec_per_call() -> float:
            client.config_resetstat()
            renewed = set(locks.renew([Hold((key,), owner, 600.0) for key in keys]))
            assert renewed == {Renewal.RENEWED}
            stats = client.info("commandstats")["cmdstat_evalsha"]
            assert stats["calls"] <= 100
            return float(stats["usec_per_call"])

        # About 500 on an idle machine. A machine that is paused may be paused within a call.
        assert any(usec_per_call() < 10_000 for _ in range(5))
        assert client.pttl("taskguard:{order:9999}") > 120_000

    def test_batches_by_keys(self, client: Any, locks: RedisLocks) -> None:
        """Leases of many keys fill a batch as quickly as many leases do."""
        owner = new_owner("m")
        holds = [Hold(tuple(f"{i}:{j}" for j in range(300)), owner, 9.0) for i in range(3)]
        locks.renew(holds[:1])
        client.config_resetstat()
        assert locks.renew(holds) == [Renewal.GONE] * 3
        assert calls(client, "evalsha") == 3


class TestScripts:
    def test_flushed(self, client: Any, locks: RedisLocks) -> None:
        """If a server has forgotten its scripts, a call loads them again."""
        owner = take(locks)
        client.script_flush()
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
        client.script_flush()
        other = new_owner("other")
        assert locks.hand_over(KEY, owner, to=other, ttl_s=5.0) is True
        client.script_flush()
        assert locks.release(KEY, other) is True
        client.script_flush()
        assert take(locks)

    def test_flushed_all_the_time(self, client: Any, server: RedisServer) -> None:
        """No call fails if the scripts are flushed while threads take and release locks."""
        stop = threading.Event()

        def flush() -> None:
            with redis.Redis(port=server.port) as own:
                while not stop.is_set():
                    own.script_flush()

        def cycle(number: int) -> int:
            locks, key = RedisLocks(server.url), (f"k{number}",)
            for _ in range(100):
                owner = new_owner("m")
                locks.acquire(key, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
                assert locks.release(key, owner)
            return number

        with ThreadPoolExecutor(4) as pool:
            flusher = pool.submit(flush)
            try:
                assert list(pool.map(cycle, range(3))) == [0, 1, 2]
            finally:
                stop.set()
            flusher.result()


class TestFullServer:
    @pytest.fixture
    def fill(self, client: Any) -> Iterator[Any]:
        """Call it to have the server refuse to store anything more."""

        def fill() -> None:
            client.config_set("maxmemory", "1")

        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        yield fill
        client.config_set("maxmemory", "0")

    def test_acquire(self, client: Any, locks: RedisLocks, fill: Any) -> None:
        """A full server refuses new locks with a clear error, and takes no part of them."""
        fill()
        with pytest.raises(LockServerUnavailableError, match="used memory > 'maxmemory'"):
            locks.acquire(("a", "b"), new_owner("m"), ttl_s=30.0, with_fence=True, wait_s=0.0)
        assert client.keys() == []

    def test_what_still_works(
        self, client: Any, server: RedisServer, fill: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A full server still reports, grants again, renews and releases a held lock, and wakes its
        waiter."""
        monkeypatch.setattr("taskguard.locks.redis.provider.WAIT_SLICE_S", 30.0)
        locks, owner, waiter = RedisLocks(server.url), new_owner("m"), new_owner("n")
        first = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        fill()
        assert locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0) == first
        assert isinstance(take(locks, waiter, wait_s=30.0), Held)
        client.config_set("maxmemory", "0")
        assert isinstance(take(locks, waiter, wait_s=30.0), Held)
        fill()
        assert isinstance(take(locks, waiter, wait_s=30.0), Held)
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
        assert locks.release(KEY, owner) is True
        assert client.get(LOCK) in (str(waiter), None)
        started = time.monotonic()
        locks.wait(KEY[0], waiter, timeout_s=30.0)
        assert time.monotonic() - started < 15.0  # a wait without a wake-up ends after 22 s


class TestRights:
    """The user with the least rights, from the module's docstring."""

    RIGHTS = re.findall(r"(?<!\w)\+\w+", taskguard.locks.redis.__doc__.partition("ACL SETUSER")[2])

    def grant(self, client: Any, rights: list[str]) -> None:
        client.execute_command(
            "ACL", "SETUSER", "tasks", "reset", "on", ">secret-word", "~taskguard:*", *rights
        )

    @pytest.fixture
    def user_url(self, server: RedisServer, client: Any) -> Iterator[str]:
        yield server.url_of(0, user="tasks", password="secret-word")
        client.execute_command("ACL", "DELUSER", "tasks")

    def everything(self, client: Any, url: str) -> None:
        """Every call, on every path of the scripts."""
        locks = RedisLocks(url)
        client.script_flush()
        owner, waiter = take(locks), new_owner("n")
        assert isinstance(take(locks, waiter, wait_s=30.0), Held)
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
        assert locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        other = new_owner("other")
        assert locks.hand_over(KEY, owner, to=other, ttl_s=30.0) is True
        assert locks.release(KEY, other) is True
        locks.wait(KEY[0], waiter, timeout_s=1.0)
        assert locks.release(KEY, waiter) is False
        owner = take(locks)
        locks.acquire(("order:41", *KEY), new_owner(), ttl_s=30.0, with_fence=True, wait_s=1.0)
        assert locks.release(KEY, owner) is True
        assert locks.check() == []

    def test_enough(self, client: Any, user_url: str) -> None:
        """These rights are enough for everything."""
        self.grant(client, [right for right in self.RIGHTS if right != "+select"])
        self.everything(client, user_url)

    def test_none_too_many(self, client: Any, user_url: str) -> None:
        """Without any one of these rights a call fails, and the error says what to do."""
        for missing in self.RIGHTS:
            if missing == "+select":
                continue
            self.grant(client, [right for right in self.RIGHTS if right != missing])
            with pytest.raises(LockServerUnavailableError, match="forbids what locks need") as info:
                self.everything(client, user_url)
            assert "secret-word" not in str(info.value)
            client.flushall()

    def test_another_database(self, client: Any, server: RedisServer, user_url: str) -> None:
        """A database other than 0 needs +select."""
        url = server.url_of(3, user="tasks", password="secret-word")
        self.grant(client, [right for right in self.RIGHTS if right != "+select"])
        with pytest.raises(LockServerUnavailableError, match="forbids what locks need"):
            take(RedisLocks(url))
        self.grant(client, self.RIGHTS)
        assert take(RedisLocks(url))

    def test_namespace(self, client: Any, server: RedisServer, user_url: str) -> None:
        """Keys outside of the user's namespace are forbidden, and the error says so."""
        self.grant(client, self.RIGHTS)
        with pytest.raises(LockServerUnavailableError, match="forbids what locks need"):
            take(RedisLocks(user_url, namespace="other"))
