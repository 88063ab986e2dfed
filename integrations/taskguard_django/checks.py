"""Checks for `manage.py check`. Only the check with the tag `database` opens connections.

The id of each message contains the finding's name, for example `taskguard.tables_missing`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from django.core import checks

from taskguard import connect, errors
from taskguard.integration import UNSET, Configuration, Finding, Level, examine
from taskguard_django import conf, findings

__all__ = ["register"]


def register() -> None:
    """Register the checks when the app is ready."""
    checks.register(check_settings, "taskguard")
    checks.register(check_tasks, "taskguard")
    checks.register(check_tables, checks.Tags.database)


def check_settings(**_: Any) -> list[Any]:
    """Check the lock server's setting, the ledger's database, and the tenants' apps."""
    found = [*_judge_servers(), *conf.tenant_tables()]
    return [_message(each, stops=each.name == "misconfigured") for each in found]


def _judge_servers() -> Iterator[Finding]:
    from django.db import connections

    where = "the setting TASKGUARD"
    try:
        locks = conf.locks()
        conf.url_of(connections[conf.alias()])
    except errors.ConfigurationError as error:
        yield findings.MISCONFIGURED.at(where, error=error)
        return
    if locks is UNSET and not os.environ.get("TASKGUARD_LOCKS_URL"):
        yield findings.NO_LOCK_SERVER.at(where)


def check_tasks(**_: Any) -> list[Any]:
    """Check the settings of the current Celery app and of its guarded tasks, if it is loaded."""
    ours, celery = sys.modules.get("taskguard_celery.doctor"), sys.modules.get("celery")
    if ours is None or celery is None:
        return []
    return _messages(ours.configuration_of(celery.current_app).findings)


def check_tables(databases: Any = None, **_: Any) -> list[Any]:
    """Check the ledger's tables and all servers (`check --database default`).

    All messages are warnings at most, because `migrate` runs this before it creates the tables.
    """
    try:
        if conf.alias() not in (databases or ()):
            return []
        ledger = conf.ledger()
        ledger.check_schema()
    except errors.LedgerSchemaError as error:
        missing = findings.TABLES_MISSING.at("the ledger", problem=error.problem)
        return [_message(missing)]
    except errors.LedgerUnavailableError:
        pass  # `examine()` reports it
    except errors.ConfigurationError:
        return []  # `check_settings()` reports it
    return [] if conf.testing() else _messages(_examined(ledger))


def _examined(ledger: Any) -> Iterator[Finding]:
    """Yield what `taskguard doctor` finds with Django's settings."""
    locks = conf.locks()
    if locks is UNSET and not os.environ.get("TASKGUARD_LOCKS_URL"):
        locks = None  # `check_settings()` reports it
    for report in examine(Configuration(lambda: connect(locks=locks, ledger=ledger))):
        yield from (each for each in report.findings if each.name != "tenant_tables")


def _messages(found: Iterable[Finding]) -> list[Any]:
    return [_message(each) for each in found]


def _message(finding: Finding, *, stops: bool = False) -> Any:
    level = checks.INFO if finding.level is Level.NOTE else checks.WARNING
    return checks.CheckMessage(
        checks.ERROR if stops else level,
        f"{finding.where}: {finding.what} {finding.why}",
        hint=f"{finding.fix} ({finding.link})",
        id=f"taskguard.{finding.name}",
    )
