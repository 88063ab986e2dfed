"""Runs: `once_per="run"`, work that is unique until it has ended, and may then run again.

A run is a record of work, with an id made of the work's id (its base) and of the message that
opened it. For each base at most one run is open, and at most one follows it. A message joins a run
as its member, and then belongs to it for good.

Guarantees: `resolve()` is pure, and decides for each ledger which run a message belongs to.
Membership counts before anything else. So a late copy of a message of an ended run is answered by
that run, also while a later run works.

Read next: `ledger/runs.py` for what is read and written.
"""

from __future__ import annotations

import hashlib
import re

from taskguard.model.states import State
from taskguard.values import value

__all__ = [
    "FAILED_RUN",
    "RUN",
    "OpenRun",
    "Resolved",
    "resolve",
    "run_ended",
    "run_id",
]

RUN = " run:"
"""What stands between the base and the opening message in the id of a run.

Keys contain no blanks, so no other work of the base's task and key has such an id. But a task's key
may look like the end of one. Whether work is a run is known by the column `base`, not by its id.
"""

FAILED_RUN = 2
"""`final` of a FAILED run whose last message has no retry left. Its members are told so."""

_PLAIN = re.compile(r"[A-Za-z0-9_.@:-]{1,36}")


def run_id(base: str, message: str) -> str:
    """Return the id of the run of this work that this message opens.

    Ids of at most 36 plain characters, such as UUIDs, are part of it as they are.
    """
    tag = message if _PLAIN.fullmatch(message) else _digest(message)
    return f"{base}{RUN}{tag}"


def _digest(message: str) -> str:
    return hashlib.sha256(message.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def run_ended(state: State, final: int) -> bool:
    """Return whether a run in this state has ended. DEAD stays open until an operator acts."""
    return state is State.DONE or (state is State.FAILED and bool(final))


@value
class OpenRun:
    """The open run of a work, as a ledger read it.

    Attributes:
        work: its id.
        ended: whether it has ended, or its record was purged.
        lapsed: whether nothing is known that will continue it: no holder with a live lease, no
            promised retry, and no stored call that will be sent.
    """

    work: str
    ended: bool
    lapsed: bool


@value
class Resolved:
    """The run to which a message belongs.

    Attributes:
        work: the id of that run.
        opens: whether it becomes the open run, once something is written for it.
        joins: whether the message becomes its member, once something is written for it.
        waits: it follows the open run, which has not ended. The message is deferred.
        ends: a lapsed run that ends, because this one takes its place. None: no run ends.
    """

    work: str
    opens: bool = False
    joins: bool = False
    waits: bool = False
    ends: str | None = None


def resolve(
    new: str, *, member_of: str | None, open_run: OpenRun | None, follows: str | None
) -> Resolved:
    """Return the run of a message, by the first rule that fits.

    Args:
        new: the id of the run that the message would open.
        member_of: the run that it has joined. None: it has joined none.
        open_run: the run that was opened last. None: there was none.
        follows: the run that follows the open one. None: no run does.
    """
    works = open_run is not None and not open_run.ended
    if member_of is not None and member_of != follows:
        return Resolved(member_of)
    if member_of is not None:
        if not works:
            return Resolved(member_of, opens=True)
        assert open_run is not None  # noqa: S101
        if open_run.lapsed:
            return Resolved(member_of, opens=True, ends=open_run.work)
        return Resolved(member_of, waits=True)
    if works:
        assert open_run is not None  # noqa: S101
        return Resolved(open_run.work, joins=True)
    return Resolved(follows or new, opens=True, joins=True)
