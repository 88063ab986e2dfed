"""Real Celery workers, each a process of its own that is ended by its process id."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from support.families import Family
from support.waiting import patience_s, wait_until

HERE = Path(__file__).resolve().parent.parent


def _path() -> str:
    return os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


class CeleryWorker:
    """`celery -A support.shop worker`; ready when it says so in its log."""

    def __init__(
        self,
        environment: dict[str, str],
        *,
        log: Path,
        pool: str = "prefork",
        concurrency: int = 2,
        queue: str | None = None,
    ) -> None:
        self.log = log
        # For what a killed worker leaves behind; not beside the log: sockets want short paths.
        self._scratch = tempfile.TemporaryDirectory(prefix="w", ignore_cleanup_errors=True)
        self._environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": _path(),
            "TMPDIR": self._scratch.name,
            "PYTHONFAULTHANDLER": "1",
        }
        if queue is not None:
            self._environment["SHOP_QUEUE"] = queue
        app = environment.get("SHOP_APP", "support.shop")
        self._command = [
            sys.executable, "-m", "celery", "-A", app, "worker", "-P", pool,
            "-c", str(concurrency), "-l", "INFO", "--without-gossip", "--without-mingle",
        ]  # fmt: skip
        self._family: Family | None = None

    def __enter__(self) -> Self:
        self._launch()
        try:
            wait_until(self._ready, message=f"worker ready, see {self.log}")
        except BaseException:
            self.kill()
            raise
        return self

    def fails_to_start(self) -> str:
        """Run a worker that is expected to end by itself, with an error; what it said."""
        self._launch()
        try:
            assert self.wait() != 0, self.text()
        finally:
            self.kill()
        return self.text()

    def _launch(self) -> None:
        self._family = Family(
            self._command, environment=self._environment, log=self.log, cwd=HERE.parent
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if kind is not None:
            print(self.text()[-8000:])

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.text()[-4000:]
        return " ready." in self.text()

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def handled(self) -> int:
        """How many deliveries came to an end that Celery calls a success or ignored."""
        return len(re.findall(r"Task \S+ (?:succeeded|ignored)", self.text()))

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The parent."""
        assert self._family is not None
        return self._family.process

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> list[int]:
        """The pool's processes."""
        return [child.pid for child in psutil.Process(self.pid).children()]

    def signal(self, number: int) -> None:
        """Send a signal to the parent."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit status, once it ended by itself. One that hangs says in its log where."""
        try:
            return self.process.wait(patience_s())
        except subprocess.TimeoutExpired:
            assert self._family is not None
            self._family.abort()
            raise

    def kill(self) -> None:
        """SIGKILL to the parent and all that it has started."""
        if self._family is not None:
            self._family.kill()
        self._scratch.cleanup()
