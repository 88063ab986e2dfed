"""A connection on which replies may be left for later: each reply is that of its own command."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from taskguard.locks.redlock.line import AWAY, LATE, Line, Refusal


class Connection:
    """What redis-py would have made."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def disconnect(self) -> None:
        self._sock.close()


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket]]:
    """A line, and the server's end of it."""
    near, far = socket.socketpair()
    line = Line(0, Connection(near), 0.0)
    yield line, far
    line.close()
    far.close()


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (b":1\r\n", 1),
        (b":0\r\n", 0),
        (b"*1\r\n:1\r\n", [1]),
        (b"*2\r\n:1\r\n$1\r\n0\r\n", [1, b"0"]),
        (b"*4\r\n:0\r\n:2\r\n$4\r\n\r\n\r\n\r\n:-1\r\n", [0, 2, b"\r\n\r\n", -1]),
        (b"$-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"+OK\r\n", b"OK"),
        (b"*0\r\n", []),
        (b"-NOSCRIPT No matching script.\r\n", Refusal("NOSCRIPT No matching script.")),
    ],
)
def test_replies(ends: tuple[Line, socket.socket], text: bytes, reply: object) -> None:
    """Of every kind, whole or byte by byte."""
    line, far = ends
    line.send(b"one")
    far.sendall(text)
    assert line.read() == reply
    line.send(b"two")
    for number in range(len(text)):
        assert line.read() is LATE
        far.sendall(text[number : number + 1])
    assert line.read() == reply
    assert type(line.reply) is type(reply)
    assert not line.late_at_s


def test_a_late_reply_answers_nothing_else(ends: tuple[Line, socket.socket]) -> None:
    """It is dropped, whether it comes before, with or in the middle of the next one."""
    line, far = ends
    line.send(b"one")
    assert line.read() is LATE
    assert line.late_at_s
    line.send(b"two")
    far.sendall(b":1\r\n")
    assert line.read() is LATE
    far.sendall(b":2\r\n")
    assert line.read() == 2
    line.send(b"three")
    line.send(b"four")
    far.sendall(b":3\r\n:")
    assert line.read() is LATE
    far.sendall(b"4\r\n")
    assert line.read() == 4
    line.send(b"five")
    far.sendall(b":5\r\n")
    line.catch_up()
    line.send(b"six")
    far.sendall(b":6\r\n")
    assert line.read() == 6


def test_catching_up_waits_for_nothing(ends: tuple[Line, socket.socket]) -> None:
    """What has come is taken in; the line is late until all has."""
    line, far = ends
    line.send(b"one and two", 2)
    assert line.read_last(2) is None
    line.catch_up()
    assert line.late_at_s
    far.sendall(b":1\r\n")
    line.catch_up()
    assert line.late_at_s
    far.sendall(b":2\r\n")
    line.catch_up()
    assert not line.late_at_s


def test_several_at_once(ends: tuple[Line, socket.socket]) -> None:
    """The last ones are given together, in order."""
    line, far = ends
    line.send(b"old")
    line.send(b"one and two", 2)
    far.sendall(b":0\r\n:1\r\n$1\r\n")
    assert line.read_last(2) is None
    assert line.reply is LATE
    far.sendall(b"2\r\n")
    assert line.read_last(2) == [1, b"2"]


@pytest.mark.parametrize("text", [b"", b"!what\r\n", b":one\r\n", b":1\r\n:2\r\n"])
def test_what_is_no_reply_ends_the_line(ends: tuple[Line, socket.socket], text: bytes) -> None:
    """The stream's end, another protocol, and a reply too many: it is never used again."""
    line, far = ends
    line.send(b"one")
    if text:
        far.sendall(text)
    else:
        far.close()
    line.read()
    assert line.reply is AWAY
    assert line.error is not None
    line.send(b"two")
    assert line.read() is AWAY
    line.catch_up()
