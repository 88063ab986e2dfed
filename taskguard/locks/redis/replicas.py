"""How many replicas have a grant before its caller goes on.

WAIT goes behind the script in the same message, so it costs what the replicas take, and no round
trip of its own. A grant that they lack is a grant all the same: the master holds it, and to free it
would make an outage of a slow replica. It is lost if the master dies now, and a line of the log
says so.

With a ledger nobody needs this: there a lost lease lets nobody in.
"""

from __future__ import annotations

import logging
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.locks.redis.protocol import pack

__all__ = ["AwaitedReplicas"]

logger = logging.getLogger("taskguard")

# A replica that is well has answered in a tenth of a millisecond.
_PATIENCE_MS = 100
_SAY_EVERY_S = 60.0


class AwaitedReplicas:
    """So many replicas, of the server at `address`."""

    def __init__(self, number: int, address: str) -> None:
        self.command = pack(b"WAIT", b"%d" % number, b"%d" % _PATIENCE_MS)
        self._number = number
        self._address = address
        self._missed = 0
        self._say_at_s = 0.0

    def heard(self, answer: Any) -> None:
        """What WAIT came to: a number of replicas, or an exception."""
        if isinstance(answer, int) and answer >= self._number:
            return
        self._missed += 1
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s < self._say_at_s:
            return
        missed, self._missed, self._say_at_s = self._missed, 0, now_s + _SAY_EVERY_S
        logger.warning(
            "%d grants of the lock server %s would be lost with it: replicas that have the last "
            "one: %s, wait_replicas=%d",
            missed,
            self._address,
            answer,
            self._number,
        )
