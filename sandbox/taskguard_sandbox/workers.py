"""Private real workers for the demo and the examples, beside the servers of `servers.py`.

    with CeleryWorker("shop", children=4) as worker:
        ...                       # `celery -A shop worker`, ready for messages
        print(worker.log)

Guaranteed, as for servers: `start()` returns when the worker takes messages, `stop()` leaves no
process and no folder behind, and neither does a starter that is killed. A worker gets the
environment of its starter, and TASKGUARD_WORKER_FOLDER: its own temporary folder, for what tasks
want to tell the starter. `python_path` is where modules are found that are not installed, `python`
the interpreter of another environment.
Not guaranteed: that a body ends before its worker is stopped; workers are stopped by SIGKILL.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import ClassVar

from taskguard_sandbox.process import Server

__all__ = ["FOLDER_VARIABLE", "CeleryWorker", "RQWorker", "Worker"]

FOLDER_VARIABLE = "TASKGUARD_WORKER_FOLDER"


class Worker(Server):
    """Base of both kinds: `python -m …`, ready when its log says so."""

    package: ClassVar[str]
    ready: ClassVar[str]

    def __init__(
        self,
        arguments: list[str],
        *,
        url: str = "",
        python_path: Path | None = None,
        python: Path | None = None,
    ) -> None:
        super().__init__()
        self._python = python or Path(sys.executable)
        self._arguments = arguments
        self._url = url
        self._python_path = python_path
        self._read_chars = 0

    @classmethod
    def available(cls) -> str | None:
        if importlib.util.find_spec(cls.package):
            return None
        return f"{cls.package} is not installed: pip install 'celery-taskguard[{cls.package}]'"

    @property
    def url(self) -> str:
        """The source of its messages, if its starter named one."""
        return self._url

    def new_lines(self) -> list[str]:
        """The lines that were added to the log since the last call."""
        new = self.log[self._read_chars :].rpartition("\n")[0]
        self._read_chars += len(new)
        return [line for line in new.split("\n") if line]

    def _command(self) -> list[str]:
        return [str(self._python), "-m", *self._arguments]

    def _environment(self) -> dict[str, str]:
        variables = super()._environment()
        if self._python_path is not None:
            paths = [str(self._python_path), variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return {
            **variables,
            FOLDER_VARIABLE: str(self.folder),
            # A killed worker does not remove its temporary files; `stop()` does.
            "TMPDIR": str(self.folder),
            "PYTHONUNBUFFERED": "1",
        }

    def _answers(self) -> bool:
        return self.ready in self.log


class CeleryWorker(Worker):
    """`celery -A app worker` with a prefork pool of `children`; the app knows its broker."""

    name = "Celery worker"
    package = "celery"
    ready = " ready."

    def __init__(
        self,
        app: str,
        *,
        children: int = 2,
        python_path: Path | None = None,
        python: Path | None = None,
    ) -> None:
        arguments = ["celery", "-A", app, "worker", "-P", "prefork", "-c", str(children)]
        # The remote control's queues and chatter are of no use to one worker.
        quiet = ["--without-gossip", "--without-mingle", "-l", "INFO"]
        super().__init__([*arguments, *quiet], python_path=python_path, python=python)


class RQWorker(Worker):
    """`rq worker` with taskguard_rq.GuardedWorker, for one queue of the broker at `url`."""

    name = "RQ worker"
    package = "rq"
    ready = "Listening on "

    def __init__(
        self,
        queue: str,
        *,
        url: str,
        python_path: Path | None = None,
    ) -> None:
        guarded = ["--worker-class", "taskguard_rq.GuardedWorker"]
        arguments = ["rq.cli", "worker", queue, "-u", url, *guarded]
        super().__init__(arguments, url=url, python_path=python_path)
