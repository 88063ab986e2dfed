"""One election: a majority of the configured servers grants the keys, or what was taken goes back.

Guarantees: granted only by a majority, in time; whatever comes of it else, whoever was asked is
told to free the keys, also where the answer was no or has not come; but not those that the owner
had before. Does not guarantee a winner: where votes stay split, the holder whom the most servers
name is told.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.redlock.asking import ask, read
from taskguard.locks.redlock.commands import Commands
from taskguard.locks.redlock.line import LATE, Line
from taskguard.locks.redlock.servers import Lines, Servers
from taskguard.model.lease import Owner, trusted_until_s

__all__ = ["Election"]

# Votes that are split are asked for again so often, after pauses that double from the first.
_ROUNDS = 7
_FIRST_PAUSE_S = 0.001
# Who did not get the first server's vote asks all in every third round, else that one alone.
_FULL_ROUND = 3


class Election:
    """Asks the servers of one call for their votes.

    Attributes:
        asked: by index, everyone who was asked.
        asked_at_s: when the round began that decided.
    """

    __slots__ = (
        "_call",
        "_commands",
        "_lines",
        "_new",
        "_owner",
        "_quorum",
        "_servers",
        "_ttl_s",
        "asked",
        "asked_at_s",
    )

    def __init__(
        self,
        servers: Servers,
        lines: Lines,
        commands: Commands,
        *,
        keys: tuple[str, ...],
        owner: Owner,
        ttl_s: float,
        wait_s: float,
        had: frozenset[str],
    ) -> None:
        self.asked: dict[int, Line] = {}
        self.asked_at_s = 0.0
        self._servers = servers
        self._lines = lines
        self._commands = commands
        self._call = commands.acquire(keys, owner, ttl_s, wait_s)
        self._new = tuple(key for key in keys if key not in had)
        self._owner = owner
        self._ttl_s = ttl_s
        self._quorum = servers.quorum

    def run(self, start: int, *, longest_s: float) -> dict[int, list[Any]] | None:
        """None: the keys are granted. Else the refusals in the name of their holder, by server.

        `start`: which server is the keys' first. `longest_s`: who runs for less has no vote.
        """
        keeps = False
        for number in range(_ROUNDS):
            if number:
                self._servers.mend(self._lines)
            self.asked_at_s = SYSTEM_CLOCK.monotonic_s()
            voters = self._lines.voters(start, longest_s=longest_s, quorum=self._quorum)
            if len(voters) < self._quorum:
                self._give_back()
                raise self._servers.too_few(0, voters)
            if number % _FULL_ROUND and not keeps and self._is_taken(voters[0]):
                _pause(number)
                continue
            votes = self._vote(voters)
            if _granted(votes) >= self._quorum:
                self._refuse_late()
                return None
            self._lines.forget()
            holder, count = _named(votes)
            if not count:
                if not number and any(line.error is not None for line in votes):
                    continue  # idle connections that the servers have closed
                error = self._servers.too_few(_granted(votes), votes)
                self._give_back()
                raise error
            refusals = {
                line.index: line.reply
                for line in votes
                if _is_no(line.reply) and line.reply[2] == holder
            }
            if count >= self._servers.blocking or number == _ROUNDS - 1:
                if number or not all(_is_no(line.reply) for line in votes):
                    self._give_back()
                return refusals
            # Who has the first server's vote keeps what it has; the others give back.
            keeps = not _is_no(votes[0].reply)
            if not keeps:
                self._give_back()
            _pause(number)
        raise AssertionError("unreachable: the last round returns or raises")

    def _vote(self, voters: list[Line]) -> list[Line]:
        """Ask the first ones, and the rest where that decides nothing; those that were asked."""
        votes = voters[: self._quorum]
        self._ask(votes)
        if _granted(votes) == self._quorum:
            return votes
        rest = voters[self._quorum :]
        if rest and _named(votes)[1] < self._servers.blocking:
            self._ask(rest)
            votes = voters
        until_s = self.asked_at_s + self._servers.silence_s
        while True:
            late = [line for line in votes if line.reply is LATE]
            granted = _granted(votes)
            is_open = granted < self._quorum <= granted + len(late)
            if not is_open or SYSTEM_CLOCK.monotonic_s() >= until_s:
                return votes
            for line in late:
                read(line, self._call)

    def _ask(self, lines: list[Line]) -> None:
        self.asked.update([(line.index, line) for line in lines])
        ask(lines, self._call)

    def _is_taken(self, first: Line) -> bool:
        """Not to disturb whoever has the first server's vote, and may be about to win."""
        self._ask([first])
        return _is_no(first.reply)

    def _refuse_late(self) -> None:
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s >= trusted_until_s(asked_at_s=self.asked_at_s, ttl_s=self._ttl_s):
            self._give_back()
            raise LockServerUnavailableError(
                f"The lock servers' votes came too late for a lease of {self._ttl_s:g} s."
            )

    def _give_back(self) -> None:
        """Free what was taken, everywhere: an answer may have been no, or have got lost."""
        if not self.asked or not self._new:
            return
        call = self._commands.release(self._new, self._owner)
        prompt = [line for line in self.asked.values() if not line.late_at_s]
        for line in self.asked.values():
            if line.late_at_s:
                line.send(call.by_source)  # nobody waits to hear that the script is not known
        ask(prompt, call)


def _is_no(reply: Any) -> bool:
    return type(reply) is list and reply[0] == 0


def _granted(votes: list[Line]) -> int:
    return sum([line.reply[0] for line in votes if type(line.reply) is list])


def _named(votes: list[Line]) -> tuple[bytes, int]:
    """Whom the most servers name as the holder, and how many do."""
    names = Counter(line.reply[2] for line in votes if _is_no(line.reply))
    return names.most_common(1)[0] if names else (b"", 0)


def _pause(number: int) -> None:
    longest_s = _FIRST_PAUSE_S * 2**number
    SYSTEM_CLOCK.sleep(random.uniform(0.5, 1.0) * longest_s)  # noqa: S311  # no secret
