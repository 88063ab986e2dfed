"""Whether Alembic, in the folder where the command runs, leaves the ledger's tables alone.

Guarantees: reads files and runs none of them. Does not find a filter that `env.py` imports from
another module.
"""

from __future__ import annotations

import configparser
import tomllib
from pathlib import Path

from taskguard.doctor import findings
from taskguard.findings import Finding

__all__ = ["check_migrations", "environment_of_alembic"]

_FILTERS = ("include_name", "include_object")


def environment_of_alembic(folder: Path) -> Path | None:
    """Return the `env.py` that Alembic would run there, or None."""
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
    """Return what is wrong with an `env.py`."""
    text = environment.read_text(encoding="utf-8", errors="replace")
    if any(name in text for name in _FILTERS):
        return []
    return [findings.ALEMBIC_DROPS.at(str(environment))]
