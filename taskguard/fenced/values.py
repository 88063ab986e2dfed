"""Values in Redis or Valkey that refuse an older fencing token.

    taskguard.fenced.set_value(client, "stock:42", "17", fence=guard.fence)
    taskguard.fenced.get_value(client, "stock:42").value

Guarantees, while the server keeps its memory: compared and set in one script, on all 64 bits. A
value is a hash with the fields `value` and `fence`: one key, so one slot of a Cluster, and whoever
expires, renames or deletes it does so to both.

Does not guarantee anything once the key has expired, was evicted or deleted (give the server
`maxmemory-policy noeviction`), or after a failover that lost the last write. The client's errors
come out as they are; a call that got no answer may be made again.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Any, NamedTuple

from taskguard.drivers import extras_named
from taskguard.errors import ConfigurationError, StaleTokenError

__all__ = ["FencedValue", "get_value", "set_value"]

_SET = (files(__package__) / "lua" / "set_value.lua").read_bytes()
# Not for security: it is how the protocol names scripts.
_SHA = hashlib.sha1(_SET, usedforsecurity=False).hexdigest()
_MOST = 2**63 - 1


class FencedValue(NamedTuple):
    """What stands under a key: the value as the client gives it, and the fence it was set with."""

    value: Any
    fence: int


def set_value(client: Any, key: Any, value: Any, *, fence: int) -> None:
    """Set `key` to `value`, unless it was set with a newer fence.

    Args:
        client: a synchronous redis-py client (`redis.Redis`, Sentinel's, `RedisCluster`).
        key: where; a hash of its own.
        value: what redis-py takes for one: bytes, text or a number.
        fence: `guard.fence`.

    Raises:
        StaleTokenError: a newer holder has set it (`newer_fence`). Nothing was written.
        ConfigurationError: `fence` is no fencing token, or the client does not answer at once.
    """
    if type(fence) is not int or not 1 <= fence <= _MOST:
        raise ConfigurationError(f"fence={fence!r} is no fencing token; pass guard.fence.")
    with extras_named("A fenced value"):
        from redis.exceptions import NoScriptError
    _refuse_what_answers_later(client)
    try:
        reply = client.evalsha(_SHA, 1, key, value, fence)
    except NoScriptError:  # EVAL makes the server remember the script
        reply = client.eval(_SET, 1, key, value, fence)
    newer = int(reply)
    if newer != fence:
        name = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
        raise StaleTokenError(
            f"{name} was set with fence {newer}, and this holder has {fence}: a newer one has been "
            "here. Stop.",
            key=name,
            fence=fence,
            newer_fence=newer,
        )


def get_value(client: Any, key: Any) -> FencedValue | None:
    """The value and its fence; None if `set_value()` has not set the key.

    `client` is a synchronous redis-py client; raises ConfigurationError for any other.
    """
    _refuse_what_answers_later(client)
    value, fence = client.hmget(key, "value", "fence")
    return None if fence is None else FencedValue(value, int(fence))


def _refuse_what_answers_later(client: Any) -> None:
    """Refuse pipelines and asyncio clients, whose refusal of a stale value may go unnoticed."""
    kind = type(client)
    if "asyncio" in kind.__module__ or "Pipeline" in kind.__name__:
        raise ConfigurationError(
            f"Fenced values want a synchronous redis-py client that answers at once, not "
            f"{kind.__module__}.{kind.__qualname__}."
        )
