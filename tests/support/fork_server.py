"""Workers that are forked from a process that has imported what workers import.

The imports of a Celery worker take a second of processor time, and tests start hundreds of workers.
`python -m support.fork_server FD MODULE...` imports once and forks on request. It has one thread
and no connection. The child runs the main module of its request, as `python -m` does.

Guarantees: the child has the arguments, environment, folder, log and signals that the test gave.
Its process id is the worker's. A child that has ended is a zombie until the test polls it or waits
for it, like a child of the test itself.

Does not guarantee that imports happen when a new process would do them. A test of imports starts a
new process. So does `forked()` if a variable counts when Python starts, or if gevent patches first.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["MARK", "ForkedProcess", "forked", "servers_pids", "stop_servers"]

# The variable that tells the members of one family; see `families.py`.
MARK = "TASKGUARD_TEST_FAMILY"
_NO_MARK = "0" * 32

_TESTS = Path(__file__).resolve().parent.parent
# Modules of libraries, imported before a main module runs. Not taskguard's own: some make parts of
# one worker, such as its name and the memory that it shares with its children.
_STORES = ("psycopg", "redis", "sqlalchemy.dialects.postgresql.psycopg")
_CELERY = (
    *("celery.apps.worker", "celery.backends.redis", "celery.bin.celery", "celery.worker.consumer"),
    *("celery.concurrency.prefork", "billiard.popen_fork", "billiard.synchronize"),
    *("kombu.transport.pyamqp", "kombu.transport.redis", "pydantic.main"),
    # Each child of a pool calls a function by cffi, which parses its declaration.
    *("_cffi_backend", "cffi.commontypes", "cffi.cparser"),
    *_STORES,
)
_RQ = ("rq.cli", "rq.cron", "rq.worker", *_STORES)
_IMPORTS = {"celery": _CELERY, "rq.cli": _RQ, "taskguard_rq": _RQ}
# Variables that count when Python, the loader, or a module above starts.
_EARLY = (
    *("PYTHON", "LD_", "MALLOC_", "LC_", "LANG", "PSYCOPG_", "GEVENT", "EVENTLET"),
    *("C_", "CELERY_", "KOMBU_", "FORKED_BY_", "MP_"),
)
_LATE = {"PYTHONPATH", "PYTHONFAULTHANDLER"}
_LONGEST_MESSAGE = 1 << 18
_LONGEST_POLL_S = 0.02


class ForkedProcess:
    """A process of a server's, with what tests use of `subprocess.Popen`."""

    def __init__(self, server: _Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(wait=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raise subprocess.TimeoutExpired as `Popen.wait()` does."""
        began_s = time.monotonic()
        pause_s = 0.001
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - began_s > timeout:
                raise subprocess.TimeoutExpired(f"the forked process {self.pid}", timeout)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the end of the process is known."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


def forked(
    command: list[str], *, environment: Mapping[str, str], log: Path, cwd: Path
) -> ForkedProcess | None:
    """Start `command` by a fork; None if it needs a new process."""
    python, option, module, *arguments = [*command, "", ""][: max(3, len(command))]
    imports = _IMPORTS.get(module)
    if sys.platform != "linux" or (python, option) != (sys.executable, "-m") or imports is None:
        return None
    if {"gevent", "eventlet"} & set(arguments) or _early(environment) != _early(os.environ):
        return None
    log.touch()
    server = _server_of(imports)
    request = {
        "module": module,
        "arguments": arguments,
        "environment": dict(environment),
        "log": str(log),
        "cwd": str(cwd),
    }
    return ForkedProcess(server, server.ask(fork=request))


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_EARLY) and k not in _LATE}


# -- in the tests' process

_servers: dict[tuple[str, ...], _Server] = {}
_starting = threading.Lock()


def servers_pids() -> set[int]:
    """Return the ids of the servers of this process."""
    return {server.process.pid for server in _servers.values()}


def stop_servers() -> None:
    """End the servers. Processes that they have forked continue."""
    while _servers:
        _servers.popitem()[1].stop()


def _server_of(imports: tuple[str, ...]) -> _Server:
    with _starting:
        server = _servers.get(imports)
        if server is not None and server.variables != _early(os.environ):
            # A test has changed what counts at the start.
            server.stop()
            server = None
        if server is None:
            server = _servers[imports] = _Server(imports)
        return server


class _Server:
    """One server, as the tests' process sees it."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        self.variables = _early(os.environ)
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers = itertools.count()
        self._asking = threading.Lock()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "support.fork_server", str(other.fileno()), *imports],
                cwd=_TESTS.parent,
                env={**os.environ, "PYTHONPATH": str(_TESTS), MARK: _NO_MARK},
                stdout=subprocess.DEVNULL,  # so that the children's is a buffer, as in a log
                pass_fds=[other.fileno()],
            )
        atexit.register(self.stop)

    def ask(self, **question: Any) -> Any:
        with self._asking:
            number = next(self._numbers)
            self._connection.sendall(json.dumps([number, question]).encode())
            while True:
                reply = self._connection.recv(_LONGEST_MESSAGE)
                assert reply, f"the fork server has ended with {self.process.wait()}"
                replied, answer = json.loads(reply)
                # Else it is for a question whose test was interrupted.
                if replied == number:
                    return answer

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._connection.shutdown(socket.SHUT_RDWR)  # a fork of the tests may have a copy
        self._connection.close()
        self.process.wait()


# -- in the server


def main(fd: str, *imports: str) -> None:
    """Fork until the tests' process is gone. In a child, run what it was asked for."""
    base = sys.path[2:]  # behind the current folder and PYTHONPATH
    for name in imports:
        with contextlib.suppress(ImportError):  # a version of a library may have it elsewhere
            importlib.import_module(name)
    ours = [name for name in sys.modules if name.startswith("taskguard")]
    assert not ours, f"{ours} would be the same in all workers"
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"threads do not live on in a fork, and there are {threads}"
    gc.collect()
    gc.freeze()  # pages that no child's collector touches stay shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the tests
    with socket.socket(fileno=int(fd)) as connection:
        request = _serve(connection)
    if request is not None:
        _become(request, base)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer questions. Return its request in each child, and None once the tests have ended."""
    while question := connection.recv(_LONGEST_MESSAGE):
        number, asked = json.loads(question)
        if "fork" in asked:
            answer = os.fork()
            if answer == 0:
                return asked["fork"]
        else:
            pid, status = os.waitpid(asked["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        connection.sendall(json.dumps([number, answer]).encode())
    return None


def _become(request: dict[str, Any], base: list[str]) -> None:
    """Make this process what `python -m` would have made, and run the module."""
    environment = request["environment"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    _overwrite_mark(environment[MARK])
    os.environ.clear()
    os.environ.update(environment)
    out = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    tempfile.tempdir = None  # TMPDIR may be another
    time.tzset()
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    path = environment.get("PYTHONPATH", "")
    sys.path[:] = [request["cwd"], *filter(None, path.split(os.pathsep)), *base]
    importlib.invalidate_caches()
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _overwrite_mark(mark: str) -> None:
    """Write the mark where /proc shows it: there are the variables that Python was started with."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    variables = Path("/proc/self/environ").read_bytes()
    old = f"{MARK}={_NO_MARK}".encode()
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start + variables.index(old))
        memory.write(f"{MARK}={mark}".encode())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
