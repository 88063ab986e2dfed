"""Redlock: which servers have a vote, what is released, and a minority in trouble is not
noticed."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import redis

import taskguard
from support import clock_shim
from support.certificates import Certificates
from support.clock_shim import ServerClock, server_clock, unavailable
from support.independent import Independent, independent
from support.lock_servers import redlock_url
from support.needs import missing, need
from support.proxy import Mode, Proxy
from support.scripts import run_script
from support.waiting import patience_s, wait_until
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.ledger.sql import SqlLedger
from taskguard.locks.base import Granted, Held, Hold, Renewal
from taskguard.locks.redlock import RedlockLocks, servers
from taskguard.locks.redlock.election import Election
from taskguard.model.lease import Owner, new_owner
from taskguard_sandbox.servers import DebianRedis, Valkey, free_port

# Each provider has its own order of the servers.
KEYS = [f"order:{number}" for number in range(8)]
SECRET = "geheim"


@pytest.fixture
def five(five_valkeys: list[Valkey]) -> Iterator[Independent]:
    """Empty servers that all tests share: they must not be stopped."""
    with closing(Independent(five_valkeys)) as made:
        made.empty()
        yield made


@pytest.fixture
def clock() -> Iterator[ServerClock]:
    missing(unavailable())
    need(Valkey)
    with server_clock() as made:
        yield made


@pytest.fixture
def own() -> Iterator[Independent]:
    """Servers that a test may stop."""
    need(Valkey)
    with independent(5) as made:
        yield made


def take(
    locks: RedlockLocks, key: str, owner: Owner | None = None, *, ttl_s: float = 30.0
) -> Granted | Held:
    return locks.acquire((key,), owner or new_owner("m"), ttl_s=ttl_s, with_fence=False, wait_s=0.0)


def cycle(locks: RedlockLocks, key: str) -> None:
    owner = new_owner("m")
    assert isinstance(take(locks, key, owner), Granted)
    assert locks.release((key,), owner) is True


def everywhere(servers: Independent, key: str, owner: Owner, *but: int) -> bool:
    found = servers.owners(key)
    return all(value == str(owner) for number, value in enumerate(found) if number not in but)


def take_everywhere(
    servers: Independent, locks: RedlockLocks, key: str, owner: Owner, *, ttl_s: float = 30.0
) -> None:
    """Take a key on each server; ask again if one was late, as on a machine that is busy."""

    def stands_everywhere() -> bool:
        assert isinstance(take(locks, key, owner, ttl_s=ttl_s), Granted)
        return everywhere(servers, key, owner)

    wait_until(stands_everywhere)


def wait_until_freed(servers: Independent, key: str) -> None:
    """Wait until the key is released or given back, also at servers that answer late. A lease lasts
    longer than this wait."""
    wait_until(lambda: servers.owners(key) == [None] * len(servers.servers))


def _is_granted(locks: RedlockLocks, key: str, *, ttl_s: float) -> bool:
    try:
        return isinstance(take(locks, key, ttl_s=ttl_s), Granted)
    except LockServerUnavailableError:
        return False


class TestQuorum:
    def test_of_those_that_are_configured(self, own: Independent) -> None:
        """Two of five configured servers grant nothing, even if they agree."""
        for server in own.servers[:3]:
            server.kill()
        locks = own.connect()
        with pytest.raises(LockServerUnavailableError, match="but 3 must"):
            take(locks, "k")
        wait_until_freed(own, "k")

    def test_a_majority_is_enough(self, own: Independent) -> None:
        """Three servers of five grant, refuse, renew and release."""
        for server in own.servers[1:3]:
            server.kill()
        locks, other = own.connect(), own.connect()
        for key in KEYS:
            owner = new_owner("m")
            assert isinstance(take(locks, key, owner), Granted)
            assert locks.renew([Hold((key,), owner, 30.0)]) == [Renewal.RENEWED]
            answer = take(other, key)
            assert isinstance(answer, Held)
            assert answer.owner == owner
            assert locks.release((key,), owner) is True
            cycle(other, key)

    def test_a_holder_on_a_minority_is_ignored(self, five: Independent) -> None:
        """A vanished holder's lease on two servers of five blocks no other owner."""
        locks = five.connect()
        for number, key in enumerate(KEYS):
            five.give(key, "gone/m", number % 5, (number + 1) % 5)
            assert isinstance(take(locks, key), Granted)

    def test_of_many_threads_in_a_new_process(self, own: Independent) -> None:
        """Each call connects for itself, while a frozen server keeps all of them waiting."""
        own.servers[0].pause()
        locks = own.connect(socket_timeout_s=60.0, connect_timeout_s=60.0)
        began_s = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(cycle, locks, key) for key in KEYS]:
                done.result(50.0)
        assert time.monotonic() - began_s < 50.0


