"""Findings: what is wrong with a configuration or a server, why that matters, and how to fix it.

A `FindingTemplate` holds the texts of one finding. Each package declares its templates in a module
`findings.py`. Its judge, in `health.py`, takes facts and fills templates in.

Guarantees: the name of a finding is stable and contains no value. `docs/reference/findings.md`
lists every template.

Does not guarantee that values contain no password: judges pass addresses and errors, which have
none.
"""

from __future__ import annotations

import enum

from taskguard.values import value

__all__ = ["Finding", "FindingTemplate", "Level"]


class Level(enum.StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Guarded tasks cannot run, or a guarantee does not hold."""
    WARNING = "warning"
    """It works until something else fails."""
    NOTE = "note"
    """Good to know."""


@value
class Finding:
    """One problem.

    Attributes:
        name: its name in the documentation and in JSON.
        level: how bad it is.
        where: the server, setting or task that has it.
        what: what was found.
        why: what can happen because of it.
        fix: the command or setting that fixes it.
        link: a page of the documentation and its section, or a URL.
    """

    name: str
    level: Level
    where: str
    what: str
    why: str
    fix: str
    link: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what} {self.why} {self.fix}"


@value
class FindingTemplate:
    """The texts of a finding, with named placeholders: `The clocks are {apart_s:.1f} s apart.`.

    Attributes: see `Finding`.
    """

    name: str
    level: Level
    what: str
    why: str
    fix: str
    link: str

    def at(self, where: str, /, **values: object) -> Finding:
        """Return the finding with its placeholders filled in."""
        what, why, fix = (text.format_map(values) for text in (self.what, self.why, self.fix))
        return Finding(self.name, self.level, where, what, why, fix, self.link)
