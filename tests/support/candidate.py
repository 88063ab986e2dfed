"""A process that is a candidate for one leader's place.

    python -m support.candidate LOG LOCKS LEDGER TTL_S check|interrupt

While it leads it adds lines to LOG, a hundred a second: its fence and the machine's steady clock.
"-" for LOCKS or LEDGER means none. SIGTERM lets it step down; then it ends with status 0.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path

import taskguard
from taskguard import Leadership


def main(log: str, locks: str, ledger: str, ttl_s: str, how: str) -> None:
    """Lead until it is asked to stop."""
    logging.basicConfig(level=logging.INFO)
    tg = taskguard.connect(
        locks=None if locks == "-" else locks, ledger=None if ledger == "-" else ledger
    )
    leader = tg.leader("test", ttl_s=float(ttl_s))
    signal.signal(signal.SIGTERM, lambda *_: leader.step_down())

    def work(leadership: Leadership) -> None:
        with Path(log).open("a", buffering=1) as out:
            while True:
                if how == "check":
                    leadership.check()
                out.write(f"{leadership.fence} {time.monotonic()}\n")
                time.sleep(0.01)

    leader.run(work)
    tg.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
