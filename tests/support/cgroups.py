"""A control group of Linux, to freeze processes or to starve them of CPU.

    with Cgroup("freezer") as group:
        group.add(pid)
        group.freeze()

Guarantees that the group is thawed and gone afterwards; its processes go back to where the tests
are. Version 1 and version 2 of control groups will do; `unavailable()` says in words why not.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from support.waiting import wait_until

__all__ = ["Cgroup", "unavailable"]

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


def unavailable(controller: str) -> str | None:
    """None where `controller` ("cpu" or "freezer") can be used, else the reason in words."""
    try:
        with Cgroup(controller):
            return None
    except OSError as error:
        return f"control groups ({controller}) cannot be used here: {error.strerror}"


def _parent(controller: str) -> Path:
    first = ROOT / controller
    return first if first.is_dir() else ROOT


class Cgroup:
    """One group below the root of `controller`."""

    def __init__(self, controller: str) -> None:
        self._parent = _parent(controller)
        self._folder = self._parent / f"taskguard-{uuid.uuid4().hex[:8]}"
        self._first = self._parent != ROOT
        files = {
            "cpu": ("cpu.cfs_quota_us", "cpu.max"),
            "freezer": ("freezer.state", "cgroup.freeze"),
        }
        self._file = self._folder / files[controller][0 if self._first else 1]

    def __enter__(self) -> Self:
        self._folder.mkdir()
        if not os.access(self._file, os.W_OK):
            self._folder.rmdir()
            raise FileNotFoundError(2, f"there is no {self._file.name}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file.name in ("freezer.state", "cgroup.freeze"):
            self.thaw()
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                (self._parent / "cgroup.procs").write_text(str(pid))
        # Ended processes stay in it until they are collected.
        wait_until(self._is_gone, message=f"{self._folder} is removed")

    def add(self, *pids: int) -> None:
        """Put processes into the group."""
        for pid in pids:
            (self._folder / "cgroup.procs").write_text(str(pid))

    def freeze(self) -> None:
        """Stop all of the group at once; none of them can notice."""
        self._file.write_text("FROZEN" if self._first else "1")
        wait_until(self._is_frozen, message="frozen")

    def thaw(self) -> None:
        self._file.write_text("THAWED" if self._first else "0")

    def starve(self, share: float) -> None:
        """Leave the group together `share` of one CPU."""
        quota_us = int(PERIOD_US * share)
        self._file.write_text(f"{quota_us}" if self._first else f"{quota_us} {PERIOD_US}")

    def _pids(self) -> list[int]:
        return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]

    def _is_frozen(self) -> bool:
        if self._first:
            return self._file.read_text().strip() == "FROZEN"
        return "frozen 1" in (self._folder / "cgroup.events").read_text()

    def _is_gone(self) -> bool:
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        return not self._folder.exists()
