"""Commands and short replies past redis-py: the same bytes and values, or all is left to it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskguard.locks.redis.protocol import UNUSUAL, read_short, send

SIMPLE = st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=40)


class Connection:
    """As much of redis-py's as is looked at, and the server's end."""

    def __init__(self) -> None:
        self._sock, self.server = socket.socketpair()
        self._sock.settimeout(5.0)

    def left(self) -> bytes:
        """What nobody has read."""
        self._sock.setblocking(False)
        try:
            return self._sock.recv(100_000)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self._sock.close()
        self.server.close()


@pytest.fixture
def connection() -> Iterator[Connection]:
    made = Connection()
    yield made
    made.close()


def written(value: Any) -> bytes:
    """As a server writes it."""
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(written, value))
    if isinstance(value, int):
        return b":%d\r\n" % value
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def test_a_command_of_any_length_is_sent_whole(connection: Connection) -> None:
    """Also one that the socket does not take at once, from whoever reads slowly."""
    command, found = bytes(range(256)) * 20_000, bytearray()

    def read() -> None:
        while len(found) < len(command):
            found.extend(connection.server.recv(100_000))

    reader = threading.Thread(target=read)
    timer = threading.Timer(0.1, reader.start)
    timer.start()
    assert send(connection, command)
    timer.join()
    reader.join()
    assert found == command


def test_who_takes_nothing_is_waited_for_as_long_as_the_time_out_says(
    connection: Connection,
) -> None:
    """No longer; and who has gone is an error at once. Both are what the link calls lost."""
    connection._sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        send(connection, b"x" * 10_000_000)
    connection.server.close()
    with pytest.raises(OSError, match="Broken pipe"):
        send(connection, b"x")


def test_by_tls_and_without_a_connection_redis_py_sends(connection: Connection) -> None:
    """It encrypts, and connects."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    plain = connection._sock
    wrapped = context.wrap_socket(plain, do_handshake_on_connect=False)
    for connection._sock in (wrapped, None):  # type: ignore[assignment]
        assert not send(connection, b"x")
    wrapped.close()
    connection._sock = plain


@given(SIMPLE | st.lists(SIMPLE, max_size=5))
def test_values_are_read_whole_or_not_at_all(value: Any) -> None:
    """Those with a line break in them are left to the parser."""
    connection = Connection()
    reply = written(value)
    connection.server.sendall(reply)
    found = read_short(connection)
    if found is UNUSUAL:
        texts = value if isinstance(value, list) else [value]
        assert any(
            b"\r\n" in text or text.endswith(b"\r") for text in texts if isinstance(text, bytes)
        )
        assert connection.left() == reply
    else:
        assert (found, connection.left()) == (value, b"")
    connection.close()


@given(st.integers(-(2**40), 2**40) | st.lists(st.integers(0, 9) | st.just(b"text"), max_size=4))
def test_what_a_lock_script_answers_is_read_here(value: Any) -> None:
    """Whole numbers, texts, and lists of them: none of these takes the longer way."""
    connection = Connection()
    connection.server.sendall(written(value))
    assert read_short(connection) == value
    connection.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"-ERR no\r\n",
        b"*-1\r\n",
        b"*2\r\n:1\r\n*1\r\n:2\r\n",
        b"$5\r\na\r\nbc\r\n",
        b":1",
        b":1\r\n:2\r\n",
        b"*2\r\n:1\r\n",
        b"$10\r\nabc\r\n",
        b"%1\r\n+a\r\n:1\r\n",
        b"\r\n",
        b"*1\r\n-ERR no\r\n",
        written(b"x" * 5_000),
    ],
)
def test_everything_else_stays_where_it_is(connection: Connection, reply: bytes) -> None:
    """Errors, a nested list, half of a reply, two of them, RESP3, a long one."""
    connection.server.sendall(reply)
    assert read_short(connection) is UNUSUAL
    assert connection.left() == reply


def test_the_end_of_the_stream_is_the_parsers_to_tell(connection: Connection) -> None:
    """It raises redis-py's own error."""
    connection.server.close()
    assert read_short(connection) is UNUSUAL


def test_a_socket_that_is_no_plain_one_is_not_touched(connection: Connection) -> None:
    """TLS has bytes of its own between."""
    connection.server.sendall(b":1\r\n")

    class Wrapped:
        _sock = object()

    assert read_short(Wrapped()) is UNUSUAL


def test_no_reply_in_time_is_an_error_of_the_system(connection: Connection) -> None:
    """The caller closes the connection, and asks again on another."""
    connection._sock.settimeout(0.01)
    with pytest.raises(TimeoutError):
        read_short(connection)
