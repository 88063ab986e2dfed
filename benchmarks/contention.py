"""Many messages for few keys: Celery, two workers of two children; RQ, two workers.

One run compares messages that park, deferred messages, a lock in the body, and no guard. It
measures how long after a COMMIT the next body of the key begins, and how fast messages of other
keys are while lines are long. Ratios are of the same round.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import redis
import sqlalchemy as sa
from rich.table import Table

from benchmarks.clocks import family
from benchmarks.measure import CONSOLE
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import KEYS, MESSAGES, WORK
from taskguard_sandbox.servers import Postgres, Valkey

BODY_S = 0.005
WAYS = {
    "taskguard, busy=park": "park",
    "taskguard, order=strict": "strict",
    "taskguard, busy=retry": "retry",
    "python-redis-lock in the body": "blocking",
    "redis-py Lock in the body": "polling",
    "no guard, each sends the next": "chained",
    "no guard": "bare",
}
REFERENCE = "python-redis-lock in the body"
TWO_CHILDREN, NOBODY = "two children, nobody waits", "nobody waits"
_READY_S = 120.0
_DONE_S = 600.0


@dataclass(frozen=True, slots=True)
class Body:
    """One run of a body, by the machine's monotonic clock."""

    key: str
    number: int
    began_s: float
    ended_s: float


