"""What is found wrong with a part of the configuration: what, why it matters, what mends it.

Guarantees: a finding's name is stable, and says nothing of the value; no text of it has a password.
Every name stands in `docs/reference/findings.md`.
"""

from __future__ import annotations

import enum

from taskguard.values import value

__all__ = ["Finding", "Level"]


class Level(enum.StrEnum):
    """How bad it is."""

    ERROR = "error"  # something guarded cannot run, or a promise does not hold
    WARNING = "warning"  # it works until something else fails
    NOTE = "note"  # good to know


@value
class Finding:
    """One thing that is wrong.

    Attributes:
        name: what it is called in the documentation and in JSON.
        level: how bad it is.
        where: the part that has it: a server, a setting, a task.
        what: what was found, in one sentence.
        why: what may come of it, in one sentence.
        mend: the command, or the setting, that mends it.
    """

    name: str
    level: Level
    where: str
    what: str
    why: str
    mend: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what} {self.why} {self.mend}"
