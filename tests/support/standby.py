"""A hot standby of a private PostgreSQL: it follows its primary, and can be promoted."""

from __future__ import annotations

import os

from taskguard_sandbox.servers import Postgres


class Standby(Postgres):
    """Copied from the primary when it starts; `promote()` makes a primary of it."""

    name = "a standby of PostgreSQL"

    def __init__(self, primary: Postgres) -> None:
        super().__init__(hot_standby="on")
        self._primary_port = primary.port

    def _prepare(self) -> None:
        if not self._data.exists():
            if self._user is not None:
                os.chown(self.folder, *self._user)
            self._make_data()

    def _initialise(self) -> list[str]:
        way = ["-h", "127.0.0.1", "-p", str(self._primary_port), "-U", "postgres"]
        how = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        return [str(self._bin() / "pg_basebackup"), *way, "-D", str(self._data), *how]

    def promote(self) -> None:
        """Returns when it is a primary."""
        self.execute("select pg_promote()")
