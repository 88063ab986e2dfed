"""Real beats of Celery, each a process of its own that is ended by its process id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from support.families import Family
from support.waiting import patience_s, wait_until

HERE = Path(__file__).resolve().parent.parent


class CeleryBeat:
    """`celery -A APP beat`, with a schedule file of its own; ready when it says so."""

    def __init__(
        self,
        environment: dict[str, str],
        *,
        log: Path,
        scheduler: str | None = None,
        app: str = "support.shop",
        folder: Path | None = None,
    ) -> None:
        self.log = log
        self._scratch = tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True)
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        self._environment = {
            **os.environ,
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": path,
            "TMPDIR": self._scratch.name,
            **environment,
        }
        file = Path(folder or self._scratch.name) / "schedule"
        self._command = [
            sys.executable, "-m", "celery", "-A", app, "beat", "-l", "DEBUG", "-s", str(file),
            "--pidfile=",
        ]  # fmt: skip
        if scheduler is not None:
            self._command += ["--scheduler", scheduler]
        self._family: Family | None = None

    def __enter__(self) -> Self:
        self._family = Family(
            self._command, environment=self._environment, log=self.log, cwd=HERE.parent
        )
        try:
            wait_until(self._ready, message=f"beat ready, see {self.log}")
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

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.text()[-4000:]
        return "beat: Starting..." in self.text()

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def sent(self) -> int:
        """How many messages it has sent, as it says."""
        return self.text().count("Scheduler: Sending due task")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._family is not None
        return self._family.process

    def pause(self) -> None:
        """Freeze it until `resume()`."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.process.pid, signal.SIGCONT)

    def pause_between_ticks(self) -> None:
        """Freeze it while it sleeps.

        A beat of Celery's that is told to end while it sends closes what it sends by, in the middle
        of that, and may end by the error.
        """

        def sleeps() -> bool:
            self.pause()
            if "beat: Waking up" in self.text().rstrip().rpartition("\n")[2]:
                return True
            self.resume()
            return False

        wait_until(sleeps, message="a moment between two ticks")

    def terminate(self) -> int:
        """SIGTERM; the exit status. One that hangs says in its log where."""
        os.kill(self.process.pid, signal.SIGTERM)
        try:
            return self.process.wait(patience_s())
        except subprocess.TimeoutExpired:
            assert self._family is not None
            self._family.abort()
            raise

    def kill(self) -> None:
        """SIGKILL to it and all that it has started."""
        if self._family is not None:
            self._family.kill()
        self._scratch.cleanup()
