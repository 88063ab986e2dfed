"""To ask several servers at the same time, and to hear what they say in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskguard.locks.redlock.commands import Call
from taskguard.locks.redlock.line import LATE, Line, Refusal

__all__ = ["ask", "hear", "read"]


def ask(lines: Sequence[Line], call: Call) -> None:
    """Send to all, then read; afterwards each has its reply, or is LATE or AWAY."""
    packed = call.packed
    for line in lines:
        line.send(packed)
    for line in lines:
        if line.reply is LATE:
            read(line, call)


def read(line: Line, call: Call) -> None:
    """The reply to a call that was sent; a server that does not know the script is told it."""
    if _is_unknown(line.read()):
        line.send(call.by_source)
        line.read()


def hear(line: Line, calls: Sequence[Call]) -> list[Any] | None:
    """The replies to all these calls; None where the line is LATE or AWAY."""
    replies = line.read_last(len(calls))
    if replies is not None and any(map(_is_unknown, replies)):
        # All again: each may be asked twice, and what is late then is late as a whole.
        line.send(b"".join(call.by_source for call in calls), len(calls))
        replies = line.read_last(len(calls))
    return replies


def _is_unknown(reply: Any) -> bool:
    return type(reply) is Refusal and reply.startswith("NOSCRIPT")
