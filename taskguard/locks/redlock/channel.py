"""One connection to one of several servers, and the replies that it owes.

Guarantees: a reply answers the last question that was asked on its connection. Nothing is asked on
a connection that owes a reply. A connection that failed is closed and never used again.
Does not guarantee that a command without a reply had no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.locks.redlock.commands import Call

__all__ = ["SLOW_S", "Channel"]

SLOW_S = 0.1


class Channel:
    """A connection of redis-py, used by its public methods.

    Attributes:
        index: the server's position in the URL.
        born_s: the latest moment at which the server can have started, on the monotonic clock.
        owed: the number of replies that have not come yet.
        owing_since_s: when the oldest of them was asked for.
        is_slow: True if a call waited `SLOW_S` for replies without success. The next calls do not
            wait for the channel, until its replies come sooner.
        replies: the replies to the last question.
        refusal: the first error among them.
        error: why the connection was closed.
    """

    __slots__ = (
        "_connection",
        "_errors",
        "_known",
        "_unheard",
        "born_s",
        "error",
        "index",
        "is_open",
        "is_slow",
        "owed",
        "owing_since_s",
        "refusal",
        "replies",
    )

    def __init__(self, index: int, connection: Any, born_s: float, errors: Any) -> None:
        self.index = index
        self.born_s = born_s
        self.owed = 0
        self.owing_since_s = 0.0
        self.replies: list[Any] = []
        self.refusal: Exception | None = None
        self.error: Exception | None = None
        self.is_open = True
        self.is_slow = False
        self._connection = connection
        self._errors = errors
        self._known: set[str] = set()
        self._unheard: Sequence[Call] = ()

    @property
    def is_ready(self) -> bool:
        """Return True if a question may be asked."""
        return self.is_open and not self.owed

    def ask(self, calls: Sequence[Call], packed: bytes) -> None:
        """Send calls of one script, on a channel that is ready. `packed`: their bytes."""
        self.replies, self.refusal = [], None
        self._unheard = calls if calls[0].frees else ()
        if calls[0].script in self._known:
            self._send(packed, len(calls))
        else:
            self._known.add(calls[0].script)
            self.tell(calls)

    def tell(self, calls: Sequence[Call]) -> None:
        """Send calls whose replies are not needed, even if the channel owes replies."""
        # Send the sources: a reply that says "unknown script" could be discarded unread.
        self._send(b"".join([call.by_source for call in calls]), len(calls))

    def hear(self, timeout_s: float) -> bool:
        """Read the replies that have come. Return True if no further one will come.

        `timeout_s`: how long to wait for each reply.
        """
        while self.owed and self.is_open:
            try:
                if not self._connection.can_read(timeout_s):
                    return False
                reply = self._connection.read_response(disable_decoding=True)
            except self._errors.ResponseError as error:
                reply = error
                self.refusal = self.refusal or error
            except (self._errors.RedisError, OSError) as error:
                self.close(error)
                return True
            self.owed -= 1
            self.replies.append(reply)
        if self.is_slow:
            self.is_slow = SYSTEM_CLOCK.monotonic_s() - self.owing_since_s > SLOW_S
        return True

    def answer(self, calls: Sequence[Call], timeout_s: float) -> bool:
        """Read the answers to `calls` as `hear()` does. If the server forgot a script, send it."""
        if not self.hear(timeout_s):
            return False
        if self.refusal is not None and self.is_open and self._was_forgotten():
            self.ask(calls, b"")  # all calls, because each may be repeated
            return self.hear(timeout_s)
        self._unheard = ()
        return True

    def discard(self) -> None:
        """Read the replies that have come meanwhile, and forget them."""
        self.hear(0.0)
        if self.is_ready and self._unheard:
            calls, self._unheard = self._unheard, ()
            if self._was_forgotten():
                self.tell(calls)

    def _was_forgotten(self) -> bool:
        if not isinstance(self.refusal, self._errors.NoScriptError):
            return False
        self._known.clear()
        return True

    def close(self, error: Exception | None = None) -> None:
        """Close the connection."""
        if self.is_open:
            self.is_open, self.error = False, error
            self._connection.disconnect()

    def _send(self, packed: bytes, count: int) -> None:
        if not self.is_open:
            return
        if not self.owed:
            self.owing_since_s = SYSTEM_CLOCK.monotonic_s()
        self.owed += count
        try:
            self._connection.send_packed_command([packed], check_health=False)
        except (self._errors.RedisError, OSError) as error:
            self.close(error)
