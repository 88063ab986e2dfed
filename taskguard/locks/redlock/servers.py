"""Which of several servers are there: connections to all of them, and who is away.

Guarantees
* A call has one connection to each server for itself; they are made beside each other, and waited
  for only while fewer than a majority are there.
* A server that is away is asked for again after a pause that grows to a few seconds, by a thread
  that holds nobody up; one that is late is asked again once it has given what it owes.
* A server votes once it runs for longer than the longest lease it may have forgotten, or if it
  forgets nothing (`appendfsync always`).
* A fork starts with no connection; a call that is interrupted closes what it used.

Not guaranteed: that a server's own word about its age is right. It is what its clock says.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.protocol import pack
from taskguard.locks.redlock.line import AWAY, LATE, Line, Refusal

__all__ = ["Lines", "Server", "Servers"]

_MOST_IDLE = 64
_ASKED = (
    pack(b"INFO", b"server"),
    pack(b"INFO", b"persistence"),
    pack(b"CONFIG", b"GET", b"appendfsync"),
)
# So long those that a lock may stand on are waited for, once there are enough of them.
_OTHERS_S = 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 4.0


class Server:
    """One of the servers.

    Attributes:
        index: its place in the URL.
        link: single calls to it.
        error: why it could not be reached the last time.
        away_until_s: it is left alone until then.
        spare: connections that were made and that nobody has yet.
        dials: how many are being made.
    """

    def __init__(self, index: int, link: RedisLink) -> None:
        self.index = index
        self.link = link
        self.error: Exception | None = None
        self.away_until_s = 0.0
        self.spare: deque[Line] = deque()
        self.dials = 0
        self._failures = 0

    def dial(self) -> Line:
        """A new connection, once the server has said for how long it runs."""
        connection, (server, persistence, policy) = self.link.connect(*_ASKED)
        if isinstance(server, LockServerUnavailableError):
            connection.disconnect()
            raise server
        age_s = float(_field(server, b"uptime_in_seconds") or 0)
        if _field(persistence, b"aof_enabled") == b"1" and _keeps_everything(policy):
            age_s = float("inf")
        return Line(self.index, connection, SYSTEM_CLOCK.monotonic_s() - age_s)

    @property
    def is_well(self) -> bool:
        """Whether nothing is known against it."""
        return not self._failures

    def note_failure(self, error: Exception) -> None:
        """Leave it alone for a while, each time for longer."""
        self.error = error
        pause_s = min(_FIRST_PAUSE_S * 2**self._failures, _LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 16)
        self.away_until_s = SYSTEM_CLOCK.monotonic_s() + pause_s * random.uniform(0.5, 1.0)  # noqa: S311

    def note_success(self) -> None:
        self._failures = 0
        self.away_until_s = 0.0


def _keeps_everything(policy: Any) -> bool:
    return isinstance(policy, list) and b"always" in [bytes(word) for word in policy]


def _field(info: Any, name: bytes) -> bytes:
    if not isinstance(info, bytes):  # it may not be asked
        return b""
    return info.partition(b"\n" + name + b":")[2].partition(b"\r\n")[0].strip()


class Lines:
    """One connection to each server, or None, for one call at a time."""

    __slots__ = ("_rotations", "_settled_s", "by_server")

    def __init__(self, count: int) -> None:
        self.by_server: list[Line | None] = [None] * count
        self._rotations: list[list[Line]] = []
        self._settled_s = 0.0

    @property
    def whole(self) -> bool:
        """Whether nothing is known to be wrong with any of them."""
        return bool(self._rotations)

    def settle(self) -> None:
        """Note whether all of them are there."""
        lines = [line for line in self.by_server if line is not None]
        if len(lines) < len(self.by_server) or any(
            line.late_at_s or line.reply is AWAY for line in lines
        ):
            self._rotations = []
        elif not self._rotations:
            self._rotations = [lines[at:] + lines[:at] for at in range(len(lines))]
            self._settled_s = SYSTEM_CLOCK.monotonic_s() - max(line.born_s for line in lines)

    def there(self) -> list[Line]:
        """Those that are connected, late ones last."""
        lines = [line for line in self.by_server if line is not None and line.reply is not AWAY]
        lines.sort(key=lambda line: bool(line.late_at_s))
        return lines

    def voters(self, start: int, *, longest_s: float, quorum: int) -> list[Line]:
        """Those that may vote, in the order of this start; late ones where it needs them."""
        if self._rotations and longest_s <= self._settled_s:
            return self._rotations[start]
        born_by_s = SYSTEM_CLOCK.monotonic_s() - longest_s
        lines = self.by_server[start:] + self.by_server[:start]
        old = [
            line
            for line in lines
            if line is not None and line.reply is not AWAY and line.born_s <= born_by_s
        ]
        prompt = [line for line in old if not line.late_at_s]
        if len(prompt) >= quorum:
            return prompt
        return prompt + [line for line in old if line.late_at_s]

    def forget(self) -> None:
        """Something is wrong with one of them."""
        self._rotations = []

    def close(self) -> None:
        self._rotations = []
        for line in self.by_server:
            if line is not None:
                line.close()
        self.by_server = [None] * len(self.by_server)


class Servers:
    """All of them. Thread-safe.

    Attributes:
        quorum: a majority of those that are configured.
        blocking: so many in another's name leave no majority to anybody else.
        silence_s: a server that is late for so long is away.
    """

    def __init__(self, links: Sequence[RedisLink], *, silence_s: float) -> None:
        self.all = [Server(index, link) for index, link in enumerate(links)]
        self.count = len(self.all)
        self.quorum = self.count // 2 + 1
        self.blocking = self.count - self.quorum + 1
        self.silence_s = silence_s
        self._begin()

    def _begin(self) -> None:
        # After a fork: the parent's connections are dropped, not shut down, and its mutex may be
        # one that nobody leaves any more.
        self._pid = os.getpid()
        self._idle: dict[int, deque[Lines]] = {}
        self._generation = object()
        self._changed = threading.Condition()
        for server in self.all:
            server.spare, server.dials = deque(), 0

    def take(self, *, all_of_them: bool = False) -> Lines:
        """Connections for one call: those that there are, and at least a majority if possible."""
        if self._pid != os.getpid():
            self._begin()
        try:
            lines = self._lane().pop()
        except IndexError:
            lines = Lines(self.count)
        if not lines.whole:
            try:
                self.mend(lines, all_of_them=all_of_them)
            except BaseException:
                lines.close()
                raise
        return lines

    def put(self, lines: Lines) -> None:
        """Keep them for the next call, unless a burst of calls left enough of them."""
        lane = self._lane()
        lines.settle()
        if len(lane) < _MOST_IDLE:
            lane.append(lines)
        else:
            lines.close()

    def mend(self, lines: Lines, *, all_of_them: bool = False) -> None:
        """Replace what is broken; wait for it where a majority is not there.

        `all_of_them`: wait for the others, too, unless they are known to be in trouble.
        """
        due = self._dial_missing(lines)
        while due and self._prompt(lines) < self.quorum:
            self._await(lines, due, self.quorum, float("inf"))
            if self._prompt(lines) >= self.quorum:
                break
            due = self._dial_missing(lines)  # another thread took what was dialled for this one
        if all_of_them:
            well = [server for server in due if server.is_well]
            self._await(lines, well, self.count, _OTHERS_S)
        lines.settle()

    def _dial_missing(self, lines: Lines) -> list[Server]:
        """Those that are dialled now: who failed a short while ago is left alone."""
        missing = self._missing(lines)
        now_s = SYSTEM_CLOCK.monotonic_s()
        due = [server for server in missing if server.away_until_s <= now_s]
        enough = self._prompt(lines) >= self.quorum
        for server in due:
            with self._changed:
                # By one thread at a time where nobody waits for it.
                dials = not (enough and (server.dials or server.spare))
                server.dials += dials
            if dials:
                self._dial(server)
        return due

    def close(self) -> None:
        """Close what is idle. Calls in flight go on; later calls connect again."""
        with self._changed:
            self._generation = object()
            spare = [line for server in self.all for line in server.spare]
            for server in self.all:
                server.spare.clear()
        for line in spare:
            line.close()
        idle = self._lane()
        while idle:
            try:
                idle.pop().close()
            except IndexError:  # another thread was faster
                break
        for server in self.all:
            server.link.close()

    def too_few(self, answered: int, asked: Sequence[Line]) -> LockServerUnavailableError:
        """The error where no majority gave an answer that counts, with a reason of one server."""
        cause = next(filter(None, map(self._problem, asked)), None)
        if cause is None and len(asked) < self.quorum:
            cause = next((server.error for server in self.all if server.error is not None), None)
        reason = cause or (
            "One that was started a short while ago does not count until every lease that it may "
            "have forgotten has run out."
        )
        error = LockServerUnavailableError(
            f"Only {answered} of {self.count} lock servers gave an answer that counts, and "
            f"{self.quorum} have to. {reason}"
        )
        error.__cause__ = cause
        return error

    def _problem(self, line: Line) -> Exception | None:
        link = self.all[line.index].link
        if type(line.reply) is Refusal:
            return LockServerUnavailableError(f"The lock server {link.address} said {line.reply}.")
        if line.reply is LATE:
            return link.unavailable(TimeoutError("Timeout reading from socket"))
        return None if line.error is None else link.unavailable(line.error)

    def _missing(self, lines: Lines) -> list[Server]:
        """The servers without a connection, after spare ones were taken."""
        missing = []
        for server, line in zip(self.all, lines.by_server, strict=True):
            if line is not None and self._is_usable(server, line):
                continue
            try:
                lines.by_server[server.index] = server.spare.pop()
            except IndexError:
                lines.by_server[server.index] = None
                missing.append(server)
        return missing

    def _is_usable(self, server: Server, line: Line) -> bool:
        if line.late_at_s:
            line.catch_up()
        if line.reply is AWAY:
            server.error = line.error
            return False
        if line.late_at_s and SYSTEM_CLOCK.monotonic_s() - line.late_at_s > self.silence_s:
            error = TimeoutError("timed out")
            line.close(error)
            server.note_failure(server.link.unavailable(error))
            return False
        return True

    def _prompt(self, lines: Lines) -> int:
        return sum(line is not None and not line.late_at_s for line in lines.by_server)

    def _await(self, lines: Lines, due: list[Server], enough: int, timeout_s: float) -> None:
        """Until so many are there, or all that was tried has ended."""
        until_s = SYSTEM_CLOCK.monotonic_s() + timeout_s
        with self._changed:
            while True:
                for server in due:
                    if lines.by_server[server.index] is None and server.spare:
                        lines.by_server[server.index] = server.spare.pop()
                left_s = until_s - SYSTEM_CLOCK.monotonic_s()
                dials = any(s.dials for s in due if lines.by_server[s.index] is None)
                if not dials or left_s <= 0.0 or self._prompt(lines) >= enough:
                    return
                self._changed.wait(min(left_s, 1.0))

    def _dial(self, server: Server) -> None:
        what = server, self._generation, self._changed
        dialing = threading.Thread(
            target=self._dial_now, args=what, name="taskguard-redlock", daemon=True
        )
        try:
            dialing.start()
        except RuntimeError:  # the interpreter is about to end, or there are too many threads
            self._dial_now(*what)

    def _dial_now(self, server: Server, generation: object, changed: threading.Condition) -> None:
        line = None
        try:
            line = server.dial()
            server.note_success()
        except LockServerUnavailableError as error:
            server.note_failure(error)
        except Exception as error:  # noqa: BLE001  # a name that is none, for example
            server.note_failure(server.link.unavailable(error))
        finally:
            with changed:
                server.dials -= 1
                if line is not None and generation is self._generation:
                    server.spare.append(line)
                    line = None
                changed.notify_all()
            if line is not None:
                line.close()

    def _lane(self) -> deque[Lines]:
        # Sockets of gevent and eventlet belong to the native thread that made them.
        plain = socket.socket.__module__ == "socket"
        lane = 0 if plain else threading.get_native_id()
        found = self._idle.get(lane)
        return found if found is not None else self._idle.setdefault(lane, deque())
