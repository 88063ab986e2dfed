"""Measure the hand-off of one lock to waiters in several processes.

The figures are how long a hand-off takes, how many commands it costs the server, and whether
waiters are served in the order of their requests. A hand-off begins when a holder starts to release
the lock, and ends when the next waiter has it. Each holder waits again as soon as it has released,
so that the number of waiters stays the same.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import redis
import redis_lock
from rich.table import Table

import taskguard
from benchmarks.measure import CONSOLE
from taskguard.locks.redis import link
from taskguard_sandbox.servers import Valkey

PROCESSES = 5
WAITERS = (50, 100)
BODY_S = 0.001
# A waiter that came this much later, in seconds, and was served earlier has overtaken. A smaller
# difference may be the way to the server.
UNFAIR_S = 0.02
OURS = "taskguard"
PEERS = ("python-redis-lock", "redis-py Lock")

_commands = itertools.count()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a waiter, by the machine's monotonic clock."""

    asked_s: float
    granted_s: float
    released_s: float


def main(*, quick: bool) -> None:
    """Print the table."""
    turns, rounds = (10, 1) if quick else (20, 5)
    with Valkey() as server:
        for waiters in WAITERS:
            found: dict[str, list[dict[str, float]]] = {}
            for _ in range(rounds):
                for kind in (OURS, *PEERS):
                    measured = _measure(kind, server.url, waiters=waiters, turns=turns)
                    found.setdefault(kind, []).append(measured)
            _show(waiters, found)


def _show(waiters: int, found: dict[str, list[dict[str, float]]]) -> None:
    title = f"{waiters} waiters in {PROCESSES} processes, a body of {BODY_S * 1000:g} ms"
    table = Table(title=title, title_justify="left", title_style="bold")
    columns = {"p50": "p50 ms", "p99": "p99 ms", "commands": "commands", "overtaken": "overtaken"}
    for name in ("hand-off", *columns.values(), "longest wait / median", "ratio of p99"):
        table.add_column(name, justify="left" if name == "hand-off" else "right")
    for kind, rounds in found.items():
        ratios = [
            mine["p99"] / other["p99"] for mine, other in zip(rounds, found[PEERS[0]], strict=True)
        ]
        cells = [f"{statistics.median(each[key] for each in rounds):.2f}" for key in columns]
        cells.append(f"{statistics.median(each['spread'] for each in rounds):.1f}")
        table.add_row(kind, *cells, f"{statistics.median(ratios):.2f}")
    CONSOLE.print(table)
    CONSOLE.print()


def _measure(kind: str, url: str, *, waiters: int, turns: int) -> dict[str, float]:
    """One run: it begins when all processes are ready."""
    words = [sys.executable, "-m", "benchmarks.waiters", kind, url]
    words += [str(waiters // PROCESSES), str(turns)]
    processes = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate()[0]) for process in processes]
    # At the beginning not all have asked, and at the end not all of them wait.
    all_turns = sorted(
        (Turn(*each) for answer in answers for each in answer["turns"]),
        key=lambda turn: turn.granted_s,
    )
    commands = sum(answer["commands"] for answer in answers) / len(all_turns)
    steady = all_turns[2 * waiters : -waiters]
    hand_offs = sorted((b.granted_s - a.released_s) * 1e3 for a, b in pairwise(steady))
    waits = [turn.granted_s - turn.asked_s for turn in steady]
    return {
        "p50": statistics.median(hand_offs),
        "p99": hand_offs[int(len(hand_offs) * 0.99)],
        "commands": commands,
        "overtaken": _overtaken(steady) / len(steady),
        "spread": max(waits) / statistics.median(waits),
    }


def _overtaken(turns: list[Turn]) -> int:
    """Return how many waiters were served after a waiter that came later."""
    latest, found = 0.0, 0
    for turn in turns:
        found += turn.asked_s < latest - UNFAIR_S
        latest = max(latest, turn.asked_s)
    return found


# -- a process of waiters ----------------------------------------------------------------------


def _locker(kind: str, url: str) -> Callable[[], AbstractContextManager[Any]]:
    if kind == OURS:
        tg = taskguard.connect(locks=url, ledger=None)
        return lambda: tg.lock("waited", ttl_s=30, wait_s=120)
    client = redis.Redis.from_url(url)
    if kind == "python-redis-lock":
        return lambda: redis_lock.Lock(client, "waited", expire=30)
    return lambda: client.lock("redis-py", timeout=30)


def _count_commands() -> None:
    """Everybody here sends by redis-py's connections, or past them what fits into one write."""
    kind = redis.connection.AbstractConnection
    send, by_socket = kind.send_packed_command, link.send

    def counting(self: Any, *words: Any, **options: Any) -> Any:
        next(_commands)
        return send(self, *words, **options)

    def counting_too(connection: Any, command: bytes) -> bool:
        was_sent = by_socket(connection, command)
        if was_sent:
            next(_commands)
        return was_sent

    kind.send_packed_command, link.send = counting, counting_too


def _work(kind: str, url: str, threads: int, turns: int) -> None:
    _count_commands()
    locker = _locker(kind, url)
    with locker():
        pass  # the scripts are loaded
    found: list[tuple[float, float, float]] = []
    go = threading.Event()

    def run() -> None:
        go.wait()
        for _ in range(turns):
            asked_s = time.monotonic()
            with locker():
                granted_s = time.monotonic()
                time.sleep(BODY_S)
                released_s = time.monotonic()
            found.append((asked_s, granted_s, released_s))

    waiting = [threading.Thread(target=run) for _ in range(threads)]
    for thread in waiting:
        thread.start()
    print("ready", flush=True)  # to the process that measures
    sys.stdin.readline()
    before = next(_commands)
    go.set()
    for thread in waiting:
        thread.join()
    json.dump({"turns": found, "commands": next(_commands) - before - 1}, sys.stdout)


if __name__ == "__main__":
    _work(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
