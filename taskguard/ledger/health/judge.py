"""Judge facts of a ledger's database. Nothing here queries the database."""

from __future__ import annotations

import math
from collections.abc import Iterator

from taskguard.errors import LedgerSchemaError
from taskguard.findings import Finding, FindingTemplate
from taskguard.ledger.health import findings
from taskguard.ledger.health.facts import MOST_COUNTED, Bodies, ServerFacts, TableFacts
from taskguard.model.policy import DAY_S

__all__ = ["judge_privileges", "judge_schema", "judge_server", "judge_tables"]

# `taskguard purge` is for every night. Work that is twice as old as needed was never purged.
_RETENTIONS = 2
_FLUSHING = {
    "fsync": "fsync = on in postgresql.conf",
    "synchronous_commit": "synchronous_commit = on for the ledger's role and database",
    "innodb_flush_log_at_trx_commit": "GLOBAL innodb_flush_log_at_trx_commit = 1, and in my.cnf",
    "PRAGMA synchronous": "PRAGMA synchronous = FULL when the Engine connects, or pass a URL",
}


def judge_server(facts: ServerFacts, bodies: Bodies, *, where: str) -> Iterator[Finding]:
    """Judge the server's settings."""
    if facts.read_only is not None:
        yield findings.READ_ONLY.at(where, state=facts.read_only)
    if facts.unflushed is not None:
        safe = _FLUSHING[facts.unflushed.partition(" = ")[0]]
        yield findings.COMMITS_UNFLUSHED.at(where, setting=facts.unflushed, safe=safe)
    if facts.pooled and facts.prepares:
        yield findings.POOLED_PREPARES.at(where)
    for name, limit_s in facts.limits_s.items():
        if limit_s < bodies.longest_s:
            yield findings.TRANSACTION_TIMEOUT.at(
                where, setting=name, limit_s=limit_s, body_s=bodies.longest_s
            )
    if bodies.idle_s is not None and bodies.idle_s < bodies.longest_s:
        yield findings.IDLE_TRANSACTIONS.at(where, limit_s=bodies.idle_s, body_s=bodies.longest_s)


def judge_tables(facts: TableFacts, bodies: Bodies, *, where: str) -> Iterator[Finding]:
    """Judge the state of the ledger's tables."""
    for table in facts.without_key:
        yield findings.PRIMARY_KEY_MISSING.at(where, table=table)
    for index in facts.without_index:
        yield findings.INDEX_MISSING.at(where, index=index)
    age_s = facts.oldest_ended_s
    if age_s is not None and age_s > _RETENTIONS * bodies.retention_s:
        days = max(1, math.ceil(bodies.retention_s / DAY_S))
        yield findings.PURGE_NEVER_RUN.at(where, age_days=age_s / DAY_S, retention_days=days)
    if facts.overdue:
        count = "1,000 or more" if facts.overdue >= MOST_COUNTED else facts.overdue
        yield findings.OVERDUE_WORK.at(where, count=count)


def judge_schema(error: LedgerSchemaError, template: FindingTemplate, *, where: str) -> Finding:
    """Return the finding for tables that are missing, of another version, or not as declared."""
    remedy = str(error).removeprefix(error.problem).strip()
    if not remedy and template is findings.TABLES_MISSING:
        return judge_privileges(error, where=where)  # this user may not read the catalogue
    return template.at(where, problem=error.problem, remedy=remedy)


def judge_privileges(error: LedgerSchemaError, *, where: str) -> Finding:
    """Return the finding for a user that lacks a right which workers need."""
    problem = error.problem.partition(" GRANT it ")[0].partition(" Its user needs ")[0]
    return findings.PRIVILEGES.at(where, problem=problem)
