"""One run of a foreign suite with its own servers, folder and pytest.

Celery's tests that are marked as flaky run once here: `__main__.py` runs those again that differ.

Guaranteed: a run leaves neither files nor processes behind, even those that its workers started in
sessions of their own. Not guaranteed: that a foreign test does the same each time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from foreign import sources
from foreign.outcomes import UNSEEN, is_over, read
from taskguard import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

TESTS = Path(__file__).resolve().parent.parent
_FOLDER = "FOREIGN_FOLDER"
_TIMEOUT_S, _EXIT_TIMEOUT_S = 5400, 30
_running: list[str] = []
Outcomes = dict[str, str]


@dataclass(frozen=True)
class Suite:
    """The parts of a package's suite to run.

    Attributes:
        package: the package, and its name here.
        wanted: the files to take from the source distribution.
        plugins: plugins for its pytest in addition to our own.
        tests: the tests to run.
        guard: the plugin that guards.
    """

    package: str
    wanted: tuple[str, ...]
    plugins: tuple[str, ...]
    tests: tuple[str, ...]
    guard: str


CELERY = Suite(
    package="celery",
    wanted=("t", "pyproject.toml"),
    plugins=("-p", "celery.contrib.pytest"),
    # All tests except those that need servers of Azure.
    tests=("t/integration", "--ignore=t/integration/test_backend.py"),
    guard="foreign.guard_celery",
)
RQ = Suite(
    package="rq",
    wanted=("tests",),
    plugins=("-p", "foreign.default_port"),
    tests=("tests",),
    guard="foreign.guard_rq",
)
REDIS = Suite(
    package="redis",
    wanted=("tests",),
    plugins=(),
    tests=("tests/test_lock.py::TestLock",),
    guard="foreign.guard_redis",
)
REDIS_LOCK = Suite(
    package="python-redis-lock",
    wanted=("tests",),
    plugins=(),
    tests=("tests/test_redis_lock.py",),
    guard="foreign.guard_redis_lock",
)
SUITES = {suite.package: suite for suite in (CELERY, RQ, REDIS, REDIS_LOCK)}

# Tests of python-redis-lock that start programs log what its own class does.
_NO_PROGRAMS = """
import pytest

def TestProcess(*args):
    pytest.skip("it starts a program of the package")

dump_on_error = wait_for_strings = TestProcess
"""
_ANY_SOCKET = """
import pytest

@pytest.fixture
def redis_socket():
    return ""

@pytest.fixture
def redis_server():
    pass
"""


def run(suite: Suite, *, guarded: bool, log: Path, only: Sequence[str] = ()) -> Outcomes:
    """Return the outcome of each test, or of the tests in `only`. Append pytest's output to `log`.

    Raises RuntimeError if none of them ran.
    """
    with tempfile.TemporaryDirectory(prefix="taskguard-foreign-") as name, ExitStack() as servers:
        folder, outcomes = Path(name), Path(name) / "outcomes.json"
        sources.unpack(suite.package, suite.wanted, folder)
        port = servers.enter_context(Valkey()).port
        environment = {**os.environ, **_environment(port), "TMPDIR": name}
        environment["FOREIGN_OUTCOMES"] = str(outcomes)
        if suite is RQ:
            _fit_rq(folder / "tests", port=port, guarded=guarded)
        elif suite is REDIS:
            _replace(folder / "tests/conftest.py", {"localhost:6379": f"127.0.0.1:{port}"})
        elif suite is REDIS_LOCK:
            _fit_redis_lock(folder / "tests", port=port)
        if guarded and suite in (CELERY, RQ):
            environment |= _guards(servers)
        command = [sys.executable, "-m", "pytest", "-v", "--timeout=300", "-p", "foreign.outcomes"]
        command += ["-p", "pytest_timeout", *suite.plugins]
        command += ["-p", suite.guard] if guarded else []
        found: Outcomes = {}
        tests = list(only or suite.tests)
        while tests:
            outcomes.unlink(missing_ok=True)
            with log.open("ab") as out:
                _run_to_its_end([*command, *tests], folder, environment, out)
            seen = read(outcomes)
            if all(how == UNSEEN for how in seen.values()):
                raise RuntimeError(f"{suite.package}'s suite did not run, see {log}")
            found |= seen
            # A test may have ended all of them: the tests after it get a run of their own.
            tests = [test for test, how in seen.items() if how == UNSEEN]
        return found


def _environment(port: int) -> dict[str, str]:
    """Return the settings of both suites and the modules for their processes."""
    server = f"redis://127.0.0.1:{port}/0"
    return {
        "PYTHONPATH": str(TESTS),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "FOREIGN_REDIS_PORT": str(port),
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(port),
        "TEST_BROKER": server,
        "TEST_BACKEND": server,
        "RUN_SLOW_TESTS_TOO": "1",
    }


def _guards(servers: ExitStack) -> dict[str, str]:
    """Return locks and a ledger apart from the suite's server, because its tests empty that."""
    locks = servers.enter_context(Valkey()).url_of(0)
    ledger = servers.enter_context(Postgres()).create_database("foreign")
    with contextlib.closing(SqlLedger(ledger)) as made:
        made.create_schema()
    return {"TASKGUARD_LOCKS_URL": locks, "TASKGUARD_LEDGER_URL": ledger}


