"""What a migration does: the statements of `taskguard ledger create --sql`, where tables miss."""

from __future__ import annotations

from typing import Any

from django.db.migrations.operations.base import Operation

from taskguard import ddl_statements, errors, upgrade_statements
from taskguard_django.conf import alias

__all__ = ["CreateLedger", "UpgradeLedger"]

TABLES = ("taskguard_messages", "taskguard_works", "taskguard_keys", "taskguard_schema")
_KINDS = {"postgresql": "postgresql+psycopg://", "sqlite": "sqlite://"}


class CreateLedger(Operation):
    """Creates what is missing, in the ledger's database alone; backwards drops the tables."""

    reduces_to_sql = True
    reversible = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The models are in the operations that follow."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Tables that `taskguard ledger create` has made stay as they are."""
        del app_label, from_state, to_state
        if schema_editor.connection.alias == alias():
            for statement in ddl_statements(_url(schema_editor), if_not_exists=True):
                schema_editor.execute(statement, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """All that was ever done is forgotten."""
        del app_label, from_state, to_state
        if schema_editor.connection.alias == alias():
            for table in TABLES:
                schema_editor.execute(f"DROP TABLE IF EXISTS {table}", params=None)

    def describe(self) -> str:
        """For `migrate --plan`."""
        return "Create the ledger's tables"


class UpgradeLedger(Operation):
    """Tables that an earlier version of the library made become those of today; no row is lost.

    Those that are of today already, because the migration before has just made them, stay.
    """

    reduces_to_sql = True
    reversible = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The models are the same."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Printed as SQL it is for tables that are there."""
        del app_label, from_state, to_state
        if schema_editor.connection.alias != alias():
            return
        if schema_editor.collect_sql or _version(schema_editor.connection) == 1:
            for statement in upgrade_statements(_url(schema_editor)):
                schema_editor.execute(statement, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Nothing: tables of an older version are of no use to this library."""

    def describe(self) -> str:
        """For `migrate --plan`."""
        return "Bring the ledger's tables up to version 2"


def _url(schema_editor: Any) -> str:
    """Not where: a test run may have it in memory, and no use for the ledger."""
    kind = schema_editor.connection.vendor
    if kind not in _KINDS:
        raise errors.ConfigurationError(f"taskguard_django has no ledger on {kind}.")
    return _KINDS[kind]


def _version(connection: Any) -> int | None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT max(version) FROM taskguard_schema")
        version: int | None = cursor.fetchone()[0]
        return version
