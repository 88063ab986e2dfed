"""A process with all that it has started."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from typing import Any

import psutil

from support.waiting import wait_until

__all__ = ["kill_family"]


def kill_family(process: subprocess.Popen[Any]) -> None:
    """SIGKILL to a process of the test's and its descendants; returns when they have ended.

    Each is stopped before its children are looked for: none has the time to start another, which
    would be nobody's child, and go on.
    """
    if process.poll() is not None:
        return  # its number may be somebody else's by now
    family = [psutil.Process(process.pid)]
    for member in family:  # grows meanwhile
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGSTOP)
            family += member.children()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    process.wait(30)
    # Not waited for as processes: they are init's now, which may take a second to collect them.
    wait_until(lambda: all(map(_ended, family)), timeout_s=30, message=f"{family} have ended")


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
