"""A connection to one of several servers: each reply belongs to its own question."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redlock.channel import Channel
from taskguard.locks.redlock.commands import Commands
from taskguard.locks.redlock.servers import Channels
from taskguard.model.lease import new_owner

# Longer than a reply takes over the loopback interface.
PATIENCE_S = 10.0
COMMANDS = Commands("taskguard")
ACQUIRE = COMMANDS.acquire(("k",), new_owner("m"), 30.0, 0.0)
RELEASE = COMMANDS.release(("k",), new_owner("m"))
FORGOTTEN = b"-NOSCRIPT No matching script.\r\n"


class Ends:
    """A channel, and the server's end of its connection."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        link = RedisLink(
            f"redis://127.0.0.1:{listener.getsockname()[1]}",
            socket_timeout_s=PATIENCE_S,
            connect_timeout_s=PATIENCE_S,
            retries=0,
            longest_block_s=0.0,
        )
        connection, _ = link.connect()
        self.server, _ = listener.accept()
        self.server.settimeout(PATIENCE_S)
        listener.close()
        self.channel = Channel(0, connection, 0.0, redis.exceptions)

    def ask(self, call: Any) -> bytes:
        """Ask, and return what arrives at the server."""
        self.channel.ask([call], call.packed)
        return self.server.recv(10_000)

    def close(self) -> None:
        self.channel.close()
        self.server.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_a_channel_that_owes_a_reply_is_asked_nothing(ends: Ends) -> None:
    """Its late reply is discarded, and the next question gets its own."""
    channels = Channels(1)
    channels.all[0] = ends.channel
    ends.ask(ACQUIRE)
    assert not ends.channel.answer([ACQUIRE], 0.01)
    assert channels.ready() == []
    ends.server.sendall(b"*1\r\n:1\r\n")
    assert ends.channel.hear(PATIENCE_S)
    ends.channel.discard()
    assert channels.ready() == [ends.channel]
    ends.ask(ACQUIRE)
    ends.server.sendall(b"*1\r\n:0\r\n")
    assert ends.channel.answer([ACQUIRE], PATIENCE_S)
    assert ends.channel.replies == [[0]]


def test_a_release_follows_what_was_not_answered(ends: Ends) -> None:
    """The release is sent behind the acquire, and both replies are still expected."""
    ends.ask(ACQUIRE)
    ends.channel.tell([RELEASE])
    assert ends.server.recv(10_000) == RELEASE.by_source
    ends.server.sendall(b"*1\r\n:1\r\n")
    ends.channel.hear(0.05)
    assert not ends.channel.is_ready
    ends.server.sendall(b":1\r\n")
    assert ends.channel.hear(PATIENCE_S)
    assert ends.channel.is_ready


@pytest.mark.parametrize("part", [b"", b"*", b"*2\r\n:1\r\n$1\r\n"])
def test_what_is_no_whole_reply_closes_the_channel(ends: Ends, part: bytes) -> None:
    """The end of the stream, also in the middle of a reply: it is never used again."""
    ends.ask(ACQUIRE)
    ends.server.sendall(part)
    ends.server.close()
    assert ends.channel.answer([ACQUIRE], PATIENCE_S)
    assert not ends.channel.is_open
    assert ends.channel.error is not None
    ends.channel.ask([ACQUIRE], ACQUIRE.packed)
    assert ends.channel.hear(PATIENCE_S)
    assert not ends.channel.is_ready


def test_a_refusal_is_a_reply(ends: Ends) -> None:
    """The channel stays open, and says why."""
    ends.ask(ACQUIRE)
    ends.server.sendall(b"-NOPERM no\r\n")
    assert ends.channel.answer([ACQUIRE], PATIENCE_S)
    assert ends.channel.is_ready
    assert "no" in str(ends.channel.refusal)


def test_the_first_use_of_a_script_sends_it(ends: Ends) -> None:
    """Later calls name it; where the server forgot it, they send it again."""
    for command in (ACQUIRE.by_source, ACQUIRE.packed):
        assert ends.ask(ACQUIRE) == command
        ends.server.sendall(b"*1\r\n:1\r\n")
        assert ends.channel.answer([ACQUIRE], PATIENCE_S)
    assert ends.ask(ACQUIRE) == ACQUIRE.packed
    ends.server.sendall(FORGOTTEN)
    assert not ends.channel.answer([ACQUIRE], 0.05)
    assert ends.server.recv(10_000) == ACQUIRE.by_source


def test_a_release_that_met_no_script_is_sent_again(ends: Ends) -> None:
    """Even if the call had its majority before this reply; an acquire is not."""
    for call, again in ((ACQUIRE, b""), (RELEASE, RELEASE.by_source)):
        ends.ask(call)
        ends.server.sendall(b":1\r\n")
        assert ends.channel.answer([call], PATIENCE_S)
        assert ends.ask(call) == call.packed
        ends.server.sendall(FORGOTTEN)
        assert ends.channel.hear(PATIENCE_S)
        ends.channel.discard()
        assert ends.channel.owed == bool(again)
        if again:
            assert ends.server.recv(10_000) == again
