"""What `check()` looks at in an etcd cluster.

Guarantees: each member of the URL is asked once, within the time-outs of the link; what the user
may not ask is left out. Does not guarantee that members which the URL leaves out are well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from taskguard import Finding, Level
from taskguard.errors import LockServerUnavailableError
from taskguard.locks import Endpoint
from taskguard_etcd.link import EtcdLink, RefusedError, clock_s
from taskguard_etcd.messages import is_never, put, several

__all__ = ["check"]

_LONG_TTL_S = 5
_CLOCKS_APART_S = 2.0


def check(link: EtcdLink, name: str) -> list[Finding]:
    """What is wrong; `name` is a key of ours.

    Raises LockServerUnavailableError where no member answers at all.
    """
    members = {endpoint: _status(link, endpoint) for endpoint in link.endpoints.all}
    answering = {each: said for each, said in members.items() if isinstance(said, dict)}
    if not answering and not any(isinstance(said, int) for said in members.values()):
        raise LockServerUnavailableError(
            f"The lock server {link.address} gave no answer: "
            + " ".join(map(str, members.values()))
        )
    found = [each for pair in members.items() for each in _of_member(*pair)]
    if answering:
        found += _of_cluster(link, name, answering)
    return found


def _status(link: EtcdLink, endpoint: Endpoint) -> dict[str, Any] | int | str:
    """What a member says of itself; a status of HTTP that is no answer of etcd's; or an error."""
    try:
        reply = link.status_of(endpoint)
    except LockServerUnavailableError as error:
        return str(error)
    if reply.status != 200:
        return reply.status
    said: dict[str, Any] = json.loads(reply.data)
    now_s = clock_s(reply.headers.get("Date", ""))
    said["ahead_s"] = None if now_s is None else now_s - time.time()
    return said


def _of_member(endpoint: Endpoint, said: dict[str, Any] | int | str) -> Iterator[Finding]:
    where = f"the lock server {endpoint}"
    if isinstance(said, int):
        yield Finding(
            "etcd_gateway",
            Level.ERROR,
            where=where,
            what=f"It answers with status {said} where etcd has its JSON gateway.",
            why="Locks speak to nothing else.",
            fix="Run etcd 3.4 or later, without --enable-grpc-gateway=false.",
        )
    elif isinstance(said, str):
        yield Finding(
            "etcd_member",
            Level.WARNING,
            where=where,
            what=f"It does not answer, while others do: {said}",
            why="One more that fails may be one too many.",
            fix="Start it again, or take it out of the URL.",
        )
    else:
        # Half a second: what its clock says is cut to the second.
        ahead_s = said["ahead_s"]
        if ahead_s is not None and abs(ahead_s + 0.5) > _CLOCKS_APART_S + 0.5:
            yield Finding(
                "etcd_clock",
                Level.WARNING,
                where=where,
                what=f"Its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}.",
                why="Tokens follow it: after a change of the lock server they may be too low.",
                fix="Let NTP set the clocks of both machines.",
            )


def _of_cluster(
    link: EtcdLink, name: str, members: dict[Endpoint, dict[str, Any]]
) -> Iterator[Finding]:
    where = f"the lock server {link.address}"
    try:
        # It is never done, but asks for the right to do it, and for a majority.
        link.call("/v3/kv/txn", several(when=[is_never(name)], then=[put(name, "")]))
    except RefusedError as error:
        if error.is_of_user:
            yield Finding(
                "etcd_user",
                Level.ERROR,
                where=where,
                what=f"It refuses the user: {error.said}.",
                why="No lock can be taken.",
                fix="Correct the URL, or the rights that `etcdctl user get NAME` shows.",
            )
            return
    except LockServerUnavailableError as error:
        leaderless = [str(each) for each, said in members.items() if not _has_leader(said)]
        yield Finding(
            "etcd_quorum",
            Level.ERROR,
            where=where,
            what=(
                f"No leader is known to {', '.join(leaderless)}."
                if leaderless
                else f"It answers to nothing that is to be decided: {str(error).rstrip('.')}."
            ),
            why="Without a majority of its members nothing is granted.",
            fix="Start the members that are missing: `etcdctl endpoint status --cluster`.",
        )
        return
    yield from _alarms(link, where)
    yield from _least_ttl(link, where)


def _alarms(link: EtcdLink, where: str) -> Iterator[Finding]:
    try:
        answer = link.call("/v3/maintenance/alarm", {"action": "GET"})
    except LockServerUnavailableError:
        return  # this user may not ask
    for alarm in sorted({each.get("alarm", "NONE") for each in answer.get("alarms", [])}):
        full = alarm == "NOSPACE"
        yield Finding(
            "etcd_alarm",
            Level.ERROR,
            where=where,
            what=f"It has raised the alarm {alarm}.",
            why="It takes no more writes: no lock is granted." if full else "Its data is damaged.",
            fix=(
                "Compact and defragment it, then `etcdctl alarm disarm`; run it with "
                "--auto-compaction-retention."
                if full
                else "Replace the member that `etcdctl alarm list` names."
            ),
        )


def _least_ttl(link: EtcdLink, where: str) -> Iterator[Finding]:
    """It is asked for one second, and the lease is ended again."""
    try:
        answer = link.call("/v3/lease/grant", {"TTL": "1", "ID": "0"})
        link.call("/v3/lease/revoke", {"ID": answer["ID"]})
    except LockServerUnavailableError:
        return  # an alarm, or this user may not
    least_s = int(answer["TTL"])
    if least_s > _LONG_TTL_S:
        yield Finding(
            "etcd_ttl",
            Level.WARNING,
            where=where,
            what=f"Its shortest lease is {least_s} s, for that is 1.5 times its election time-out.",
            why="The keys of a dead worker stay taken for at least so long.",
            fix="Lower --election-timeout, or count with it in ttl_s.",
        )


def _has_leader(said: dict[str, Any]) -> bool:
    return str(said.get("leader", "0")) != "0"
