"""A Redis that has the queues: whether messages stay there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from taskguard.doctor import findings
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Finding
from taskguard.locks.redis import RedisLocks
from taskguard.locks.redis.health import RedisFacts

__all__ = ["check_queue_server", "judge_queue_server"]


def check_queue_server(server: Any) -> tuple[str, list[Finding]] | None:
    """Return the address of a Redis and what is wrong with it. Close all connections.

    `server` is a URL or a redis-py client. None: kombu knows URLs that redis-py does not.
    """
    try:
        redis = RedisLocks(server)  # only to read its facts
    except ConfigurationError:
        return None
    where = f"the queues' server {redis.address}"
    with contextlib.closing(redis):
        try:
            return redis.address, list(judge_queue_server(redis.facts(), where=where))
        except LockServerUnavailableError as error:
            text = str(error).replace("The lock server", "The queues' server")
            return redis.address, [findings.QUEUE_SERVER_AWAY.at(where, error=text)]


def judge_queue_server(facts: RedisFacts, *, where: str) -> Iterator[Finding]:
    """Judge what a Redis's facts mean for messages."""
    if facts.replica_of is not None:
        yield findings.QUEUE_REPLICA.at(where, primary=facts.replica_of)
    if facts.evicts:
        yield findings.QUEUE_EVICTION.at(where, policy=facts.policy)
    if not facts.journal:
        yield findings.QUEUE_NO_PERSISTENCE.at(where)
