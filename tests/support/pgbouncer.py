"""PgBouncer before a PostgreSQL, with transactions pooled: no session state outlives one."""

from __future__ import annotations

import os
import shutil

from taskguard_sandbox.process import nobody
from taskguard_sandbox.servers import Server


class PgBouncer(Server):
    """Debian's. `url_of(database)` is the way through it; one connection to the server serves all.

    As root, which it refuses to run as, it runs as `nobody`.
    """

    name = "PgBouncer"

    def __init__(self, postgres_port: int) -> None:
        super().__init__()
        self._postgres_port = postgres_port

    @classmethod
    def available(cls) -> str | None:
        return None if cls.binary() else "pgbouncer is not installed (Debian: pgbouncer)"

    @staticmethod
    def binary() -> str | None:
        """Debian has it where a user's PATH does not look."""
        return shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin")

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    @property
    def _user(self) -> tuple[int, int] | None:
        return nobody()

    def _prepare(self) -> None:
        lines = [
            "[databases]",
            f"* = host=127.0.0.1 port={self._postgres_port} user=postgres",
            "[pgbouncer]",
            "listen_addr = 127.0.0.1",
            f"listen_port = {self.port}",
            "unix_socket_dir =",
            "auth_type = any",
            "pool_mode = transaction",
            "default_pool_size = 4",
        ]
        (self.folder / "pgbouncer.ini").write_text("\n".join([*lines, ""]))
        if self._user is not None:
            os.chown(self.folder, *self._user)

    def _command(self) -> list[str]:
        binary = self.binary()
        assert binary is not None
        return [binary, str(self.folder / "pgbouncer.ini")]

    def _answers(self) -> bool:
        # An SSLRequest; "N" is the answer of a server without TLS.
        return self._ask(b"\x00\x00\x00\x08\x04\xd2\x16\x2f") == b"N"
