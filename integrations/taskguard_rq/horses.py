"""Counts of work horses, which end after one job: a worker adds them up and sends them.

A work horse hands its counts to its worker by a pipe. The worker sends them when it has no job, or
before the next one, about every ten seconds, and at its end. A work horse of a stock worker, or of
a worker that does not know the ledger, sends its counts itself, at the end of its delivery.

Guarantees: no job waits for the pipe. If the pipe is full, the work horse sends its counts itself.
The worker has no connection to the ledger open when it forks. The counts of a work horse that is
killed are lost, and the worker counts that.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from taskguard.errors import ConfigurationError
from taskguard.integration import flush_all
from taskguard_rq.runtime import runtime

if TYPE_CHECKING:
    from taskguard import TaskGuard

__all__ = ["HorseCounts", "flush_stock_horse"]

logger = logging.getLogger("taskguard")

# RQ sets it in work horses.
_VARIABLE_OF_RQ = "RQ_WORKER_ID"
_MOST_BYTES = 65_536

_handing = False  # in a work horse: its worker takes its counts


def flush_stock_horse() -> None:
    """Send the counts of this process if it is a work horse whose worker does not take them."""
    if not _handing and _VARIABLE_OF_RQ in os.environ:
        flush_all()


class HorseCounts:
    """The pipe between a worker and its work horses, one after the other."""

    def __init__(self, runtime: TaskGuard) -> None:
        self._runtime = runtime
        self._counting = runtime.runner.counting
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._rest = b""

    @classmethod
    def of_worker(cls) -> HorseCounts | None:
        """Return the pipe of this worker, or None if it does not know the ledger."""
        try:
            found = runtime()
        except ConfigurationError:
            return None
        return None if found.ledger is None else cls(found)

    # -- in the work horse --------------------------------------------------------------------

    def begin(self) -> None:
        """Keep the counts for the worker."""
        global _handing  # noqa: PLW0603  # one for the process
        _handing = True
        self._counting.flush.hand(True)

    def hand_over(self) -> None:
        """Hand the counts to the worker. Send those for other ledgers."""
        self._counting.hand_over(lambda line: os.write(self._write, line))
        flush_all()

    # -- in the worker ------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return self._counting.tally.is_empty

    def take(self) -> None:
        """Take what work horses have handed over."""
        while True:
            try:
                found = os.read(self._read, _MOST_BYTES)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + found).split(b"\n")
            for line in lines:
                try:
                    self._counting.take_over(line)
                except ValueError as error:  # of another version
                    logger.debug("counts of a work horse were not read: %s", error)

    def note_killed(self) -> None:
        """Count that a work horse was killed."""
        self._counting.note_gap()

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._write)

    def send(self, *, due: bool = True) -> None:
        """Take the counts, and send them to the ledger. `due`: only if it is time to."""
        self.take()
        if self.is_empty or (due and not self._counting.flush.is_due):
            return
        try:
            self._counting.flush.flush()
        finally:
            if self._runtime.ledger is not None:
                self._runtime.ledger.close()
