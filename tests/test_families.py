"""A process of a test ends with all processes that it has started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from support.families import Family
from support.waiting import patience_s, wait_until

# A child that outlives its parent, and has let its session go.
_ORPHAN = """
import os, sys, time
if not os.fork():
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_what_outlives_its_parent_is_ended_too(tmp_path: Path) -> None:
    """A scheduler whose worker is gone would go on in the next test's queue."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", _ORPHAN]
    family = Family(command, environment=os.environ, log=log, cwd=tmp_path)
    assert family.process.wait(patience_s()) == 0
    wait_until(lambda: log.read_text().endswith("\n"), message="the orphan's number")
    orphan = psutil.Process(int(log.read_text()))
    assert orphan.is_running()
    family.kill()
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_an_id_that_another_process_had_before_makes_no_difference(tmp_path: Path) -> None:
    """Ids come again in a long run: a leader that was not ended so led on in the next test."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    family = Family(command, environment=os.environ, log=tmp_path / "log", cwd=tmp_path)
    for known in psutil.process_iter():
        if known.pid == family.process.pid:
            known._ident = (known.pid, 1.0)  # as it is remembered of the one before
    family.kill()
    assert family.process.returncode is not None
