"""Fixtures over private real servers, started once for the run and only when a test asks.

A server that cannot run here skips its tests with the reason, and fails them where CI=true. At the
end no process that the run started may be left.

The run may be divided (`pytest -n 4`): each of its processes then has servers of its own, on ports
of its own share, and tests know nothing of each other. An empty database folder is made once for
all of them, and copied.

`valkey`, `redis62`, `debian_redis`, `sentinel_group`, `cluster`, `etcd`, `newest_etcd`, `consul`,
`zookeeper`, `postgres`, `mariadb`, `mysql`, `rabbitmq`, `newest_rabbitmq` are the servers; a test
that stops or pauses one starts its own (`taskguard_sandbox`).
`redis_url`, `pg_url`, `mariadb_url`, `mysql_url` and `sqlite_url` are empty stores for one test.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import psutil
import pytest

from support import certificates, fork_server
from support.certificates import Certificates
from support.exploration import Exploration
from support.ledger_databases import LedgerDatabases
from support.needs import missing, need, need_redis_in_memory
from support.sentinel import Group, groups
from support.waiting import wait_until
from taskguard_sandbox.clusters import Cluster
from taskguard_sandbox.process import share_ports
from taskguard_sandbox.servers import (
    TEMPLATES_VARIABLE,
    Consul,
    DebianRedis,
    Etcd,
    MariaDB,
    MySQL,
    NewestEtcd,
    NewestRabbitMQ,
    Postgres,
    RabbitMQ,
    Redis62,
    Server,
    Valkey,
    ZooKeeper,
)

_OF_DEBIAN = {
    "any_rabbitmq",
    "consul",
    "debian_redis",
    "etcd",
    "mariadb",
    "mariadb_url",
    "mysql",
    "mysql_url",
    "newest_etcd",
    "newest_rabbitmq",
    "rabbitmq",
    "sentinel",
    "sentinel_group",
    "zookeeper",
}
# Values of parameters that choose a server: with --once-each each of them is tried.
_SERVERS = frozenset(
    ("pg_url", "sqlite_url", "redis_url", "mariadb_url", "mysql_url", "postgresql", "sqlite")
) | frozenset(("valkey", "cluster", "fakeredis", "memory", "pg_table"))
ServerT = TypeVar("ServerT", bound=Server)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore Ctrl-C, and so would every worker that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Workers that are run in a test's own process stay the handlers of Ctrl-C for later ones."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make explore`."""
    parser.addoption(
        "--explore", type=int, metavar="SEED", help="leave nothing out; draw by this seed"
    )
    parser.addoption(
        "--once-each", action="store_true", help="run each test once for each of its servers"
    )


@pytest.fixture(scope="session")
def exploration(pytestconfig: pytest.Config) -> Exploration:
    """A bounded part, or everything."""
    seed: int | None = pytestconfig.getoption("--explore")
    return Exploration() if seed is None else Exploration(seed, whole=True)


def pytest_configure(config: pytest.Config) -> None:
    """A share of the ports for each process of a run, and one folder for what they all copy.

    Hypothesis tries the same examples each time; `make explore` tries others.
    """
    if config.getoption("--explore") is None:
        hypothesis.settings.register_profile("same", derandomize=True)
        hypothesis.settings.load_profile("same")
    divided: dict[str, Any] | None = getattr(config, "workerinput", None)
    if divided is not None:
        number = int(divided["workerid"].removeprefix("gw"))
        share_ports(number, divided["workercount"])
    elif TEMPLATES_VARIABLE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="taskguard-templates-")
        config.add_cleanup(folder.cleanup)
        os.environ[TEMPLATES_VARIABLE] = folder.name


