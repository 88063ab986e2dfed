"""Locks while the server or its connection fails: lost replies, silence, restarts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from support.proxy import Mode, Proxy
from support.waiting import wait_until
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.base import Granted, Held, Hold, Renewal
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import Valkey

KEY = ("order:42",)
LOCK = "taskguard:{order:42}"
SOCKET_TIMEOUT_S = 1.0
# Two attempts of a connection, a handshake, a reply each, and time for a busy machine. Without
# timeouts no attempt here would ever end.
BOUND_S = 2 * 3 * SOCKET_TIMEOUT_S + 20.0
BOTH_WAYS = pytest.mark.parametrize("then", [Mode.SWALLOW, Mode.CUT])


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A server that a test may pause and stop."""
    with Valkey() as server:
        yield server


@pytest.fixture
def client(valkey: Valkey) -> Iterator[Any]:
    with redis.Redis(port=valkey.port, decode_responses=True, protocol=2) as client:
        client.flushall()
        yield client


@pytest.fixture
def proxy(valkey: Valkey, client: Any) -> Iterator[Proxy]:
    with Proxy(valkey.port) as proxy:
        yield proxy


def connect(port: int, **options: Any) -> RedisLocks:
    bounds = {"socket_timeout_s": SOCKET_TIMEOUT_S, "connect_timeout_s": SOCKET_TIMEOUT_S}
    return RedisLocks(f"redis://127.0.0.1:{port}/0", **{**bounds, **options})


def take(locks: RedisLocks, *, ttl_s: float = 30.0) -> Any:
    owner = new_owner("m")
    answer = locks.acquire(KEY, owner, ttl_s=ttl_s, with_fence=True, wait_s=0.0)
    assert isinstance(answer, Granted)
    return owner


@contextmanager
def unavailable(match: str = ".") -> Iterator[pytest.ExceptionInfo[LockServerUnavailableError]]:
    """Check that the right error is raised, with its cause, within the timeout."""
    started = time.monotonic()
    with pytest.raises(LockServerUnavailableError, match=match) as info:
        yield info
    assert time.monotonic() - started < BOUND_S
    assert isinstance(info.value.__cause__, (redis.RedisError, OSError))


def every_call(locks: RedisLocks) -> list[Callable[[], object]]:
    owner = new_owner("m")
    return [
        lambda: locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=1.0),
        lambda: locks.renew([Hold(KEY, owner, 30.0)]),
        lambda: locks.hand_over(KEY, owner, to=new_owner("n"), ttl_s=30.0),
        lambda: locks.release(KEY, owner),
    ]


class TestLostReply:
    @BOTH_WAYS
    def test_of_acquire(self, client: Any, proxy: Proxy, then: Mode) -> None:
        """Asked again, the server gives the grant that it had given: one token, one owner."""
        locks = connect(proxy.port)
        locks.release(KEY, take(locks))
        proxy.lose_reply_to(b"EVALSHA", then=then)
        owner = new_owner("m")
        answer = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        assert not proxy.armed
        assert proxy.lost > 0
        assert isinstance(answer, Granted)
        assert client.get(LOCK) == str(owner)
        assert int(client.get(f"{LOCK}:fence")) == answer.fence
        direct = connect(client.connection_pool.connection_kwargs["port"])
        again = direct.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        assert again == answer

    @BOTH_WAYS
    def test_of_acquire_and_of_its_retry(self, client: Any, proxy: Proxy, then: Mode) -> None:
        """If both replies are lost, the caller gets an error, and a later request gets the
        grant."""
        locks = connect(proxy.port, retries=0)
        locks.release(KEY, take(locks))
        owner = new_owner("m")
        proxy.lose_reply_to(b"EVALSHA", then=then)
        with unavailable():
            locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        fence = int(client.get(f"{LOCK}:fence"))
        answer = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        assert isinstance(answer, Granted)
        assert answer.fence == fence

    @BOTH_WAYS
    def test_of_renew(self, proxy: Proxy, then: Mode) -> None:
        """A renewal whose reply is lost is asked again."""
        locks = connect(proxy.port)
        owner = take(locks)
        proxy.lose_reply_to(b"EVALSHA", then=then)
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
        assert proxy.lost > 0

    @BOTH_WAYS
    def test_of_release(self, client: Any, proxy: Proxy, then: Mode) -> None:
        """A release whose reply is lost has released the key, and does not release the next
        holder's."""
        locks = connect(proxy.port)
        locks.release(KEY, take(locks))
        owner = take(locks)
        proxy.lose_reply_to(b"EVALSHA", then=then)
        assert locks.release(KEY, owner) is True  # the caller cannot know that it did not
        assert proxy.lost > 0
        assert client.exists(LOCK) == 0
        assert locks.release(KEY, owner) is False

    @BOTH_WAYS
    def test_of_hand_over(self, client: Any, proxy: Proxy, then: Mode) -> None:
        """A repeated hand-over, whose reply was lost, is reported as done."""
        locks, true = connect(proxy.port), new_owner("true")
        owner = take(locks)
        proxy.lose_reply_to(b"EVALSHA", then=then)
        assert locks.hand_over(KEY, owner, to=true, ttl_s=30.0) is True
        assert proxy.lost > 0
        assert client.get(LOCK) == str(true)


