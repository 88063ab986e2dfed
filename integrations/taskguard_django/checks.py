"""What `manage.py check` says. Nothing here connects but the check that is tagged `database`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from django.core import checks

from taskguard import UNSET, Configuration, Finding, Level, connect, errors, examine
from taskguard_django import conf

__all__ = ["register"]


def register() -> None:
    """Register the checks; called when the app is ready."""
    checks.register(check_settings, "taskguard")
    checks.register(check_tasks, "taskguard")
    checks.register(check_tables, checks.Tags.database)


def check_settings(**_: Any) -> list[Any]:
    """Whether there is a lock server, a database that can have a ledger, and one ledger for all."""
    return [*_check_servers(), *map(_told, conf.tenant_tables())]


def _check_servers() -> list[Any]:
    from django.db import connections

    try:
        locks = conf.locks()
        conf.url_of(connections[conf.alias()])
    except errors.ConfigurationError as error:
        return [checks.Error(str(error), id="taskguard.E001")]
    if locks is UNSET and not os.environ.get("TASKGUARD_LOCKS_URL"):
        return [
            checks.Warning(
                "No lock server is configured.",
                hint='TASKGUARD = {"LOCKS": "redis://localhost/1"}, or TASKGUARD_LOCKS_URL in the '
                'environment; "LOCKS": None leaves it to the ledger alone.',
                id="taskguard.W001",
            )
        ]
    return []


def check_tasks(**_: Any) -> list[Any]:
    """Whether settings of the guarded Celery tasks that are loaded by now can lose work."""
    ours, celery = sys.modules.get("taskguard_celery"), sys.modules.get("celery")
    if ours is None or celery is None:
        return []
    hint = "taskguard_celery.safe_defaults(app) sets what is safe."
    return [
        checks.Warning(f"{task.name} can lose work: {problem}.", hint=hint, id="taskguard.W004")
        for task in list(celery.current_app.tasks.values())
        if ours.guarded_function_of(task) is not None
        for problem in ours.warnings_for(task)
    ]


def check_tables(databases: Any = None, **_: Any) -> list[Any]:
    """Whether the ledger's tables are there (`check --database default`), and what else is wrong.

    Nothing is more than a warning: `migrate`, which makes the tables, asks this first.
    """
    try:
        if conf.alias() not in (databases or ()):
            return []
        ledger = conf.ledger()
        ledger.check_schema()
        return [] if conf.testing() else [_told(finding) for finding in _findings(ledger)]
    except errors.LedgerSchemaError as error:
        hint = (
            "Run `manage.py migrate`. If an older checkout of taskguard made the tables, first run "
            "`manage.py migrate taskguard zero`, which drops them."
        )
        return [checks.Warning(error.problem, hint=hint, id="taskguard.W002")]
    except errors.TaskguardError as error:
        return [checks.Warning(str(error), id="taskguard.W003")]


def _findings(ledger: Any) -> Iterator[Finding]:
    """What `taskguard doctor` finds by Django's settings; its connections are closed."""
    locks = conf.locks()
    if locks is UNSET and not os.environ.get("TASKGUARD_LOCKS_URL"):
        locks = None  # said by `check_settings`
    for report in examine(Configuration(lambda: connect(locks=locks, ledger=ledger))):
        # `check_settings` says what the settings alone say.
        yield from (each for each in report.findings if each.name != "tenant_tables")


def _told(finding: Finding) -> Any:
    level = checks.INFO if finding.level is Level.NOTE else checks.WARNING
    return checks.CheckMessage(
        level,
        f"{finding.where}: {finding.what} {finding.why}",
        hint=finding.mend,
        id=f"taskguard.{finding.name}",
    )
