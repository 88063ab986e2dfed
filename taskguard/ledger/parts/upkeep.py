"""Makes, upgrades and checks the tables, and purges old records: `ports.Tables`, `ports.Upkeep`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from taskguard.findings import Finding
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.own_rows.guarded_row import GuardedRow
from taskguard.ledger.parts.base import Part
from taskguard.ledger.schema import creation
from taskguard.ledger.schema.privileges import check_privileges
from taskguard.ledger.schema.upgrades import expect_version, statements_from, upgrade, version_in
from taskguard.model.claims import DeclaredRow
from taskguard.model.history import HISTORY_S
from taskguard.model.policy import DAY_S
from taskguard.model.records import Purged

__all__ = ["SqlUpkeep"]


class SqlUpkeep(Part):
    """The tables, their age and their health."""

    def check_schema(self, rows: Iterable[DeclaredRow] = ()) -> None:
        """Raise LedgerSchemaError unless the tables are there, and those of `rows` as declared.

        It is also raised if the ledger's user lacks a privilege that workers need on them.
        """
        from taskguard.ledger import health  # not for deliveries

        expect_version(health.version_of_tables(self._database))
        check_privileges(self._database)
        self._check_rows(cast("Iterable[GuardedRow]", rows))

    def create_schema(self) -> None:
        """Create the tables that are missing.

        Raises LedgerSchemaError if there are tables of another version.
        """
        creation.create(self._database)

    def upgrade_schema(self) -> tuple[int, int]:
        """Upgrade the tables, and return the versions before and after.

        Raises LedgerSchemaError if there are no tables, or nothing upgrades them.
        """
        return upgrade(self._database)

    def upgrade_statements(self) -> list[str]:
        """Return the SQL that `upgrade_schema()` would run now. Change nothing."""
        kind = self._database.engine.dialect.name
        return statements_from(version_in(self._database), kind=kind)

    def purge(
        self,
        *,
        older_than_s: float,
        batch: int = 1000,
        dead: bool = False,
        history_s: float = HISTORY_S,
    ) -> Purged:
        """Delete work that ended so long ago, its messages, and keys whose lease ended before.

        Delete operators' actions of that age, too, and old happenings and counts of minutes.

        Args:
            older_than_s: in seconds; not shorter than the longest `retention_s` of the tasks, for
                a message of forgotten work that is younger than that would run it again.
            batch: how many rows go in one transaction.
            dead: DEAD work, too, which waits for a person. NEW and PROCESSING work never goes.
            history_s: delete happenings (duplicates, deferrals, lost leases) that are older, in
                seconds; by default a week. The history of a work goes with the work.

        Raises:
            ConfigurationError: `older_than_s` is less than an hour.
        """
        from taskguard.ledger.retention import purge  # not for deliveries

        return purge(
            self._database, older_than_s=older_than_s, batch=batch, dead=dead, history_s=history_s
        )

    @retried
    def mark_left(self, *, after: str, page: int) -> str | None:
        """Flag work of one page whose lease has expired. Return its last id, or None at the end."""
        from taskguard.ledger.operations.left import mark_left  # not for deliveries

        return mark_left(self._database, after=after, page=page)

    def check(
        self,
        rows: Iterable[DeclaredRow] = (),
        *,
        longest_body_s: float = 30.0,
        retention_s: float = 30 * DAY_S,
    ) -> list[Finding]:
        """Return what is wrong with the database, its settings and the tables. Change nothing.

        Args:
            rows: the users' own rows, whose tables have to be as declared.
            longest_body_s: how long a body may take. No timeout should be shorter.
            retention_s: the longest of the tasks' `retention_s`.

        Raises:
            LedgerUnavailableError: it gives no answer at all.
        """
        from taskguard.ledger import health  # not for deliveries

        bounded = self._database.dialect.bounds_idleness(self._database.engine)
        bodies = health.Bodies(
            longest_s=longest_body_s,
            idle_s=self._transactions.idle_s if bounded else None,
            retention_s=retention_s,
        )
        declared = cast("Iterable[GuardedRow]", rows)
        return health.check(
            self._database, bodies=bodies, check_rows=lambda: self._check_rows(declared)
        )

    def close(self) -> None:
        """Close idle connections."""
        self._database.close()
