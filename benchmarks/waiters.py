"""Measure the hand-off of one lock to waiters, each of which is a process.

The figures are how long a hand-off takes, and how many commands and how much processor time it
costs the server. They also say whether waiters are served in the order of their requests. A
hand-off begins when a holder starts to release the lock, and ends when the next waiter has it. Each
holder waits again as soon as it has released, so that the number of waiters stays the same.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import redis
import redis_lock
from rich.table import Table

import taskguard
from benchmarks.clocks import family
from benchmarks.measure import CONSOLE, figures
from taskguard_sandbox.servers import Valkey

WAITERS = (50, 100, 200)
BODY_S = 0.001
# A waiter that came this much later, in seconds, and was served earlier has overtaken. A smaller
# difference may be the way to the server.
UNFAIR_S = 0.02
OURS = "taskguard"
PEERS = ("python-redis-lock", "redis-py Lock")

# Processes are forked from one that has imported the libraries.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "taskguard.locks.redis.provider", "taskguard.run.lock"])
_commands = itertools.count()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a waiter, by the machine's monotonic clock."""

    asked_s: float
    granted_s: float
    released_s: float


def main(*, quick: bool) -> None:
    """Print the table."""
    turns, rounds = (6, 1) if quick else (10, 5)
    with Valkey() as server:
        for waiters in WAITERS[: 1 if quick else None]:
            found: dict[str, list[dict[str, float]]] = {}
            for _ in range(rounds):
                for kind in (OURS, *PEERS):
                    measured = _measure(kind, server, waiters=waiters, turns=turns)
                    found.setdefault(kind, []).append(measured)
            _show(waiters, found)


def _show(waiters: int, found: dict[str, list[dict[str, float]]]) -> None:
    title = f"{waiters} waiting processes, a body of {BODY_S * 1000:g} ms"
    table = Table(title=title, title_justify="left", title_style="bold")
    columns = {"p50": "p50 ms", "p99": "p99 ms", "commands": "commands", "server": "server ms"}
    columns["overtaken"] = "overtaken"
    more = ("longest wait / median", "ratio of p99", "ratio of server")
    for name in ("hand-off", *columns.values(), *more):
        table.add_column(name, justify="left" if name == "hand-off" else "right")
    for kind, rounds in found.items():
        cells = [f"{statistics.median(each[key] for each in rounds):.2f}" for key in columns]
        cells.append(f"{statistics.median(each['spread'] for each in rounds):.1f}")
        for key in ("p99", "server"):
            samples = {name: [each[key] for each in of_kind] for name, of_kind in found.items()}
            ratio = {each.name: each for each in figures(samples, reference=PEERS[0])}[kind]
            cells.append(f"{ratio.ratio:.2f} [{ratio.low:.2f}–{ratio.high:.2f}]")
        table.add_row(kind, *cells)
    CONSOLE.print(table)
    CONSOLE.print()


def _measure(kind: str, server: Valkey, *, waiters: int, turns: int) -> dict[str, float]:
    """One run: it begins when all processes are ready."""
    started = []
    for _ in range(waiters):
        mine, theirs = _FORKS.Pipe()
        process = _FORKS.Process(target=_work, args=(kind, server.url, turns, theirs))
        process.start()
        started.append((process, mine))
    for _, pipe in started:
        assert pipe.recv() == "ready"
    clock = family(server.pid)
    used_s = -clock()
    for _, pipe in started:
        pipe.send("go")
    answers = [pipe.recv() for _, pipe in started]
    used_s += clock()
    for process, _ in started:
        process.join()
    # At the beginning not all have asked, and at the end not all of them wait.
    all_turns = sorted(
        (Turn(*each) for turns_of_one, _ in answers for each in turns_of_one),
        key=lambda turn: turn.granted_s,
    )
    commands = sum(count for _, count in answers) / len(all_turns)
    steady = all_turns[2 * waiters : -waiters]
    hand_offs = sorted((b.granted_s - a.released_s) * 1e3 for a, b in pairwise(steady))
    waits = [turn.granted_s - turn.asked_s for turn in steady]
    return {
        "p50": statistics.median(hand_offs),
        "p99": hand_offs[int(len(hand_offs) * 0.99)],
        "commands": commands,
        "server": used_s / len(all_turns) * 1e3,
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


# -- a waiter ----------------------------------------------------------------------


def _locker(kind: str, url: str) -> Callable[[], AbstractContextManager[Any]]:
    if kind == OURS:
        tg = taskguard.connect(locks=url, ledger=None)
        return lambda: tg.lock("waited", ttl_s=30, wait_s=120)
    client = redis.Redis.from_url(url)
    if kind == "python-redis-lock":
        return lambda: redis_lock.Lock(client, "waited", expire=30)
    return lambda: client.lock("redis-py", timeout=30)


def _count_commands() -> None:
    kind = redis.connection.AbstractConnection
    send = kind.send_packed_command

    def counting(self: Any, *words: Any, **options: Any) -> Any:
        next(_commands)
        return send(self, *words, **options)

    kind.send_packed_command = counting


def _work(kind: str, url: str, turns: int, pipe: Connection) -> None:
    _count_commands()
    locker = _locker(kind, url)
    with locker():
        pass  # the scripts are loaded
    pipe.send("ready")
    pipe.recv()
    before = next(_commands)
    found: list[tuple[float, float, float]] = []
    for _ in range(turns):
        asked_s = time.monotonic()
        with locker():
            granted_s = time.monotonic()
            time.sleep(BODY_S)
            released_s = time.monotonic()
        found.append((asked_s, granted_s, released_s))
    pipe.send((found, next(_commands) - before - 1))
