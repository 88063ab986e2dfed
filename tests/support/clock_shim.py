"""Servers whose wall clock a test can move, by a library that is loaded before their own.

    with server_clock() as clock, Valkey(clock) as server:
        server.jump(60)       # the server's clock only; it goes on from there

Guarantees that the server has seen the jump when `jump()` returns. The library is built with the
machine's C compiler; `unavailable()` says in words what is missing.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from support.waiting import patience_s, wait_until
from taskguard_sandbox import servers

__all__ = ["DebianRedis", "Postgres", "ServerClock", "Valkey", "server_clock", "unavailable"]

SOURCE = Path(__file__).with_name("clock_shim.c")


def unavailable() -> str | None:
    """Return None if clocks can be moved, else the reason in words."""
    if not sys.platform.startswith("linux"):
        return "clocks can be moved on Linux only (LD_PRELOAD)"
    return (
        None if shutil.which("cc") else "there is no C compiler (cc) to build the clock shim with"
    )


class ServerClock:
    """The difference between the clock of these servers and the machine's.

    Attributes:
        offset_s: the sum of all jumps.
    """

    def __init__(self, folder: Path) -> None:
        self._library = folder / "clock_shim.so"
        self._file = folder / "offset"
        self._file.write_bytes(struct.pack("=q", 0))
        self.offset_s = 0.0
        build = ["cc", "-O2", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(build, check=True, capture_output=True, timeout=patience_s())

    def jump(self, seconds: float) -> None:
        """Move the clock forward, or back."""
        self.offset_s += seconds
        # Overwrite the file in place: the servers have it mapped.
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", int(self.offset_s * 1_000_000)))

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CLOCK_SHIM_FILE": str(self._file)}


@contextmanager
def server_clock() -> Iterator[ServerClock]:
    """Yield a clock that shows the right time, in a folder that servers of any user can read."""
    with tempfile.TemporaryDirectory(prefix="clock-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield ServerClock(folder)


class _Redis(servers.RedisServer):
    """A Redis that goes by `clock`."""

    def __init__(self, clock: ServerClock, **options: str | int | list[str]) -> None:
        super().__init__(**options)
        self.clock = clock

    def jump(self, seconds: float) -> None:
        """The clock jumps; the server looks at it some ten times a second."""
        self.clock.jump(seconds)
        with redis.Redis(port=self.port) as client:
            wait_until(lambda: abs(client.time()[0] - time.time() - self.clock.offset_s) < 10.0)

    def _environment(self) -> dict[str, str]:
        return super()._environment() | self.clock.environment


class Valkey(_Redis, servers.Valkey):
    """A Valkey that goes by `clock`."""


class DebianRedis(_Redis, servers.DebianRedis):
    """The system's that goes by `clock`."""


class Postgres(servers.Postgres):
    """A PostgreSQL that goes by `clock`."""

    def __init__(self, clock: ServerClock, **settings: str | int) -> None:
        super().__init__(**settings)
        self.clock = clock

    def jump(self, seconds: float) -> None:
        """The clock jumps; the server asks it whenever it wants to know."""
        self.clock.jump(seconds)

    def _environment(self) -> dict[str, str]:
        return super()._environment() | self.clock.environment
