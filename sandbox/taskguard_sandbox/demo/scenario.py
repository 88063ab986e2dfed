"""The demo from beginning to end: servers, messages, workers, faults, counts.

Guarantees: everything that was started is stopped at the end of `played`, Ctrl-C included.
Ends when both brokers hold no message and no victim's story is open, or when nothing has happened
for a minute; the counts then say what is missing.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import islice
from types import FrameType
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.demo.display import Display
from taskguard_sandbox.demo.effects import count_effects, create_effects
from taskguard_sandbox.demo.faults import Faults
from taskguard_sandbox.demo.journal import FILE, Line, Tail
from taskguard_sandbox.demo.line import show_line
from taskguard_sandbox.demo.queues import DELIVERIES, DemoQueue, Invoices, Orders
from taskguard_sandbox.demo.tally import Tally, tally, total
from taskguard_sandbox.servers import Postgres, Valkey
from taskguard_sandbox.workers import Worker

__all__ = ["played"]

_POLL_S = 0.004
_SENT_A_ROUND = 4
_WAITING = 30
_SHOW_EVERY_S = 0.2
_NOTHING_HAPPENS_S = 60.0
_LOG_CHARS = 4_000


@contextmanager
def played(
    orders: Sequence[str], invoices: Sequence[str], display: Display
) -> Iterator[tuple[list[Tally], bool]]:
    """The tallies of Celery, RQ and both together; and whether a line was drained in order.

    The servers run until the end of the block.
    """
    with ExitStack() as stack:
        raise_if_interrupted = stack.enter_context(_interrupts())
        with display.doing("Starting Valkey and PostgreSQL"):
            valkey = stack.enter_context(Valkey())
            postgres = stack.enter_context(Postgres())
            database = postgres.create_database("demo")
            engine = sa.create_engine(database)
            stack.callback(engine.dispose)
            _create_tables(database, engine)
        _set_environment(valkey, database)
        queues = [
            Orders(orders, broker=valkey.url_of(2)),
            Invoices(invoices, broker=valkey.url_of(4)),
        ]
        for queue in queues:
            stack.callback(queue.close)
        display.say(_versions(queues[0], engine))
        workers = {queue.name: queue.workers() for queue in queues}
        with display.doing("Starting the workers"):
            for worker in [each for several in workers.values() for each in several]:
                stack.enter_context(worker)
        sent = " and ".join(f"{len(queue.items):,} {queue.things}" for queue in queues)
        display.say(f"{sent}, {DELIVERIES} deliveries each, shuffled.")
        display.say("Effects are rows of a table without a unique index: a double one would show.")
        display.say()
        scenario = _Scenario(queues, workers, display)
        scenario.watch(raise_if_interrupted)
        yield scenario.count(engine), show_line(database, engine, display, raise_if_interrupted)


@contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Remembers Ctrl-C: what it raises is lost where a destructor is running at that moment.

    Gives what raises it once more if it has come. A Ctrl-C that is ignored stays ignored.
    """
    came = False
    before = signal.getsignal(signal.SIGINT)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def raise_if_interrupted() -> None:
        if came:
            raise KeyboardInterrupt

    if before is not signal.default_int_handler:
        yield raise_if_interrupted
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _set_environment(valkey: Valkey, database: str) -> None:
    """For this process, which publishes, and for the workers, which get a copy."""
    for name in [each for each in os.environ if each.startswith(("CELERY_", "RQ_", "TASKGUARD_"))]:
        del os.environ[name]
    os.environ.update(
        CELERY_BROKER_URL=valkey.url_of(2),
        CELERY_RESULT_BACKEND=valkey.url_of(3),
        TASKGUARD_LOCKS_URL=valkey.url_of(1),
        TASKGUARD_LEDGER_URL=database,
    )


def _create_tables(database: str, engine: sa.Engine) -> None:
    ledger = SqlLedger(database)
    ledger.create_schema()
    ledger.close()
    create_effects(engine)


def _versions(queue: DemoQueue, engine: sa.Engine) -> str:
    server: Any = queue.broker.info("server")
    with engine.connect() as db:
        postgresql = db.execute(sa.text("show server_version")).scalar_one()
    servers = f"Valkey {server['valkey_version']}, PostgreSQL {postgresql}"
    packages = f"Celery {version('celery')}, RQ {version('rq')}"
    return f"{servers}, {packages}, Python {platform.python_version()}"


class _Scenario:
    """The part between the start of the workers and the counts."""

    def __init__(
        self, queues: Sequence[DemoQueue], workers: dict[str, list[Worker]], display: Display
    ) -> None:
        self._queues = queues
        self._workers = workers
        self._display = display
        self._events: dict[str, Counter[str]] = {queue.name: Counter() for queue in queues}
        self._faults = {
            queue.name: Faults(queue.name, items=len(queue.items), say=display.note)
            for queue in queues
        }
        every = [worker for several in workers.values() for worker in several]
        self._tail = Tail(worker.folder / FILE for worker in every)
        self._sending = {queue: queue.publish() for queue in queues}
        self._was_quiet = False

    def watch(self, raise_if_interrupted: Callable[[], None]) -> None:
        """Run until the demo is over, or interrupted."""
        heard_at_s = shown_at_s = time.monotonic()
        with self._display.bars(self._queues):
            while True:
                raise_if_interrupted()
                now_s = time.monotonic()
                self._send_some()
                if self._hear():
                    heard_at_s = now_s
                for faults in self._faults.values():
                    faults.step()
                if now_s - shown_at_s > _SHOW_EVERY_S:
                    shown_at_s = now_s
                    self._display.update(self._queues, self._events)
                    if self._over():
                        self._display.answered(self._queues)
                        return
                if now_s - heard_at_s > _NOTHING_HAPPENS_S:
                    self._complain()
                    return
                time.sleep(_POLL_S)

    def _send_some(self) -> None:
        """Send so much that no worker waits, and so little that copies and takeovers come soon."""
        for queue, sending in list(self._sending.items()):
            if queue.waiting() >= _WAITING:
                continue
            if len(list(islice(sending, _SENT_A_ROUND))) < _SENT_A_ROUND:
                del self._sending[queue]

    def _hear(self) -> list[Line]:
        lines = self._tail.read()
        for line in lines:
            self._events[line.queue][line.name] += 1
            self._faults[line.queue].hear(line)
        return lines

    def _over(self) -> bool:
        """No message anywhere, twice in a row: one can be on its way from one list to another."""
        quiet = not self._sending and all(queue.quiet() for queue in self._queues)
        quiet, self._was_quiet = quiet and self._was_quiet, quiet
        if not quiet or any(faults.in_progress for faults in self._faults.values()):
            return False
        return not any(queue.unanswered() for queue in self._queues)

    def _complain(self) -> None:
        quiet_s = f"{_NOTHING_HAPPENS_S:.0f} s"
        self._display.say(f"Nothing has happened for {quiet_s}. The workers' logs:")
        for worker in [each for several in self._workers.values() for each in several]:
            self._display.quote(worker.log[-_LOG_CHARS:])

    def count(self, engine: sa.Engine) -> list[Tally]:
        """The tallies, with the sum last."""
        self._hear()
        tallies = [
            tally(
                queue.name,
                items=queue.items,
                sent=queue.sent,
                effects=count_effects(engine, queue.name),
                events=self._events[queue.name],
                killed=self._faults[queue.name].killed,
                paused=self._faults[queue.name].paused,
                unanswered=queue.unanswered(),
            )
            for queue in self._queues
        ]
        return [*tallies, total(tallies)]
