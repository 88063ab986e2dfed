"""The events of work and keys except claims and completions, for operators to read.

Three places have it. `WORK.history` has what happened to one work item, `KEYS.works` has the last
works of a key, and `taskguard_happenings` has what changed no record. This module has the formats
of the first two, and `ledger/history.py` has the SQL that writes them.

A history has one happening in a line, the newest last: a JSON array of the time, what happened, the
owner, its fencing token and a text. It keeps its last `HISTORY_CHARS` characters, so its first line
may be cut. Claims and completions of ordinary work are not in it, because the columns of the record
have their times.

Guarantees: names here are stored, so they stay. `read()` and `works_of()` return only whole lines,
whatever the texts contain, and `read()` says whether older lines were dropped. A text is one line
without control characters, and has at most `TEXT_CHARS` characters. It never contains arguments of
a task, unless the error's text has them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import NamedTuple

from taskguard.model.texts import printable

__all__ = [
    "HISTORY_CHARS",
    "HISTORY_S",
    "TEXT_CHARS",
    "WORKS_CHARS",
    "Action",
    "Flag",
    "Happened",
    "Happening",
    "brief",
    "entry",
    "entry_after_time",
    "read",
    "works_of",
]

HISTORY_CHARS = 4_000
"""Maximum length of a history. The oldest lines go first."""
TEXT_CHARS = 300
"""Maximum length of the text of one happening."""
HISTORY_S = 7 * 86_400.0
"""Age of happenings that a purge deletes by default, in seconds."""
WORKS_CHARS = 400
"""Length of `KEYS.works` at which the oldest works are dropped. The newest work always stays."""


class Flag(IntEnum):
    """Why an operator may look for a work: `WORK.flag`, with its time in `WORK.since`."""

    RUNS_LONG = 1
    """Its lease was renewed at least once since the claim. The time is that of the claim."""
    FAILED = 2
    DEAD = 3
    LEFT = 4
    """No worker runs it: it is PROCESSING, and its lease has expired. The time is that of the
    expiry."""


class Happened(Enum):
    """An event in `WORK.history` or in `taskguard_happenings`."""

    TAKEOVER = "takeover"
    """Another holder claimed it after the lease of this owner had expired. The text is the new
    owner."""
    FAILED = "failed"
    """An attempt of this owner failed. The text is its error."""
    ROUND = "round"
    """The database ended the transaction of this owner, so the work runs again."""
    CRASHED = "crashed"
    """The body of this owner ended its process. The text says how."""
    DEAD = "dead"
    """The holders of the work vanished too often. The owner is the last one that vanished."""
    STALE = "stale"
    """The database refused the late commit of this owner."""
    LEASE_LOST = "lease_lost"
    """This owner lost its lease before its body ended."""
    DUPLICATE = "duplicate"
    DEFERRED = "deferred"
    SKIPPED = "skipped"
    OVERRULED = "overruled"
    """The lock server had this key for another owner, and the ledger decided."""
    OPERATOR = "operator"
    """An operator changed it. The text has the action, the actor and the reason."""
    CUT = "cut"
    """Older lines were dropped, because the history was too long. It is read, and never stored."""
    OTHER = "other"
    """A later version of taskguard wrote it. The text begins with that version's name for it."""


class Action(Enum):
    """A change by an operator: `taskguard_actions.action`."""

    REQUEUE = "requeue"
    REQUEUE_LEFT = "requeue_left"
    DROP = "drop"
    DONE = "done"
    CALL = "call"
    RELEASE = "release"
    PAUSE = "pause"
    RESUME = "resume"


class Happening(NamedTuple):
    """One line of a history.

    Attributes:
        at_us: its time, in µs since 1970 by the database's clock.
        what: the kind of event.
        owner: the owner in question, as in `WORK.owner`, or "".
        fence: the fencing token of that owner's claim, or 0. Unless a clock was set back, it is
            the time of the claim in µs.
        text: an error, a reason or another owner, on one line, or "".
    """

    at_us: int
    what: Happened
    owner: str = ""
    fence: int = 0
    text: str = ""


def brief(text: object) -> str:
    """Return the first line of a text, escaped, with at most `TEXT_CHARS` characters."""
    lines = str(text).strip().splitlines()
    shown = printable(lines[0][: TEXT_CHARS + 1]) if lines else ""
    return shown if len(shown) <= TEXT_CHARS else f"{shown[: TEXT_CHARS - 3]}..."


def entry(at_us: int, what: Happened, *, owner: str = "", fence: int = 0, text: object = "") -> str:
    """Return a line of a history, with its end of line."""
    return f"[{at_us}{entry_after_time(what, owner=owner, fence=fence, text=text)}"


def entry_after_time(what: Happened, *, owner: str = "", fence: int = 0, text: object = "") -> str:
    """Return a line without its first bracket and time, which a statement puts before it."""
    rest = json.dumps([what.value, owner, fence, brief(text)], ensure_ascii=False)
    return f", {rest[1:]}\n"


def read(history: str | None) -> list[Happening]:
    """Return the happenings of a history, the oldest first, without a line that was cut.

    If the history is full, the first one is `Happened.CUT`.
    """
    history = history or ""
    found = [each for each in map(_happening, history.split("\n")) if each is not None]
    if len(history) < HISTORY_CHARS:
        return found
    at_us = found[0].at_us if found else 0
    return [Happening(at_us, Happened.CUT, text="older lines were dropped"), *found]


def _happening(line: str) -> Happening | None:
    try:
        at_us, what, owner, fence, text = json.loads(line)
    except (ValueError, TypeError):
        return None
    if what not in _HAPPENED:
        return Happening(at_us, Happened.OTHER, owner, fence, f"{what}: {text}")
    return Happening(at_us, _HAPPENED[what], owner, fence, text)


_HAPPENED = {each.value: each for each in Happened}


def works_of(works: str | None) -> Sequence[str]:
    """Return the ids in `KEYS.works` (newest first) or `WORK.also`, without one that was cut."""
    return [] if works is None else works.split("\n")[:-1]
