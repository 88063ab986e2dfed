"""Processor time of other processes, two busy neighbours, and the time of a flush.

Processor time is in steps of nanoseconds while a process runs. That of children that have ended is
in steps of 10 ms. Needs Linux.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["BusyNeighbours", "family", "flush_us"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# It hashes a megabyte again and again, so it takes part of the processor's caches, too. It ends
# with its parent.
_BUSY = """
import hashlib, os
data, parent = bytes(1 << 20), os.getppid()
while os.getppid() == parent:
    hashlib.sha256(data)
"""
_BLOCK = bytes(8192)


def family(pid: int) -> Callable[[], float]:
    """Seconds of processor time of a process and its children, those that have ended included."""

    def clock() -> float:
        return sum(_processor_s(each) for each in _members(pid)) + _ended_s(pid)

    return clock


def _members(pid: int) -> Iterator[int]:
    yield pid
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = tasks.read_text().split()
        except OSError:
            continue  # the thread has ended
        for child in children:
            yield from _members(int(child))


def _processor_s(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(), which Python lacks
    except OSError:
        return 0.0  # it has ended


def _ended_s(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[13:15])) / _TICKS_PER_S


class BusyNeighbours:
    """One process on each processor that never waits. They run only within `running()`."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _BUSY]
        self._processes = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
        self._send(signal.SIGSTOP)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let them run."""
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def close(self) -> None:
        """End them."""
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


def flush_us(times: int = 200) -> tuple[float, float, float]:
    """Quartiles of the time of `fdatasync()` after 8 KiB, where the servers have their data."""
    took_us = []
    with tempfile.TemporaryFile() as file:
        for _ in range(times):
            os.pwrite(file.fileno(), _BLOCK, 0)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took_us.append((time.perf_counter() - began) * 1e6)
    low, middle, high = statistics.quantiles(took_us, n=4)
    return low, middle, high
