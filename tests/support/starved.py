"""A holder that computes without end, as a program that prints what it learns of its lease.

`python -m support.starved LEDGER TTL_S` prints "holds", then "lost" when its lease is lost, and at
last the outcome of its commit.
"""

from __future__ import annotations

import sys

import taskguard
from support.guarded_shop import write
from taskguard import Guard


def main(ledger: str, ttl_s: float) -> None:
    tg = taskguard.connect(locks=None, ledger=ledger)

    @tg.guarded(key="order:<order>", work="ship", ttl_s=ttl_s)
    def ship(order: int, guard: Guard) -> str:
        print("holds", flush=True)
        lost = guard.lost
        while not lost.is_set():  # never waits
            pass
        print("lost", flush=True)
        with guard.transaction() as db:
            write(db, f"starved {order}")
        return "starved"

    print(f"answered {ship(1)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
