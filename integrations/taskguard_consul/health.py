"""Check a Consul: read the facts once, then judge them.

Guarantees: sends one request to each agent of the URL, within the link's timeouts. Knows only the
agents in the URL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from taskguard.errors import LockServerUnavailableError
from taskguard.locks import LOCK_SERVER_MEMBER, LOCK_SERVER_QUORUM, Finding
from taskguard_consul import findings
from taskguard_consul.link import ConsulLink, RefusedError

__all__ = ["check", "judge"]


@dataclass(frozen=True, slots=True)
class ConsulFacts:
    """The agents of the URL.

    Attributes:
        silent: the agents that give no answer, and the error of each.
        has_leader: whether an agent knows a leader.
        refused: why the token may not take locks. None: it may.
    """

    silent: dict[str, LockServerUnavailableError] = field(default_factory=dict)
    has_leader: bool = True
    refused: RefusedError | None = None


def check(link: ConsulLink, name: str) -> list[Finding]:
    """Return what is wrong. `name` is a key of taskguard's.

    Raises LockServerUnavailableError if no agent answers.
    """
    return list(judge(_read(link, name), address=link.address))


def judge(facts: ConsulFacts, *, address: str) -> Iterator[Finding]:
    """Judge the agents and the rights of the token."""
    for agent, error in facts.silent.items():
        yield LOCK_SERVER_MEMBER.at(f"the lock server {agent}", error=error)
    where = f"the lock server {address}"
    if not facts.has_leader:
        command = "consul operator raft list-peers"
        yield LOCK_SERVER_QUORUM.at(where, error="the agents know no leader.", command=command)
    if facts.refused is not None:
        yield findings.LOCK_SERVER_RIGHTS.at(where, error=facts.refused)


def _read(link: ConsulLink, name: str) -> ConsulFacts:
    silent: dict[str, LockServerUnavailableError] = {}
    leaders: list[str] = []
    for endpoint in link.endpoints.all:
        try:
            leaders.append(link.leader_of(endpoint))
        except LockServerUnavailableError as error:
            silent[str(endpoint)] = error
    if not leaders:
        raise LockServerUnavailableError(
            f"The lock server {link.address} gave no answer: {' '.join(map(str, silent.values()))}"
        )
    if not any(leaders):
        return ConsulFacts(silent, has_leader=False)
    try:
        link.try_rights(name)
    except RefusedError as error:
        return ConsulFacts(silent, refused=error)
    return ConsulFacts(silent)
