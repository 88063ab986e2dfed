"""Statements in .sql files, beside the modules that execute them."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["statement"]


def statement(package: str, name: str) -> str:
    """The text of `<name>.sql` in the package, without lines that are comments alone."""
    text = (files(package) / f"{name}.sql").read_text("utf-8")
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))
