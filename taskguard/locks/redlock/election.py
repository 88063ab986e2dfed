"""One election: a majority of the configured servers grants the keys, or they are freed again.

Guarantees: keys are granted only by a majority, in time. Otherwise a release is sent to every
server that was asked, even if it refused or has not answered. Keys that the owner held before are
kept.
Does not guarantee a winner: if the votes stay split, the holder that most servers name is returned.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.redlock.commands import Commands
from taskguard.locks.redlock.servers import Channels, Servers
from taskguard.model.lease import Owner, trusted_until_s

__all__ = ["Election"]

# After split votes, the next round starts after a random pause, twice as long each time.
_ROUNDS = 7
_FIRST_PAUSE_S = 0.001


class Election:
    """Asks all servers for their votes on behalf of one owner."""

    def __init__(
        self,
        servers: Servers,
        channels: Channels,
        commands: Commands,
        *,
        keys: tuple[str, ...],
        owner: Owner,
        ttl_s: float,
        wait_s: float,
        had: frozenset[str],
    ) -> None:
        self._servers = servers
        self._channels = channels
        self._commands = commands
        self._call = commands.acquire(keys, owner, ttl_s, wait_s)
        self._new = tuple(key for key in keys if key not in had)
        self._owner = owner
        self._ttl_s = ttl_s
        self._answers: dict[int, list[Any]] = {}

    def run(self, *, longest_s: float) -> dict[int, list[Any]] | None:
        """Return None if the keys are granted, else the refusals for their holder, by server.

        `longest_s`: a server that has been running for less than this has no vote.
        """
        quorum, keeps = self._servers.quorum, False
        for number in range(_ROUNDS):
            if number:
                self._pause(number, keeps=keeps)
                self._servers.restore(self._channels)
            requested_at_s = SYSTEM_CLOCK.monotonic_s()
            votes = self._vote(requested_at_s - longest_s)
            if _granted(votes) >= quorum:
                self._refuse_late(requested_at_s)
                return None
            if len(votes) < quorum:
                error = self._servers.too_few(self._channels, len(votes))
                self._give_back()
                raise error
            holder, count = _named(votes)
            if count >= self._servers.blocking or number == _ROUNDS - 1:
                if number or self._may_have_votes():
                    self._give_back()
                return {n: reply for n, reply in votes.items() if reply[:3:2] == [0, holder]}
            # The owner with the first server's vote keeps its votes. The others give theirs back.
            keeps = next(iter(votes.values()))[0] == 1
            if not keeps:
                self._give_back()
        raise AssertionError("unreachable: the last round returns or raises")

    def _vote(self, born_by_s: float) -> dict[int, list[Any]]:
        """Ask all servers; return the replies of those that may vote."""
        quorum = self._servers.quorum

        def is_enough(answers: dict[int, list[Any]]) -> bool:
            return len(answers) >= quorum and _granted(self._counted(answers, born_by_s)) >= quorum

        self._answers = self._servers.ask(self._channels, [self._call], is_enough=is_enough)
        return self._counted(self._answers, born_by_s)

    def _counted(self, answers: dict[int, list[Any]], born_by_s: float) -> dict[int, list[Any]]:
        channels = self._channels.all
        return {
            number: reply
            for number, (reply,) in sorted(answers.items())
            if (channel := channels[number]) is not None and channel.born_s <= born_by_s
        }

    def _may_have_votes(self) -> bool:
        """Return True if a server granted the keys, or may do so yet."""
        return any(reply[0] == 1 for (reply,) in self._answers.values()) or any(
            channel.owed for channel in self._channels.open()
        )

    def _refuse_late(self, requested_at_s: float) -> None:
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s >= trusted_until_s(requested_at_s=requested_at_s, ttl_s=self._ttl_s):
            self._give_back()
            raise LockServerUnavailableError(
                f"The lock servers' votes came too late for a lease of {self._ttl_s:g} s."
            )

    def _give_back(self) -> None:
        """Free the new keys on every server: a refusal may be outdated, or a grant's reply lost."""
        if self._new:
            self._servers.tell(self._channels, [self._commands.release(self._new, self._owner)])

    def _pause(self, number: int, *, keeps: bool) -> None:
        # The owner that keeps its votes asks again before the others.
        longest_s = _FIRST_PAUSE_S * (1 if keeps else 2**number)
        SYSTEM_CLOCK.sleep(random.uniform(0.5, 1.0) * longest_s)  # noqa: S311  # no secret


def _granted(votes: dict[int, list[Any]]) -> int:
    return sum([reply[0] for reply in votes.values()])


def _named(votes: dict[int, list[Any]]) -> tuple[bytes, int]:
    """Return the holder that most servers name, and how many do."""
    names = Counter([reply[2] for reply in votes.values() if reply[0] == 0])
    return names.most_common(1)[0] if names else (b"", 0)
