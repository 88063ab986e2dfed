"""`taskguard.fenced.set_value()` on real servers: a value accepts the same holder and newer
ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from support.needs import need_redis_in_memory
from support.proxy import Mode, Proxy
from support.threads import at_once
from taskguard.errors import ConfigurationError, StaleTokenError
from taskguard.fenced import FencedValue, get_value, set_value
from taskguard_sandbox.servers import Valkey

# Limits of doubles, changes of the number of digits, and the smallest and largest fence.
EDGES = [2, 10, 10**15, 2**53, 2**53 + 1, 10**16, 10**18, 2**63 - 1]


@pytest.fixture(params=["valkey", "redis62", "fakeredis"])
def client(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """Return a client of an empty server without loaded scripts."""
    if request.param == "fakeredis":
        need_redis_in_memory()
        from fakeredis import FakeRedis

        yield FakeRedis()
        return
    with redis.Redis(port=request.getfixturevalue(request.param).port) as client:
        client.flushall()
        client.script_flush()
        yield client
        client.flushall()


def test_a_value_is_set_and_read_with_its_fence(client: redis.Redis) -> None:
    """A value is set and read with its fence, also again by the same holder. Before that there is
    none."""
    assert get_value(client, "stock:42") is None
    set_value(client, "stock:42", "17", fence=7)
    set_value(client, "stock:42", b"\x00\xff", fence=7)
    assert get_value(client, "stock:42") == FencedValue(b"\x00\xff", 7)
    assert client.hgetall("stock:42") == {b"value": b"\x00\xff", b"fence": b"7"}


@pytest.mark.parametrize("newer", EDGES)
def test_an_older_holder_is_refused(client: redis.Redis, newer: int) -> None:
    """An older holder is refused on all 64 bits, in both orders. The error has the key and both
    fences."""
    set_value(client, "stock:42", "old", fence=newer - 1)
    set_value(client, "stock:42", "new", fence=newer)
    with pytest.raises(StaleTokenError) as raised:
        set_value(client, "stock:42", "late", fence=newer - 1)
    error = raised.value
    assert (error.key, error.fence, error.newer_fence) == ("stock:42", newer - 1, newer)
    assert get_value(client, "stock:42") == FencedValue(b"new", newer)


def test_a_server_that_forgot_its_scripts_gets_them_again(client: redis.Redis) -> None:
    """If a restart or SCRIPT FLUSH removed the scripts, a call takes one more round trip and
    succeeds."""
    set_value(client, "stock:42", "a", fence=1)
    client.script_flush()
    set_value(client, "stock:42", "b", fence=2)
    assert get_value(client, "stock:42") == FencedValue(b"b", 2)


def test_a_client_that_decodes_gives_texts(redis_url: str) -> None:
    """A client that decodes responses returns the value as text. The fence is always a number."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        set_value(client, "stock:42", "ä", fence=7)
        assert get_value(client, "stock:42") == FencedValue("ä", 7)


def test_an_answer_that_is_lost_may_be_asked_for_again(valkey: Valkey, redis_url: str) -> None:
    """After a lost answer, setting the value again with the same fence is no stale write."""
    with Proxy(valkey.port) as proxy:
        with redis.Redis(port=proxy.port, retry=None, socket_timeout=5.0) as client:
            set_value(client, "stock:42", "0", fence=6)
            proxy.lose_reply_to(b"EVALSHA", then=Mode.CUT)
            with pytest.raises(redis.ConnectionError):
                set_value(client, "stock:42", "1", fence=7)
            set_value(client, "stock:42", "1", fence=7)
            assert get_value(client, "stock:42") == FencedValue(b"1", 7)


def test_of_many_holders_at_once_the_newest_has_the_value(redis_url: str) -> None:
    """The newest of several concurrent fences remains, because compare and set are
    one step."""
    refused: list[StaleTokenError] = []

    def hold(number: int) -> None:
        with redis.Redis.from_url(redis_url) as client:
            for _ in range(20):
                try:
                    set_value(client, "stock:42", number + 1, fence=number + 1)
                except StaleTokenError as error:
                    refused.append(error)

    at_once(8, hold)
    assert all(each.newer_fence > each.fence for each in refused)
    with redis.Redis.from_url(redis_url) as client:
        assert get_value(client, "stock:42") == FencedValue(b"8", 8)


@pytest.mark.parametrize("fence", [0, -1, 2**63, 1.5, "7", None, True])
def test_what_is_no_fence_is_refused(client: redis.Redis, fence: object) -> None:
    """A number that is no fence is refused, because it could shut out all holders for ever."""
    with pytest.raises(ConfigurationError, match=r"guard\.fence"):
        set_value(client, "stock:42", "x", fence=fence)  # type: ignore[arg-type]
    assert client.exists("stock:42") == 0


def test_what_answers_later_is_refused(redis_url: str) -> None:
    """A pipeline or an asynchronous client is refused, because the caller would not learn of a
    refusal."""
    with redis.Redis.from_url(redis_url) as client, client.pipeline() as pipeline:
        for later in (pipeline, redis.asyncio.Redis.from_url(redis_url)):
            with pytest.raises(ConfigurationError, match="synchronous"):
                set_value(later, "stock:42", "x", fence=1)
            with pytest.raises(ConfigurationError, match="synchronous"):
                get_value(later, "stock:42")


def test_a_key_that_is_something_else_stays_as_it_is(client: redis.Redis) -> None:
    """A plain text or a hash without a fence is not overwritten: Redis reports an error."""
    client.set("text", "x")
    client.hset("hash", "fence", "next week")
    for key, said in (("text", "WRONGTYPE|wrong kind"), ("hash", "no fencing token")):
        with pytest.raises(redis.ResponseError, match=said):
            set_value(client, key, "y", fence=1)
    assert client.get("text") == b"x"
    assert client.hgetall("hash") == {b"fence": b"next week"}
