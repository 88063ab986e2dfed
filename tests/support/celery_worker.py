"""Real workers of Celery and RQ, each a process of its own that is ended by its process id."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import psutil

from support.families import Family
from support.waiting import patience_s, wait_until

HERE = Path(__file__).resolve().parent.parent


class Program:
    """`python -m` in a process of its own. It is ready when its log says so."""

    READY: ClassVar[str]

    def __init__(self, arguments: list[str], *, environment: dict[str, str], log: Path) -> None:
        self.log = log
        # For what a killed process leaves behind; not beside the log: sockets want short paths.
        self._scratch = tempfile.TemporaryDirectory(prefix="w", ignore_cleanup_errors=True)
        self._environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(HERE), os.environ.get("PYTHONPATH")]),
            ),
            "TMPDIR": self._scratch.name,
            "PYTHONFAULTHANDLER": "1",
        }
        self._command = [sys.executable, "-m", *arguments]
        self._family: Family | None = None

    def __enter__(self) -> Self:
        self._launch()
        try:
            wait_until(self._is_ready, message=f"ready, see {self.log}")
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if kind is not None:
            print(self.text()[-8000:])

    def _launch(self) -> None:
        self._family = Family(
            self._command, environment=self._environment, log=self.log, cwd=HERE.parent
        )

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.text()[-4000:]
        return self.READY in self.text()

    def text(self) -> str:
        """Return the log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The parent."""
        assert self._family is not None
        return self._family.process

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the parent."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit status, once it ended by itself. If it hangs, its log says where."""
        try:
            return self.process.wait(patience_s())
        except subprocess.TimeoutExpired:
            assert self._family is not None
            self._family.abort()
            raise

    def kill(self) -> None:
        """Send SIGKILL to the parent and to all that it has started."""
        if self._family is not None:
            self._family.kill()
        self._scratch.cleanup()


class CeleryProgram(Program):
    """A program of `celery -A APP`."""

    def __init__(
        self, app: str, arguments: list[str], *, environment: dict[str, str], log: Path
    ) -> None:
        super().__init__(["celery", "-A", app, *arguments], environment=environment, log=log)


class RQWorker(Program):
    """`rq worker`. Its work horses have what the module of the worker class imports."""

    READY = "Listening on "

    def __init__(self, queue: str, *, url: str, worker_class: str, log: Path) -> None:
        arguments = ["rq.cli", "worker", queue, "-u", url, "--worker-class", worker_class]
        super().__init__(arguments, environment={}, log=log)


class CeleryWorker(CeleryProgram):
    """`celery -A support.shop worker`."""

    READY = " ready."

    def __init__(
        self,
        environment: dict[str, str],
        *,
        log: Path,
        pool: str = "prefork",
        concurrency: int = 2,
        queue: str | None = None,
    ) -> None:
        if queue is not None:
            environment = {**environment, "SHOP_QUEUE": queue}
        arguments = ["worker", "-P", pool, "-c", str(concurrency), "-l", "INFO"]
        arguments += ["--without-gossip", "--without-mingle"]
        app = environment.get("SHOP_APP", "support.shop")
        super().__init__(app, arguments, environment=environment, log=log)

    def fails_to_start(self) -> str:
        """Run a worker that is expected to end by itself with an error. Return its log."""
        self._launch()
        try:
            assert self.wait() != 0, self.text()
        finally:
            self.kill()
        return self.text()

    def handled(self) -> int:
        """Return the number of deliveries that Celery's log calls a success or ignored."""
        return len(re.findall(r"Task \S+ (?:succeeded|ignored)", self.text()))

    def children(self) -> list[int]:
        """Return the pool's processes."""
        return [child.pid for child in psutil.Process(self.pid).children()]
