"""Stores the names of workers, which errors, events and log lines read: `ports.Workers`.

Guarantees: a row is written and changed only by the worker with its number, host and pid. So the
name of a worker is never that of another worker with the same number.
"""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.parts.base import Part
from taskguard.ledger.tables import WORKERS
from taskguard.model.workers import Worker

__all__ = ["SqlWorkers"]

_IDENTITY = ("number", "host", "pid")
_NAMES = (*_IDENTITY, "kind", "name", "queues", "version")


class SqlWorkers(Part):
    """Workers by their numbers."""

    @retried
    def register_worker(self, worker: Worker) -> bool:
        """Store a worker, or note that it was seen. Return False if another one has its number."""
        seen = {"seen": self._database.now()}
        values = {each: getattr(worker, each) for each in _NAMES}
        new = {**values, **seen, "started": self._database.now()}
        ours = (WORKERS.c[each] == values[each] for each in _IDENTITY)
        # As short as a renewal: the thread that renews leases calls this.
        with self._database.transaction(lock_timeout_s=self._database.lock_timeout_s) as db:
            db.execute(self._database.dialect.insert_missing(WORKERS, new))
            # MariaDB and MySQL do not say whether they inserted a row.
            found = db.execute(sa.update(WORKERS).where(*ours).values(**values, **seen))
            return found.rowcount == 1

    @retried
    def worker(self, number: str) -> Worker | None:
        """Return the worker with this number, or None if it is not on record."""
        select = sa.select(*(WORKERS.c[each] for each in _NAMES)).where(WORKERS.c.number == number)
        with self._database.transaction() as db:
            row = db.execute(select).first()
        return None if row is None else Worker(**dict(zip(_NAMES, row, strict=True)))
