"""Every way to connect to a lock server: TLS, users, Unix sockets, a password of any characters.

Each server is real and refuses other clients. A user takes, renews, waits for and releases locks,
and no text shows the password. Sentinel and etcd are in `test_sentinel.py` and
`test_etcd_settings.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, quote_plus

import pytest
import redis

import taskguard
from support.certificates import Certificates
from support.guarded_shop import GuardedShop, write
from support.needs import need
from taskguard.errors import LockServerUnavailableError
from taskguard.ledger.sql import SqlLedger
from taskguard.lock_table import TableLocks
from taskguard.locks.base import Granted, Held, Hold, LockProvider, Renewal
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import new_owner
from taskguard.settings import make_locks
from taskguard_sandbox.clusters import Cluster
from taskguard_sandbox.servers import (
    Consul,
    DebianPostgres,
    DebianRedis,
    MariaDB,
    MySQL,
    RedisServer,
    Server,
    Valkey,
    free_port,
)

KEY = ("order:42",)
PASSWORD = "p@s's/w#r?d:%,&+=é\"\\ $1[x]{y}"
WRONG = "wrong-secret"
RIGHTS = [
    *("~taskguard:*", "+evalsha", "+eval", "+get", "+set", "+del", "+exists", "+pexpire", "+pttl"),
    *("+time", "+lpush", "+blpop", "+info", "+select", "+cluster|slots", "+cluster|info"),
    *("+config|get", "+zadd", "+zcard", "+zrange", "+zrem", "+zscore"),
]
ServerT = TypeVar("ServerT", bound=Server)


@dataclass(frozen=True)
class Way:
    """A connection to a server as its user `tasks`; `text` is a URL without the password."""

    text: str

    def url(self, password: str = PASSWORD) -> str:
        return self.text.replace("PASSWORD", quote(password, safe=""))


@contextlib.contextmanager
def locks_of(url: str) -> Iterator[LockProvider]:
    locks = make_locks(url)
    assert locks is not None
    with closing(locks):
        yield locks


def cycle(locks: LockProvider) -> None:
    """Take a lock, renew it, have another owner refused and waiting, release it."""
    owner, waiter = new_owner("m"), new_owner("n")
    answer = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=locks.traits.tokens, wait_s=0.0)
    assert isinstance(answer, Granted)
    assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
    other = locks.acquire(KEY, waiter, ttl_s=30.0, with_fence=False, wait_s=5.0)
    assert isinstance(other, Held)
    assert other.owner == owner
    locks.wait(KEY[0], waiter, timeout_s=0.05)
    assert locks.release(KEY, waiter) is False
    assert locks.release(KEY, owner) is True


def shows(text: object) -> bool:
    """Return whether a text contains one of the passwords or a part of it, in any spelling."""
    said = str(text)
    pieces = ["w#r?d", PASSWORD[-8:], WRONG]
    return any(
        each in said or quote(each, safe="") in said or quote_plus(each) in said for each in pieces
    )


def check_way(way: Way, caplog: pytest.LogCaptureFixture, *, refuses: bool = True) -> None:
    """Check what must hold for each connection."""
    caplog.set_level(logging.DEBUG)
    with locks_of(way.url()) as locks:
        cycle(locks)
        found = locks.check()
        assert not [each for each in found if each.level == "error"]
        assert not shows((found, locks))
    if refuses:
        with locks_of(way.url(WRONG)) as locks:
            with pytest.raises(LockServerUnavailableError) as caught:
                cycle(locks)
            error: BaseException | None = caught.value
            while error is not None:
                assert not shows(repr(error))
                error = error.__cause__
            with contextlib.suppress(LockServerUnavailableError):
                found = locks.check()
                assert [each for each in found if each.level == "error"]
                assert not shows(found)
    assert not shows([record.getMessage() for record in caplog.records])


def check_strangers(url: str, says: str) -> None:
    """A server with a certificate of an unknown authority is refused."""
    with locks_of(url) as locks, pytest.raises(LockServerUnavailableError, match=says) as caught:
        cycle(locks)
    assert not shows(caught.value)


def let_in(server: RedisServer) -> None:
    """Create the user `tasks` with only the rights on the pages."""
    with redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "SETUSER", "tasks", "reset", "on", f">{PASSWORD}", *RIGHTS)


def lock_out(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "DELUSER", "tasks")


def running(server: ServerT) -> Iterator[ServerT]:
    need(type(server))
    with server:
        yield server


@pytest.fixture(scope="module")
def redis_server(
    made_certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DebianRedis]:
    """Start a Redis with TCP, TLS and a Unix socket."""
    tls = made_certificates.of_server()
    socket = tmp_path_factory.mktemp("s") / "s"
    for server in running(
        DebianRedis(tls_port=free_port(), unixsocket=str(socket), appendonly="yes", **tls)
    ):
        let_in(server)
        yield server


@pytest.mark.debian
class TestRedis:
    def test_tcp(self, redis_server: DebianRedis, caplog: pytest.LogCaptureFixture) -> None:
        """redis://user:password@host."""
        check_way(Way(f"redis://tasks:PASSWORD@127.0.0.1:{redis_server.port}/1"), caplog)

    @pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
    def test_tls(
        self,
        redis_server: DebianRedis,
        made_certificates: Certificates,
        scheme: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """rediss://, with a client's certificate and a user."""
        where = f"127.0.0.1:{redis_server.options['tls-port']}/1"
        check_way(Way(f"{scheme}://tasks:PASSWORD@{where}?{made_certificates.of_client()}"), caplog)
        check_strangers(f"{scheme}://tasks:{WRONG}@{where}", "certificate verify failed")

    def test_unix_socket(self, redis_server: DebianRedis, caplog: pytest.LogCaptureFixture) -> None:
        """unix://user:password@/path?db=1."""
        socket = redis_server.options["unixsocket"]
        check_way(Way(f"unix://tasks:PASSWORD@{socket}?db=1"), caplog)

    def test_password_of_its_default_user(self, caplog: pytest.LogCaptureFixture) -> None:
        """requirepass: a URL with a password and no user."""
        with Valkey() as server:
            with redis.Redis(port=server.port) as client:
                client.config_set("requirepass", PASSWORD)
            check_way(Way(f"redis://:PASSWORD@127.0.0.1:{server.port}/0"), caplog)

    def test_a_client_of_redis_py(
        self, redis_server: DebianRedis, made_certificates: Certificates
    ) -> None:
        """With its TLS, its user and its password."""
        url = f"rediss://127.0.0.1:{redis_server.options['tls-port']}/1?{made_certificates.of_client()}"
        with redis.Redis.from_url(url, username="tasks", password=PASSWORD) as client:
            locks = RedisLocks(client)
            cycle(locks)
            assert not shows(repr(locks))


class TestSeveralRedis:
    def test_cluster(self, cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
        """redis+cluster://: the user is that of every node."""
        for node in cluster.nodes:
            let_in(node)
        try:
            check_way(Way(cluster.url_of(user="tasks", password="PASSWORD")), caplog)
        finally:
            for node in cluster.nodes:
                lock_out(node)

    def test_redlock(self, five_valkeys: list[Valkey], caplog: pytest.LogCaptureFixture) -> None:
        """redlock://: the user is that of every server."""
        for server in five_valkeys:
            let_in(server)
        try:
            hosts = ",".join(f"127.0.0.1:{server.port}" for server in five_valkeys)
            check_way(Way(f"redlock://tasks:PASSWORD@{hosts}"), caplog)
        finally:
            for server in five_valkeys:
                lock_out(server)


@pytest.fixture(scope="module")
def pg_server(made_certificates: Certificates) -> Iterator[DebianPostgres]:
    """Start a PostgreSQL with TLS only, and a socket. The user `tasks` has a password."""
    rules = made_certificates.folder / "pg_hba.conf"
    rules.write_text(
        "host all postgres 127.0.0.1/32 trust\n"
        "hostssl all tasks 127.0.0.1/32 scram-sha-256 clientcert=verify-ca\n"
        "local all tasks scram-sha-256\n"
    )
    for server in running(
        DebianPostgres(
            fsync="off",
            ssl="on",
            ssl_cert_file=made_certificates.server,
            ssl_key_file=made_certificates.key,
            ssl_ca_file=made_certificates.authority,
            hba_file=rules,
            unix_socket_directories=".",
        )
    ):
        literal = PASSWORD.replace("'", "''")
        server.execute("create database shop")
        server.execute(f"create user tasks password '{literal}'")
        for granted in ("all on schema public", "all on tables"):
            always = "alter default privileges " if "tables" in granted else ""
            server.execute(f"{always}grant {granted} to tasks", database="shop")
        yield server


@pytest.mark.debian
class TestPostgreSQL:
    def test_tls(
        self,
        pg_server: DebianPostgres,
        made_certificates: Certificates,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """sslmode=verify-full, with a client's certificate and a password."""
        folder = made_certificates.folder
        where = f"127.0.0.1:{pg_server.port}/shop"
        known = f"?sslmode=verify-full&sslrootcert={made_certificates.authority}"
        shown = f"&sslcert={folder / 'client.crt'}&sslkey={folder / 'client.key'}"
        way = Way(f"postgresql+psycopg://tasks:PASSWORD@{where}{known}{shown}")
        check_database(pg_server, way, caplog)
        bare = f"postgresql+psycopg://tasks:{WRONG}@{where}"
        check_strangers(f"{bare}?sslmode=verify-full&sslrootcert={folder / 'client.crt'}", "verify")
        check_strangers(f"{bare}{known}", "certificate")

    def test_unix_socket(self, pg_server: DebianPostgres, caplog: pytest.LogCaptureFixture) -> None:
        """host=, the folder of the socket."""
        folder = pg_server.folder / "data"
        way = Way(f"postgresql+psycopg://tasks:PASSWORD@/shop?host={folder}&port={pg_server.port}")
        check_database(pg_server, way, caplog)


@pytest.fixture(scope="module", params=[MariaDB, MySQL])
def mysql_server(
    made_certificates: Certificates, request: pytest.FixtureRequest
) -> Iterator[MariaDB | MySQL]:
    """Start a server with TLS and a socket. The user `tasks` has a password."""
    for server in running(
        request.param(
            innodb_flush_log_at_trx_commit=0,
            ssl_cert=str(made_certificates.server),
            ssl_key=str(made_certificates.key),
            ssl_ca=str(made_certificates.authority),
        )
    ):
        server.execute("create database shop")
        literal = PASSWORD.replace("\\", "\\\\").replace("'", "\\'")
        for host, more in (("127.0.0.1", "require x509"), ("localhost", "")):
            user = f"tasks@'{host}'"
            server.execute(f"create user {user} identified by '{literal}' {more}")
            server.execute(f"grant all on shop.* to {user}")
        yield server


@pytest.mark.debian
class TestMySQL:
    def test_tls(
        self,
        mysql_server: MariaDB | MySQL,
        made_certificates: Certificates,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """ssl_ca=, with a client's certificate and a password."""
        folder = made_certificates.folder
        scheme, where = mysql_server._SCHEME, f"127.0.0.1:{mysql_server.port}/shop"
        known = f"?ssl_ca={made_certificates.authority}"
        shown = f"&ssl_cert={folder / 'client.crt'}&ssl_key={folder / 'client.key'}"
        check_database(
            mysql_server, Way(f"{scheme}+pymysql://tasks:PASSWORD@{where}{known}{shown}"), caplog
        )
        bare = f"{scheme}+pymysql://tasks:{WRONG}@{where}"
        check_strangers(f"{bare}?ssl_ca={folder / 'client.crt'}", "certificate verify failed")
        check_strangers(f"{bare}{known}", "Access denied")

    def test_unix_socket(
        self, mysql_server: MariaDB | MySQL, caplog: pytest.LogCaptureFixture
    ) -> None:
        """unix_socket=, its path."""
        path = mysql_server.folder / "data" / mysql_server._SOCKET
        way = Way(f"{mysql_server._SCHEME}+pymysql://tasks:PASSWORD@/shop?unix_socket={path}")
        check_database(mysql_server, way, caplog)


def check_database(
    server: DebianPostgres | MariaDB | MySQL, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    """Locks in its table, and a ledger there, with an effect."""
    with closing(TableLocks(way.url())) as locks:
        locks.create_table()
    check_way(way, caplog)
    # Another driver reads the effects, because PyMySQL would escape this password differently.
    with closing(GuardedShop(server.url_of("shop"), way.url(), locks=way.url())) as shop:
        shop.deliver(effect)
        assert shop.effects == ["x"]
        assert not shows((shop.tg.ledger, shop.tg.runner.locks, shop.tg))
        assert not shows(shop.ledger.check([], longest_body_s=1.0, retention_s=1.0))
    with pytest.raises(taskguard.errors.LedgerUnavailableError) as caught:
        SqlLedger(way.url(WRONG)).create_schema()
    assert not shows(repr(caught.value))
    assert not shows(repr(caught.value.__cause__))


def effect(guard: taskguard.Guard) -> None:
    with guard.transaction() as db:
        write(db)


@pytest.mark.debian
class TestConsul:
    def test_tls(self, made_certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
        """consuls://, with a client's certificate and a token."""
        folder, port = made_certificates.folder, free_port()
        settings = "\n".join(
            [
                f"ports {{ https = {port} }}",
                f'cert_file = "{made_certificates.server}"',
                f'key_file = "{made_certificates.key}"',
                f'ca_file = "{made_certificates.authority}"',
                "verify_incoming_https = true",
            ]
        )
        settings += '\nacl { enabled = true, tokens { master = "secret-token" } }'
        for _ in running(Consul(hcl=settings)):
            known = f"?ca={made_certificates.authority}"
            shown = f"&cert={folder / 'client.crt'}&key={folder / 'client.key'}"
            url = f"consuls://:secret-token@127.0.0.1:{port}"
            check_way(Way(f"{url}{known}{shown}"), caplog, refuses=False)
            check_strangers(url, "certificate verify failed")
            check_strangers(f"{url}{known}", "gave no answer")
        assert "secret-token" not in caplog.text
