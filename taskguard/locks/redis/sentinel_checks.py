"""What may be wrong with a group of Sentinels and the servers that they watch.

Each Sentinel of the URL is asked, and each server that they know of. What a user may not ask is
left out; a server that does not answer is Sentinel's business, and left out, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.locks.redis.findings import RedisFacts, facts_of, findings_of
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.protocol import pack

if TYPE_CHECKING:
    from redis import Redis

    from taskguard.locks.redis.sentinel import SentinelLink

__all__ = ["check_group"]

State = dict[str, Any]  # what a Sentinel knows of the master, as redis-py reads it

_FEWEST = 3
# A third of a lease of 30 s, which is the default: until then a holder has renewed in vain once.
_SLOWEST_MS = 10_000
_CLOCKS_APART_S = 1.0
# What a failover takes once the master counts as gone: 1.7 s where it was measured.
_ELECTION_S = 3.0


def check_group(link: SentinelLink) -> list[Finding]:
    """All findings; raises LockServerUnavailableError where no Sentinel answers.

    The link then knows how long a failover takes.
    """
    where = f"the lock server {link.address}"
    states: dict[Redis, State] = {}
    silent: list[LockServerUnavailableError] = []
    for sentinel in link.sentinels.sentinels:
        try:
            states[sentinel] = link.sentinels.state(sentinel)
        except LockServerUnavailableError as error:
            silent.append(error)
    if not states:
        raise silent[0]
    newest = max(states.values(), key=lambda state: state["config-epoch"])
    link.failover_s = newest["down-after-milliseconds"] / 1000 + _ELECTION_S
    servers = [(newest["ip"], newest["port"]), *_replicas(link, list(states))]
    return [
        *map(_silence, silent),
        *_few(where, list(states.values())),
        *_disagreement(where, list(states.values())),
        *_quorum(where, newest),
        *_slow(where, newest),
        *_servers(link, where, servers),
    ]


def _silence(error: LockServerUnavailableError) -> Finding:
    return Finding(
        "sentinel_silent",
        Level.WARNING,
        where="the lock server's Sentinels",
        what=str(error),
        why="Each that is missing brings the group closer to where it cannot fail over.",
        fix="Start it, mend the network or its user's rights, or take it out of the URL.",
    )


def _few(where: str, states: list[State]) -> Iterator[Finding]:
    known = max(map(_sentinels, states))
    if min(known, len(states)) < _FEWEST:
        yield Finding(
            "sentinel_count",
            Level.WARNING,
            where=where,
            what=f"Of the Sentinels in the URL {len(states)} answer, and they know of {known}.",
            why="With fewer than three, the loss of one may be the end of failing over, or of "
            "finding the master.",
            fix="Run three Sentinels or more on machines of their own, and name them all.",
        )


def _disagreement(where: str, states: list[State]) -> Iterator[Finding]:
    named = sorted({f"{state['ip']}:{state['port']}" for state in states})
    if len(named) > 1:
        yield Finding(
            "sentinel_disagreement",
            Level.ERROR,
            where=where,
            what=f"Its Sentinels name different masters: {', '.join(named)}.",
            why="A client that hears one of them alone takes locks where the others do not.",
            fix="In a failover this passes; else see that the Sentinels reach each other, and "
            "SENTINEL RESET where one watches another group.",
        )


def _quorum(where: str, state: State) -> Iterator[Finding]:
    quorum, known = state["quorum"], _sentinels(state)
    if known > 1 and not 2 <= quorum <= known:
        too_low = quorum < 2
        yield Finding(
            "sentinel_quorum",
            Level.WARNING if too_low else Level.ERROR,
            where=where,
            what=f"Its quorum is {quorum}, of {known} Sentinels.",
            why="One Sentinel that is cut off begins a failover."
            if too_low
            else "They never begin a failover.",
            fix=f"SENTINEL SET <name> quorum {known // 2 + 1}, at each Sentinel.",
        )


def _slow(where: str, state: State) -> Iterator[Finding]:
    after_ms = state["down-after-milliseconds"]
    if after_ms >= _SLOWEST_MS:
        yield Finding(
            "sentinel_slow",
            Level.WARNING,
            where=where,
            what=f"Its down-after-milliseconds is {after_ms}.",
            why="A master that is gone for that long takes leases of 30 s with it: keep it well "
            "below a third of ttl_s.",
            fix="SENTINEL SET <name> down-after-milliseconds 5000, at each Sentinel.",
        )


def _sentinels(state: State) -> int:
    return int(state["num-other-sentinels"]) + 1


def _replicas(link: SentinelLink, sentinels: list[Redis]) -> list[tuple[str, int]]:
    """Return the replicas that are up, as the first Sentinel that may say so knows them."""
    for sentinel in sentinels:
        try:
            replicas = sentinel.sentinel_slaves(link.sentinels.name)
        except (RedisError, OSError):
            continue
        return [
            (each["ip"], each["port"])
            for each in replicas
            if not (each["is_sdown"] or each["is_odown"] or each["is_disconnected"])
        ]
    return []


def _servers(link: SentinelLink, where: str, servers: list[tuple[str, int]]) -> Iterator[Finding]:
    ahead_s: dict[str, float] = {}
    for number, (host, port) in enumerate(servers):
        server = link.to(host, port)
        this = f"the lock server {host}:{port}"
        try:
            facts = facts_of(server.ask(pack(b"INFO")).decode("utf-8", "replace"))
            ahead_s[f"{host}:{port}"] = _ahead_s(server)
        except LockServerUnavailableError:
            continue
        finally:
            server.close()
        if number == 0:
            yield from _replication(where, facts)  # the rest of the master is the provider's
        else:
            # What matters once it is the master.
            yield from findings_of(replace(facts, replica_of=None), where=this)
    yield from _clocks(where, ahead_s)


def _replication(where: str, facts: RedisFacts) -> Iterator[Finding]:
    if facts.replicas == 0:
        yield Finding(
            "no_replica",
            Level.ERROR,
            where=where,
            what="Its master has no replica.",
            why="There is nothing to fail over to.",
            fix="Start one with replicaof, or see why it is not connected (masterauth).",
        )


def _ahead_s(server: RedisLink) -> float:
    before_s = SYSTEM_CLOCK.wall_s()
    seconds, micros = server.ask(pack(b"TIME"))
    return float(int(seconds) + int(micros) / 1e6 - (before_s + SYSTEM_CLOCK.wall_s()) / 2)


def _clocks(where: str, ahead_s: dict[str, float]) -> Iterator[Finding]:
    if not ahead_s:
        return
    first, last = min(ahead_s, key=ahead_s.__getitem__), max(ahead_s, key=ahead_s.__getitem__)
    apart_s = ahead_s[last] - ahead_s[first]
    if apart_s > _CLOCKS_APART_S:
        yield Finding(
            "clocks_apart",
            Level.WARNING,
            where=where,
            what=f"The clock of {last} is {apart_s:.1f} s ahead of that of {first}.",
            why="Tokens are the server's clock: after a failover they may go back by that much, "
            "where a ledger does not make them.",
            fix="Run an NTP client on each of the machines.",
        )