class TestGiveBack:
    def test_after_a_refusal(self, five: Independent) -> None:
        """If a majority refuses, the other grants are released, and the holder is named."""
        self.is_refused(five)

    def is_refused(self, five: Independent) -> None:
        def found(key: str) -> set[int]:
            return {number for number, who in enumerate(five.owners(key)) if who is not None}

        for number, key in enumerate(KEYS):
            holders = [(number + each) % 5 for each in (0, 2, 4)]
            five.give(key, "holder/m", *holders)
            answer = take(five.connect(), key)
            assert isinstance(answer, Held)
            assert (answer.key, answer.owner) == (key, Owner("holder", "m"))
            wait_until(lambda: found(key) == set(holders))  # noqa: B023

    def test_after_too_few_votes(self, own: Independent) -> None:
        """Without a majority, what a minority granted is free again at once."""
        locks = own.connect(socket_timeout_s=1.0)
        cycle(locks, "k")
        for server in own.servers[2:]:
            server.pause()
        with pytest.raises(LockServerUnavailableError):
            take(locks, "k")
        wait_until(lambda: own.owners("k")[:2] == [None, None])  # while the others are frozen
        for server in own.servers[2:]:
            server.resume()
        # The frozen servers take it when they continue, and learn that it is over.
        wait_until_freed(own, "k")

    def test_of_votes_that_came_too_late(
        self, own: Independent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A majority whose last vote came after the lease was over has granted nothing."""
        locks = own.connect(socket_timeout_s=60.0)
        cycle(locks, "k")
        for server in own.servers[2:]:
            server.pause()
        caught: list[BaseException] = []
        asked, vote = threading.Event(), Election._vote

        def noted(self: Election, born_by_s: float) -> Any:
            asked.set()  # the lease has begun before that
            return vote(self, born_by_s)

        def ask() -> None:
            try:
                take(locks, "k", ttl_s=0.2)
            except LockServerUnavailableError as error:
                caught.append(error)

        asking = threading.Thread(target=ask)
        monkeypatch.setattr(Election, "_vote", noted)
        asking.start()
        assert asked.wait(patience_s())
        time.sleep(0.5)  # longer than the lease
        for server in own.servers[2:]:
            server.resume()
        asking.join(patience_s())
        assert [type(error) for error in caught] == [LockServerUnavailableError]
        assert "too late" in str(caught[0])
        wait_until_freed(own, "k")


class TestRestarted:
    """A server that may have forgotten a valid lease has no vote."""

    def test_has_no_vote(self, clock: ServerClock) -> None:
        """Two of three servers are killed and come back empty: no other owner gets the key
        meanwhile."""
        with independent(3, clock=clock) as three:
            holder = new_owner("m")
            assert isinstance(take(three.connect(), "k", holder, ttl_s=600.0), Granted)
            for server in three.servers[:2]:
                server.kill()
                server.start()
            with pytest.raises(LockServerUnavailableError, match="just started"):
                take(three.connect(), "k", ttl_s=600.0)
            clock.jump(700.0)
            for server in three.servers:
                server.jump(0.0)
            assert isinstance(take(three.connect(), "k", ttl_s=600.0), Granted)

    def test_one_of_three_is_not_missed(self, clock: ServerClock) -> None:
        """If one server of three restarts, the other two go on, also on connections that noticed
        the restart."""
        with independent(3, clock=clock) as three:
            locks = three.connect()
            for key in KEYS:
                cycle(locks, key)
            three.servers[0].kill()
            three.servers[0].start()
            for key in KEYS:
                owner = new_owner("m")
                assert isinstance(take(locks, key, owner), Granted)
                assert locks.release((key,), owner) is True

    def test_a_longer_lease_of_others_is_configured(self, clock: ServerClock) -> None:
        """A provider with short leases can be configured for the longer leases of others."""
        with independent(3, clock=clock) as three:
            for server in three.servers[:2]:
                server.kill()
                server.start()
            clock.jump(60.0)
            for server in three.servers:
                server.jump(0.0)
            assert isinstance(take(three.connect(), "k", ttl_s=30.0), Granted)
            with pytest.raises(LockServerUnavailableError):
                take(three.connect(longest_ttl_s=600.0), "other", ttl_s=30.0)

    def test_has_no_vote_a_moment_too_early(self, clock: ServerClock) -> None:
        """An uptime is a difference of whole seconds, so it may be almost a second too much."""
        with independent(3, clock=clock) as three:
            for server in three.servers[:2]:
                server.kill()
            clock.jump(0.3 - (time.time() + clock.offset_s) % 1.0)
            began_s = time.time() + clock.offset_s
            restarted = three.servers[0]
            restarted.start()
            assert isinstance(restarted, clock_shim.Valkey)
            clock.jump(began_s + 599.9 - time.time() - clock.offset_s)
            with redis.Redis(port=restarted.port) as client:
                wait_until(lambda: client.info("server")["uptime_in_seconds"] >= 599)
            with pytest.raises(LockServerUnavailableError, match="Only 1 of 3"):
                take(three.connect(), "k", ttl_s=600.0)
            restarted.jump(2.0)
            assert isinstance(take(three.connect(), "k", ttl_s=600.0), Granted)

    def test_that_forgets_nothing_votes_at_once(self, own: Independent) -> None:
        """A server with appendfsync always has stored all its grants, and votes at once."""
        holder = new_owner("m")
        locks = own.connect()
        take_everywhere(own, locks, "k", holder, ttl_s=600.0)
        for server in own.servers:
            server.kill()
            server.start()
        answer = take(own.connect(), "k", ttl_s=600.0)
        assert isinstance(answer, Held)
        assert answer.owner == holder
        assert locks.release(("k",), holder) is True


class TestMinorityInTrouble:
    def test_frozen_servers_are_not_waited_for(self, own: Independent) -> None:
        """Two of five are frozen: a cycle takes milliseconds, not the timeout."""
        locks = own.connect(socket_timeout_s=60.0)
        for key in KEYS:
            cycle(locks, key)
        for server in own.servers[:2]:
            server.pause()
        took = []
        for key in KEYS * 10:
            began = time.monotonic()
            cycle(locks, key)
            took.append(time.monotonic() - began)
        assert max(took) < 30.0
        assert statistics.median(took) < 0.5
        for server in own.servers[:2]:
            server.resume()
        self._is_asked_again(own, locks)

    def test_a_new_process_does_not_wait_either(self, own: Independent) -> None:
        """A new process connects to frozen servers in the background."""
        for server in own.servers[3:]:
            server.pause()
        began = time.monotonic()
        locks = own.connect(socket_timeout_s=60.0, connect_timeout_s=60.0)
        for key in KEYS:
            cycle(locks, key)
        assert time.monotonic() - began < 50.0

    def test_what_is_away_is_not_asked_all_the_time(self, own: Independent) -> None:
        """A server that is down is tried sometimes, not at every call. It is used again when it is
        up."""
        with Proxy(own.servers[0].port) as proxy:
            ports = [proxy.port] + [server.port for server in own.servers[1:]]
            locks = RedlockLocks(redlock_url(*ports), socket_timeout_s=1.0)
            for key in KEYS:
                cycle(locks, key)
            own.servers[0].kill()
            proxy.cut()
            before, began = proxy.connections, time.monotonic()
            calls = 0
            while calls <= 20 or time.monotonic() < began + 1.5:
                cycle(locks, KEYS[calls % len(KEYS)])
                calls += 1
            assert proxy.connections - before <= 8 * max(1.0, (time.monotonic() - began) / 1.5)
            own.servers[0].start()
            self._is_asked_again(own, locks)

    def test_an_interrupted_call_keeps_no_server_out(
        self, own: Independent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If a call was interrupted while it connected, later calls connect to servers that were
        restarted."""
        locks = own.connect()

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(servers.Servers, "_start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cycle(locks, "k")
        take_everywhere(own, locks, "before", new_owner("m"))
        for server in own.servers[3:]:
            server.restart()
        take_everywhere(own, locks, "after", new_owner("m"))

    def test_an_interrupted_call_leaves_nothing_locked(
        self, own: Independent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A signal may arrive when a Condition was just entered, which then stays locked."""
        locks = own.connect()
        changed, enter = locks._servers._changed, threading.Condition.__enter__

        def interrupted(condition: threading.Condition) -> bool:
            entered = enter(condition)
            if condition is changed:
                raise KeyboardInterrupt
            return entered

        with monkeypatch.context() as patch:
            patch.setattr(threading.Condition, "__enter__", interrupted)
            cycle(locks, "k")
        cycle(locks, "k")

    def test_late_replies_answer_nothing_else(self, own: Independent) -> None:
        """A server that stops and goes on all the time: each answer is that of its own call."""
        locks, ended = own.connect(socket_timeout_s=5.0), threading.Event()

        def disturb() -> None:
            number = 0
            while not ended.is_set():
                server = own.servers[number % 5]
                server.pause()
                ended.wait(0.02)
                server.resume()
                number += 1

        before: dict[str, set[Owner]] = defaultdict(set)

        def is_granted(key: str, owner: Owner) -> bool:
            answer = take(locks, key, owner)
            # A server that frees the key late may refuse in the name of any holder of this key.
            assert isinstance(answer, Granted) or answer.owner in before[key]
            return isinstance(answer, Granted)

        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        try:
            for number in range(150):
                owner, key = new_owner("m"), KEYS[number % len(KEYS)]
                wait_until(functools.partial(is_granted, key, owner))
                before[key].add(owner)
                assert locks.renew([Hold((key,), owner, 30.0)]) == [Renewal.RENEWED]
                held = take(locks, key)
                assert isinstance(held, Held)
                assert held.owner == owner
                assert locks.release((key,), owner) is True
        finally:
            ended.set()
            disturbing.join(patience_s())
            for server in own.servers:
                server.resume()

    def _is_asked_again(self, own: Independent, locks: RedlockLocks) -> None:
        take_everywhere(own, locks, "again", owner := new_owner("m"))
        locks.release(("again",), owner)


class TestEverywhere:
    def test_a_lock_is_on_all_servers(self, five: Independent) -> None:
        """Every server gets the acquire and the release, although a majority is enough."""
        locks = five.connect()
        for key in KEYS:
            owner = new_owner("m")
            take_everywhere(five, locks, key, owner)
            assert locks.release((key,), owner) is True
            wait_until_freed(five, key)

    def test_two_of_five_may_forget(self, five: Independent) -> None:
        """If two servers of five forget a lease, no other owner gets the key, and the lease is
        renewed."""
        locks = five.connect()
        for number, key in enumerate(KEYS):
            owner = new_owner("m")
            take_everywhere(five, locks, key, owner)
            five.empty(number % 5, (number + 1) % 5)
            answer = take(five.connect(), key)
            assert isinstance(answer, Held)
            assert answer.owner == owner
            assert locks.renew([Hold((key,), owner, 30.0)]) == [Renewal.RENEWED]

    def test_one_of_its_majority_says_nothing(self, own: Independent) -> None:
        """If one server of its majority is silent, a lease is neither reported as gone nor given
        up."""
        locks, owner = own.connect(), new_owner("m")
        cycle(locks, "warm")
        own.give("k", str(owner), 0, 1, 2)
        holds = [Hold(("k",), owner, 30.0)]
        own.servers[0].pause()
        assert locks.renew(holds) == [Renewal.UNANSWERED]
        own.servers[0].resume()
        wait_until(lambda: locks.renew(holds) == [Renewal.RENEWED])

    def test_a_lease_that_most_forgot_is_given_up(self, five: Independent) -> None:
        """If most servers have forgotten a lease, its renewal releases the rest."""
        locks, owner = five.connect(), new_owner("m")
        take_everywhere(five, locks, "k", owner)
        five.empty(0, 2, 4)
        assert locks.renew([Hold(("k",), owner, 30.0)]) == [Renewal.GONE]
        wait_until_freed(five, "k")

    def test_released_at_once(self, five: Independent) -> None:
        """A release also reaches a server that had not yet answered the acquire."""
        locks = five.connect()
        for number in range(60):
            key, owner = f"order:{number}", new_owner("m")
            take(locks, key, owner)
            assert locks.release((key,), owner) is True
            wait_until_freed(five, key)

    def test_released_after_the_scripts_were_forgotten(self, five: Independent) -> None:
        """A server that has forgotten its scripts still releases a lock, although no call waits for
        it."""
        locks = five.connect()
        for key in KEYS[:3]:
            owner = new_owner("m")
            take_everywhere(five, locks, key, owner)
            for server in five.servers:
                with redis.Redis(port=server.port) as client:
                    client.script_flush()
            assert locks.release((key,), owner) is True
            cycle(locks, "another")
            wait_until_freed(five, key)

    def test_asked_again_without_a_majority(self, own: Independent) -> None:
        """A repeated acquire without a majority does not end the owner's earlier grant."""
        locks, owner = own.connect(), new_owner("m")
        take_everywhere(own, locks, "k", owner)
        for server in own.servers[:3]:
            server.pause()
        with pytest.raises(LockServerUnavailableError):
            take(locks, "k", owner)
        for server in own.servers[:3]:
            server.resume()
        time.sleep(0.5)  # what was sent to the frozen ones is done by then
        assert everywhere(own, "k", owner)


class TestRoundTrips:
    def calls(self, five: Independent) -> list[int]:
        found = []
        for server in five.servers:
            with redis.Redis(port=server.port) as client:
                stats: Any = client.info("commandstats")
                found.append(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])
                client.config_resetstat()
        return found

    def test_of_a_short_lock(self, five: Independent) -> None:
        """Each server is asked twice: a cycle on a single server takes two round trips."""
        locks = five.connect()
        cycle(locks, "k")

        def ten() -> bool:
            self.calls(five)
            cycle(locks, "k")
            return self.calls(five) == [2] * 5

        wait_until(ten)  # a late server gets the release's whole source

    def test_of_a_thousand_renewals(self, five: Independent) -> None:
        """At most ten commands for each server, sent at once."""
        locks = five.connect()
        holds = [Hold((f"order:{number}",), new_owner("m"), 30.0) for number in range(1000)]
        for hold in holds:
            locks.acquire(hold.keys, hold.owner, ttl_s=600.0, with_fence=False, wait_s=0.0)
        self.calls(five)
        assert locks.renew(holds) == [Renewal.RENEWED] * 1000
        assert max(self.calls(five)) <= 10


class TestMutants:
    """With a part left out, the tests above fail."""

    def test_a_quorum_of_those_that_answer(
        self, own: Independent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connect = Independent.connect

        def agreeable(self: Independent, **options: Any) -> RedlockLocks:
            locks = connect(self, **options)
            locks._servers.quorum = 1
            return locks

        monkeypatch.setattr(Independent, "connect", agreeable)
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            TestQuorum().test_of_those_that_are_configured(own)

    def test_nothing_is_given_back(
        self, five: Independent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Election, "_give_back", lambda self: None)
        monkeypatch.setattr("support.waiting._BASE_S", 1.0)
        with pytest.raises(AssertionError):
            TestGiveBack().is_refused(five)

    def test_whoever_was_just_started_votes(
        self, clock: ServerClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(servers, "_field", lambda info, name: b"1000000")
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            TestRestarted().test_has_no_vote(clock)


class TestConnections:
    def test_url(self) -> None:
        """Credentials and options of the URL apply to each server. The password is never shown."""
        locks = RedlockLocks(f"redlock://me:{SECRET}%2C%40@a:1,[::1]:2,c/3?socket_timeout=2")
        assert repr(locks) == "<RedlockLocks a:1/3,::1:2/3,c:6379/3 namespace='taskguard'>"

    @pytest.mark.parametrize(
        "url", [f"redlock://:{SECRET}@", "redlock://a,b,c/x", "redlock://a,,b"]
    )
    def test_wrong_urls(self, url: str) -> None:
        """A wrong URL is refused, without what may be a password."""
        with pytest.raises(ConfigurationError) as info:
            RedlockLocks(url)
        assert SECRET not in str(info.value)

    def test_by_name(self, five: Independent, sqlite_url: str) -> None:
        """`connect()` knows the URL, and requires a ledger, because there are no tokens."""
        with pytest.raises(ConfigurationError, match="no fencing tokens"):
            taskguard.connect(locks=five.url, ledger=None)
        ledger = SqlLedger(sqlite_url)
        ledger.create_schema()
        tg = taskguard.connect(locks=five.url, ledger=ledger)
        with tg.lock("inventory:1"):
            assert sum(who is not None for who in five.owners("inventory:1")) >= 3
        tg.close()

    def test_clients(self, five: Independent) -> None:
        """The provider also takes a client for each server."""
        clients = [redis.Redis(port=server.port) for server in five.servers]
        cycle(RedlockLocks(clients), "k")

    def test_rights(self) -> None:
        """The rights of a single server's user and `+info` are enough. Without `+info` the error
        says so."""
        rights = "~taskguard:* +evalsha +eval +get +set +del +exists +pexpire +pttl +time +lpush"
        users = [f"tasks on >{SECRET} {rights} +blpop +info", f"less on >{SECRET} {rights}"]
        need(Valkey)
        with independent(3, user=["default on nopass ~* &* +@all", *users]) as three:
            hosts = three.url.removeprefix("redlock://")
            locks = RedlockLocks(f"redlock://tasks:{SECRET}@{hosts}")
            # It may not ask for appendfsync, and so goes by for how long they have run.
            wait_until(lambda: _is_granted(locks, "k", ttl_s=0.5))
            with pytest.raises(LockServerUnavailableError, match="forbids what locks need") as info:
                take(RedlockLocks(f"redlock://less:{SECRET}@{hosts}"), "k")
            assert SECRET not in str(info.value)

    @pytest.mark.debian
    def test_encrypted(self, made_certificates: Certificates) -> None:
        """TLS with verified certificates works, even if replies come late."""
        need(DebianRedis)
        options: dict[str, Any] = {
            **made_certificates.of_server(),
            "appendonly": "yes",
            "appendfsync": "always",
        }
        with ExitStack() as stack:
            ports = [free_port() for _ in range(3)]
            three = [stack.enter_context(DebianRedis(tls_port=port, **options)) for port in ports]
            hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
            locks = RedlockLocks(f"redlocks://{hosts}/1?{made_certificates.of_client()}")
            for key_name in KEYS:
                cycle(locks, key_name)
            three[1].pause()
            for key_name in KEYS:
                cycle(locks, key_name)
            three[1].resume()
            holds = [Hold((f"order:{n}",), new_owner("m"), 30.0) for n in range(300)]
            assert locks.renew(holds) == [Renewal.GONE] * 300
            cycle(locks, "k")
            locks.close()

    @pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4], [0, 1, 2], [3]])
    def test_idle_connections_that_the_servers_closed(
        self, five: Independent, numbers: list[int]
    ) -> None:
        """Connections that servers closed are replaced within the call. No lock is lost or left."""
        locks, owner = five.connect(), new_owner("m")

        def close() -> None:
            for number in numbers:
                with redis.Redis(port=five.servers[number].port) as client:
                    client.client_kill_filter(_type="normal", skipme=True)

        take_everywhere(five, locks, "k", owner)
        close()
        assert locks.renew([Hold(("k",), owner, 30.0)]) == [Renewal.RENEWED]
        close()
        assert locks.release(("k",), owner) is True
        wait_until_freed(five, "k")
        close()
        cycle(locks, "k")

    def test_the_end_of_a_process_waits_for_no_server(self, own: Independent) -> None:
        """A thread that is still connecting to a frozen server is left behind."""
        script = """
import sys
from taskguard.locks.base import Granted
from taskguard.locks.redlock import RedlockLocks
from taskguard.model.lease import new_owner
owner = new_owner("m")
locks = RedlockLocks(sys.argv[1], socket_timeout_s=300, connect_timeout_s=300)
assert isinstance(locks.acquire(("k",), owner, ttl_s=30, with_fence=False, wait_s=0), Granted)
assert locks.release(("k",), owner)
"""
        own.servers[0].pause()
        assert run_script(script, own.url) == ""

    def test_swallowed_replies_of_some(self, five: Independent) -> None:
        """Replies of two servers vanish: the others decide, and nothing is mistaken for them."""
        with Proxy(five.servers[0].port) as first, Proxy(five.servers[1].port) as second:
            ports = [first.port, second.port, *(server.port for server in five.servers[2:])]
            locks = RedlockLocks(redlock_url(*ports), socket_timeout_s=5.0)
            cycle(locks, "k")
            first.mode = second.mode = Mode.SWALLOW
            for key in KEYS:
                cycle(locks, key)
            locks.close()


class TestFindings:
    def names(self, locks: RedlockLocks) -> list[str]:
        found = locks.check()
        assert all(str(finding) and SECRET not in str(finding) for finding in found)
        return [finding.name for finding in found]

    def test_none(self, five: Independent) -> None:
        """Five equal servers that forget nothing have no findings."""
        assert self.names(five.connect()) == []

    def test_the_same_server_twice(self, five: Independent) -> None:
        """One server under two names is found."""
        ports = [server.port for server in five.servers[:2]]
        url = f"redlock://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]},localhost:{ports[0]}"
        assert self.names(RedlockLocks(url)) == ["redlock_same_server"]

    def test_a_replica(self, five: Independent) -> None:
        """A replica of one of the others is found: it has no vote of its own."""
        need(Valkey)
        master = five.servers[0].port
        with independent(1, replicaof=f"127.0.0.1 {master}") as replica:
            ports = [master, five.servers[1].port, replica.servers[0].port]
            assert self.names(RedlockLocks(redlock_url(*ports))) == ["redlock_replica"]

    def test_one_that_is_away(self, five: Independent) -> None:
        """A server that is down is named. If all are down, check() raises."""
        nobody = free_port()
        ports = [nobody, *(server.port for server in five.servers[:2])]
        (found,) = RedlockLocks(redlock_url(*ports)).check()
        assert found.name == "lock_server_member"
        assert str(nobody) in found.where
        with pytest.raises(LockServerUnavailableError):
            RedlockLocks(redlock_url(nobody, nobody, nobody)).check()

    def test_eviction(self, five: Independent) -> None:
        """Each server that may evict locks is a finding."""
        options = {"maxmemory": "10mb", "maxmemory_policy": "allkeys-lru"}
        with independent(1, **options) as full:
            ports = [full.servers[0].port, *(server.port for server in five.servers[:2])]
            assert self.names(RedlockLocks(redlock_url(*ports))) == ["eviction"]
