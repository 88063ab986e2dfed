"""One run of a foreign suite: servers of its own, a folder of its own, a pytest of its own.

Celery's tests that are marked as flaky run once here: `__main__.py` runs again what differs.

Guaranteed: nothing of a run is left behind, neither processes, also those that its workers started
in sessions of their own, nor files. Not guaranteed: that a test of theirs does the same each time.
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
    """What to run of a package's suite.

    Attributes:
        package: whose, and its name here.
        wanted: what is taken from the source distribution.
        plugins: what its pytest needs beside our own.
        tests: which of them.
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
    # Without what wants servers of Azure's.
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
SUITES = {suite.package: suite for suite in (CELERY, RQ)}


def run(suite: Suite, *, guarded: bool, log: Path, only: Sequence[str] = ()) -> Outcomes:
    """The outcome of each test; `only`: of these. What pytest says goes to the end of `log`.

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
        if guarded:
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
            # A test may have ended all of them: what comes after it has a run of its own.
            tests = [test for test, how in seen.items() if how == UNSEEN]
        return found


def _environment(port: int) -> dict[str, str]:
    """What both suites look at, and what is loaded into their processes."""
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
    """Locks and ledger of their own: tests empty the server that is theirs."""
    locks = servers.enter_context(Valkey()).url_of(0)
    ledger = servers.enter_context(Postgres()).create_database("foreign")
    with contextlib.closing(SqlLedger(ledger)) as made:
        made.create_schema()
    return {"TASKGUARD_LOCKS_URL": locks, "TASKGUARD_LEDGER_URL": ledger}


def _fit_rq(tests: Path, *, port: int, guarded: bool) -> None:
    """RQ's tests know one port and one folder, and have their jobs in one module."""
    for path in tests.rglob("*.py"):
        text = path.read_text().replace("/tmp/", f"{tests.parent}/")
        path.write_text(text.replace("127.0.0.1:6379", f"127.0.0.1:{port}"))
    if guarded:
        with (tests / "fixtures.py").open("a") as jobs:
            jobs.write("\n\nfrom foreign.guard_rq import guard_jobs\n\nguard_jobs(globals())\n")


def _run_to_its_end(
    command: list[str], folder: Path, environment: dict[str, str], out: IO[bytes]
) -> None:
    """Run it, and end whatever it has started: all have its folder in their environment.

    Tests may leave processes that pytest's own waits for at its exit, for ever.
    """
    environment = {**environment, _FOLDER: str(folder)}
    # In a session of its own: RQ's tests send signals to groups of processes.
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
    """End every run's processes: `run` raises then, in its thread, and has left nothing behind."""
    for folder in _running:
        _end(folder)


def _end(folder: str) -> None:
    while left := [each for each in _processes() if _is_of(each, folder)]:
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, timeout=1)


def _processes() -> Iterator[psutil.Process]:
    """Not process_iter(): it takes one whose id was another's before for that other one."""
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _is_of(process: psutil.Process, folder: str) -> bool:
    try:
        return process.environ().get(_FOLDER) == folder
    except psutil.Error:
        return False
