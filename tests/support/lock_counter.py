"""Workers that count up an unprotected counter under a lock, and the record of their grants.

Guarantees: without exclusion counts get lost, since every step is a read, a pause and a write.
As a program: `python -m support.lock_counter URL FILE THREADS ROUNDS` prints its grants as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from taskguard.clock import SYSTEM_CLOCK
from taskguard.lease import new_owner, trusted_until_s
from taskguard.locks.base import Granted, LockProvider
from taskguard.settings import make_locks

KEYS = ("counter",)
TTL_S = 20.0


@dataclass(frozen=True)
class Grant:
    """One turn at the lock; times are on the machine's monotonic scale."""

    fence: int
    asked_at_s: float
    answered_at_s: float
    released_at_s: float


def count(locks: LockProvider, counter: Path, rounds: int) -> list[Grant]:
    """Count up `rounds` times."""
    return [_turn(locks, counter) for _ in range(rounds)]


def count_in_threads(
    locks: LockProvider, counter: Path, *, threads: int, rounds: int
) -> list[Grant]:
    """Several threads share one provider."""
    barrier = threading.Barrier(threads)

    def run(_: int) -> list[Grant]:
        barrier.wait()
        return count(locks, counter, rounds)

    with ThreadPoolExecutor(threads) as pool:
        return [grant for grants in pool.map(run, range(threads)) for grant in grants]


def _turn(locks: LockProvider, counter: Path) -> Grant:
    owner, clock = new_owner("counter"), SYSTEM_CLOCK
    while True:
        asked_at_s = clock.monotonic_s()
        answer = locks.acquire(KEYS, owner, ttl_s=TTL_S, with_fence=True, wait_s=30.0)
        if isinstance(answer, Granted):
            break
        locks.wait(answer.key, timeout_s=30.0)
    answered_at_s = clock.monotonic_s()
    value = int(counter.read_text())
    time.sleep(0.0005)
    counter.write_text(str(value + 1))
    released_at_s = clock.monotonic_s()
    assert released_at_s < trusted_until_s(asked_at_s=asked_at_s, ttl_s=TTL_S)
    assert locks.release(KEYS, owner)
    return Grant(answer.fence, asked_at_s, answered_at_s, released_at_s)


if __name__ == "__main__":
    url, path, thread_count, round_count = sys.argv[1:]
    server = make_locks(url)
    assert server is not None
    done = count_in_threads(server, Path(path), threads=int(thread_count), rounds=int(round_count))
    print(json.dumps([asdict(grant) for grant in done]))
