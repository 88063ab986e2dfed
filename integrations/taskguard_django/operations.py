"""Operations for migrations. They run what `taskguard ledger create` and `upgrade` run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.db.migrations.operations.base import Operation

from taskguard import ddl_statements, errors, upgrade_statements
from taskguard_django.conf import alias

__all__ = ["CreateLedger", "UpgradeLedger"]

TABLES = (
    "taskguard_snapshot",
    "taskguard_counts",
    "taskguard_actions",
    "taskguard_happenings",
    "taskguard_workers",
    "taskguard_runs",
    "taskguard_messages",
    "taskguard_work",
    "taskguard_keys",
    "taskguard_schema",
)
_KINDS = {"postgresql": "postgresql+psycopg://", "sqlite": "sqlite://"}


class _OnTheLedger(Operation):
    """Runs statements for the ledger's tables, only in the ledger's database."""

    reduces_to_sql = True
    reversible = True

    def forwards(self, schema_editor: Any) -> Iterable[str]:
        """Return the statements of this migration."""
        raise NotImplementedError

    def backwards(self, schema_editor: Any) -> Iterable[str]:
        """Return the statements that undo this migration."""
        raise NotImplementedError

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: the models have operations of their own."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Run the statements of `forwards()`."""
        del app_label, from_state, to_state
        self._execute(schema_editor, self.forwards)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Run the statements of `backwards()`."""
        del app_label, from_state, to_state
        self._execute(schema_editor, self.backwards)

    def _execute(self, schema_editor: Any, of: Callable[[Any], Iterable[str]]) -> None:
        if schema_editor.connection.alias == alias():
            for statement in of(schema_editor):
                schema_editor.execute(statement, params=None)


class CreateLedger(_OnTheLedger):
    """Create the ledger's tables. Backwards, drop them."""

    def forwards(self, schema_editor: Any) -> Iterable[str]:
        """Return what creates the tables, or upgrades those that `taskguard ledger create` made.

        Raises LedgerSchemaError if nothing upgrades them.
        """
        version = None if schema_editor.collect_sql else _version(schema_editor.connection)
        if version is None:
            return ddl_statements(_url(schema_editor), if_not_exists=True)
        return upgrade_statements(_url(schema_editor), version=version)

    def backwards(self, schema_editor: Any) -> Iterable[str]:
        """Return what drops the tables, and with them the record of all work."""
        del schema_editor
        return [f"DROP TABLE IF EXISTS {table}" for table in TABLES]

    def describe(self) -> str:
        """Return the text for `migrate --plan`."""
        return "Create the ledger's tables"


class UpgradeLedger(_OnTheLedger):
    """Upgrade the ledger's tables to version `to`. No row is lost.

    If the first migration has just made them, they have this library's version and stay as they
    are.
    """

    def __init__(self, to: int) -> None:
        self._to = to

    def forwards(self, schema_editor: Any) -> Iterable[str]:
        """Return the upgrade if the tables have the version before, or if SQL is only printed."""
        before, to = self._to - 1, self._to
        if schema_editor.collect_sql or _version(schema_editor.connection) == before:
            return upgrade_statements(_url(schema_editor), version=before, to=to)
        return ()

    def backwards(self, schema_editor: Any) -> Iterable[str]:
        """Return nothing: this library cannot use tables of an older version."""
        del schema_editor
        return ()

    def describe(self) -> str:
        """Return the text for `migrate --plan`."""
        return f"Upgrade the ledger's tables to version {self._to}"


def _url(schema_editor: Any) -> str:
    """Return a URL with only the kind of the database: a test run may have it in memory."""
    kind = schema_editor.connection.vendor
    if kind not in _KINDS:
        raise errors.ConfigurationError(
            f"A database of kind {kind} cannot have a ledger. Use PostgreSQL or SQLite."
        )
    return _KINDS[kind]


def _version(connection: Any) -> int | None:
    """Return the version of the tables, or None if there are none."""
    if TABLES[-1] not in connection.introspection.table_names():
        return None
    with connection.cursor() as cursor:
        cursor.execute("SELECT max(version) FROM taskguard_schema")
        version: int | None = cursor.fetchone()[0]
        return version