class Rig:
    """Servers, a ledger, and the file that the bodies write to."""

    def __init__(self, valkey: Valkey, postgres: Postgres, folder: Path) -> None:
        self.journal = folder / "journal"
        self.valkey = valkey
        self.ledger = SqlLedger(postgres.create_database("contention"))
        self.ledger.create_schema()
        self.broker = redis.Redis.from_url(valkey.url_of(2))
        self.servers = [family(valkey.pid), family(postgres.pid)]
        self._started: list[subprocess.Popen[bytes]] = []
        self._bodies: dict[str, list[Body]] = {}
        self._read_bytes = 0
        os.environ.update(
            CONTENTION_BROKER=valkey.url_of(2),
            CONTENTION_JOURNAL=str(self.journal),
            TASKGUARD_LOCKS_URL=valkey.url_of(1),
            TASKGUARD_LEDGER_URL=postgres.url_of("contention"),
        )

    def clear(self) -> None:
        """Delete everything of the last run."""
        self._started = []
        self.broker.flushall()
        with self.ledger.database.engine.begin() as db:
            for table in (WORK, KEYS, MESSAGES):
                db.execute(sa.text(f"truncate {table.name}"))
        self.journal.write_bytes(b"")
        self._bodies, self._read_bytes = {}, 0

    def publish(
        self, task: str, keys: str, count: int, body_s: float = BODY_S, *, to: str = "celery"
    ) -> None:
        """Messages of these keys, in turns."""
        words = f"{task!r}, {keys.split()!r}, {count}, {body_s}"
        program = f"from benchmarks.contention_{to} import publish; publish({words})"
        subprocess.run([sys.executable, "-c", program], check=True)

    def bodies(self, keys: str) -> list[list[Body]]:
        """Return the bodies that have run so far, for each of these keys."""
        with self.journal.open("rb") as journal:
            journal.seek(self._read_bytes)
            added = journal.read()
        # The last line may be on its way.
        added = added[: added.rfind(b"\n") + 1]
        self._read_bytes += len(added)
        for line in added.splitlines():
            body = Body(*json.loads(line))
            self._bodies.setdefault(body.key, []).append(body)
        return [self._bodies.get(key, []) for key in keys.split()]

    def wait(self, keys: str, count: int) -> list[Body]:
        """Wait until this many bodies have ended."""
        until_s = time.monotonic() + _DONE_S
        while (done := sum(map(len, found := self.bodies(keys)))) < count:
            self._look_after_workers()
            if time.monotonic() > until_s:
                raise TimeoutError(f"{done} of {count} bodies of {keys} after {_DONE_S:g} s")
            time.sleep(0.05)
        return [body for of_key in found for body in of_key]

    def _look_after_workers(self) -> None:
        """Raise at once if a worker has ended, because its part would be missing."""
        if any(each.poll() is not None for each in self._started):
            raise RuntimeError("a worker has ended: set CONTENTION_LOG=<file> to keep its log")

    def park(self, key: str, count: int, body_s: float) -> None:
        """Put messages into a key's line, as their deliveries would: one, and copies of it."""
        from benchmarks.contention_celery import parked_template

        template = f"{key}-template"
        asked = parked_template(key, body_s, template)
        assert self.ledger.park(asked)
        columns = [column.name for column in WORK.columns]
        texts = {"id", "message", "call"}
        values = ", ".join(
            f"replace({name}, '{template}', '{key}-' || n)"
            if name in texts
            else "parked + n"
            if name == "parked"
            else name
            for name in columns
        )
        with self.ledger.database.engine.begin() as db:
            db.execute(
                sa.text(
                    f"insert into taskguard_work ({', '.join(columns)}) select {values}"
                    f" from taskguard_work, generate_series(1, {count}) n where id = :id"
                ),
                {"id": asked.work},
            )
            db.execute(sa.delete(WORK).where(WORK.c.id == asked.work))

    def flushes(self) -> int:
        """How often sessions of the database have flushed; some may have shared one."""
        with self.ledger.database.engine.connect() as db:
            db.execute(sa.text("select pg_stat_force_next_flush()"))
            select = "select sum(fsyncs) from pg_stat_io where object = 'wal'"
            return int(
                db.execute(sa.text(f"{select} and backend_type = 'client backend'")).scalar_one()
            )

    @contextmanager
    def processor_time(
        self, workers: list[subprocess.Popen[bytes]], count: int
    ) -> Iterator[dict[str, float]]:
        """Measure the processor time of workers and servers, for each of `count` messages.

        The values are in the dictionary once the block has ended. A shared machine is slower at
        times, so processor times say more than a rate does.
        """
        clocks = {"worker_us": [family(each.pid) for each in workers], "servers_us": self.servers}
        before = {name: sum(clock() for clock in each) for name, each in clocks.items()}
        used: dict[str, float] = {}
        yield used
        for name, each in clocks.items():
            used[name] = (sum(clock() for clock in each) - before[name]) / count * 1e6

    def analyze(self) -> None:
        """Vacuum the table, as autovacuum does within a minute."""
        engine = self.ledger.database.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as db:
            db.execute(sa.text("vacuum analyze taskguard_work"))

    @contextmanager
    def workers(self, children: int = 2, count: int = 2) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Celery workers, each of whose children has run a body."""
        with ExitStack() as stack:
            command = _celery_worker(children)
            found = [stack.enter_context(running(command)) for _ in range(count)]
            self._started = found
            until_s = time.monotonic() + _READY_S
            while len({pid for each in found for pid in _children(each)}) < children * count:
                self._look_after_workers()
                if time.monotonic() > until_s:
                    raise TimeoutError("the workers did not start")
                time.sleep(0.1)
            self.publish("free", "warm", 20 * children * count, 0.02)
            self.wait("warm", 20 * children * count)
            yield found

    @contextmanager
    def rq_workers(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Two of RQ's, each of which has run a job: so many are not done by one alone."""
        command = _rq_worker(os.environ["CONTENTION_BROKER"])
        with running(command) as one, running(command) as other:
            self._started = [one, other]
            self.publish("park_committed", "warm", 20, 0.1, to="rq")
            self.wait("warm", 20)
            yield [one, other]


def _celery_worker(children: int) -> list[str]:
    return [
        sys.executable, "-m", "celery", "-A", "benchmarks.contention_celery", "worker", "-P",
        "prefork", "-c", str(children), "-l", "WARNING", "--without-gossip", "--without-mingle",
    ]  # fmt: skip


def _rq_worker(broker: str) -> list[str]:
    program = "import benchmarks.contention_rq, rq.cli; rq.cli.main()"
    words = ["--url", broker, "--worker-class", "taskguard_rq.GuardedWorker", "contention"]
    return [sys.executable, "-c", program, "worker", *words]


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with Path(os.environ.get("CONTENTION_LOG", os.devnull)).open("ab") as said:
        worker = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        yield worker
    finally:
        others = psutil.Process(worker.pid).children(recursive=True)
        worker.terminate()
        try:
            worker.wait(30)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        for child in psutil.wait_procs(others, timeout=10)[1]:
            child.kill()


