"""Read statements from .sql files, which are in the folders of the modules that execute them."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["statement"]


def statement(package: str, name: str, **parts: str) -> str:
    """Return the text of `<name>.sql` in the package, without comment lines.

    A line `--| where` is replaced by the part `where=`, if that is given.
    """
    text = (files(package) / f"{name}.sql").read_text("utf-8")
    lines = []
    for line in text.splitlines():
        said = line.lstrip()
        if said.startswith("--|"):
            lines += [parts.pop(said.removeprefix("--|").strip(), "")]
        elif not said.startswith("--"):
            lines.append(line)
    assert not parts, f"{name}.sql has no place for {', '.join(parts)}"  # noqa: S101
    return "\n".join(filter(None, lines))
