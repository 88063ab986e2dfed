"""The ledger: what it finds itself, given what the tasks want of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from taskguard.doctor.configuration import GuardedTask, named
from taskguard.doctor.locks import LEFT_AT_A_RENEWAL, names_of
from taskguard.errors import LedgerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.model.policy import Policy

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger

__all__ = ["check_ledger"]


def check_ledger(
    ledger: DatabaseLedger, tasks: Sequence[GuardedTask]
) -> tuple[list[Finding], bool]:
    """What is wrong, and whether the database answers."""
    default = Policy()
    longest_s = max((task.limit_s or task.policy.ttl_s for task in tasks), default=default.ttl_s)
    retention_s = max((task.policy.retention_s for task in tasks), default=default.retention_s)
    rows = [task.row for task in tasks if task.row is not None]
    found = _slow_to_connect(ledger, tasks)
    try:
        asked = ledger.check(rows, longest_body_s=longest_s, retention_s=retention_s)
        return [*asked, *found], True
    except LedgerUnavailableError as error:
        return [_away(ledger, error), *found], False


def _slow_to_connect(ledger: DatabaseLedger, tasks: Sequence[GuardedTask]) -> list[Finding]:
    """Whether a lease may end while a renewal connects to the last of several hosts."""
    takes_s = getattr(getattr(ledger, "database", None), "failover_s", 0.0)
    short = [task for task in tasks if task.policy.ttl_s * LEFT_AT_A_RENEWAL < takes_s]
    if not short:
        return []
    return [
        Finding(
            "ttl_below_connect",
            Level.WARNING,
            where=names_of(short),
            what=f"Their leases may end while a connection is made to the ledger {named(ledger)}, "
            f"which takes {takes_s:g} s if only the last of its hosts answers.",
            why="The body loses its lease, and another delivery runs the work again.",
            mend=f"ttl_s={math.ceil(takes_s / LEFT_AT_A_RENEWAL)} or more, or a shorter "
            "connect_timeout= in the URL, for each host.",
        )
    ]


def _away(ledger: DatabaseLedger, error: LedgerUnavailableError) -> Finding:
    return Finding(
        "ledger_away",
        Level.ERROR,
        where=f"the ledger {named(ledger)}",
        what=str(error),
        why="Nothing guarded runs: deliveries are put off, and none is lost.",
        mend="Look whether the database runs, and can be reached from here by that URL.",
    )
