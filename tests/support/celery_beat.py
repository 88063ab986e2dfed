"""Real beats of Celery, each a process of its own that is ended by its process id."""

from __future__ import annotations

import signal
from pathlib import Path

from support.celery_worker import HERE, CeleryProgram
from support.waiting import wait_until

__all__ = ["HERE", "CeleryBeat"]


class CeleryBeat(CeleryProgram):
    """`celery -A APP beat`, with a schedule file of its own."""

    READY = "beat: Starting..."

    def __init__(
        self,
        environment: dict[str, str],
        *,
        log: Path,
        scheduler: str | None = None,
        app: str = "support.shop",
        folder: Path | None = None,
    ) -> None:
        super().__init__(app, ["beat", "-l", "DEBUG"], environment=environment, log=log)
        file = Path(folder or self._scratch.name) / "schedule"
        self._command += ["-s", str(file), "--pidfile="]
        if scheduler is not None:
            self._command += ["--scheduler", scheduler]

    def sent(self) -> int:
        """Return the number of messages that its log says it has sent."""
        return self.text().count("Scheduler: Sending due task")

    def pause(self) -> None:
        """Freeze it until `resume()`."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)

    def pause_between_ticks(self) -> None:
        """Freeze it while it sleeps.

        If Celery's beat is stopped while it sends, it closes its connection in the middle of that,
        and may end by the error.
        """

        def sleeps() -> bool:
            self.pause()
            if "beat: Waking up" in self.text().rstrip().rpartition("\n")[2]:
                return True
            self.resume()
            return False

        wait_until(sleeps, message="a moment between two ticks")

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()
