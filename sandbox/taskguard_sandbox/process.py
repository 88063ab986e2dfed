"""The life of one private server process: start, wait until it answers, pause, kill, end.

`Server` is the base of the kinds in `servers.py`, which say how their server is started and how it
shows that it is ready. Guaranteed: see there. One object belongs to the process that made it; in a
forked child it does nothing, so that a child's end does not stop the parent's servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from taskguard_sandbox import supervisor

if TYPE_CHECKING:
    from typing import Self

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.02
# Below the range of ports for outgoing connections, so that no connection gets the port of a server
# that is down for a moment.
PORTS = range(15_000, 32_000)
# "15000-19999": a share of them, so that runs side by side never meet. A client that looks for a
# server that is down for a moment would find the other run's.
PORTS_VARIABLE = "TASKGUARD_TEST_PORTS"
PORT_TRIES = 5
# So many as the servers of one cluster may want together.
_told_lately: deque[int] = deque(maxlen=30)
# As servers say it; the last is what RabbitMQ says where epmd has no port.
_PORT_IS_TAKEN = ("address already in use", "port_already_used", "nodistribution")


class ServerError(RuntimeError):
    """A server did not start or did not stop; the end of its log is in the message."""


def share_ports(number: int, shares: int) -> None:
    """This process and its children take the ports of one of so many equal shares from here on."""
    ports = _ports()
    size = len(ports) // shares
    mine = ports[number * size : (number + 1) * size]
    os.environ[PORTS_VARIABLE] = f"{mine.start}-{mine.stop - 1}"


def _ports() -> range:
    first, _, last = os.environ.get(PORTS_VARIABLE, "").partition("-")
    return range(int(first), int(last) + 1) if last else PORTS


def free_port() -> int:
    """Return a free port of the loopback interface that was not returned recently.

    So a caller can get several ports before it listens on one of them.
    """
    ports = _ports()
    while True:
        port = random.choice(ports)
        if port in _told_lately:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            _told_lately.append(port)
            return port


def nobody() -> tuple[int, int] | None:
    """User and group for what refuses to run as root; None where this is not root."""
    if os.geteuid() != 0:
        return None
    user = pwd.getpwnam("nobody")
    return user.pw_uid, user.pw_gid


def environment() -> dict[str, str]:
    """The environment without what would steer a server elsewhere."""
    foreign = ("PG", "RABBITMQ_", "ERL_", "LC_", "LANG")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)}


class _Kept:
    """One process and its supervisor."""

    def __init__(
        self,
        cmd: list[str],
        *,
        folder: Path,
        env: dict[str, str],
        user: tuple[int, int] | None,
    ) -> None:
        spec = {
            "parent": os.getpid(),
            "folder": str(folder),
            "cmd": cmd,
            "env": env,
            "user": user,
            "log": str(folder / "server.log"),
        }
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is the starter's to handle
        )
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        # Where it ended before it read, the next line says so.
        with contextlib.suppress(BrokenPipeError), self._supervisor.stdin as pipe:
            pipe.write(json.dumps(spec).encode() + b"\n")
        with self._supervisor.stdout as pipe:
            line = pipe.readline()
        if not line:
            raise ServerError(f"the supervisor of {cmd[0]} ended with {self._supervisor.wait()}")
        self.pid = int(line)

    @property
    def exit_code(self) -> int | None:
        return self._supervisor.poll()

    def signal(self, number: int) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_tree(self, number: int) -> None:
        if self.exit_code is None:
            supervisor.signal_tree(self.pid, number)

    def ends_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(timeout_s)
            return True
        return False


class Server(ABC):
    """A server that is not running yet. `with` starts and stops it."""

    name: ClassVar[str]
    _halt_signal: ClassVar[int] = signal.SIGTERM
    _stop_signal: ClassVar[int] = signal.SIGKILL

    def __init__(self, *, port: int | None = None) -> None:
        self._chosen_port = port
        self._port = port
        self._folder: Path | None = None
        self._process: _Kept | None = None
        self._helpers: list[_Kept] = []
        self._paused = False
        self._owner = os.getpid()

    @classmethod
    @abstractmethod
    def available(cls) -> str | None:
        """None when the server can run here, else the reason in words."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients find the server."""

    @abstractmethod
    def _command(self) -> list[str]:
        """The command line, its first part an absolute path."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server is ready for clients."""

    def _prepare(self) -> None:  # noqa: B027 - most kinds have nothing to lay out
        """Lays out the folder before a start; the folder may hold data already."""

    def _environment(self) -> dict[str, str]:
        return environment()

    @property
    def _user(self) -> tuple[int, int] | None:
        """(uid, gid) to run as, None for the starter's own."""
        return None

    # -- what a user calls

    @property
    def port(self) -> int:
        """The port of the loopback interface, the same over restarts."""
        if self._port is None:
            raise ServerError(f"{self.name} has no port before start()")
        return self._port

    @property
    def pid(self) -> int:
        """The process id of the server (of PostgreSQL: the postmaster)."""
        if self._process is None or self._process.exit_code is not None:
            raise ServerError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists; a paused one does."""
        return self._process is not None and self._process.exit_code is None

    @property
    def folder(self) -> Path:
        """The temporary folder of data, configuration and log."""
        if self._folder is None:
            raise ServerError(f"{self.name} has no folder before start()")
        return self._folder

    @property
    def log(self) -> str:
        """The server's log so far."""
        with contextlib.suppress(FileNotFoundError, ServerError):
            return (self.folder / "server.log").read_text("utf-8", errors="replace")
        return ""

    def start(self) -> Self:
        """Starts the server, on its port and data if it had them, and waits until it answers."""
        if self.running:
            return self
        reason = self.available()
        if reason is not None:
            raise ServerError(reason)
        fresh = self._folder is None
        tries = PORT_TRIES if fresh and self._chosen_port is None else 1
        while True:
            tries -= 1
            try:
                self._start_once()
                return self
            except BaseException:
                # Somebody else took the port between its choice and the start: choose again.
                lost_race = any(words in self.log.lower() for words in _PORT_IS_TAKEN)
                if fresh:
                    self.stop()
                if not (lost_race and tries):
                    raise

    def halt(self) -> None:
        """Ends the server the way an operator would, and keeps port and data for `start()`."""
        self._end(self._halt_signal)

    def kill(self) -> None:
        """Ends the server and all its processes by SIGKILL; keeps port and what is on disk."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ends the server and removes its folder. May be called twice."""
        if os.getpid() != self._owner:
            return
        try:
            self._end(self._stop_signal)
        finally:
            for helper in self._helpers:
                self._end_process(helper, signal.SIGKILL)
            self._helpers.clear()
            if self._folder is not None:
                supervisor.remove_shared_memory(self._folder)
                shutil.rmtree(self._folder)
                self._folder = None
            self._port = self._chosen_port

    def restart(self) -> Self:
        """`halt()` and `start()`: the same port, the same data."""
        self.halt()
        return self.start()

    def pause(self) -> None:
        """Freezes the server and all its processes (SIGSTOP): connections stay, answers do not."""
        if self._process is not None:
            self._paused = True
            self._process.signal_tree(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused server go on (SIGCONT)."""
        if self._process is not None:
            self._process.signal_tree(signal.SIGCONT)
            self._paused = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # -- what the kinds use

    def _choose_ports(self) -> None:
        """Choose ports at the first start, and again if another process has taken one."""
        if self._port is None:
            self._port = free_port()

    def _spawn_helper(self, cmd: list[str]) -> None:
        """Start another process that the server needs, unless it runs. `stop()` ends it."""
        if not any(helper.exit_code is None for helper in self._helpers):
            env = self._environment()
            self._helpers.append(_Kept(cmd, folder=self.folder, env=env, user=self._user))

    def _ask(self, question: bytes) -> bytes:
        """Return the first bytes of the port's answer, or nothing if there is no answer."""
        address = ("127.0.0.1", self.port)
        with contextlib.suppress(OSError), socket.create_connection(address, 1.0) as connection:
            connection.sendall(question)
            return connection.recv(64)
        return b""

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not condition():
            if self._process is not None and (code := self._process.exit_code) is not None:
                raise ServerError(f"{what} ended with {code}: {self.log[-2000:]}")
            if time.monotonic() > deadline:
                text = f"{what} did not answer within {READY_TIMEOUT_S:g} s"
                raise ServerError(f"{text}: {self.log[-2000:]}")
            time.sleep(POLL_S)

    # -- inside

    def _start_once(self) -> None:
        if self._folder is None:
            self._choose_ports()
            self._folder = Path(tempfile.mkdtemp(prefix="taskguard-"))
        self._process = None
        self._prepare()
        self._process = _Kept(
            self._command(), folder=self._folder, env=self._environment(), user=self._user
        )
        self._await(self._answers, self.name)

    def _end(self, number: int) -> None:
        if os.getpid() == self._owner and self._process is not None:
            if self._paused:
                self.resume()
            self._end_process(self._process, number)
            self._process = None

    def _end_process(self, process: _Kept, number: int) -> None:
        if number != signal.SIGKILL:
            process.signal(number)
            if process.ends_within(STOP_TIMEOUT_S):
                return
        process.signal_tree(signal.SIGKILL)
        if not process.ends_within(STOP_TIMEOUT_S):
            raise ServerError(f"{self.name} (pid {process.pid}) does not end")
