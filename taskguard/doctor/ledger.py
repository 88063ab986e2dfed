"""The ledger: what it finds itself, given what the tasks want of it."""

from __future__ import annotations

from collections.abc import Sequence

from taskguard.doctor.configuration import GuardedTask, named
from taskguard.errors import LedgerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.ledger.protocol import DatabaseLedger
from taskguard.policy import Policy

__all__ = ["check_ledger"]


def check_ledger(
    ledger: DatabaseLedger, tasks: Sequence[GuardedTask]
) -> tuple[list[Finding], bool]:
    """What is wrong, and whether the database answers."""
    default = Policy()
    longest_s = max((task.limit_s or task.policy.ttl_s for task in tasks), default=default.ttl_s)
    retention_s = max((task.policy.retention_s for task in tasks), default=default.retention_s)
    rows = [task.row for task in tasks if task.row is not None]
    try:
        return ledger.check(rows, longest_body_s=longest_s, retention_s=retention_s), True
    except LedgerUnavailableError as error:
        return [_away(ledger, error)], False


def _away(ledger: DatabaseLedger, error: LedgerUnavailableError) -> Finding:
    return Finding(
        "ledger_away",
        Level.ERROR,
        where=f"the ledger {named(ledger)}",
        what=str(error),
        why="Nothing guarded runs: deliveries are put off, and none is lost.",
        mend="Look whether the database runs, and can be reached from here by that URL.",
    )