class TestSilence:
    def test_black_hole(self, proxy: Proxy) -> None:
        """Every call ends within the bound when packets vanish, and works when they come again."""
        locks = connect(proxy.port)
        take(locks)
        proxy.mode = Mode.BLACK_HOLE
        for call in every_call(locks):
            with unavailable(rf"127\.0\.0\.1:{proxy.port}/0 gave no answer"):
                call()
        proxy.mode = Mode.PASS
        for call in every_call(locks):
            call()

    def test_waiting(self, proxy: Proxy) -> None:
        """Waiting ends within its own time and the bound."""
        locks = connect(proxy.port, retries=0)
        take(locks)
        proxy.mode = Mode.BLACK_HOLE
        started = time.monotonic()
        with pytest.raises(LockServerUnavailableError):
            locks.wait(KEY[0], new_owner(), timeout_s=30.0)
        assert time.monotonic() - started < 1.0 + BOUND_S

    def test_patient_client(self, valkey: Valkey, proxy: Proxy) -> None:
        """A client of the user's own that retries ten times in silence does not make us wait."""
        ten_times = Retry(ExponentialBackoff(), 10)
        theirs = redis.Redis(port=proxy.port, socket_timeout=5.0, retry=ten_times)
        locks = RedisLocks(
            theirs, socket_timeout_s=SOCKET_TIMEOUT_S, connect_timeout_s=SOCKET_TIMEOUT_S
        )
        take(locks)
        proxy.mode = Mode.BLACK_HOLE
        before = proxy.connections
        with unavailable():
            take(locks)
        assert proxy.connections == before + 1

    def test_paused_server(self, server: Valkey) -> None:
        """A frozen server is an error within the bound, whether connected before or not."""
        connected, fresh = connect(server.port), connect(server.port)
        take(connected)
        server.pause()
        for locks in (connected, fresh):
            with unavailable("gave no answer"):
                take(locks)
        server.resume()
        for locks in (connected, fresh):
            locks.acquire(("other",), new_owner(), ttl_s=5.0, with_fence=True, wait_s=0.0)

    def test_done_later(self, server: Valkey) -> None:
        """A frozen server processes its pending requests when it goes on. A lease of a nonce is
        granted to its owner only, when it asks again."""
        locks, owner = connect(server.port), new_owner("m")
        locks.release(KEY, take(locks))  # the server knows the script
        server.pause()
        with unavailable():
            locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        server.resume()
        with redis.Redis(port=server.port) as client:
            wait_until(lambda: client.exists(LOCK))
        answer = locks.acquire(KEY, new_owner("n"), ttl_s=30.0, with_fence=True, wait_s=0.0)
        assert isinstance(answer, Held)
        assert answer.owner == owner
        assert isinstance(
            locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0), Granted
        )

    def test_refused(self, server: Valkey) -> None:
        """A stopped server is an error at once; when it is back, so are the locks."""
        locks = connect(server.port)
        take(locks)
        server.kill()
        for call in every_call(locks):
            with unavailable("refused|closed|reset"):
                call()
        with unavailable():
            locks.wait(KEY[0], new_owner(), timeout_s=1.0)
        server.start()
        take(locks)


