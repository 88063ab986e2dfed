"""The worker that this process belongs to: its number, its name, and the nonces of its attempts.

A worker is a process with all processes that it forks: Celery's or RQ's worker, a web server, or a
plain program. A nonce is its number (8 hexadecimal digits), a pid (6) and a counter (10).

Guarantees: no two attempts have the same nonce.

* Attempts of one process differ in the counter, which begins again after 2^40 attempts.
* Processes of one worker that exist at the same time differ in their pids.
* Processes of two workers, on one host or two, differ in their numbers, which are random.
* A process may have the pid of one that has ended, or two workers may draw the same number, once in
  2^32 pairs. Then their counters differ: each process begins at a random number of 40 bits.

A nonce that came back would do harm only to attempts of one message on one key while both leases
exist: a lock server compares the message, too, and a ledger compares the fence, which only one
grant has. A process that names itself with `describe_worker()`, although it was forked, has a
number of its own from then on. It never goes back to the number of its parent.

Read next: `run/names.py`, which stores and reads the names.
"""

from __future__ import annotations

import itertools
import os
import sys

from taskguard.values import value

__all__ = [
    "COUNTER_DIGITS",
    "NONCE_DIGITS",
    "NO_PROCESS",
    "NUMBER_DIGITS",
    "Worker",
    "adopt_worker",
    "describe_worker",
    "nonces",
]

NUMBER_DIGITS = 8
NO_PROCESS = "f" * NUMBER_DIGITS
"""The number of an operator's pause, which no worker draws."""
_PID_DIGITS = 6
COUNTER_DIGITS = 10
NONCE_DIGITS = NUMBER_DIGITS + _PID_DIGITS + COUNTER_DIGITS


@value
class Worker:
    """A worker, as `taskguard_workers` has it.

    Attributes:
        number: the first 8 digits of its nonces.
        kind: "celery", "rq" or "plain".
        name: the name that its queue knows, or the name of its program.
        host: the name of its machine or container.
        pid: the process that the others were forked from.
        queues: the queues that it reads, with commas between them.
        version: the version of taskguard.
    """

    number: str
    kind: str
    name: str
    host: str
    pid: int
    queues: str
    version: str

    @property
    def label(self) -> str:
        """Its name and host, for people: "celery@web-3", "manage.py on web-3"."""
        return self.name if self.host in self.name else f"{self.name} on {self.host}"


class Nonces:
    """The number of this worker, and the nonces of this process.

    Attributes:
        number: the worker's number.
        pid: the process that drew the number. Others were forked from it.
        registers: whether this worker may have a row in the ledger.
    """

    def __init__(self) -> None:
        self.registers = True
        self.draw()
        # The hook takes no lock: the child has one thread, and the parent keeps its counter.
        os.register_at_fork(after_in_child=self.begin)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that drew the number."""
        return self.pid != os.getpid()

    def draw(self, number: str | None = None) -> None:
        """Begin a worker with a new number, or with the number of the worker that started it."""
        # 00000000 and NO_PROCESS are reserved for owners that are no process.
        self.number = number or f"{1 + _random(NUMBER_DIGITS) % (16**NUMBER_DIGITS - 2):08x}"
        self.pid = os.getpid()
        self.begin()

    def begin(self, at: int | None = None) -> None:
        """Count from `at`, or from a random number, as this process."""
        prefix = f"{self.number}{os.getpid() % 16**_PID_DIGITS:06x}"
        self._counting = prefix, itertools.count(_random(COUNTER_DIGITS) if at is None else at)

    def __call__(self) -> str:
        prefix, numbers = self._counting
        return f"{prefix}{next(numbers) % 16**COUNTER_DIGITS:010x}"

    def worker(self) -> Worker:
        """Return this worker with its name."""
        from platform import node  # not for a process that only locks

        kind, name, queues = _described
        version = sys.modules["taskguard"].__version__  # an import would be a circle
        return Worker(self.number, kind, name or _program(), node(), self.pid, queues, version)


def _random(digits: int) -> int:
    return int(os.urandom(digits // 2).hex(), 16)


def _program() -> str:
    """Return the name of the program, without its arguments, which may contain secrets."""
    *_, folder, name = "", *(sys.argv[0] if sys.argv else "").replace(os.sep, "/").split("/")
    if name == "__main__.py":
        name = folder
    return name if name not in ("", "-c", "-m") else "python"


nonces = Nonces()
_described = ("plain", "", "")


def describe_worker(kind: str, name: str, queues: str = "") -> str:
    """Name this worker, before it forks and before its first delivery. Return its number.

    If it was started by a process with a number, it draws a number of its own: it is not a part of
    that process.

    Args:
        kind: "celery", "rq" or "plain".
        name: the name that the queue knows.
        queues: the queues that it reads, with commas between them.
    """
    global _described  # noqa: PLW0603  # once in a process, like its number
    _described = (kind, name, queues)
    if nonces.is_forked or not nonces.registers:
        nonces.draw()
        nonces.registers = True
    return nonces.number


def adopt_worker(number: str | None) -> None:
    """Make this process a part of the worker that started it, which has the row in the ledger.

    Args:
        number: the number of that worker. None: it is unknown, and this process keeps its own.
    """
    if number is not None:
        nonces.draw(number)
    nonces.registers = False
