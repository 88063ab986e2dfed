"""Findings about Django's settings."""

from __future__ import annotations

from taskguard.integration import FindingTemplate, Level

TENANT_TABLES = FindingTemplate(
    "tenant_tables",
    Level.ERROR,
    what='The setting contains "taskguard_django", so each tenant\'s schema has '
    "tables of taskguard.",
    why="The ledger is in one schema. A message that runs in a tenant's schema finds the tenant's "
    "tables, and its transaction is refused.",
    fix='Move "taskguard_django" to SHARED_APPS, run `migrate_schemas --shared`, and drop the '
    "tables in the tenants' schemas.",
    link="docs/how-to/django.md",
)
NO_LOCK_SERVER = FindingTemplate(
    "no_lock_server",
    Level.WARNING,
    what="No lock server is configured.",
    why="No guarded task can run.",
    fix='Set TASKGUARD = {{"LOCKS": "redis://localhost/1"}}, or TASKGUARD_LOCKS_URL in the '
    'environment. With "LOCKS": None the ledger decides alone.',
    link="docs/reference/settings.md",
)
MISCONFIGURED = FindingTemplate(
    "misconfigured",
    Level.ERROR,
    what="{error}",
    why="No guarded task can run.",
    fix="Correct the setting.",
    link="docs/how-to/django.md",
)
TABLES_MISSING = FindingTemplate(
    "tables_missing",
    Level.ERROR,
    what="{problem}",
    why="No guarded task can run.",
    fix="Run `manage.py migrate`. If an older checkout of taskguard made the tables, first run "
    "`manage.py migrate taskguard zero`, which drops them.",
    link="docs/how-to/django.md",
)
