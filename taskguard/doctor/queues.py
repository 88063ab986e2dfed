"""A Redis that has the queues: whether messages stay there, and whether locks lie among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.locks.base import LockProvider
from taskguard.locks.redis import RedisLocks
from taskguard.locks.redis.findings import RedisFacts

__all__ = ["QueueServer", "judge_queue_server"]


class QueueServer:
    """A Redis by its URL, or a redis-py client. Raises ConfigurationError for what is none."""

    def __init__(self, server: Any) -> None:
        self._redis = RedisLocks(server)  # asked for its facts alone
        self.address = self._redis.address

    def check(self, *, locks: LockProvider | None) -> list[Finding]:
        """What is wrong, and whether locks are there, too; connections are closed."""
        where = f"the queues' server {self.address}"
        found = list(_judge_place(self.address, locks, where=where))
        try:
            facts = self._redis.facts()
        except LockServerUnavailableError as error:
            return [_away(error, where=where), *found]
        finally:
            self._redis.close()
        return [*judge_queue_server(facts, where=where), *found]

    @classmethod
    def of(cls, server: Any) -> QueueServer | None:
        """None where locks would not connect so: kombu has options that redis-py has not."""
        try:
            return cls(server)
        except ConfigurationError:
            return None


def judge_queue_server(facts: RedisFacts, *, where: str) -> Iterator[Finding]:
    """What a Redis's facts mean for messages."""
    if facts.replica_of is not None:
        yield Finding(
            "queue_replica",
            Level.ERROR,
            where=where,
            what=f"It is a replica of {facts.replica_of}.",
            why="It takes no messages.",
            mend="Give the master's address, or Sentinel's.",
        )
    if facts.evicts:
        yield Finding(
            "queue_eviction",
            Level.WARNING,
            where=where,
            what=f"It has maxmemory-policy {facts.policy}.",
            why="When it is full it throws messages away.",
            mend="CONFIG SET maxmemory-policy noeviction.",
        )
    if not facts.journal:
        yield Finding(
            "queue_no_persistence",
            Level.WARNING,
            where=where,
            what="It does not write each change to its disk (appendonly no).",
            why="A crash loses messages; a sweep sends again only what is recoverable=True, or "
            "was enqueued in a transaction.",
            mend="CONFIG SET appendonly yes, and in redis.conf.",
        )


def _judge_place(address: str, locks: LockProvider | None, *, where: str) -> Iterator[Finding]:
    if isinstance(locks, RedisLocks) and _same(locks.address, address):
        yield Finding(
            "shared_database",
            Level.NOTE,
            where=where,
            what="Locks are in the same database as the queues.",
            why="Emptying the queues by FLUSHDB frees all locks.",
            mend="A database number of their own for locks, for example …/1.",
        )


def _same(one: str, other: str) -> bool:
    return one.replace("localhost", "127.0.0.1") == other.replace("localhost", "127.0.0.1")


def _away(error: LockServerUnavailableError, *, where: str) -> Finding:
    said = str(error).replace("The lock server", "The queues' server")
    return Finding(
        "queue_server_away",
        Level.ERROR,
        where=where,
        what=said,
        why="No message comes or goes.",
        mend="Look whether it runs, and whether it can be reached from here by that address.",
    )
