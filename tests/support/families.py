"""A process with all processes that it has started, including those that outlive it.

A mark in their environment identifies them, even if their parent has ended. Otherwise a scheduler
or work horse whose worker was killed would go on in the next test's queue.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from support.fork_server import MARK, forked
from support.waiting import patience_s, wait_until

__all__ = ["Family"]


class Family:
    """A process that is started at once, and its descendants.

    Args:
        fresh: start a new Python, for a test that depends on imports and their time. Otherwise a
            worker may be forked from a process that has imported what workers import.

    Attributes:
        process: the first of them.
    """

    def __init__(
        self,
        command: list[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        cwd: Path,
        fresh: bool = False,
    ) -> None:
        self._mark = uuid.uuid4().hex
        environment = {**environment, MARK: self._mark}
        child = None if fresh else forked(command, environment=environment, log=log, cwd=cwd)
        self.process = child or _started(command, environment, log, cwd)

    def abort(self) -> None:
        """Send SIGABRT to all live processes: those with PYTHONFAULTHANDLER log the stack of each
        thread."""
        found = set(self._members())
        _signal(found, signal.SIGABRT)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: all(map(_ended, found)), message="ended")

    def kill(self) -> None:
        """Send SIGKILL to all live processes. Return when they have ended.

        They are stopped before the search for others, so that none can start another one.
        """
        found: set[psutil.Process] = set()
        while more := set(self._members()) - found:
            _signal(more, signal.SIGSTOP)
            found |= more
        _signal(found, signal.SIGKILL)
        self.process.wait(patience_s())
        # Do not wait for them as child processes: init may take a second to collect them.
        wait_until(lambda: all(map(_ended, found)), message=f"{found} have ended")

    def _members(self) -> Iterator[psutil.Process]:
        # Not process_iter(): it remembers processes by their ids, which come again in a long run. A
        # process with the id of an ended one would seem to have ended.
        for pid in psutil.pids():
            # Skip processes that have ended, and those of other users.
            with contextlib.suppress(psutil.Error, OSError):
                if self._is_marked(pid) and not _ended(process := psutil.Process(pid)):
                    yield process

    def _is_marked(self, pid: int) -> bool:
        try:  # a fifth of psutil's time, for hundreds of processes at each end of a worker
            return f"{MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except FileNotFoundError:  # it has ended, or this is not Linux
            return psutil.Process(pid).environ().get(MARK) == self._mark


def _started(
    command: list[str], environment: Mapping[str, str], log: Path, cwd: Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, cwd=cwd, env=environment)


def _signal(processes: set[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _ended(process: psutil.Process) -> bool:
    try:
        return bool(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
