"""Exclusion and tokens under contention, on an unprotected counter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

import support
from support.lock_counter import Grant, count_in_threads
from support.lock_servers import LockServer
from taskguard.lease import new_owner
from taskguard.locks.base import Granted, Held, LockProvider

TESTS = Path(support.__path__[0]).parent
# Those that other processes reach as well.
SHARED = [
    "valkey",
    "redis62",
    *(pytest.param(name, marks=pytest.mark.debian) for name in ("debian_redis", "etcd")),
]


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "counter"
    path.write_text("0")
    return path


def check(grants: list[Grant], counter: Path, expected: int) -> None:
    """No count was lost, turns do not overlap, and tokens grow in the order of the turns."""
    assert int(counter.read_text()) == expected
    ordered = sorted(grants, key=lambda grant: grant.answered_at_s)
    assert len(ordered) == expected
    for before, after in pairwise(ordered):
        assert before.released_at_s <= after.answered_at_s
        assert before.fence < after.fence


def test_threads(locks: LockProvider, counter: Path) -> None:
    """Threads that share a provider exclude each other."""
    grants = count_in_threads(locks, counter, threads=8, rounds=20)
    check(grants, counter, 160)


@pytest.mark.parametrize("server", SHARED, indirect=True)
def test_processes(server: LockServer, counter: Path) -> None:
    """Processes of several threads each exclude each other."""
    assert server.url is not None
    command = [sys.executable, "-m", "support.lock_counter", server.url, str(counter), "4", "20"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    workers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    grants: list[Grant] = []
    for worker in workers:
        output, _ = worker.communicate(timeout=120.0)
        assert worker.returncode == 0
        grants += [Grant(**grant) for grant in json.loads(output)]
    check(grants, counter, 240)


def test_one_of_many(locks: LockProvider) -> None:
    """Of many who ask at the same moment one is granted; the others learn its name."""
    barrier, answers = threading.Barrier(16), []

    def ask() -> None:
        owner = new_owner("m")
        barrier.wait()
        answer = locks.acquire(("k",), owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        answers.append((owner, answer))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    (winner,) = [owner for owner, answer in answers if isinstance(answer, Granted)]
    losers = [answer for _, answer in answers if isinstance(answer, Held)]
    assert len(losers) == 15
    assert {answer.owner for answer in losers} == {winner}


def test_overlapping_sets(locks: LockProvider) -> None:
    """Sets of keys that overlap in a ring are taken by one after the other, without deadlock."""
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
                locks.wait(answer.key, timeout_s=30.0)
            if inside & set(keys):
                failures.append(f"{keys} while {inside}")
            inside.update(keys)
            time.sleep(0.001)
            inside.difference_update(keys)
            locks.release(keys, owner)

    threads = [threading.Thread(target=run, args=(keys,)) for keys in sets * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
