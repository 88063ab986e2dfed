"""Behaviour of locks on ZooKeeper: requests, sessions, lost replies, tokens, rights, findings."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import Ping

from support.certificates import Certificates, unavailable
from support.lock_servers import KEY, answered, take, token
from support.needs import allowed, need
from support.proxy import Mode, Proxy
from support.waiting import wait_until
from support.zookeeper import client_of, end_session, locks_in
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.locks.base import Granted, Held, Hold, LockProvider, Renewal
from taskguard.model.lease import Owner, new_owner
from taskguard.settings import make_locks
from taskguard_sandbox.process import free_port
from taskguard_sandbox.servers import ZooKeeper
from taskguard_zookeeper import ZooKeeperLocks

pytestmark = pytest.mark.debian


@pytest.fixture
def client(zookeeper: ZooKeeper) -> Iterator[KazooClient]:
    """Return a client of an empty server."""
    with client_of(zookeeper) as client:
        client.delete("/taskguard", recursive=True)
        yield client


@pytest.fixture
def locks(zookeeper: ZooKeeper, client: KazooClient) -> Iterator[ZooKeeperLocks]:
    """A provider on an empty server, with a session."""
    with locks_on(zookeeper.url) as locks:
        token(locks)
        yield locks


@contextmanager
def locks_on(url: str, **options: float) -> Iterator[ZooKeeperLocks]:
    patient = {"socket_timeout_s": 5.0, "connect_timeout_s": 5.0}
    with closing(ZooKeeperLocks(url, **{**patient, **options})) as locks:
        yield locks


@contextmanager
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the kinds of requests, apart from pings."""
    sent: list[str] = []
    submit = ConnectionHandler._submit

    def counted(self: ConnectionHandler, request: Any, *rest: Any) -> None:
        if not isinstance(request, Ping):
            sent.append(type(request).__name__.strip("_"))
        submit(self, request, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ConnectionHandler, "_submit", counted)
        yield sent


