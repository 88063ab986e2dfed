"""A process that waits for a lock: `python -m support.waiting_process URL`, and options as JSON.

It begins when it reads a line. It prints the time at which it has the lock, by the machine's
monotonic clock, and keeps the lock until it reads another line. In the end it says whether its
lease was lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import taskguard
from taskguard.errors import LeaseLostError

KEY = "waited"


def main(url: str, options: str = "{}") -> None:
    tg = taskguard.connect(locks=url, ledger=None)
    sys.stdin.readline()
    try:
        with tg.lock(KEY, **{"ttl_s": 30, "wait_s": 120} | json.loads(options)):
            print(time.monotonic(), flush=True)
            sys.stdin.readline()
    except LeaseLostError:
        print("lost", flush=True)
    else:
        print("kept", flush=True)


@dataclass
class WaitingProcess:
    """One of them."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, url: str, **options: object) -> WaitingProcess:
        command = [sys.executable, "-m", "support.waiting_process", url, json.dumps(options)]
        pipe = subprocess.PIPE
        folder = Path(__file__).parent.parent
        return cls(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder))

    def got_it_s(self) -> float:
        """Wait for the lock, and return the time at which it had it."""
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def ended(self) -> str:
        """Wait for its end, and return what it says about its lease."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


if __name__ == "__main__":
    main(*sys.argv[1:])
