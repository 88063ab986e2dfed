"""Values in Redis or Valkey that refuse an older fencing token.

    taskguard.fenced.set_value(client, "stock:42", "17", fence=guard.fence)
    taskguard.fenced.get_value(client, "stock:42").value

Guarantees, while the server keeps its memory: one script compares and sets, with all 64 bits. A
value is a hash with the fields `value` and `fence`. It is one key, so it has one slot of a Cluster,
and both fields expire, are renamed and deleted together.

Does not guarantee anything after the key has expired, was evicted or deleted (run the server with
`maxmemory-policy noeviction`), or after a failover that lost the last write. The client's errors
are raised unchanged. A call that got no answer may be repeated.
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
    """A stored value, as the client returns it, and the fence with which it was set."""

    value: Any
    fence: int


def set_value(client: Any, key: Any, value: Any, *, fence: int) -> None:
    """Set `key` to `value`, unless it was set with a newer fence.

    Args:
        client: a synchronous redis-py client (`redis.Redis`, Sentinel's, `RedisCluster`).
        key: the name of a hash that has nothing else.
        value: bytes, text or a number, as redis-py takes it.
        fence: `guard.fence`.

    Raises:
        StaleTokenError: a newer holder has set it (`newer_fence`). Nothing was written.
        ConfigurationError: `fence` is no fencing token, or the client is not synchronous.
    """
    if type(fence) is not int or not 1 <= fence <= _MOST:
        raise ConfigurationError(f"fence={fence!r} is no fencing token: pass guard.fence.")
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
            f"{name} was set with fence {newer}, and this holder has {fence}: a newer holder has "
            "written it. Stop.",
            key=name,
            fence=fence,
            newer_fence=newer,
        )


def get_value(client: Any, key: Any) -> FencedValue | None:
    """Return the value and its fence; None if `set_value()` has not set the key.

    `client` is a synchronous redis-py client. Raises ConfigurationError for any other.
    """
    _refuse_what_answers_later(client)
    value, fence = client.hmget(key, "value", "fence")
    return None if fence is None else FencedValue(value, int(fence))


def _refuse_what_answers_later(client: Any) -> None:
    """Refuse pipelines and asyncio clients, whose refusal of a stale value may go unnoticed."""
    kind = type(client)
    if "asyncio" in kind.__module__ or "Pipeline" in kind.__name__:
        raise ConfigurationError(
            f"Fenced values need a synchronous redis-py client without pipeline, not "
            f"{kind.__module__}.{kind.__qualname__}. Pass a redis.Redis."
        )
