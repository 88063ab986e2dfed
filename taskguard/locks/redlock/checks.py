"""What may be wrong with several servers, each by itself and together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.protocol import pack
from taskguard.values import value

__all__ = ["look_at"]

_ASKED = (pack(b"INFO"), pack(b"CONFIG", b"GET", b"appendfsync"), pack(b"TIME"))
# Leases run by each server's own clock. One that is corrected by so much ends them, or renews them.
_MOST_APART_S = 1.0


@value
class _Report:
    """What one server says of itself; empty where this user may not ask."""

    where: str
    values: dict[str, str]
    forgets_nothing: bool
    ahead_s: float | None


def look_at(links: Sequence[RedisLink]) -> list[Finding]:
    """All that is found. Raises LockServerUnavailableError where no server answers."""
    reports: list[_Report] = []
    silent: list[tuple[RedisLink, LockServerUnavailableError]] = []
    for link in links:
        try:
            reports.append(_report(link))
        except LockServerUnavailableError as error:
            silent.append((link, error))
    if not reports:
        raise silent[0][1]
    findings = [_away(link, error) for link, error in silent]
    findings += _of_their_number(len(links))
    findings += _of_their_identity(reports)
    findings += _of_their_clocks(reports)
    findings += _of_their_memory(reports)
    for report in reports:
        findings += _of_one(report)
    return findings


def _report(link: RedisLink) -> _Report:
    asked_at_s = SYSTEM_CLOCK.wall_s()
    connection, (info, policy, time) = link.connect(*_ASKED)
    connection.disconnect()
    answered_at_s = SYSTEM_CLOCK.wall_s()
    values: dict[str, str] = {}
    if isinstance(info, bytes):
        lines = info.decode("utf-8", "replace").splitlines()
        values = dict(line.split(":", 1) for line in lines if ":" in line)
    always = isinstance(policy, list) and b"always" in [bytes(word) for word in policy]
    return _Report(
        where=f"the lock server {link.address}",
        values=values,
        forgets_nothing=always and values.get("aof_enabled") == "1",
        ahead_s=_ahead_s(time, (asked_at_s + answered_at_s) / 2),
    )


def _ahead_s(time: Any, here_s: float) -> float | None:
    return int(time[0]) + int(time[1]) / 1e6 - here_s if isinstance(time, list) else None


def _away(link: RedisLink, error: LockServerUnavailableError) -> Finding:
    return Finding(
        "redlock_away",
        Level.WARNING,
        where=f"the lock server {link.address}",
        what=f"It has no vote: {error}",
        why="Fewer of the others may fail before no majority is left and the ledger decides alone.",
        fix="Start it, or correct its address in the URL.",
    )


def _of_their_number(count: int) -> Iterator[Finding]:
    if count >= 3 and count % 2:
        return
    quorum = count // 2 + 1
    yield Finding(
        "redlock_count",
        Level.WARNING,
        where="the lock servers",
        what=f"There are {count} of them, and {quorum} have to answer.",
        why=f"{count - quorum} may fail, as with {max(1, count - 1)}: the last one adds nothing.",
        fix="Name three servers, or five, on machines of their own.",
    )


def _of_their_identity(reports: Sequence[_Report]) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for report in reports:
        run_id = report.values.get("run_id")
        if run_id is None:
            continue
        if run_id in seen:
            yield Finding(
                "redlock_same_server",
                Level.ERROR,
                where=report.where,
                what=f"It is the same server as {seen[run_id]}.",
                why="It has more than one vote: where it fails, or forgets, several do at once.",
                fix="Name each server once.",
            )
        seen.setdefault(run_id, report.where)


def _of_their_clocks(reports: Sequence[_Report]) -> Iterator[Finding]:
    known = sorted(
        (report.ahead_s, report.where) for report in reports if report.ahead_s is not None
    )
    if not known:
        return
    middle_s = known[len(known) // 2][0]
    for ahead_s, where in known:
        if abs(ahead_s - middle_s) > _MOST_APART_S:
            yield Finding(
                "redlock_clock",
                Level.WARNING,
                where=where,
                what=f"Its clock is {abs(ahead_s - middle_s):.1f} s "
                f"{'ahead of' if ahead_s > middle_s else 'behind'} the other servers'.",
                why="A clock that is set right all at once ends leases, and hides a restart.",
                fix="Let chrony or ntpd keep it, and make it go slower or faster, never jump.",
            )


def _of_their_memory(reports: Sequence[_Report]) -> Iterator[Finding]:
    forgetful = [r.where.split()[-1] for r in reports if r.values and not r.forgets_nothing]
    if forgetful:
        yield Finding(
            "redlock_persistence",
            Level.NOTE,
            where="the lock servers",
            what=f"{', '.join(forgetful)} may forget locks when started again.",
            why="Such a server then has no vote until the longest lease has run out.",
            fix="Nothing, if the others are enough meanwhile; else appendonly yes and "
            "appendfsync always, by which each lock waits for its disk.",
        )


def _of_one(report: _Report) -> Iterator[Finding]:
    values = report.values
    if values.get("role") == "slave":
        yield Finding(
            "redlock_replica",
            Level.ERROR,
            where=report.where,
            what=f"It is a replica of {values.get('master_host')}:{values.get('master_port')}.",
            why="It grants nothing, and promoted it lacks what its master granted last.",
            fix="REPLICAOF NO ONE, or name a server that stands by itself.",
        )
    policy = values.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and values.get("maxmemory", "0") != "0":
        yield Finding(
            "eviction",
            Level.WARNING,
            where=report.where,
            what=f"It has maxmemory-policy {policy}.",
            why="When it is full it throws locks away.",
            fix="CONFIG SET maxmemory-policy noeviction, or give locks a server of their own.",
        )
