"""Fresh interpreters in which drivers and frameworks are missing, as where an extra is left out."""

from __future__ import annotations

from support.scripts import run_script

__all__ = ["ALL", "run_without"]

ALL = frozenset(
    {"celery", "django", "fakeredis", "kazoo", "kombu", "psycopg", "pymysql", "redis", "rich", "rq"}
    | {"sqlalchemy", "urllib3", "prometheus_client", "opentelemetry", "shtab"}
)
"""Every package that an extra brings, by the name that it is imported by."""


def run_without(hidden: frozenset[str] | set[str], code: str) -> str:
    """Return what `code` prints where importing a hidden package fails; the code must succeed."""
    hiding = f"import sys; sys.modules.update(dict.fromkeys({sorted(hidden)!r}))\n"
    return run_script(hiding + code)