@pytest.hookimpl(tryfirst=True)  # before it is looked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that use a server that only Debian has. With --once-each, choose parameters."""
    for item in items:
        if {*getattr(item, "fixturenames", ()), *_parameters(item)} & _OF_DEBIAN:
            item.add_marker("debian")
    if config.getoption("--once-each"):
        chosen = _once_each(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _parameters(item: pytest.Item) -> set[str]:
    """Return the parameters of a test that are texts."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {each for each in parameters.values() if isinstance(each, str)}


def _once_each(items: list[pytest.Item]) -> dict[pytest.Item, None]:
    """Return the first of the items of each test on each of its servers, in their order."""
    first: dict[tuple[str, frozenset[str]], pytest.Item] = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("debian", "once"))):  # they would not be run
            servers = frozenset(_parameters(item) & _SERVERS)
            first.setdefault((item.nodeid.partition("[")[0], servers), item)
    return dict.fromkeys(first.values())


def pytest_collection_finish() -> None:
    """Exclude the half a million objects that stay to the end from garbage collection. Each
    collection would take 0.3 s more, and the plugin collects for each death."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The plugin's fixtures want its lock server in memory."""
    if "taskguard_memory" in getattr(item, "fixturenames", ()):
        need_redis_in_memory()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """The run fails if it leaves a process behind; the next run does not meet it."""
    yield  # begun before all others, so that it ends after them
    me = psutil.Process()

    def children() -> list[psutil.Process]:
        known = fork_server.servers_pids()
        return [each for each in me.children(recursive=True) if each.pid not in known]

    try:
        # Ended servers and workers need a moment until their keepers are gone.
        wait_until(lambda: not children())
    except AssertionError:
        left = []
        for process in children():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.append(f"process {process.pid} ({process.status()}) {process.name()}")
                process.kill()
        pytest.fail("left behind: " + ", ".join(left))
    finally:
        fork_server.stop_servers()


def started(server: ServerT) -> Iterator[ServerT]:
    """Runs the server for as long as the fixture lives."""
    need(type(server))
    with server:
        yield server


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    yield from started(Valkey())


@pytest.fixture(scope="session")
def made_certificates() -> Iterator[Certificates]:
    """Certificates of an authority, a server and a client, for TLS."""
    missing(certificates.unavailable())
    # Not in pytest's folders, which `nobody` may not enter.
    with tempfile.TemporaryDirectory(prefix="taskguard-certificates-") as folder:
        yield Certificates.make(Path(folder))


@pytest.fixture(scope="session")
def five_valkeys() -> Iterator[list[Valkey]]:
    """Independent ones, for Redlock. They write each change to the disk first: others would have no
    vote for as long as a lease may last."""
    need(Valkey)
    with contextlib.ExitStack() as stack:
        durable = {"appendonly": "yes", "appendfsync": "always"}
        yield [stack.enter_context(Valkey(**durable)) for _ in range(5)]


@pytest.fixture(scope="session")
def redis62() -> Iterator[Redis62]:
    yield from started(Redis62())


@pytest.fixture(scope="session")
def debian_redis() -> Iterator[DebianRedis]:
    yield from started(DebianRedis())


@pytest.fixture(scope="session")
def etcd() -> Iterator[Etcd]:
    yield from started(Etcd())


@pytest.fixture(scope="session")
def consul() -> Iterator[Consul]:
    yield from started(Consul())


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[ZooKeeper]:
    yield from started(ZooKeeper())


@pytest.fixture(scope="session")
def newest_etcd() -> Iterator[NewestEtcd]:
    yield from started(NewestEtcd())


@pytest.fixture(scope="session")
def sentinel_group() -> Iterator[Group]:
    """A group that fails over only if a test orders it, and not because the machine is busy."""
    need(DebianRedis)
    with groups(down_after_ms=60_000) as group:
        yield group


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three masters, one of them with a replica. All tests share it, so slots stay where
    they are."""
    need(Valkey)
    with Cluster(replicas=1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """PostgreSQL without fsync: faster, and nothing here cuts the power."""
    yield from started(Postgres(fsync="off"))


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """MariaDB that flushes nothing to the disk. It would flush each table that a test creates."""
    quick = {"debug_no_sync": 1, "innodb_flush_method": "nosync"}
    yield from started(MariaDB(innodb_flush_log_at_trx_commit=0, **quick))


@pytest.fixture(scope="session")
def mysql() -> Iterator[MySQL]:
    """MySQL that does not flush its commits, where there is one: Debian has it in unstable only."""
    quick = {"disable_log_bin": 1, "innodb_doublewrite": 0, "innodb_flush_method": "nosync"}
    yield from started(MySQL(innodb_flush_log_at_trx_commit=0, tls_version="", **quick))


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    yield from started(RabbitMQ())


@pytest.fixture(scope="session")
def newest_rabbitmq() -> Iterator[RabbitMQ]:
    """Yield the RabbitMQ of Debian unstable."""
    yield from started(NewestRabbitMQ())


@pytest.fixture
def redis_url(valkey: Valkey) -> Iterator[str]:
    """Database 0 of an empty Valkey; the other databases are empty as well."""
    flush(valkey.port)
    yield valkey.url
    flush(valkey.port)


@pytest.fixture(scope="session")
def pg_databases(postgres: Postgres) -> list[str]:
    """Names of empty databases: to empty one takes a quarter of what it takes to create one."""
    del postgres  # they end with it
    return []


@pytest.fixture
def pg_url(postgres: Postgres, pg_databases: list[str]) -> Iterator[str]:
    """The SQLAlchemy URL of an empty PostgreSQL database."""
    if pg_databases:
        name = pg_databases.pop()
    else:
        name = f"test_{uuid.uuid4().hex[:12]}"
        postgres.create_database(name)
    yield postgres.url_of(name)
    postgres.empty_database(name)
    pg_databases.append(name)


@pytest.fixture(scope="session")
def ledger_databases() -> Iterator[LedgerDatabases]:
    """Databases that keep the ledger's tables from test to test."""
    databases = LedgerDatabases()
    yield databases
    databases.close()


@pytest.fixture
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """None to verify a server by: for each connection PyMySQL loads all of the machine's, 25 ms."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)


@pytest.fixture
def mariadb_url(mariadb: MariaDB, no_certificates: None) -> Iterator[str]:
    """The SQLAlchemy URL of an empty MariaDB database, dropped afterwards."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield mariadb.create_database(name)
    mariadb.drop_database(name)


@pytest.fixture
def mysql_url(mysql: MySQL, no_certificates: None) -> Iterator[str]:
    """The SQLAlchemy URL of an empty MySQL database, dropped afterwards."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield mysql.create_database(name)
    mysql.drop_database(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The SQLAlchemy URL of an SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


@pytest.fixture(autouse=True)
def rq_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """RQ's settings are those of a process: each test has its own, and what it makes is closed."""
    settings = sys.modules.get("taskguard_rq.runtime")
    if settings is None:
        yield
        return
    monkeypatch.setattr(settings, "_settings", {})
    monkeypatch.setattr(settings, "_made", made := [])
    yield
    for tg in made:
        tg.close()


def flush(port: int) -> None:
    """FLUSHALL, and functions and scripts too, so that no test finds what another loaded."""
    with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
        for command in (b"FLUSHALL\r\n", b"SCRIPT FLUSH\r\n"):
            connection.sendall(command)
            reply = connection.recv(64)
            assert reply.startswith(b"+OK"), reply