def _fit_rq(tests: Path, *, port: int, guarded: bool) -> None:
    """Adapt RQ's tests, which know one port and one folder, and have their jobs in one module."""
    for path in tests.rglob("*.py"):
        text = path.read_text().replace("/tmp/", f"{tests.parent}/")
        path.write_text(text.replace("127.0.0.1:6379", f"127.0.0.1:{port}"))
    if guarded:
        with (tests / "fixtures.py").open("a") as jobs:
            jobs.write("\n\nfrom foreign.guard_rq import guard_jobs\n\nguard_jobs(globals())\n")


def _fit_redis_lock(tests: Path, *, port: int) -> None:
    """Let python-redis-lock's tests use the run's server, each once: answers are bytes."""
    (tests / "conftest.py").write_text(_ANY_SOCKET)
    (tests / "process_tests.py").write_text(_NO_PROGRAMS)
    both = "params=[True, False], ids=['decode_responses=True', 'decode_responses=False']"
    client = {"unix_socket_path=redis_socket": f"port={port}", both: "params=[False], ids=['_']"}
    _replace(tests / "test_redis_lock.py", client)


def _replace(path: Path, texts: dict[str, str]) -> None:
    found = path.read_text()
    for text, other in texts.items():
        found = found.replace(text, other)
    path.write_text(found)


def _run_to_its_end(
    command: list[str], folder: Path, environment: dict[str, str], out: IO[bytes]
) -> None:
    """Run the tests, and end every process that they started: all have the run's folder in their
    environment.

    Tests may leave processes that pytest would wait for without end at its exit.
    """
    environment = {**environment, _FOLDER: str(folder)}
    # In its own session, because RQ's tests send signals to groups of processes.
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
    )
    _running.append(str(folder))
    try:
        until_s, outcomes = time.monotonic() + _TIMEOUT_S, Path(environment["FOREIGN_OUTCOMES"])
        while process.poll() is None and time.monotonic() < until_s:
            time.sleep(1)
            if is_over(read(outcomes)):
                until_s = min(until_s, time.monotonic() + _EXIT_TIMEOUT_S)
    finally:
        _end(str(folder))
        process.wait()


def end_all() -> None:
    """End every run's processes. Then `run` raises in its thread, and leaves nothing behind."""
    for folder in _running:
        _end(folder)


def _end(folder: str) -> None:
    while left := [each for each in _processes() if _is_of(each, folder)]:
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, timeout=1)


def _processes() -> Iterator[psutil.Process]:
    """Return the run's processes. Not process_iter(): it confuses processes if an id is
    used again."""
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _is_of(process: psutil.Process, folder: str) -> bool:
    try:
        return process.environ().get(_FOLDER) == folder
    except psutil.Error:
        return False
