"""What goes over the wire to a Redis: commands, scripts, and replies that are read in one piece.

Guarantees: a command is sent whole or an error is raised; a reply is read whole or not at all. What
is not short and whole is left in the socket for redis-py's own parser.
"""

from __future__ import annotations

import hashlib
import os
import socket
from importlib import resources
from typing import Any

__all__ = ["UNUSUAL", "Script", "pack", "read_short", "send"]

UNUSUAL: Any = object()  # nothing was read

_LONGEST_BYTES = 4096
# A look first: what a reply turns out not to be must still be there.
_PEEK = getattr(socket, "MSG_PEEK", 0)
# Python asks `poll` before it sends or receives on a socket with a time-out, also where it is known
# to be ready; elsewhere than here a socket is no file.
_AS_FILE = os.name == "posix"


def pack(*words: bytes) -> bytes:
    """A command as it goes over the wire. redis-py's packer takes several times as long."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


def send(connection: Any, command: bytes) -> bool:
    """Send a command on a redis-py connection; False: redis-py has to, as by TLS. Raises OSError.

    redis-py takes longer for it than the server does.
    """
    sock = getattr(connection, "_sock", None)  # there is no other way to it
    if type(sock) is not socket.socket or not _AS_FILE:
        return False
    try:
        sent = os.write(sock.fileno(), command)
    except BlockingIOError:
        sent = 0
    if sent < len(command):
        sock.sendall(command[sent:])  # which waits
    return True


def read_short(connection: Any) -> Any:
    """The reply that a redis-py connection in RESP2 has next, or UNUSUAL. Raises OSError.

    Whole numbers, texts without a line break, None, and arrays of these. redis-py's parser takes
    longer for them than the server does; the rest stays in the socket for it: errors, pushed
    messages, long replies, those that have not come whole, the end of the stream; all by TLS.
    """
    sock = getattr(connection, "_sock", None)  # there is no other way to it
    if type(sock) is not socket.socket or not _PEEK:
        return UNUSUAL
    data = sock.recv(_LONGEST_BYTES, _PEEK)
    reply = _parsed(data)
    if reply is not UNUSUAL:
        # It is there: nothing is waited for.
        os.read(sock.fileno(), len(data)) if _AS_FILE else sock.recv(len(data))
    return reply


def _parsed(data: bytes) -> Any:
    """One reply and nothing else, or UNUSUAL. The protocol: https://redis.io/docs/reference/protocol-spec."""
    *lines, rest = data.split(b"\r\n")
    if rest or not lines:
        return UNUSUAL
    try:
        if not lines[0].startswith(b"*"):
            found, used = _value(lines, 0)
            return found if used == len(lines) else UNUSUAL
        found, used = [], 1
        for _ in range(int(lines[0][1:])):
            value, used = _value(lines, used)
            found.append(value)
    except (ValueError, IndexError):
        return UNUSUAL
    return found if used == len(lines) and lines[0] != b"*-1" else UNUSUAL


def _value(lines: list[bytes], at: int) -> tuple[Any, int]:
    """The value that begins in this line, and the line after it; ValueError for other kinds."""
    head = lines[at]
    kind, said = head[:1], head[1:]
    if kind == b":":
        return int(said), at + 1
    if kind == b"+":
        return said, at + 1
    if kind != b"$":
        raise ValueError
    if said == b"-1":
        return None, at + 1
    text = lines[at + 1]
    if len(text) != int(said):
        raise ValueError  # it has a line break in it
    return text, at + 2


class Script:
    """A Lua file and its checksum, by which servers know it.

    `after`: another file, whose functions it uses; `package`: where the files are.
    """

    def __init__(
        self, name: str, *, after: str | None = None, package: str = "taskguard.locks.redis"
    ) -> None:
        files = resources.files(package) / "lua"
        names = (name,) if after is None else (after, name)
        self.name = name
        self.source = b"".join((files / f"{each}.lua").read_bytes() for each in names)
        # Not for security: it is how the protocol names scripts.
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()
