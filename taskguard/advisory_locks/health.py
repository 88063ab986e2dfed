"""Check whether the locks of a session exclude others: read the facts once, then judge them."""

from __future__ import annotations

from collections.abc import Iterator

from taskguard.advisory_locks import findings
from taskguard.advisory_locks.session import Opened, Session
from taskguard.findings import Finding

__all__ = ["check", "judge"]

_IN_GALERA = "show variables like 'wsrep_on'"


def check(session: Session) -> list[Finding]:
    """Return what is wrong with an open session and its server."""
    where = f"the locks in {session.database.place}"
    return list(judge(session.opened, in_galera=_is_in_galera(session), where=where))


def judge(opened: Opened, *, in_galera: bool, where: str) -> Iterator[Finding]:
    """Judge the facts that a session reported when it was opened."""
    if not opened.own:
        yield findings.ADVISORY_POOLED.at(where)
    if opened.replica:
        yield findings.ADVISORY_REPLICA.at(where)
    if in_galera:
        yield findings.ADVISORY_GALERA.at(where)


def _is_in_galera(session: Session) -> bool:
    if session.database.engine.dialect.name == "postgresql":
        return False
    with session.database.transaction() as db:
        row = db.exec_driver_sql(_IN_GALERA).first()
    return row is not None and bool(row[1] == "ON")
