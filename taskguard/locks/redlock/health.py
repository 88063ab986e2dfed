"""Check the servers of Redlock, each by itself and together: read facts once, then judge them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding
from taskguard.locks.findings import LOCK_SERVER_MEMBER
from taskguard.locks.redis.findings import EVICTION
from taskguard.locks.redis.health import RedisFacts, facts_of
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.protocol import pack
from taskguard.locks.redlock import findings

__all__ = ["check", "judge"]


def check(links: Sequence[RedisLink]) -> list[Finding]:
    """Return what is wrong. Raise LockServerUnavailableError if no server answers."""
    servers: dict[str, RedisFacts] = {}
    silent: dict[str, LockServerUnavailableError] = {}
    for number, link in enumerate(links):
        # One address may be in the URL twice.
        where = f"the lock server {link.address} (number {number + 1} of {len(links)})"
        try:
            servers[where] = _read(link)
        except LockServerUnavailableError as error:
            silent[where] = error
    if not servers:
        raise next(iter(silent.values()))
    found = [LOCK_SERVER_MEMBER.at(where, error=error) for where, error in silent.items()]
    return [*found, *judge(servers)]


def judge(servers: Mapping[str, RedisFacts]) -> Iterator[Finding]:
    """Judge the facts of each server, by its address."""
    first: dict[str, str] = {}
    for where, facts in servers.items():
        if facts.run_id in first:
            yield findings.REDLOCK_SAME_SERVER.at(where, other=first[facts.run_id])
        elif facts.run_id:
            first[facts.run_id] = where
        if facts.replica_of is not None:
            yield findings.REDLOCK_REPLICA.at(where, primary=facts.replica_of)
        if facts.evicts:
            yield EVICTION.at(where, policy=facts.policy)


def _read(link: RedisLink) -> RedisFacts:
    try:
        return facts_of(link.ask(pack(b"INFO")).decode("utf-8", "replace"))
    except LockServerUnavailableError as error:
        if not link.was_refused(error):
            raise
        return RedisFacts()  # locks do not need that right