def _children(worker: subprocess.Popen[bytes]) -> list[int]:
    return [child.pid for child in psutil.Process(worker.pid).children()]


def main(*, quick: bool) -> None:
    """Print a table for each case."""
    with Valkey() as valkey, Postgres() as postgres, TemporaryDirectory() as folder:
        rig = Rig(valkey, postgres, Path(folder))
        try:
            for case in _cases(quick=quick):
                case(rig)
        finally:
            rig.ledger.close()
            rig.broker.close()


def _cases(*, quick: bool) -> list[Callable[[Rig], None]]:
    rounds, long_rounds = (1, 1) if quick else (5, 3)
    named: dict[str, Callable[[Rig], None]] = {
        "hot": lambda rig: hot(rig, 100 if quick else 400, rounds),
        "idle": lambda rig: idle(rig, 30 if quick else 200),
        "cold": lambda rig: beside(
            rig,
            parked=1_000 if quick else 10_000,
            count=200 if quick else 2_000,
            body_s=0.5,
            rounds=long_rounds,
        ),
        "free": lambda rig: many(
            rig,
            parked=2_000 if quick else 100_000,
            count=500 if quick else 50_000,
            rounds=long_rounds,
        ),
    }
    asked = os.environ.get("CONTENTION_CASES", " ".join(named)).split()
    return [named[name] for name in asked]


# -- two hot keys ------------------------------------------------------------------------------