class TestRequests:
    """How many requests each step takes, once there is a session."""

    def test_free_keys(self, locks: ZooKeeperLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """One request acquires any number of keys, with or without a token. One releases them."""
        with requests(monkeypatch) as sent:
            for with_fence in (False, True):
                take(locks, ("a", "b"), owner := new_owner("m"), with_fence=with_fence)
                locks.release(("a", "b"), owner)
        assert sent == ["Transaction"] * 4

    def test_taken_key(self, locks: ZooKeeperLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """One request is refused, and one reads the holder."""
        take(locks)
        with requests(monkeypatch) as sent:
            take(locks)
        assert sent == ["Transaction", "GetData"]

    def test_renewals(self, locks: ZooKeeperLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two requests renew a thousand leases of one session."""
        me = new_owner("m")
        holds = [Hold((f"order:{number}",), me, 30.0) for number in range(1000)]
        for hold in holds:
            take(locks, hold.keys, me)
        with requests(monkeypatch) as sent:
            assert locks.renew(holds) == [Renewal.RENEWED] * 1000
        assert sent == ["Sync", "GetEphemerals"]

    def test_waiters_of_a_process(
        self, locks: ZooKeeperLocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Repeated waits of one process for one key share a watch."""
        take(locks)
        with requests(monkeypatch) as sent:
            for _ in range(5):
                locks.wait(KEY[0], new_owner("n"), timeout_s=0.01)
        assert sent == ["GetData"]


class TestSession:
    def test_as_the_server_keeps_it(self, zookeeper: ZooKeeper, client: KazooClient) -> None:
        """A grant lasts as long as the server keeps a silent session, whatever was asked."""
        for asked_s, kept_s in [(0.9, 1.0), (3.0, 3.0), (60.0, 10.0)]:
            with locks_on(f"{zookeeper.url}?session_s={asked_s}") as locks:
                keys, owner = (f"order:{asked_s}",), new_owner("m")
                # One of a second may end before it has answered.
                answer = wait_until(lambda: grant(locks, keys, owner))  # noqa: B023
                assert (answer.ttl_s, locks.traits.min_ttl_s) == (kept_s, kept_s)

    def test_a_connection_that_breaks(self, zookeeper: ZooKeeper, client: KazooClient) -> None:
        """While the connection is broken, a renewal has no answer. After it the session has its
        leases."""
        with Proxy(zookeeper.port) as proxy:
            url = f"zookeeper://127.0.0.1:{proxy.port}"
            with locks_on(url, connect_timeout_s=0.3) as locks:
                owner = new_owner("m")
                wait_until(lambda: granted(locks, KEY, owner))
                proxy.mode = Mode.CUT
                with pytest.raises(LockServerUnavailableError) as caught:
                    locks.renew([Hold(KEY, owner, 30.0)])
                assert str(proxy.port) in str(caught.value)
                proxy.mode = Mode.PASS
                wait_until(lambda: renewed(locks, owner) == Renewal.RENEWED)

    def test_a_session_that_has_ended(self, locks: ZooKeeperLocks, zookeeper: ZooKeeper) -> None:
        """If a session ends, all its leases are gone, and the next grant opens another session."""
        holds = [Hold((f"order:{number}",), new_owner("m"), 30.0) for number in range(20)]
        for hold in holds:
            take(locks, hold.keys, hold.owner)
        before = locks._session()
        end_session(locks, zookeeper)
        wait_until(lambda: before.ended)
        assert locks.renew(holds) == [Renewal.GONE] * 20
        assert isinstance(take(locks), Granted)

    def test_a_grant_without_an_answer(self, zookeeper: ZooKeeper, client: KazooClient) -> None:
        """A grant whose reply was lost is undone without a further request. A lost release is
        repeated."""
        with Proxy(zookeeper.port) as proxy:
            url = f"zookeeper://127.0.0.1:{proxy.port}"
            with locks_on(url, socket_timeout_s=1.0) as locks:
                kept, freed = new_owner("kept"), new_owner("freed")
                wait_until(lambda: granted(locks, ("kept",), kept))
                wait_until(lambda: granted(locks, ("freed",), freed))
                stays = [f"{kept.nonce},kept", "kept"]
                proxy.mode = Mode.SWALLOW
                lost = new_owner("lost")
                with pytest.raises(LockServerUnavailableError):
                    take(locks, owner=lost)
                wait_until(lambda: KEY[0] not in locks_in(client))  # sent requests still arrive
                proxy.mode = Mode.CUT
                with pytest.raises(LockServerUnavailableError):
                    locks.release(("freed",), freed)
                proxy.mode = Mode.PASS
                wait_until(lambda: locks_in(client) == stays)

    def test_asked_again(self, zookeeper: ZooKeeper, client: KazooClient) -> None:
        """A request that is repeated after a lost reply is granted. Undoing the first one does not
        undo the second."""
        with Proxy(zookeeper.port) as proxy:
            url = f"zookeeper://127.0.0.1:{proxy.port}"
            with locks_on(url, socket_timeout_s=1.0) as locks:
                for number in range(5):
                    owner, keys = new_owner("m"), (f"order:{number}",)
                    wait_until(lambda: answered(locks))
                    proxy.lose_reply_to(owner.nonce.encode(), then=Mode.CUT)
                    with pytest.raises(LockServerUnavailableError):
                        take(locks, keys, owner)
                    wait_until(lambda: granted(locks, keys, owner))  # noqa: B023
                    assert heard(locks, owner, keys) == Renewal.RENEWED

    def test_handed_over_to_another_process(
        self, locks: ZooKeeperLocks, zookeeper: ZooKeeper, client: KazooClient
    ) -> None:
        """The first renewal by the new owner moves the key into that owner's session. The token
        stays."""
        finder, true = new_owner("finder"), new_owner("true")
        first = take(locks, owner=finder, with_fence=True)
        assert locks.hand_over(KEY, finder, to=true, ttl_s=30.0) is True
        with locks_on(zookeeper.url) as other:
            assert renewed(other, true) == Renewal.RENEWED
            locks.close()
            assert isinstance(take(other), Held)
            assert take(other, owner=true, with_fence=True).fence == first.fence  # type: ignore[union-attr]
            assert other.release(KEY, true) is True
        assert locks_in(client) == []

    def test_closed_while_the_server_is_frozen(self) -> None:
        """`close()` does not wait for a frozen server, and leaves no thread behind."""
        need(ZooKeeper)
        before, owner = set(threading.enumerate()), new_owner("m")
        with ZooKeeper() as server:
            with locks_on(f"{server.url}?session_s=2", socket_timeout_s=1.0) as locks:
                wait_until(lambda: granted(locks, KEY, owner))
                server.pause()
            server.resume()
        wait_until(lambda: not set(threading.enumerate()) - before)

    @pytest.mark.parametrize("asked_s", [10, 60])
    def test_a_connection_that_is_never_answered(
        self, zookeeper: ZooKeeper, client: KazooClient, asked_s: int
    ) -> None:
        """If a server accepts a connection and never answers, another connection is made in time
        for the session.

        That holds even if the server grants a shorter session than requested.
        """
        with Proxy(zookeeper.port) as proxy:
            url = f"zookeeper://127.0.0.1:{proxy.port}?session_s={asked_s}"
            with locks_on(url, connect_timeout_s=0.3) as locks:
                owner = new_owner("m")
                wait_until(lambda: granted(locks, KEY, owner))
                session, asked = locks._session(), proxy.requests
                proxy.mode = Mode.BLACK_HOLE
                proxy.cut()
                wait_until(lambda: proxy.requests > asked)
                proxy.mode = Mode.PASS
                wait_until(lambda: renewed(locks, owner) == Renewal.RENEWED)
                assert locks._session() is session

    def test_servers_that_are_cut_off(
        self, zookeeper: ZooKeeper, client: KazooClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two of three servers neither accept nor refuse connections. The third is tried in time
        for the session and its locks."""
        monkeypatch.setattr("random.shuffle", lambda _: None)
        with cut_off() as one, cut_off() as two, Proxy(zookeeper.port) as proxy:
            url = f"zookeeper://127.0.0.1:{one},127.0.0.1:{two},127.0.0.1:{proxy.port}"
            with locks_on(url, connect_timeout_s=0.3) as locks:
                owner = new_owner("m")
                wait_until(lambda: granted(locks, KEY, owner))
                session = locks._session()
                proxy.cut()
                wait_until(lambda: renewed(locks, owner) == "no answer")
                wait_until(lambda: renewed(locks, owner) == Renewal.RENEWED)
                assert locks._session() is session

    def test_a_server_that_is_not_there(self) -> None:
        """The error names the server and has the system's own error. After the server has started,
        it is used. A client that gave up before leaves no thread."""
        need(ZooKeeper)
        before = set(threading.enumerate())
        port = free_port()
        url = f"zookeeper://127.0.0.1:{port}?session_s=1"
        with locks_on(url, connect_timeout_s=0.2) as locks:

            def refused() -> bool:
                with pytest.raises(LockServerUnavailableError, match=str(port)) as caught:
                    take(locks)
                return isinstance(caught.value.__cause__, OSError)

            for _ in range(8):
                wait_until(refused)
            with ZooKeeper(port=port):
                wait_until(lambda: answered(locks))
        wait_until(
            lambda: not set(threading.enumerate()) - before,
            message=lambda: f"the end of {set(threading.enumerate()) - before}",
        )


def renewed(locks: LockProvider, owner: Owner, keys: tuple[str, ...] = KEY) -> str:
    try:
        (answer,) = locks.renew([Hold(keys, owner, 30.0)])
    except LockServerUnavailableError:
        return "no answer"
    return answer


def heard(locks: LockProvider, owner: Owner, keys: tuple[str, ...]) -> str:
    """Return the next renewal's answer, as soon as there is one."""
    said: list[str] = []

    def is_heard() -> bool:
        said.append(renewed(locks, owner, keys))
        return said[-1] != "no answer"

    wait_until(is_heard)
    return said[-1]


def grant(locks: LockProvider, keys: tuple[str, ...], owner: Owner) -> Granted | None:
    try:
        answer = take(locks, keys, owner)
    except LockServerUnavailableError:
        return None
    return answer if isinstance(answer, Granted) else None


def granted(locks: LockProvider, keys: tuple[str, ...], owner: Owner) -> bool:
    return grant(locks, keys, owner) is not None


@contextmanager
def cut_off() -> Iterator[int]:
    """A port whose listener's backlog is full, so that the system answers no connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port: int = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            yield port


class Waiting(ZooKeeper):
    """A member of an ensemble, which is not ready before it has found the others."""

    def _answers(self) -> bool:
        return bool(self.say("srvr"))


def members() -> dict[str, str | int]:
    """Options of three servers that make an ensemble."""
    places = {f"server__{n}": f"127.0.0.1:{free_port()}:{free_port()}" for n in (1, 2, 3)}
    # Long timeouts, because an election on a busy machine takes time.
    return {"initLimit": 120, "syncLimit": 60, "maxSessionTimeout": 60_000, **places}


class TestEnsemble:
    def test_a_leader_that_is_killed(self) -> None:
        """Leases remain valid in the same session, the next token is higher, and the missing server
        is a finding."""
        need(ZooKeeper)
        options = members()
        with (
            Waiting(number=1, **options) as first,
            Waiting(number=2, **options) as second,
            Waiting(number=3, **options) as third,
        ):
            servers = [first, second, third]
            hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
            wait_until(lambda: all("Mode: " in each.say("srvr") for each in servers))
            with locks_on(f"zookeeper://{hosts}?session_s=30") as locks:
                assert locks.check() == []
                before = token(locks)
                held = new_owner("held")
                assert isinstance(take(locks, ("held",), held), Granted)
                session = locks._session()
                (leader,) = wait_until(
                    lambda: [each for each in servers if "Mode: leader" in each.say("srvr")],
                )
                leader.kill()
                # An election takes seconds, on a busy machine a quarter of a minute.
                wait_until(lambda: renewed(locks, held, ("held",)) == Renewal.RENEWED)
                assert locks._session() is session
                assert wait_until(lambda: answered(locks)) > before
                assert isinstance(take(locks, ("held",)), Held)
                (finding,) = locks.check()
                assert finding.name == "lock_server_member"


class TestTokens:
    def test_of_two_processes(self, locks: ZooKeeperLocks, zookeeper: ZooKeeper) -> None:
        """A process that began earlier uses the epoch of one that began later."""
        with locks_on(zookeeper.url) as other:
            tokens = [token(each) for each in (locks, other) * 5]
        assert tokens == sorted(set(tokens))

    def test_without_and_with(self, locks: ZooKeeperLocks) -> None:
        """An owner without a token gets one on request, and then always the same."""
        owner = new_owner("m")
        before = token(locks)
        take(locks, owner=owner)
        tokens = [take(locks, owner=owner, with_fence=True) for _ in range(2)]
        assert tokens[0] == tokens[1]
        assert isinstance(tokens[0], Granted)
        assert tokens[0].fence > before

    def test_over_elections(self) -> None:
        """An election raises the transaction number by 2^32. Tokens grow and stay near the clock,
        and a lock keeps its token."""
        need(ZooKeeper)
        one = f"127.0.0.1:{free_port()}:{free_port()}"
        with (
            ZooKeeper(
                standaloneEnabled="false",
                initLimit=10,
                syncLimit=5,
                maxSessionTimeout=60_000,
                server__1=one,
            ) as server,
            # Longer than a start on a slow machine.
            locks_on(f"{server.url}?session_s=60") as locks,
        ):
            owner = new_owner("held")
            held = take(locks, ("held",), owner, with_fence=True)
            assert isinstance(held, Granted)
            tokens = [held.fence]
            for _ in range(3):
                term = term_of(server)
                tokens.append(token(locks))
                server.kill()
                server.start()
                tokens.append(wait_until(lambda: answered(locks)))
                assert term_of(server) > term
                again = take(locks, ("held",), owner, with_fence=True)
                assert again == held
            assert tokens == sorted(set(tokens))
            assert tokens[-1] - tokens[0] < 1_000 * 1_000_000  # 2^32 are 4295 s

    def test_emptied(self) -> None:
        """An emptied server has higher tokens than before, and accepts a client that has seen later
        transactions."""
        need(ZooKeeper)
        with ZooKeeper() as server, locks_on(f"{server.url}?session_s=1") as locks:
            before = [wait_until(lambda: answered(locks)) for _ in range(3)][-1]
            server.kill()
            server.forget()
            server.start()
            assert wait_until(lambda: answered(locks)) > before


def term_of(server: ZooKeeper) -> int:
    """Return the number of elections: the upper half of the last transaction's number."""
    said = wait_until(lambda: server.say("srvr").partition("Zxid: ")[2])
    return int(said.split()[0], 16) >> 32


class TestUrls:
    def test_a_path(self, zookeeper: ZooKeeper, client: KazooClient) -> None:
        """All nodes are below the URL's path, which is created if it does not exist."""
        with locks_on(f"{zookeeper.url}/shop/a%20b/") as locks, locks_on(zookeeper.url) as root:
            assert isinstance(take(locks), Granted)
            assert isinstance(take(root), Granted)
            assert client.get_children("/shop/a b/taskguard/lock") == ["order%3A42"]
        client.delete("/shop", recursive=True)

    @pytest.mark.parametrize(
        "url",
        [
            "zookeeper://",
            "zookeeper://:s3cret",
            "zookeeper://u:s3cret@host:port",
            "zookeeper://u:s3cret@host/..",
            "zookeeper://u:s3cret@host/a//b",
            "zookeeper://u:s3cret@host?session_s=soon",
            "zookeeper://u:s3cret@host?session_s=0",
            "zookeeper://u:s3cret@host?ca=/nowhere",
            "zookeepers://u:s3cret@host?ca=/nowhere",
        ],
    )
    def test_unreadable(self, url: str) -> None:
        """A wrong URL raises an error that does not show it."""
        with pytest.raises(ConfigurationError) as caught:
            make_locks(url)
        assert "s3cret" not in str(caught.value)

    def test_greenlets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gevent is refused, because kazoo needs native threads."""
        monkeypatch.setattr("taskguard_zookeeper.provider.greenlets", lambda: "gevent")
        with pytest.raises(ConfigurationError, match="gevent"):
            make_locks("zookeeper://127.0.0.1")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    allowed(unavailable())
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(certificates: Certificates) -> Iterator[str]:
    """Host and port of a ZooKeeper that wants a client's certificate."""
    need(ZooKeeper)
    crt, key = (certificates.folder / f"server.{name}" for name in ("crt", "key"))
    both = certificates.folder / "server.pem"
    both.write_text(crt.read_text() + key.read_text())
    port = free_port()
    with ZooKeeper(
        serverCnxnFactory="org.apache.zookeeper.server.NettyServerCnxnFactory",
        secureClientPort=port,
        secureClientPortAddress="127.0.0.1",
        ssl__keyStore__location=str(both),
        ssl__keyStore__type="PEM",
        ssl__trustStore__location=str(certificates.authority),
        ssl__trustStore__type="PEM",
        ssl__clientAuth="need",
        ssl__clientHostnameVerification="false",
    ):
        yield f"127.0.0.1:{port}"


class TestTls:
    def test_cycle(self, secure: str, certificates: Certificates) -> None:
        """With certificates of server and client, locks work over TLS, and have no findings."""
        folder = certificates.folder
        files = f"ca={certificates.authority}&cert={folder}/client.crt&key={folder}/client.key"
        with locks_on(f"zookeepers://{secure}?{files}") as locks:
            owner = new_owner("m")
            assert isinstance(take(locks, owner=owner, with_fence=True), Granted)
            assert renewed(locks, owner) == Renewal.RENEWED
            assert locks.release(KEY, owner) is True
            assert locks.check() == []

    @pytest.mark.parametrize("known", ["server", "client"])
    def test_strangers(self, secure: str, certificates: Certificates, known: str) -> None:
        """A server with an unknown certificate is refused, and so is a client without a
        certificate."""
        options = f"ca={certificates.authority}"
        if known == "client":
            folder = certificates.folder
            options = f"cert={folder}/client.crt&key={folder}/client.key"
        with locks_on(f"zookeepers://{secure}?{options}", connect_timeout_s=0.5) as locks:

            def cause() -> str:
                with pytest.raises(LockServerUnavailableError) as caught:
                    take(locks)
                return str(caught.value.__cause__)

            cause()
            if known == "client":
                wait_until(lambda: "certificate verify failed" in cause())


class TestRights:
    def test_a_user(
        self, zookeeper: ZooKeeper, client: KazooClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A user's nodes belong to that user, and other users are refused. The error, the finding
        and kazoo's log show no password."""
        caplog.set_level(0)
        where = f"127.0.0.1:{zookeeper.port}"
        with client_of(zookeeper, auth_data=[("digest", "shop:pa:s/s")]) as his:
            with locks_on(f"zookeeper://shop:pa%3As%2Fs@{where}") as locks:
                owner = new_owner("m")
                assert isinstance(take(locks, owner=owner, with_fence=True), Granted)
                assert renewed(locks, owner) == Renewal.RENEWED
                locks.wait(KEY[0], owner, timeout_s=0.05)
                assert locks.release(KEY, owner) is True
                assert locks.check() == []
            for user in ("", "shop:c0ffee@"):
                with locks_on(f"zookeeper://{user}{where}") as locks:
                    with pytest.raises(
                        LockServerUnavailableError, match="Give it all rights"
                    ) as no:
                        take(locks)
                    (finding,) = locks.check()
                    assert (finding.name, finding.level) == ("lock_server_rights", Level.ERROR)
                    for text in (str(no.value), str(finding), repr(locks), caplog.text):
                        assert "c0ffee" not in text
            his.delete("/taskguard", recursive=True)


class TestFindings:
    def test_nothing(self, zookeeper: ZooKeeper, client: KazooClient) -> None:
        """A newly started ZooKeeper has no findings. The check leaves no node, and no thread in a
        process that may fork."""
        before = set(threading.enumerate())
        with locks_on(zookeeper.url) as locks:
            assert locks.check() == []
            wait_until(lambda: set(threading.enumerate()) <= before)
        assert locks_in(client) == []

    def test_away(self, zookeeper: ZooKeeper) -> None:
        """If no server answers, check() raises. If one of several is down, it is a finding."""
        port = free_port()
        with locks_on(f"zookeeper://127.0.0.1:{port}") as locks:
            with pytest.raises(LockServerUnavailableError):
                locks.check()
        with locks_on(f"zookeeper://127.0.0.1:{port},127.0.0.1:{zookeeper.port}") as locks:
            (finding,) = locks.check()
        assert (finding.name, finding.level) == ("lock_server_member", Level.WARNING)

    @pytest.mark.parametrize(("asked_s", "limit"), [(60.0, "max"), (0.9, "min")])
    def test_session(
        self, zookeeper: ZooKeeper, client: KazooClient, asked_s: float, limit: str
    ) -> None:
        """A session that is shorter or longer than requested is a finding."""
        with locks_on(f"{zookeeper.url}?session_s={asked_s}") as locks:

            def found() -> list[Finding]:
                with contextlib.suppress(LockServerUnavailableError):  # it was shorter than a step
                    return locks.check()
                return []

            (finding,) = wait_until(found)
        assert (finding.name, finding.level) == ("zookeeper_session", Level.WARNING)
        assert f"{limit}SessionTimeout={asked_s * 1000:.0f}" in finding.fix

    def test_no_quorum(self) -> None:
        """A server that waits for others that never come has no quorum."""
        need(ZooKeeper)
        with Waiting(**members()) as server:
            with locks_on(server.url, connect_timeout_s=0.5) as locks:
                with pytest.raises(LockServerUnavailableError):
                    take(locks)
            with locks_on(server.url) as locks:
                (finding,) = locks.check()
            assert (finding.name, finding.level) == ("lock_server_quorum", Level.ERROR)

    @pytest.mark.parametrize(
        ("said", "name"),
        [
            ("Zookeeper version: 3.5.9-83df, built on\nMode: standalone", "zookeeper_version"),
            ("Zookeeper version: 3.8.0-1, built on\nMode: read-only", "lock_server_quorum"),
        ],
    )
    def test_what_it_says_of_itself(self, said: str, name: str) -> None:
        """A server that is too old to list a session's nodes, or that is read-only, is found."""
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4)
                    connection.sendall(said.encode())

            thread = threading.Thread(target=answer)
            thread.start()
            with locks_on(f"zookeeper://127.0.0.1:{listener.getsockname()[1]}") as locks:
                (finding,) = locks.check()
            thread.join()
        assert (finding.name, finding.level) == (name, Level.ERROR)


def test_a_worker_that_is_frozen_or_killed(zookeeper: ZooKeeper, client: KazooClient) -> None:
    """The key of a frozen or killed worker is free after its session's timeout. A worker that
    wakes learns at once that its lease is gone."""
    url = f"{zookeeper.url}?session_s=5"  # not so short that a pause of the machine ends it
    with locks_on(zookeeper.url) as locks:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    with locks_on(url) as mine:
                        owner = new_owner("frozen")
                        take(mine, owner=owner)
                        os.write(write, b"taken")
                        # It is renewed until it is gone: no answer may say that it is held after
                        # another owner has it.
                        while (said := renewed(mine, owner)) in (Renewal.RENEWED, "no answer"):
                            pass
                        code = 0 if said == Renewal.TAKEN else 2
                finally:
                    os._exit(code)
            assert os.read(read, 5) == b"taken"
            assert isinstance(take(locks), Held)
            os.kill(child, number)
            heir = new_owner("heir")
            wait_until(lambda: granted(locks, KEY, heir))  # noqa: B023
            if number == signal.SIGSTOP:
                os.kill(child, signal.SIGCONT)
                assert os.waitpid(child, 0)[1] == 0
            else:
                os.waitpid(child, 0)
            assert renewed(locks, heir) == Renewal.RENEWED
            locks.release(KEY, heir)
            os.close(read)
            os.close(write)
