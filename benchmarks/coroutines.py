"""Measure the hand-off of one lock to the coroutines of one process.

A hand-off begins when a coroutine starts to release the lock. It ends when the next one has it.
With redis-py's lock each coroutine needs a connection. The default pool has too few of them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Any

import redis.asyncio
from rich.table import Table

import taskguard
from benchmarks.measure import CONSOLE
from taskguard_sandbox.servers import Valkey

WAITERS = 200
BODY_S = 0.001
OURS, THEIRS = "taskguard", "redis-py asyncio Lock"
_Lock = Callable[[], AbstractAsyncContextManager[Any]]


def main(*, quick: bool) -> None:
    """Print the table."""
    turns, rounds = (3, 1) if quick else (5, 5)
    found: dict[str, list[tuple[float, float]]] = {OURS: [], THEIRS: []}
    with Valkey() as server:
        for _ in range(rounds):
            found[OURS].append(asyncio.run(_ours(server.url, turns)))
            found[THEIRS].append(asyncio.run(_theirs(server.url, turns)))
    title = f"{WAITERS} coroutines of one process, a body of {BODY_S * 1000:g} ms"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("hand-off", "p50 ms", "p99 ms", "ratio of p99"):
        table.add_column(name, justify="left" if name == "hand-off" else "right")
    for kind, figures in found.items():
        ratios = [mine[1] / other[1] for mine, other in zip(figures, found[THEIRS], strict=True)]
        columns = (*zip(*figures, strict=True), ratios)
        table.add_row(kind, *(f"{statistics.median(column):.2f}" for column in columns))
    CONSOLE.print(table)
    CONSOLE.print()


async def _ours(url: str, turns: int) -> tuple[float, float]:
    tg = taskguard.connect(locks=url, ledger=None)
    try:
        return await _measure(lambda: tg.lock("ours", wait_s=None), turns)
    finally:
        tg.close()


async def _theirs(url: str, turns: int) -> tuple[float, float]:
    async with redis.asyncio.Redis.from_url(url, max_connections=2 * WAITERS) as client:
        return await _measure(lambda: client.lock("theirs", timeout=30), turns)


async def _measure(lock: _Lock, turns: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of the hand-offs, in ms."""
    held: list[tuple[float, float]] = []

    async def work() -> None:
        for _ in range(turns):
            async with lock():
                granted_s = time.monotonic()
                await asyncio.sleep(BODY_S)
                held.append((granted_s, time.monotonic()))

    await asyncio.gather(*(work() for _ in range(WAITERS)))
    # At the beginning not all have asked, and at the end not all of them wait.
    steady = sorted(held)[WAITERS // 2 : -WAITERS]
    hand_offs = sorted((b[0] - a[1]) * 1e3 for a, b in pairwise(steady))
    return statistics.median(hand_offs), hand_offs[int(len(hand_offs) * 0.99)]
