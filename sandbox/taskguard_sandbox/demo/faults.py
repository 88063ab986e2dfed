"""Kill and stop children of workers: one of each in every queue, one after the other.

A child is first stopped (SIGSTOP). It becomes a victim only if the journal shows that it is in its
body, before its transaction. So "killed in its body" is always true, and a child that has finished
goes on unharmed. No stopped child has locked rows in the database, for which a takeover would wait.

A stopped victim goes on (SIGCONT) after another child has done its work. Its own commit must then
be refused. A fault without a result is tried again on another child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from taskguard.events import Completed, Deferred, Duplicate, Failed, StaleRefused, Takeover
from taskguard_sandbox.demo.journal import BEGAN, WRITES, Line

__all__ = ["Faults"]

_PATIENCE_S = 20.0
_FEW = 5
_ENDS = {Completed.name, Deferred.name, Duplicate.name, Failed.name}


class _Phase(Enum):
    IDLE = auto()
    STOPPING = auto()  # SIGSTOP was sent
    STOPPED = auto()  # the child is stopped. Its journal is read next.
    KILLED = auto()  # until another child takes its work over.
    PAUSED = auto()  # until another child has done its work.
    RESUMED = auto()  # until its commit is refused.


@dataclass
class _Victim:
    pid: int
    key: str
    since_s: float


class Faults:
    """The faults of one queue. Fed with every line of the journal, then asked to `step()`."""

    def __init__(self, queue: str, *, items: int, say: Callable[[str, str], None]) -> None:
        """Begin when a tenth of `items` is done; `say(queue, text)` tells what was done."""
        self.killed = 0
        self.paused = 0
        self._queue = queue
        self._say = say
        self._wanted = deque(["kill", "pause"])
        self._left = items
        self._begin_at = items - items // 10
        self._phase = _Phase.IDLE
        self._bodies: dict[int, str] = {}
        self._victim = _Victim(0, "", 0.0)

    @property
    def in_progress(self) -> bool:
        """Return True if a killed or stopped process has not been replaced yet."""
        return self._phase is not _Phase.IDLE

    def hear(self, line: Line) -> None:
        """Take note of what happened."""
        if line.name == BEGAN:
            self._bodies[line.pid] = line.key
            if self._phase is _Phase.IDLE and self._wanted and self._suits(line):
                self._stop(line)
            return
        if line.name == Takeover.name:
            text = f"takeover of {line.key}, fence {line.fence}, attempt {line.attempt}"
            self._say(self._queue, text)
        elif line.name == StaleRefused.name:
            self._say(self._queue, f"stale commit refused: {line.key}, fence {line.fence}")
        if line.name in (*_ENDS, WRITES):
            self._bodies.pop(line.pid, None)
        if line.name == Completed.name:
            self._left -= 1
        if line.key == self._victim.key:
            self._hear_of_victim(line)

    def _hear_of_victim(self, line: Line) -> None:
        by_itself = line.pid == self._victim.pid
        if line.name == Takeover.name and self._phase is _Phase.KILLED:
            self._over("kill")
        elif line.name == StaleRefused.name and by_itself and self._phase is _Phase.RESUMED:
            self._over("pause")
        elif line.name in _ENDS and by_itself and self._phase is _Phase.RESUMED:
            self._phase = _Phase.IDLE  # it was through before it stopped
        elif line.name == Completed.name and self._phase is _Phase.PAUSED and not by_itself:
            self._resume()

    def step(self) -> None:
        """Go on with the victim. To be called when all that was written has been heard."""
        if self._phase is _Phase.STOPPING:
            if _state(self._victim.pid) == "T":
                self._phase = _Phase.STOPPED
            elif self._waited_s() > 1.0:
                self._phase = _Phase.IDLE
        elif self._phase is _Phase.STOPPED:
            if self._bodies.get(self._victim.pid) == self._victim.key:
                self._strike()
            else:
                _signal(self._victim.pid, signal.SIGCONT)
                self._phase = _Phase.IDLE
        elif self.in_progress and self._waited_s() > _PATIENCE_S:
            _signal(self._victim.pid, signal.SIGCONT)
            self._phase = _Phase.IDLE

    def _suits(self, line: Line) -> bool:
        """Late enough, and new work, as long as more of that is to come."""
        return self._left <= self._begin_at and (line.attempt == 1 or self._left <= _FEW)

    def _stop(self, line: Line) -> None:
        self._victim = _Victim(line.pid, line.key, time.monotonic())
        if _signal(line.pid, signal.SIGSTOP):
            self._phase = _Phase.STOPPING

    def _strike(self) -> None:
        self._victim.since_s = time.monotonic()
        pid, key = self._victim.pid, self._victim.key
        if self._wanted[0] == "kill":
            _signal(pid, signal.SIGKILL)
            self._bodies.pop(pid, None)
            self.killed += 1
            self._phase = _Phase.KILLED
            self._say(self._queue, f"child {pid} killed in the body of {key} (SIGKILL)")
        else:
            self.paused += 1
            self._phase = _Phase.PAUSED
            self._say(self._queue, f"child {pid} stopped in the body of {key} (SIGSTOP)")

    def _resume(self) -> None:
        paused_s = self._waited_s()
        _signal(self._victim.pid, signal.SIGCONT)
        self._phase = _Phase.RESUMED
        self._say(
            self._queue,
            f"child {self._victim.pid} goes on after {paused_s:.1f} s (SIGCONT), too late",
        )

    def _over(self, fault: str) -> None:
        self._phase = _Phase.IDLE
        self._wanted.remove(fault)

    def _waited_s(self) -> float:
        return time.monotonic() - self._victim.since_s


def _signal(pid: int, number: int) -> bool:
    """Return True if the process existed and got the signal."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _state(pid: int) -> str:
    """The letter that `ps` shows: T for stopped; "" for a process that is gone."""
    if Path("/proc/self/stat").exists():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return stat.rpartition(")")[2].split()[0]
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout[:1]
