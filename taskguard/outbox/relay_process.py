"""A process of one worker that may become the relay (`relay.py`).

    process = RelayProcess(make_relay)
    process.keep(parks=True)  # now and then

It is a process, because a worker that forks must not run other threads. A mutex that another thread
holds at the fork (one of SQLite, for example) would stay locked in the child for ever. The process
goes on if the worker's other children end, and no body can starve it.

Guarantees: a worker has at most one such process. If it has died, `keep()` starts it again. It ends
with its worker, however the worker ends. If no task of the worker parks, the process checks once a
minute whether messages wait in the ledger, and ends again if none do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from taskguard.outbox.relay import Relay

__all__ = ["RelayProcess"]

logger = logging.getLogger("taskguard")

_LOOK_AT_PARENT_S = 0.5
_STEP_DOWN_S = 3.0
_LOOK_S = 0.02
# From one start to the next: of a process that ended by itself, and of one that was not needed.
_AGAIN_S = 5.0
_LOOK_FOR_LINES_S = 60.0


class RelayProcess:
    """The relay process of one worker: a child of the worker's process.

    Args:
        make: makes the relay. It is called in the child.
    """

    def __init__(self, make: Callable[[], Relay]) -> None:
        self._make = make
        self._worker = os.getpid()
        self._child = 0
        self._ends_if_idle = False
        self._again_at_s = 0.0
        self._stopped = False

    def keep(self, *, parks: bool) -> None:
        """Start the process unless it runs. Call this every second or so.

        `parks`: whether a task of this worker may park. If not, the process ends again unless
        messages wait in the ledger, and `keep()` starts it again after a minute.
        """
        if self._stopped or os.getpid() != self._worker:
            return
        if parks and self._ends_if_idle:
            self._again_at_s = 0.0
        if self._runs() or time.monotonic() < self._again_at_s:
            return
        self._ends_if_idle = not parks
        self._again_at_s = time.monotonic() + (_AGAIN_S if parks else _LOOK_FOR_LINES_S)
        self._child = os.fork()
        if self._child == 0:
            status = 1
            try:
                self._run(parks=parks)
                status = 0
            except BaseException:
                logger.exception("the relay of parked messages has ended")
            finally:
                os._exit(status)
        level = logging.INFO if parks else logging.DEBUG
        logger.log(level, "the relay of parked messages of this worker is process %d", self._child)

    def step_down(self) -> None:
        """Let another worker's relay take over. Do not wait for the end of the process."""
        self._stopped = True
        if os.getpid() == self._worker and self._runs():
            self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Let another worker's relay take over, and wait for the end of the process."""
        self.step_down()
        if os.getpid() != self._worker:
            return
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
            ended, status = os.waitpid(self._child, os.WNOHANG)
        except ChildProcessError:  # other code waited for any child, and got this one
            ended, status = self._child, 0
        if ended:
            self._child = 0
            if os.WIFSIGNALED(status):
                self._again_at_s = 0.0
        return not ended

    # -- in the child

    def _run(self, *, parks: bool) -> None:
        stopped = threading.Event()
        _take_signals(stopped)
        relay = self._make()
        watch = threading.Thread(
            target=self._watch, args=(relay, stopped), name="taskguard-parent", daemon=True
        )
        watch.start()
        if parks or relay.is_needed():
            relay.run()

    def _watch(self, relay: Relay, stopped: threading.Event) -> None:
        """End this process once it is asked to stop, or its worker is gone."""
        while os.getppid() == self._worker and not stopped.wait(_LOOK_AT_PARENT_S):
            pass
        relay.stop()
        time.sleep(_STEP_DOWN_S)
        os._exit(1)


def _take_signals(stopped: threading.Event) -> None:
    """Forget the worker's handlers. SIGTERM stops the relay.

    The terminal's interrupt is for the worker, which may have a message to end before.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
