"""A worker that is forked has what it would have if Python were started for it."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.families import Family
from support.fork_server import ForkedProcess, forked, servers_pids
from support.waiting import patience_s, wait_until

# An application: where it is loaded, it writes down what its process is like.
_APP = """
import faulthandler, json, os, pathlib, random, re, signal, sys, tempfile, threading
import celery
app = celery.Celery("probe")
found = {
    "argv": sys.argv,
    "path": sys.path,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "started_with": pathlib.Path("/proc/self/environ").read_text().split("\\0"),
    "signals": re.findall("Sig[BIC].*", pathlib.Path("/proc/self/status").read_text()),
    "interrupt": str(signal.getsignal(signal.SIGINT)),
    "files": sorted(os.readlink(each) for each in pathlib.Path("/proc/self/fd").iterdir()
                    if os.path.exists(each)),
    "buffers": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.encoding],
    "group": [os.getpgrp(), os.getsid(0)],
    "threads": threading.active_count(),
    "faulthandler": faulthandler.is_enabled(),
    "temporary": tempfile.gettempdir(),
    "random": random.random(),
}
pathlib.Path("found.json").write_text(json.dumps(found))
"""
_CELERY = [sys.executable, "-m", "celery", "-A", "probe"]
_only_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "probe.py").write_text(textwrap.dedent(_APP))
    (tmp_path / "scratch").mkdir()
    return {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "elsewhere"),
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(tmp_path / "scratch"),
    }


def _run(folder: Path, environment: dict[str, str], *arguments: str, fresh: bool) -> Any:
    """Exit status, and what the application found."""
    family = Family(
        [*_CELERY, *arguments],
        environment=environment,
        log=folder / "log",
        cwd=folder,
        fresh=fresh,
    )
    status = family.process.wait(patience_s())
    assert isinstance(family.process, ForkedProcess) is not fresh
    return status, json.loads((folder / "found.json").read_text())


@_only_linux
def test_nothing_but_the_start_differs(tmp_path: Path, environment: dict[str, str]) -> None:
    """Arguments, folder, variables, signals, files, group, buffers; and the exit status."""
    status, new = _run(tmp_path, environment, "report", fresh=True)
    said = (tmp_path / "log").read_text()
    (tmp_path / "log").unlink()
    forked_status, found = _run(tmp_path, environment, "report", fresh=False)
    assert (forked_status, status) == (0, 0)
    assert (tmp_path / "log").read_text() == said
    marks = [variables.pop("environment").items() for variables in (new, found)]
    assert len(marks[0] ^ marks[1]) == 2, "another mark for each"
    mark = next(f"{k}={v}" for k, v in marks[1] - marks[0])
    assert mark in found.pop("started_with")
    del new["started_with"]
    assert new.pop("random") != found.pop("random")
    assert found == new


@_only_linux
def test_the_status_of_a_failure(tmp_path: Path, environment: dict[str, str]) -> None:
    """A failure has the status and the output of a process that was started anew."""
    statuses, said = [], []
    for fresh in (True, False):
        statuses.append(_run(tmp_path, environment, "report", "--no-such", fresh=fresh)[0])
        said.append((tmp_path / "log").read_text())
        (tmp_path / "log").unlink()
    assert statuses[0] == statuses[1] != 0
    assert said[0] == said[1]


@_only_linux
def test_two_forks_draw_other_numbers(tmp_path: Path, environment: dict[str, str]) -> None:
    """Back-offs of two workers would be the same otherwise."""
    drawn = {_run(tmp_path, environment, "report", fresh=False)[1]["random"] for _ in range(2)}
    assert len(drawn) == 2


@_only_linux
def test_a_killed_one_stays_until_it_is_waited_for(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """A killed process stays until it is waited for, so no other process gets its number before."""
    command = [*_CELERY, "shell", "--python"]
    (tmp_path / "probe.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    family = Family(command, environment=environment, log=tmp_path / "log", cwd=tmp_path)
    wait_until(lambda: "here" in (tmp_path / "log").read_text(), message="it runs")
    process = psutil.Process(family.process.pid)
    assert process.parent().pid in servers_pids()
    assert family.process.poll() is None
    os.kill(family.process.pid, signal.SIGKILL)
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, message="its end")
    assert family.process.wait(patience_s()) == -signal.SIGKILL
    assert family.process.returncode == -signal.SIGKILL
    assert not process.is_running()
    family.kill()


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ([sys.executable, "-m", "celery", "worker", "-P", "gevent"], {}),
        ([sys.executable, "-m", "celery", "worker"], {"LD_PRELOAD": "clock.so"}),
        ([sys.executable, "-m", "celery", "worker"], {"PYTHONWARNINGS": "error"}),
        ([sys.executable, "-m", "celery", "worker"], {"CELERY_WORKER_REVOKES_MAX": "3"}),
        ([sys.executable, "-X", "dev", "-m", "celery", "worker"], {}),
        ([sys.executable, "-m", "taskguard", "relay"], {}),
        ([sys.executable, "-c", "pass"], {}),
        (["/usr/bin/python3", "-m", "celery", "worker"], {}),
    ],
)
def test_what_has_to_be_started(
    command: list[str], variables: dict[str, str], tmp_path: Path
) -> None:
    """Patches that come before all imports, another Python, what counts when it starts."""
    environment = {**os.environ, **variables}
    assert forked(command, environment=environment, log=tmp_path / "log", cwd=tmp_path) is None
