"""Alembic in the folder where the command is run: whether it leaves the ledger's tables alone.

Guarantees: files are read, and nothing of them is run. Looks at what `alembic init` made: an
`env.py` that gets its names from another module is taken for one that has them not.
"""

from __future__ import annotations

import configparser
import tomllib
from pathlib import Path

from taskguard.findings import Finding, Level

__all__ = ["check_migrations", "environment_of_alembic"]

_FILTERS = ("include_name", "include_object")


def environment_of_alembic(folder: Path) -> Path | None:
    """The `env.py` that Alembic would run there; None: there is none."""
    where = _location_in_ini(folder / "alembic.ini") or _location_in_toml(folder / "pyproject.toml")
    if where is None:
        return None
    file = folder / where.replace("%(here)s", str(folder)) / "env.py"
    return file if file.is_file() else None


def _location_in_ini(file: Path) -> str | None:
    parser = configparser.RawConfigParser()
    try:
        parser.read(file, encoding="utf-8")
    except (configparser.Error, UnicodeError):
        return None
    return parser.get("alembic", "script_location", fallback=None)


def _location_in_toml(file: Path) -> str | None:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    location = found.get("tool", {}).get("alembic", {}).get("script_location")
    return location if isinstance(location, str) else None


def check_migrations(environment: Path) -> list[Finding]:
    """What is wrong with an `env.py`."""
    text = environment.read_text(encoding="utf-8", errors="replace")
    if any(name in text for name in _FILTERS):
        return []
    return [
        Finding(
            "alembic_drops",
            Level.WARNING,
            where=str(environment),
            what="It has neither include_name nor include_object.",
            why="`alembic revision --autogenerate` drops the ledger's tables, which are in no "
            "model.",
            mend="context.configure(…, include_name=taskguard.include_name).",
        )
    ]
