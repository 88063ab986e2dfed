"""Check an etcd cluster: read the facts once, then judge them.

Guarantees: sends one request to each member of the URL, within the link's timeouts. Skips facts
that this user may not read. Knows only the members in the URL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from taskguard.errors import LockServerUnavailableError
from taskguard.locks import LOCK_SERVER_MEMBER, LOCK_SERVER_QUORUM, Finding
from taskguard_etcd import findings
from taskguard_etcd.link import EtcdLink, RefusedError
from taskguard_etcd.messages import is_never, put, several

__all__ = ["check", "judge"]


@dataclass(frozen=True, slots=True)
class EtcdFacts:
    """A cluster.

    Attributes:
        silent: the members of the URL that give no answer, and the error of each.
        refused: why this user may not take locks. None: it may.
        undecided: why a write got no answer. None: it got one.
        alarms: names of the alarms that are raised.
    """

    silent: dict[str, LockServerUnavailableError] = field(default_factory=dict)
    refused: RefusedError | None = None
    undecided: LockServerUnavailableError | None = None
    alarms: frozenset[str] = frozenset()


def check(link: EtcdLink, name: str) -> list[Finding]:
    """Return what is wrong. `name` is a key of taskguard's.

    Raises LockServerUnavailableError if no member answers.
    """
    return list(judge(_read(link, name), address=link.address))


def judge(facts: EtcdFacts, *, address: str) -> Iterator[Finding]:
    """Judge a cluster and the rights of its user."""
    for member, error in facts.silent.items():
        yield LOCK_SERVER_MEMBER.at(f"the lock server {member}", error=error)
    where = f"the lock server {address}"
    if facts.refused is not None:
        yield findings.LOCK_SERVER_RIGHTS.at(where, error=facts.refused)
    if facts.undecided is not None:
        command = "etcdctl endpoint status --cluster"
        yield LOCK_SERVER_QUORUM.at(where, error=facts.undecided, command=command)
    for alarm in sorted(facts.alarms):
        yield findings.ETCD_ALARM.at(where, alarm=alarm)


def _read(link: EtcdLink, name: str) -> EtcdFacts:
    silent: dict[str, LockServerUnavailableError] = {}
    for endpoint in link.endpoints.all:
        try:
            link.status_of(endpoint)
        except LockServerUnavailableError as error:
            silent[str(endpoint)] = error
    if len(silent) == len(link.endpoints.all):
        raise LockServerUnavailableError(
            f"The lock server {link.address} gave no answer: {' '.join(map(str, silent.values()))}"
        )
    refused = None
    try:
        # It changes nothing, but needs the rights and a majority.
        link.call("/v3/kv/txn", several(when=[is_never(name)], then=[put(name, "")]))
    except RefusedError as error:
        if error.is_of_user:
            return EtcdFacts(silent, refused=error)
        refused = error
    except LockServerUnavailableError as error:
        return EtcdFacts(silent, undecided=error)
    try:
        alarms = link.call("/v3/maintenance/alarm", {"action": "GET"}).get("alarms", [])
    except LockServerUnavailableError:
        alarms = []  # this user may not read them
    if refused is not None and not alarms:
        raise refused
    return EtcdFacts(silent, alarms=frozenset(each.get("alarm", "NONE") for each in alarms))
