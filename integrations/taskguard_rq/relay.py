"""A worker's relay process, which promotes jobs that no holder promoted.

It is a process, like RQ's scheduler, because a worker forks for each job and must run no threads.

Guarantees: a worker has at most one. The worker starts it once it knows of a job that parks: it ran
such a job, or a message was waiting in a line when the worker started or cleaned its registries
(every ten minutes). If the process dies, the worker starts it again. It ends when its worker ends,
even if the worker is killed.

Read next: in taskguard `outbox/relay_process.py` and `relay.py`.
"""

from __future__ import annotations

import functools
import logging
import mmap
from typing import Any

from redis import Redis

from taskguard import errors
from taskguard.integration import MessageRef, Relay, RelayProcess
from taskguard_rq.calls import NAME, RQSender
from taskguard_rq.runtime import runtime

__all__ = ["RQRelay", "look_for_lines", "note_parking"]

logger = logging.getLogger("taskguard")

# One byte that a worker shares with its work horses: 1 if a job that parks is known.
_known = mmap.mmap(-1, 1)


def note_parking() -> None:
    """Note that a job that parks was declared here, so that the worker starts a relay."""
    _known[0] = 1


def look_for_lines() -> None:
    """Start a relay if messages wait in the ledger. Close the connection afterwards."""
    ledger = _ledger()
    if ledger is None or _known[0]:
        return
    try:
        if ledger.waiting(limit=1):
            note_parking()
    except errors.TaskguardError as error:
        logger.debug("the ledger did not answer whether messages wait: %s", error)
        note_parking()
    finally:
        ledger.close()


def _ledger() -> Any:
    """Return the ledger, or None if only the jobs' module configures it."""
    try:
        return runtime().ledger
    except errors.ConfigurationError:
        return None


class RQRelay:
    """The relay process of one worker."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._process = RelayProcess(self._make)

    def keep(self) -> None:
        """Start the process if jobs park and it is not running."""
        if not _known[0]:
            return
        if _ledger() is None:
            _warn_of_unknown_ledger()
            return
        self._process.keep(parks=True)

    def stop(self) -> None:
        """Stop the process, so that another worker's relay takes over, and wait for its end."""
        self._process.stop()

    def _make(self) -> Relay:
        sender = RQSender(self._connection)
        return Relay(runtime(), {NAME: _OneByOne(sender)}, {NAME: sender.hand_off})


@functools.cache
def _warn_of_unknown_ledger() -> None:
    logger.warning(
        'A job has busy="park", and this worker does not know the ledger, so it has no relay. '
        "After a holder is killed, the next holder of its key promotes the messages that wait. Set "
        "TASKGUARD_LEDGER_URL, or run `taskguard relay --rq …`."
    )


class _OneByOne:
    """Sends each job separately, so that a job that was withdrawn leaves the line."""

    def __init__(self, sender: RQSender) -> None:
        self._sender = sender
        self.is_away = sender.is_away
        self.rate_of = sender.rate_of

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        self._sender(call, message)
