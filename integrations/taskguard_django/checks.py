"""What `manage.py check` says. Nothing here connects but the check that is tagged `database`."""

from __future__ import annotations

from typing import Any

from django.core import checks

from taskguard import errors
from taskguard_django import conf

__all__ = ["register"]


def register() -> None:
    """For the app."""
    checks.register(check_settings, "taskguard")
    checks.register(check_tables, checks.Tags.database)


def check_settings(**_: Any) -> list[Any]:
    """Whether there is a lock server, and a database that can have a ledger."""
    import os

    from django.db import connections

    from taskguard import UNSET

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


def check_tables(databases: Any = None, **_: Any) -> list[Any]:
    """Whether the ledger's tables are there (`check --database default`)."""
    try:
        if conf.alias() not in (databases or ()):
            return []
        conf.ledger().check_schema()
    except errors.LedgerSchemaError as error:
        hint = "Run `manage.py migrate`."
        return [checks.Warning(str(error), hint=hint, id="taskguard.W002")]
    except errors.TaskguardError as error:
        return [checks.Warning(str(error), id="taskguard.W003")]
    return []
