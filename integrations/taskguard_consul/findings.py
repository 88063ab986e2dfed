"""What `check()` looks at in a Consul.

Guarantees: each agent of the URL is asked once, within the time-outs of the link. Does not
guarantee that servers which the URL leaves out are well.
"""

from __future__ import annotations

from taskguard import Finding, Level
from taskguard.errors import LockServerUnavailableError
from taskguard_consul.link import ConsulLink, RefusedError

__all__ = ["check"]


def check(link: ConsulLink, name: str) -> list[Finding]:
    """What is wrong; `name` is a key of ours.

    Raises LockServerUnavailableError where no agent answers at all.
    """
    where = f"the lock server {link.address}"
    silent, leaders = {}, {}
    for endpoint in link.endpoints.all:
        try:
            leaders[endpoint] = link.leader_of(endpoint)
        except LockServerUnavailableError as error:
            silent[endpoint] = str(error)
    if not leaders:
        raise LockServerUnavailableError(
            f"The lock server {link.address} gave no answer: {' '.join(silent.values())}"
        )
    found = [
        Finding(
            "consul_agent",
            Level.WARNING,
            where=f"the lock server {endpoint}",
            what=f"It does not answer, while others do: {said}",
            why="One more that fails may be one too many.",
            fix="Start it again, or take it out of the URL.",
        )
        for endpoint, said in silent.items()
    ]
    if not any(leaders.values()):
        found.append(
            Finding(
                "consul_leader",
                Level.ERROR,
                where=where,
                what="No leader is known to it.",
                why="Without a majority of its servers nothing is granted.",
                fix="Start the servers that are missing: `consul operator raft list-peers`.",
            )
        )
        return found
    try:
        link.try_rights(name)
    except RefusedError as error:
        found.append(
            Finding(
                "consul_token",
                Level.ERROR,
                where=where,
                what=f"It refuses the token: {str(error).rstrip('.')}.",
                why="No lock can be taken.",
                fix='Give the token key_prefix "taskguard/" and session_prefix "" with write.',
            )
        )
    return found
