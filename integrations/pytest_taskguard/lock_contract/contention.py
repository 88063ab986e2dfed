"""Exclusion and tokens under contention, on an unprotected counter.

Guarantees: without exclusion counts get lost, since every turn is a read, a pause and a write. The
times of turns are on the machine's monotonic scale, so that those of processes can be compared.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pytest_taskguard.lock_contract.server import known
from taskguard.locks import Granted, Held, LockProvider, Owner, new_owner

__all__ = ["TestContention", "Turn", "check_turns", "count_in_threads"]

KEYS = ("counter",)
TTL_S = 20.0


class TestContention:
    def test_threads(self, locks: LockProvider, tmp_path: Path) -> None:
        """Threads that share a provider exclude each other."""
        counter = tmp_path / "counter"
        counter.write_text("0")
        turns = count_in_threads(locks, counter, threads=8, rounds=20)
        check_turns(turns, counter, 160, tokens=locks.traits.tokens)

    def test_one_of_many(self, locks: LockProvider) -> None:
        """One of many owners that ask at the same moment is granted; the others learn its name."""
        barrier = threading.Barrier(16)
        answers: list[tuple[Owner, Granted | Held]] = []

        def ask() -> None:
            owner = new_owner("m")
            barrier.wait()
            answer = locks.acquire(("k",), owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
            answers.append((owner, answer))

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        winners = [owner for owner, answer in answers if isinstance(answer, Granted)]
        losers = [answer for _, answer in answers if isinstance(answer, Held)]
        assert (len(winners), len(losers)) == (1, 15)
        assert {answer.owner for answer in losers} <= known(locks, *winners)

    def test_overlapping_sets(self, locks: LockProvider) -> None:
        """Sets of keys that overlap in a ring are taken by one after the other, without
        deadlock."""
        sets = [("a", "b"), ("b", "c"), ("a", "c")]
        inside: set[str] = set()
        failures: list[str] = []

        def run(keys: tuple[str, ...]) -> None:
            for _ in range(15):
                owner = new_owner("m")
                while isinstance(
                    answer := locks.acquire(keys, owner, ttl_s=30.0, with_fence=False, wait_s=30.0),
                    Held,
                ):
                    locks.wait(answer.key, owner, timeout_s=min(30.0, answer.remaining_s + 0.01))
                if inside & set(keys):
                    failures.append(f"{keys} while {inside}")
                inside.update(keys)
                time.sleep(0.001)
                inside.difference_update(keys)
                locks.release(keys, owner)

        threads = [threading.Thread(target=run, args=(keys,), daemon=True) for keys in sets * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []


@dataclass(frozen=True)
class Turn:
    """One turn at the counter; times are on the machine's monotonic scale."""

    fence: int
    requested_at_s: float
    answered_at_s: float
    released_at_s: float


def count_in_threads(
    locks: LockProvider, counter: Path, *, threads: int, rounds: int
) -> list[Turn]:
    """Several threads that share one provider count up, `rounds` times each."""
    barrier = threading.Barrier(threads)

    def run(_: int) -> list[Turn]:
        barrier.wait()
        return [_turn(locks, counter) for _ in range(rounds)]

    with ThreadPoolExecutor(threads) as pool:
        return [turn for turns in pool.map(run, range(threads)) for turn in turns]


def check_turns(turns: list[Turn], counter: Path, expected: int, *, tokens: bool) -> None:
    """No count was lost, turns do not overlap, and tokens grow in the order of the turns."""
    assert int(counter.read_text()) == expected
    ordered = sorted(turns, key=lambda turn: turn.answered_at_s)
    assert len(ordered) == expected
    for before, after in pairwise(ordered):
        assert before.released_at_s <= after.answered_at_s
        assert not tokens or before.fence < after.fence


def _turn(locks: LockProvider, counter: Path) -> Turn:
    owner = new_owner("counter")
    while True:
        requested_at_s = time.monotonic()
        answer = locks.acquire(KEYS, owner, ttl_s=TTL_S, with_fence=True, wait_s=30.0)
        if isinstance(answer, Granted):
            break
        locks.wait(answer.key, owner, timeout_s=min(30.0, answer.remaining_s + 0.01))
    answered_at_s = time.monotonic()
    value = int(counter.read_text())
    time.sleep(0.0005)
    counter.write_text(str(value + 1))
    released_at_s = time.monotonic()
    if not locks.traits.session:  # no watchdog renews here, and a session keeps itself alive
        assert released_at_s < requested_at_s + answer.ttl_s
    assert locks.release(KEYS, owner)
    return Turn(answer.fence, requested_at_s, answered_at_s, released_at_s)
