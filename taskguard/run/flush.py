"""Sends the counters of a process to its ledger, about every ten seconds.

The thread that made the last delivery sends them. A process that may become idle for long has a
thread for what is left (`flush_when_idle()`), or its worker calls `flush_all()` at times. So do the
end of a process, and the shutdown of a worker.

Guarantees: no delivery fails, waits for long, or stays unacknowledged because of a flush. A flush
has one short deadline. After a failure, or a delivery without an answer of the ledger, the next one
is a minute later. Counters that were not sent
are added to the next flush. If it is unknown whether they were committed, they are not sent again,
but counted as lost. A time limit that arrives in a flush ends only the flush. A shutdown goes on,
and the counters stay. A forked child begins at zero, and sends nothing of its parent's.

Read next: `tally.py`, and `ledger/operations/counts.py` for the statements.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

from taskguard.errors import TaskguardError
from taskguard.model.counts import Count, Noted
from taskguard.native import Wakeup, allocate_lock, start_thread
from taskguard.run.shutdown import is_time_limit
from taskguard.run.tally import Tally

if TYPE_CHECKING:
    from taskguard.ledger.ports import Counts

__all__ = ["EVERY_S", "Flush", "flush_all", "flush_when_idle"]

logger = logging.getLogger("taskguard")

EVERY_S = 10.0
_AFTER_FAILURE_S = 60.0
_MOST_BEGUN = 20  # tasks, each with 53 zeros: several hundred take longer than a deadline
_AT_EXIT_S = 2.0  # for all ledgers of a process together

_flushes: WeakSet[Flush] = WeakSet()
_idle_thread = False

# Tasks that have zeros in a ledger, for this process and those that it forks.
_begun: set[tuple[str, str]] = set()


class Flush:
    """Sends the counters of one `Tally` to one ledger. None: nothing is sent.

    Attributes:
        due_at_s: when the next flush is due, by `time.monotonic()`.
        is_handed: the counters are handed to the process that forked this one, so nothing is sent.
    """

    def __init__(self, tally: Tally, ledger: Counts | None) -> None:
        self._tally = tally
        self._ledger = ledger
        self._begin()
        if ledger is not None:
            _flushes.add(self)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._mutex = allocate_lock()
        self._sending: tuple[list[Count], list[Noted]] | None = None
        self._committing = False
        self._watched = False
        self.is_handed = False
        self.due_at_s = time.monotonic() + EVERY_S

    def hand(self, is_handed: bool) -> None:
        """Set whether the counters of this process are handed to the one that forked it."""
        self._begin()
        self.is_handed = is_handed

    @property
    def is_due(self) -> bool:
        """Whether a flush is due."""
        return time.monotonic() >= self.due_at_s

    @property
    def is_put_off(self) -> bool:
        """Whether the ledger gave no answer a moment ago."""
        return self.due_at_s - time.monotonic() > EVERY_S

    def put_off(self) -> None:
        """Wait for a minute, because the ledger gave no answer."""
        self.due_at_s = time.monotonic() + _AFTER_FAILURE_S

    def flush(self) -> None:
        """Send all counters, unless another thread does. Raises only what ends the process."""
        if self._ledger is None:
            return
        if self._pid != os.getpid():
            self._begin()
        if self.is_handed or not self._mutex.acquire(False):
            return
        try:
            self.due_at_s = time.monotonic() + EVERY_S
            self._settle()
            self._send(self._ledger)
        except BaseException as error:
            if not is_time_limit(error):
                raise
            self.put_off()
            known = isinstance(error, TaskguardError)
            logger.debug("counts were not sent: %s", error, exc_info=None if known else error)
        finally:
            try:
                with contextlib.suppress(Exception):
                    self._settle()
            finally:
                self._mutex.release()

    def last(self) -> None:
        """Send all counters before the ledger is closed, unless it gave no answer a moment ago."""
        if not self.is_put_off:
            self.flush()

    def _send(self, ledger: Counts) -> None:
        self._begin_tasks(ledger, self._tally.tasks)
        self._committing = False
        self._sending = rows, happened = self._tally.drain()
        if rows or happened:
            ledger.add_counts(rows, happened=happened, committing=self._note_commit)
        self._sending = None

    def _note_commit(self) -> None:
        self._committing = True

    def _settle(self) -> None:
        """Keep counters that were not sent. Count those that may have been sent as lost."""
        if self._sending is None:
            return
        rows, happened = self._sending
        if self._committing:
            self._tally.lose(rows)
        else:
            self._tally.put_back(rows, happened)
        self._sending = None

    def begin(self, tasks: Iterable[str]) -> None:
        """Write zeros for tasks, unless this process, or one that forked it, did.

        If the ledger gave no answer, the next flush does it. Raises only what ends the process.
        """
        if self._ledger is None or self.is_handed or self.is_put_off:
            return
        try:
            self._begin_tasks(self._ledger, tasks)
        except BaseException as error:
            if not is_time_limit(error):
                raise
            self.put_off()
            logger.debug("counts did not begin: %s", error)

    @staticmethod
    def _begin_tasks(ledger: Counts, tasks: Iterable[str]) -> None:
        name = repr(ledger)
        new = [task for task in tasks if (name, task) not in _begun]
        for at in range(0, len(new), _MOST_BEGUN):
            some = new[at : at + _MOST_BEGUN]
            ledger.begin_counts(some)
            _begun.update((name, task) for task in some)

    def watch(self) -> None:
        """Let a thread send what is left if no delivery follows: see `flush_when_idle()`."""
        if not _idle_thread or self._ledger is None or self.is_handed:
            return
        if self._pid != os.getpid():
            self._begin()
        if not self._watched and not self._tally.is_empty:
            self._watched = True
            try:
                start_thread(self._watch)
            except RuntimeError:  # there can be no more threads
                self._watched = False

    def _watch(self) -> None:
        never = Wakeup()
        try:
            while not self._tally.is_empty:
                never.wait(max(0.05, self.due_at_s - time.monotonic()))
                if self.is_due:
                    self.flush()
        finally:
            self._watched = False
        self.watch()  # what was counted since the last look


def flush_when_idle() -> None:
    """Let a thread of this process send counters if no delivery follows.

    Not for a process that forks, because threads and forks do not go together.
    """
    global _idle_thread  # noqa: PLW0603  # one setting for the process
    _idle_thread = True


def flush_all(*, due: bool = False, within_s: float = _AT_EXIT_S) -> None:
    """Send the counters of all ledgers of this process.

    Args:
        due: only those that are due.
        within_s: begin none after this time, in seconds.
    """
    until_s = time.monotonic() + within_s
    for each in list(_flushes):
        if time.monotonic() < until_s and (each.is_due or not due):
            each.flush()


atexit.register(flush_all)