def hot(rig: Rig, count: int, rounds: int) -> None:
    """Messages of two keys, all published before the first one runs."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for number in range(rounds):
        names = list(WAYS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(_hot(rig, WAYS[name], count))
            took_s = found[name][-1]["took_s"]
            CONSOLE.print(f"  round {number + 1}: {name}: {took_s:.2f} s")
    title = f"{count} messages of two keys, bodies of {BODY_S * 1e3:g} ms, two workers of two"
    columns = {
        "took_s": "s", "ratio": "ratio", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "max_ms": "max ms",
        "inversions": "inversions", "overlaps": "overlaps", "worker_us": "worker µs",
        "servers_us": "servers µs", "flushes": "flushes",
    }  # fmt: skip
    for each in found.values():
        for mine, other in zip(each, found[REFERENCE], strict=True):
            mine["ratio"] = mine["took_s"] / other["took_s"]
    _show(title, found, columns)


def _hot(rig: Rig, task: str, count: int) -> dict[str, float]:
    rig.clear()
    with rig.workers() as workers:
        # Nobody fetches while it is published; what is on its way to a worker waits in its socket.
        with frozen(workers):
            rig.publish(task, "a b", count)
        flushed, began_s = rig.flushes(), time.monotonic()
        with rig.processor_time(workers, count) as used:
            bodies = rig.wait("a b", count)
    return {
        "took_s": max(each.ended_s for each in bodies) - began_s,
        **used,
        "flushes": (rig.flushes() - flushed) / count,
        **order(bodies),
    }


@contextmanager
def frozen(workers: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    for each in workers:
        each.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for each in workers:
            each.send_signal(signal.SIGCONT)


def order(bodies: list[Body]) -> dict[str, float]:
    """Hand-offs from one body of a key to the next, and whether they came one after the other."""
    hand_offs, inversions, overlaps = [], 0, 0
    for key in {each.key for each in bodies}:
        of_key = sorted((each for each in bodies if each.key == key), key=lambda one: one.began_s)
        latest_s = 0.0
        for one, other in pairwise(of_key):
            latest_s = max(latest_s, one.ended_s)
            overlaps += other.began_s < latest_s
            inversions += other.number < one.number
            hand_offs.append((other.began_s - latest_s) * 1e3)
    hand_offs.sort()
    return {
        "p50_ms": statistics.median(hand_offs),
        "p99_ms": hand_offs[int(len(hand_offs) * 0.99)],
        "max_ms": hand_offs[-1],
        "inversions": inversions,
        "overlaps": overlaps,
    }


# -- one after the other on idle workers -------------------------------------------------------


def idle(rig: Rig, count: int) -> None:
    """Messages of one key that all wait, and workers that have nothing else to do."""
    found: dict[str, list[dict[str, float]]] = {}
    for queue, workers in {"celery": rig.workers, "rq": rig.rq_workers}.items():
        rig.clear()
        with workers() as started:
            with frozen(started):
                rig.publish("park_committed", "c", count, 0.02, to=queue)
            bodies = rig.wait("c", count)
        # Until then the workers are busy with parking.
        steady = sorted(bodies, key=lambda one: one.began_s)[count // 3 :]
        found[f"taskguard, busy=park, {queue}"] = [order(steady)]
    title = "From COMMIT to the next body of its key, on an idle worker"
    _show(title, found, {"p50_ms": "p50 ms", "p99_ms": "p99 ms", "max_ms": "max ms"})


# -- other keys beside long lines --------------------------------------------------------------


def beside(rig: Rig, *, parked: int, count: int, body_s: float, rounds: int) -> None:
    """Messages of other keys, while the two bodies of two long lines hold two of four children."""
    found: dict[str, list[dict[str, float]]] = {TWO_CHILDREN: [], "two of four": []}
    for _ in range(rounds):
        for name, rates in found.items():
            rig.clear()
            lines = name != TWO_CHILDREN
            with rig.workers(children=2 if lines else 1) as workers:
                if lines:
                    for key in "ab":
                        rig.park(key, parked // 2, body_s)
                    rig.analyze()
                    for key in "ab":
                        rig.wait(key, 1)
                rates.append(_free(rig, workers, count, BODY_S))
    title = f"{count:,} messages of other keys beside {parked:,} parked of two keys, which run"
    _show_rates(title, found, TWO_CHILDREN)


def many(rig: Rig, *, parked: int, count: int, rounds: int) -> None:
    """graphile-worker's case: the cost of two long lines for messages of other keys."""
    found: dict[str, list[dict[str, float]]] = {NOBODY: [], f"{parked:,} wait": []}
    for _ in range(rounds):
        for name, rates in found.items():
            rig.clear()
            with rig.workers() as workers:
                if name != NOBODY:
                    # No message is promoted: this measures what waiting messages cost the others.
                    with rig.ledger.database.engine.begin() as db:
                        for key in "ab":
                            db.execute(sa.insert(KEYS).values(_held(f"hot:{key}")))
                    for key in "ab":
                        rig.park(key, parked // 2, BODY_S)
                    rig.analyze()
                rates.append(_free(rig, workers, count, 0.0))
    title = (
        f"{count:,} messages of other keys beside {parked:,} parked of two keys, which do not run"
    )
    _show_rates(title, found, NOBODY)


def _held(key: str) -> dict[str, Any]:
    until_us = int((time.time() + 86_400) * 1e6)
    return {"key": key, "fence": until_us, "owner": "elsewhere", "lease_until": until_us}


def _free(
    rig: Rig, workers: list[subprocess.Popen[bytes]], count: int, body_s: float
) -> dict[str, float]:
    """Messages a second, from a tenth of them to the last, and what they cost."""
    with frozen(workers):
        rig.publish("free", "x", count, body_s)
    with rig.processor_time(workers, count) as used:
        ends = sorted(each.ended_s for each in rig.wait("x", count))
    first = count // 10
    return {"rate": (count - first) / (ends[-1] - ends[first]), **used}


def _show_rates(title: str, found: dict[str, list[dict[str, float]]], reference: str) -> None:
    for each in found.values():
        for one, other in zip(each, found[reference], strict=True):
            one["ratio"] = one["rate"] / other["rate"]
    columns = {
        "rate": "messages/s",
        "ratio": "ratio",
        "worker_us": "worker µs",
        "servers_us": "servers µs",
    }
    _show(title, found, columns)


def _show(title: str, found: Mapping[str, list[dict[str, float]]], columns: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for name in columns.values():
        table.add_column(name, justify="right")
    for name, rounds in found.items():
        cells = []
        for key in columns:
            values = [each[key] for each in rounds]
            # Count events that must not happen, instead of averaging them.
            value = sum(values) if key in ("inversions", "overlaps") else statistics.median(values)
            cells.append(f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}")
        style = "bold" if name.startswith("taskguard") else ""
        table.add_row(name, *cells, style=style)
    CONSOLE.print(table)
    CONSOLE.print()
