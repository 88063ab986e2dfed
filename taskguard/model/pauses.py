"""A pause of a key, as its owner in the ledger says it: an operator's lease on the key.

A paused key has the owner `ffffffff<time>/pause:<actor>: <reason>`. No process has the number
ffffffff. So each refused claim knows who paused the key, since when and why, without a query.
"""

from __future__ import annotations

from datetime import UTC, datetime

from taskguard.model.workers import NO_PROCESS
from taskguard.values import value

__all__ = ["FAR_US", "Pause", "pause_in", "pause_names"]

FAR_US = 9_000_000_000_000_000
"""When the lease of a paused key ends: in the year 2255."""

_BEGIN = "pause:"
_TIME_DIGITS = 16


@value
class Pause:
    """An operator's pause of a key.

    Attributes:
        actor: the operator.
        reason: why.
        since_s: when it began, in seconds since 1970, by the database's clock.
    """

    actor: str
    reason: str
    since_s: float

    def __str__(self) -> str:
        since = f"{datetime.fromtimestamp(self.since_s, UTC):%Y-%m-%d %H:%M:%S}Z"
        return f"paused by {self.actor} since {since}: {self.reason}"


def pause_names(pause: Pause) -> tuple[str, str]:
    """Return the nonce and the message of a pause's owner."""
    actor = pause.actor.replace("%", "%25").replace(":", "%3A")
    nonce = f"{NO_PROCESS}{round(pause.since_s * 1e6):0{_TIME_DIGITS}x}"
    return nonce, f"{_BEGIN}{actor}: {pause.reason}"


def pause_in(nonce: str, message: str) -> Pause | None:
    """Return the pause that an owner with this nonce and message means, or None."""
    if not nonce.startswith(NO_PROCESS) or not message.startswith(_BEGIN):
        return None
    actor, _, reason = message.removeprefix(_BEGIN).partition(": ")
    actor = actor.replace("%3A", ":").replace("%25", "%")
    return Pause(actor, reason, int(nonce[len(NO_PROCESS) :], 16) / 1e6)
