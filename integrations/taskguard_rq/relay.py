"""The process of a worker that calls jobs which nobody has called: it may become the relay.

A process of its own, as RQ's scheduler is: a worker forks a horse for each job, and what another
thread has locked at that moment (SQLite's own mutexes, for example) would stay locked in the horse
for ever.

Guarantees: a worker has at most one, from the moment on at which it knows of a job that parks: by
a job of its own, or because somebody stands in a line when it starts, or when it looks after its
registries, which RQ does every ten minutes. One that has died is started again. It ends with its
worker, however that ends.

Read next: in taskguard `relay.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import signal
import threading
import time
from typing import Any

from redis import Redis

from taskguard import MessageRef, Relay, errors
from taskguard_rq.calls import NAME, RQSender
from taskguard_rq.runtime import runtime

__all__ = ["RelayProcess", "look_for_lines", "note_parking"]

logger = logging.getLogger("taskguard")

_LOOK_AT_PARENT_S = 0.5
_STEP_DOWN_S = 3.0
_LOOK_S = 0.02

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


class RelayProcess:
    """The relay's process beside one worker, of whose process it is a child."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._worker = os.getpid()
        self._child = 0

    def keep(self) -> None:
        """Start it if it is wanted and does not run."""
        if not _known[0] or os.getpid() != self._worker or self._runs():
            return
        if _ledger() is None:
            _warn_of_unknown_ledger()
            return
        self._child = os.fork()
        if self._child == 0:
            status = 1
            try:
                _relay(self._connection, self._worker)
                status = 0
            except BaseException:
                logger.exception("the relay of parked jobs has ended")
            finally:
                os._exit(status)
        logger.info("a relay of parked jobs runs beside this worker, in process %d", self._child)

    def stop(self) -> None:
        """Let another worker's take over, and wait for its end."""
        if os.getpid() != self._worker or not self._runs():
            return
        self._signal(signal.SIGTERM)
        until_s = time.monotonic() + _STEP_DOWN_S
        while self._runs():
            if time.monotonic() > until_s:
                self._signal(signal.SIGKILL)
                until_s += _STEP_DOWN_S
            time.sleep(_LOOK_S)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _runs(self) -> bool:
        if not self._child:
            return False
        try:
            ended, _ = os.waitpid(self._child, os.WNOHANG)
        except ChildProcessError:  # a body that waited for any child got it
            ended = self._child
        if ended:
            self._child = 0
        return not ended


@functools.cache
def _warn_of_unknown_ledger() -> None:
    logger.warning(
        'A job has busy="park", and this worker does not know the ledger, so it has no relay: what '
        "waits for the key of a killed holder is called by the next one who uses that key. Set "
        "TASKGUARD_LEDGER_URL, or run `taskguard relay --rq …`."
    )


class _OneByOne:
    """Sends each job by itself: one that was withdrawn meanwhile leaves the line."""

    def __init__(self, sender: RQSender) -> None:
        self._sender = sender
        self.is_away = sender.is_away

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        self._sender(call, message)


def _relay(connection: Redis, worker: int) -> None:
    """Relay until the worker says so, or is gone."""
    sender = RQSender(connection)
    relay = Relay(runtime(), {NAME: _OneByOne(sender)}, {NAME: sender.hand_off})
    # The terminal's interrupt is for the worker, which may have a job to end before.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: relay.stop())
    thread = threading.Thread(target=_watch, args=(relay, worker), name="parent", daemon=True)
    thread.start()
    relay.run()


def _watch(relay: Relay, worker: int) -> None:
    """End this process soon after its worker is gone, which may have been killed."""
    while os.getppid() == worker:
        time.sleep(_LOOK_AT_PARENT_S)
    relay.stop()
    time.sleep(_STEP_DOWN_S)
    os._exit(1)
