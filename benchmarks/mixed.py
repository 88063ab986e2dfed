"""Messages of two hot keys among messages of cold ones: taskguard and procrastinate, in turns.

taskguard is Celery with `busy="park"`: two workers of two children. procrastinate has `lock=`: two
workers with two concurrent jobs, which look for jobs every 0.1 s. By default that is every 5 s if
both keys are locked, which would decide the result. Both run the messages of a key in order and one
at a time, and no message that waits occupies a worker. All messages are published before the first
one runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table

from benchmarks.contention import BODY_S, Rig, frozen, order, running
from benchmarks.measure import CONSOLE, figures
from taskguard_sandbox.servers import Postgres, Valkey

HOT = ["a", "b"]
OURS, PEER = "taskguard, busy=park", "procrastinate, lock="
COLUMNS = {
    "took_s": "s",
    "worker_us": "worker µs",
    "servers_us": "servers µs",
    "p50_ms": "hand-off p50 ms",
    "p99_ms": "p99 ms",
}


def main(*, quick: bool) -> None:
    """Print the table."""
    hot, rounds = (60, 1) if quick else (400, 3)
    cold = hot // 2
    with Valkey() as valkey, Postgres() as postgres, TemporaryDirectory() as folder:
        rig = Rig(valkey, postgres, Path(folder))
        url = postgres.create_database("procrastinate")
        os.environ["MIXED_DATABASE"] = url.replace("+psycopg", "")
        _procrastinate("create()")
        ways: dict[str, Callable[[], dict[str, float]]] = {
            OURS: lambda: _ours(rig, hot, cold),
            PEER: lambda: _theirs(rig, hot, cold),
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        try:
            for number in range(rounds):
                names = list(ways)[:: 1 if number % 2 else -1]
                for name in names:
                    found[name].append(ways[name]())
                    CONSOLE.print(
                        f"  round {number + 1}: {name}: {found[name][-1]['took_s']:.2f} s"
                    )
        finally:
            rig.ledger.close()
            rig.broker.close()
    _show(f"{hot} messages of two keys beside {cold} of others, {rounds} rounds", found)


def _ours(rig: Rig, hot: int, cold: int) -> dict[str, float]:
    rig.clear()
    with rig.workers() as workers:
        words = f"{HOT!r}, {hot}, {BODY_S}, cold={cold}"
        program = f"from benchmarks.contention_celery import publish_mixed as p; p({words})"
        with frozen(workers):
            subprocess.run([sys.executable, "-c", program], check=True)
        return _measured(rig, workers, hot, cold)


def _theirs(rig: Rig, hot: int, cold: int) -> dict[str, float]:
    rig.clear()
    with _workers() as workers:
        _procrastinate(f"publish(['warm'], 40, {BODY_S})")
        rig.wait("warm", 40)
        with frozen(workers):
            _procrastinate(f"publish({HOT!r}, {hot}, {BODY_S}, cold={cold})")
        return _measured(rig, workers, hot, cold)


def _measured(
    rig: Rig, workers: list[subprocess.Popen[bytes]], hot: int, cold: int
) -> dict[str, float]:
    began_s = time.monotonic()
    with rig.processor_time(workers, hot + cold) as used:
        bodies = rig.wait(f"{' '.join(HOT)} cold", hot + cold)
    of_hot_keys = order([each for each in bodies if each.key in HOT])
    return {"took_s": max(each.ended_s for each in bodies) - began_s, **used, **of_hot_keys}


@contextmanager
def _workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    program = "from procrastinate.cli import main; main()"
    words = [
        "--app=benchmarks.mixed_procrastinate.app",
        "worker",
        "--concurrency=2",
        "-q",
        "mixed",
        "-p",
        "0.1",
    ]
    with ExitStack() as stack:
        command = [sys.executable, "-c", program, *words]
        yield [stack.enter_context(running(command)) for _ in range(2)]


def _procrastinate(call: str) -> None:
    program = f"from benchmarks.mixed_procrastinate import *; {call}"
    subprocess.run([sys.executable, "-c", program], check=True)


def _show(title: str, found: dict[str, list[dict[str, float]]]) -> None:
    table = Table("", *found, "ratio", title=title, title_justify="left", title_style="bold")
    for column, name in COLUMNS.items():
        samples = {way: [each[column] for each in rounds] for way, rounds in found.items()}
        ours, theirs = figures(samples, reference=PEER)
        ratio = f"{ours.ratio:.2f} [{ours.low:.2f}–{ours.high:.2f}]"
        table.add_row(name, f"{ours.median:,.1f}", f"{theirs.median:,.1f}", ratio)
    CONSOLE.print(table)
    CONSOLE.print("medians, in brackets quartiles of the ratios\n")
