"""The ledger: what it finds itself, given what the tasks require of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from taskguard.doctor import findings
from taskguard.doctor.configuration import GuardedTask, named
from taskguard.doctor.locks import LEFT_AT_A_RENEWAL, names_of
from taskguard.errors import LedgerUnavailableError
from taskguard.findings import Finding
from taskguard.model.policy import Policy

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger

__all__ = ["check_ledger"]


def check_ledger(
    ledger: DatabaseLedger, tasks: Sequence[GuardedTask]
) -> tuple[list[Finding], bool]:
    """Return what is wrong, and whether the database answers."""
    default = Policy()
    longest_s = max((task.limit_s or task.policy.ttl_s for task in tasks), default=default.ttl_s)
    retention_s = max((task.policy.retention_s for task in tasks), default=default.retention_s)
    rows = [task.row for task in tasks if task.row is not None]
    # A ledger of the user's own may have no database of ours.
    takes_s = getattr(getattr(ledger, "database", None), "failover_s", 0.0)
    slow = list(judge_connect(tasks, takes_s=takes_s, ledger=named(ledger)))
    try:
        found = ledger.check(rows, longest_body_s=longest_s, retention_s=retention_s)
        return [*found, *slow], True
    except LedgerUnavailableError as error:
        where = f"the ledger {named(ledger)}"
        return [findings.LEDGER_AWAY.at(where, error=error), *slow], False


def judge_connect(
    tasks: Sequence[GuardedTask], *, takes_s: float, ledger: str
) -> Iterator[Finding]:
    """Judge whether leases outlast a connection to the last of the ledger's hosts."""
    short = [task for task in tasks if task.policy.ttl_s * LEFT_AT_A_RENEWAL < takes_s]
    if short:
        least_s = math.ceil(takes_s / LEFT_AT_A_RENEWAL)
        yield findings.TTL_BELOW_CONNECT.at(
            names_of(short), ledger=ledger, takes_s=takes_s, least_s=least_s
        )
