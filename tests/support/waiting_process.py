"""A process that waits for a lock: `python -m support.waiting_process URL`.

It begins when it is told a line, says when it has the lock, by the machine's monotonic clock, and
keeps that until it is told another.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import taskguard

KEY = "waited"


def main(url: str) -> None:
    tg = taskguard.connect(locks=url, ledger=None)
    sys.stdin.readline()
    with tg.lock(KEY, ttl_s=30, wait_s=120):
        print(time.monotonic(), flush=True)
        sys.stdin.readline()


@dataclass
class WaitingProcess:
    """One of them."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, url: str) -> WaitingProcess:
        command = [sys.executable, "-m", "support.waiting_process", url]
        pipe = subprocess.PIPE
        folder = Path(__file__).parent.parent
        return cls(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder))

    def got_it_s(self) -> float:
        """When it had the lock: waits for that."""
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


if __name__ == "__main__":
    main(sys.argv[1])