class TestConnections:
    def test_closed_by_the_server(self, client: Any, valkey: Valkey) -> None:
        """Connections that the server closed meanwhile are replaced without an error."""
        locks = connect(valkey.port)
        with ThreadPoolExecutor(4) as pool:  # several idle connections of both kinds
            for _ in range(4):
                pool.submit(locks.wait, KEY[0], new_owner(), timeout_s=0.2)
                pool.submit(locks.release, KEY, new_owner())
        for call in every_call(locks):
            client.client_kill_filter(_type="normal", skipme=True)
            call()
        client.client_kill_filter(_type="normal", skipme=True)
        locks.wait(KEY[0], new_owner(), timeout_s=0.1)

    def test_are_kept(self, proxy: Proxy) -> None:
        """Calls one after the other share one connection."""
        locks = connect(proxy.port)
        for _ in range(5):
            locks.release(KEY, take(locks))
        assert proxy.connections == 1

    def test_after_close(self, proxy: Proxy) -> None:
        """`close()` closes what is idle; the next call connects again."""
        locks = connect(proxy.port)
        owner = take(locks)
        locks.close()
        assert locks.release(KEY, owner) is True
        assert proxy.connections == 2

    def test_interrupted_call(self, server: Valkey) -> None:
        """A call that a time limit interrupts leaves no reply that the next one takes as its."""

        class TimeLimitError(Exception):
            pass

        def ring(number: int, frame: object) -> None:
            raise TimeLimitError

        locks = connect(server.port, socket_timeout_s=20.0)
        owner, other = take(locks), new_owner("other")
        old = signal.signal(signal.SIGUSR1, ring)
        main = threading.get_ident()
        try:
            for call in (
                lambda: locks.acquire(KEY, other, ttl_s=30.0, with_fence=True, wait_s=0.0),
                lambda: locks.renew([Hold(KEY, owner, 30.0)]),
            ):
                server.pause()
                timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGUSR1))
                with pytest.raises(TimeLimitError):
                    timer.start()
                    call()
                timer.join()
                server.resume()
                assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
                assert locks.release(("nothing",), owner) is False
        finally:
            signal.signal(signal.SIGUSR1, old)
            server.resume()


class TestRefusals:
    def test_replica(self, server: Valkey) -> None:
        """A demoted master is an error that says so, and forgotten once it is master again."""
        locks = connect(server.port)
        locks.release(KEY, take(locks))
        with redis.Redis(port=server.port) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            with unavailable("read only replica"):
                take(locks)
            client.execute_command("REPLICAOF", "NO", "ONE")
        take(locks)

    def test_too_many_clients(self, server: Valkey) -> None:
        """A server that takes no more clients is an error that says so."""
        with redis.Redis(port=server.port) as client:
            client.config_set("maxclients", "1")
            with unavailable("max number of clients"):
                take(connect(server.port))

    @pytest.mark.parametrize(
        "credentials", ["", ":wrong-secret@", "tasks:wrong-secret@", "nobody:wrong-secret@"]
    )
    def test_password(self, credentials: str) -> None:
        """A missing or wrong password is said in words, never with the password."""
        users = ["default on >right-secret ~* +@all", "tasks on >right-secret ~* +@all"]
        with Valkey(user=users) as server:
            locks = RedisLocks(f"redis://{credentials}127.0.0.1:{server.port}/0")
            with unavailable("mistake in the settings") as info:
                take(locks)
            seen: BaseException | None = info.value
            while seen is not None:
                assert "secret" not in f"{seen} {seen!r}"
                seen = seen.__cause__ or seen.__context__
            assert "secret" not in repr(locks)
            good = RedisLocks(server.url_of(0, user="tasks", password="right-secret"))
            take(good)

    def test_cluster(self) -> None:
        """A Redis Cluster is refused by name, with the URL to write."""
        with Valkey(cluster_enabled="yes") as server:
            with redis.Redis(port=server.port) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
                wait_until(lambda: client.cluster("info")["cluster_state"] == "ok")
            locks = connect(server.port)
            take(locks)
            with pytest.raises(LockServerUnavailableError, match=r"redis\+cluster://"):
                locks.acquire(("a", "b"), new_owner(), ttl_s=5, with_fence=True, wait_s=0)
