"""Read connection options from a service file of PostgreSQL.

Guarantees: a file that cannot be read has no options and raises no error. libpq reports it when it
connects.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import sqlalchemy as sa

__all__ = ["options_of"]


def options_of(url: sa.URL) -> dict[str, str]:
    """Return the options of the service that the URL or PGSERVICE names, or {} without one."""
    named = url.query.get("service") or os.environ.get("PGSERVICE")
    if not named:
        return {}
    service = named if isinstance(named, str) else named[0]
    for path in _files():
        found = _section(path, service)
        if found is not None:
            return found
    return {}


def _files() -> list[Path]:
    own = os.environ.get("PGSERVICEFILE")
    shared = os.environ.get("PGSYSCONFDIR")
    files = [Path(own)] if own else []
    if not own:
        with contextlib.suppress(RuntimeError):  # this user has no home
            files = [Path("~/.pg_service.conf").expanduser()]
    return [*files, Path(shared) / "pg_service.conf"] if shared else files


def _section(path: Path, service: str) -> dict[str, str] | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found: dict[str, str] | None = None
    for line in map(str.strip, lines):
        if line.startswith("["):
            if found is not None:
                break
            found = {} if line == f"[{service}]" else None
        elif found is not None and "=" in line and not line.startswith("#"):
            name, _, text = line.partition("=")
            found[name.strip()] = text.strip()
    return found
