"""One connection to one of several servers, on which replies may be left for later.

Guarantees: a reply belongs to the command that it answers, however late it comes; a line whose next
reply cannot be known is closed and never used again; reading waits for a few milliseconds at most.
Does not guarantee that what was sent has had no effect where no reply came.

A connection is made, logged in and encrypted by redis-py; commands and replies go past it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any

from taskguard.clock import SYSTEM_CLOCK

__all__ = ["AWAY", "LATE", "Line", "Refusal"]

# So long a reply is waited for before others are asked instead. A server that is only busy costs
# two more messages.
PATIENCE_S = 0.01
_KERNEL_PATIENCE = struct.pack("ll", 0, int(PATIENCE_S * 1e6))
_MOST_BYTES = 65536
_NOW = getattr(socket, "MSG_DONTWAIT", 0)
# What scripts answer nearly always.
_USUAL: dict[bytes, Any] = {
    b"*1\r\n:1\r\n": [1],
    b":0\r\n": 0,
    b":1\r\n": 1,
}
_PART: Any = object()


class _Mark:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


LATE: Any = _Mark("LATE")  # no reply yet
AWAY: Any = _Mark("AWAY")  # no reply any more: the line is closed


class Refusal(str):
    """An error that the server answered with."""

    __slots__ = ()


class Line:
    """A connection, and how many replies it owes.

    Attributes:
        index: of its server.
        reply: what it answered last; LATE, AWAY.
        error: why it is AWAY.
        late_at_s: since when a reply is overdue; 0.0 where none is.
        born_s: when its server was started, at the latest, on this process's monotonic scale.
    """

    __slots__ = (
        "_buffer",
        "_connection",
        "_kernel_waits",
        "_owed",
        "_replies",
        "_sock",
        "born_s",
        "error",
        "index",
        "late_at_s",
        "reply",
    )

    def __init__(self, index: int, connection: Any, born_s: float) -> None:
        self.index = index
        self.reply: Any = None
        self.error: Exception | None = None
        self.late_at_s = 0.0
        self.born_s = born_s
        self._connection = connection
        self._sock = connection._sock  # noqa: SLF001  # there is no other way to it
        self._owed = 0
        self._replies: list[Any] = []
        self._buffer = b""
        self._kernel_waits = self._wait_in_kernel()

    def _wait_in_kernel(self) -> bool:
        """Python's own time-outs ask the system twice for each call."""
        plain = type(self._sock) is socket.socket and socket.socket.__module__ == "socket"
        if plain and _NOW:
            with contextlib.suppress(OSError):
                for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    self._sock.setsockopt(socket.SOL_SOCKET, side, _KERNEL_PATIENCE)
                self._sock.settimeout(None)
                return True
        self._sock.settimeout(PATIENCE_S)
        return False

    def send(self, data: bytes, replies: int = 1) -> None:
        """Send commands that get so many replies. Sets `reply` to LATE, or AWAY."""
        if self._sock is None:
            return
        self.reply = LATE
        self._owed += replies
        try:
            sent = self._sock.send(data)
            if sent < len(data):
                self._sock.sendall(data[sent:])
        except OSError as error:
            self.close(error)

    def read(self) -> Any:
        """The reply to the last command, if there was one. Sets and returns `reply`."""
        replies = self.read_last(1)
        if replies is not None:
            self.reply = replies[0]
        return self.reply

    def read_last(self, count: int) -> list[Any] | None:
        """The replies to the last commands; None where `reply` is LATE or AWAY instead."""
        while self._sock is not None:
            if not self._owed:
                found, self._replies = self._replies[-count:], []
                self.late_at_s = 0.0
                self.reply = None
                return found
            try:
                data = self._sock.recv(_MOST_BYTES)
            except (BlockingIOError, TimeoutError):
                if not self.late_at_s:
                    self.late_at_s = SYSTEM_CLOCK.monotonic_s()
                self.reply = LATE
                return None
            except OSError as error:
                self.close(error)
                return None
            if self._owed == 1 and count == 1 and not self._buffer and data in _USUAL:
                self._owed = 0
                self._replies = [_USUAL[data]]
            else:
                self._take_in(data)
        return None

    def catch_up(self) -> None:
        """Take in what has come meanwhile, without waiting."""
        if not self._owed or self._sock is None:
            return
        try:
            if self._kernel_waits:
                data = self._sock.recv(_MOST_BYTES, _NOW)
            else:
                self._sock.settimeout(0.0)
                try:
                    data = self._sock.recv(_MOST_BYTES)
                finally:
                    self._sock.settimeout(PATIENCE_S)
        except (BlockingIOError, TimeoutError):
            return
        except OSError as error:
            if "Want" not in type(error).__name__:  # TLS has nothing yet
                self.close(error)
            return
        self._take_in(data)
        if not self._owed:
            self._replies = []
            self.late_at_s = 0.0

    def close(self, error: Exception | None = None) -> None:
        """Close the connection; it is AWAY from now on."""
        if self._sock is not None:
            self._sock = None
            self.error = error
            self._connection.disconnect()
        self.reply = AWAY

    def _take_in(self, data: bytes) -> None:
        if not data:
            self.close(ConnectionError("Connection closed by server."))
            return
        data = self._buffer + data
        at = 0
        try:
            while self._owed:
                reply, end = _reply(data, at)
                if reply is _PART:
                    break
                self._replies.append(reply)
                self._owed -= 1
                at = end
        except ValueError as error:
            self.close(error)
            return
        self._buffer = data[at:]
        if self._buffer and not self._owed:
            self.close(ConnectionError("A reply that nobody asked for."))


def _reply(data: bytes, at: int) -> tuple[Any, int]:
    """The reply that begins here in RESP2, and where it ends; _PART where it has not all come."""
    end = data.find(b"\r\n", at)
    if end < 0:
        return _PART, at
    kind, said, after = data[at : at + 1], data[at + 1 : end], end + 2
    if kind in b"$*":
        read = _text if kind == b"$" else _array
        return read(data, after, int(said))
    if kind == b":":
        return int(said), after
    if kind == b"-":
        return Refusal(said.decode("utf-8", "replace")), after
    if kind != b"+":
        raise ValueError(f"{kind!r} begins no reply.")
    return said, after


def _text(data: bytes, at: int, length: int) -> tuple[Any, int]:
    if length < 0:
        return None, at
    end = at + length
    return (data[at:end], end + 2) if len(data) >= end + 2 else (_PART, at)


def _array(data: bytes, at: int, length: int) -> tuple[Any, int]:
    values: list[Any] = []
    for _ in range(length):
        value, at = _reply(data, at)
        if value is _PART:
            return _PART, at
        values.append(value)
    return values, at
