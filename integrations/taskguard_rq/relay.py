"""The process of a worker that calls jobs which nobody has called: it may become the relay.

A process of its own, as RQ's scheduler is: a worker forks a horse for each job, and must run no
threads.

Guarantees: a worker has at most one, from the moment on at which it knows of a job that parks: by
a job of its own, or because somebody stands in a line when it starts, or when it looks after its
registries, which RQ does every ten minutes. One that has died is started again. It ends with its
worker, however that ends.

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

# One byte, which a worker shares with its horses: whether a job that parks is known.
_known = mmap.mmap(-1, 1)


def note_parking() -> None:
    """Let the worker of this process have a relay: a job that parks was declared here."""
    _known[0] = 1


def look_for_lines() -> None:
    """The same if somebody stands in a line; by a connection that is closed again."""
    ledger = _ledger()
    if ledger is None or _known[0]:
        return
    try:
        if ledger.waiting(limit=1):
            note_parking()
    except errors.TaskguardError as error:
        logger.debug("whether somebody waits for a key got no answer: %s", error)
        note_parking()
    finally:
        ledger.close()


def _ledger() -> Any:
    """The ledger, if this process knows it: the job's module may say where it is."""
    try:
        return runtime().ledger
    except errors.ConfigurationError:
        return None


class RQRelay:
    """The relay's process beside one worker."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._process = RelayProcess(self._make)

    def keep(self) -> None:
        """Start it if it is wanted and does not run."""
        if not _known[0]:
            return
        if _ledger() is None:
            _warn_of_unknown_ledger()
            return
        self._process.keep(parks=True)

    def stop(self) -> None:
        """Let another worker's take over, and wait for its end."""
        self._process.stop()

    def _make(self) -> Relay:
        sender = RQSender(self._connection)
        return Relay(runtime(), {NAME: _OneByOne(sender)}, {NAME: sender.hand_off})


@functools.cache
def _warn_of_unknown_ledger() -> None:
    logger.warning(
        'A job has busy="park", and this worker does not know the ledger, so it has no relay: '
        "after a holder is killed, the next holder of its key promotes the messages that wait. Set "
        "TASKGUARD_LEDGER_URL, or run `taskguard relay --rq …`."
    )


class _OneByOne:
    """Sends each job by itself: one that was withdrawn meanwhile leaves the line."""

    def __init__(self, sender: RQSender) -> None:
        self._sender = sender
        self.is_away = sender.is_away
        self.rate_of = sender.rate_of

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        self._sender(call, message)
