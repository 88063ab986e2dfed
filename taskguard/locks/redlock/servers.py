"""Connections to several servers: questions to all of them, and the servers that are down.

Guarantees
* A call has one channel to each server for itself. Channels are made at the same time, each by a
  thread of its own. A call waits for them only while a majority is missing, or for 100 ms.
* A question goes to all servers at once, and a majority answers it. Late replies are discarded
  before the next question. A server that is late for more than 100 ms is left out meanwhile.
* A server that is down is tried again after a pause, which grows to a few seconds.
* A fork starts with no channel, no thread and no lock of its parent. Threads are never joined.
* A call that is interrupted closes the channels that it used.

Does not guarantee that a server's uptime is right: it depends on the server's clock.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.redis.link import RedisLink, driver
from taskguard.locks.redis.protocol import pack
from taskguard.locks.redlock.channel import SLOW_S, Channel
from taskguard.locks.redlock.commands import Call

__all__ = ["Channels", "Server", "Servers"]

Answers = dict[int, list[Any]]

_MOST_IDLE = 64
_INTRODUCTION = (
    pack(b"INFO", b"server"),
    pack(b"INFO", b"persistence"),
    pack(b"CONFIG", b"GET", b"appendfsync"),
)
# How long to wait for one server before looking at the next. It doubles with each round.
_FIRST_PATIENCE_S, _LONGEST_PATIENCE_S = 0.002, 0.02
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 4.0


class Server:
    """One of the servers.

    Attributes:
        index: its position in the URL.
        link: for single calls to it.
        error: why it could not be reached the last time.
        away_until_s: no connection is tried before this moment.
        dialing: the thread that connects to it, or did so last.
    """

    def __init__(self, index: int, link: RedisLink) -> None:
        self.index = index
        self.link = link
        self.error: Exception | None = None
        self.away_until_s = 0.0
        self.dialing: threading.Thread | None = None
        self._failures = 0

    def connect(self, errors: Any) -> Channel:
        """Connect, and ask the server how long it has been running."""
        connection, (server, persistence, policy) = self.link.connect(*_INTRODUCTION)
        if isinstance(server, LockServerUnavailableError):
            connection.disconnect()
            raise server
        # The server subtracts whole seconds from whole seconds, so it may be a second too much.
        age_s = max(0.0, float(_field(server, b"uptime_in_seconds") or 0) - 1.0)
        if _field(persistence, b"aof_enabled") == b"1" and _keeps_everything(policy):
            age_s = float("inf")
        return Channel(self.index, connection, SYSTEM_CLOCK.monotonic_s() - age_s, errors)

    @property
    def is_well(self) -> bool:
        """Return True if the last attempt to connect succeeded."""
        return not self._failures

    @property
    def is_dialed(self) -> bool:
        """Return True if a thread is connecting to it."""
        return self.dialing is not None and self.dialing.is_alive()

    def note_failure(self, error: Exception) -> None:
        """Leave the server alone for a while, longer each time."""
        self.error = error
        pause_s = min(_FIRST_PAUSE_S * 2**self._failures, _LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 16)
        self.away_until_s = SYSTEM_CLOCK.monotonic_s() + pause_s * random.uniform(0.5, 1.0)  # noqa: S311

    def note_success(self) -> None:
        """Forget earlier failures."""
        self._failures = 0
        self.away_until_s = 0.0


def _keeps_everything(policy: Any) -> bool:
    return isinstance(policy, list) and b"always" in [bytes(word) for word in policy]


def _field(info: Any, name: bytes) -> bytes:
    if not isinstance(info, bytes):  # this user may not ask
        return b""
    return info.partition(b"\n" + name + b":")[2].partition(b"\r\n")[0].strip()


class Channels:
    """One channel to each server, or None, for one call at a time."""

    __slots__ = ("all",)

    def __init__(self, count: int) -> None:
        self.all: list[Channel | None] = [None] * count

    def open(self) -> list[Channel]:
        """Return the channels that are connected."""
        return [each for each in self.all if each is not None and each.is_open]

    def ready(self) -> list[Channel]:
        """Return the channels on which a question may be asked."""
        return [each for each in self.all if each is not None and each.is_open and not each.owed]

    def close(self) -> None:
        """Close all of them."""
        for channel in self.open():
            channel.close()


class _Dials:
    """The connections that one call is waiting for."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.made: list[Channel] = []
        self.is_over = False


class _Lane:
    """Channels that no call uses: whole sets, the latest used first, and single ones."""

    def __init__(self, count: int) -> None:
        self.idle: deque[Channels] = deque()
        self.spare: list[deque[Channel]] = [deque() for _ in range(count)]


class Servers:
    """All servers. Threads may call at once.

    Attributes:
        quorum: a majority of the configured servers.
        blocking: if this many servers name another holder, no majority is left.
        silence_s: a server that owes a reply for longer than this is down.
    """

    def __init__(self, links: Sequence[RedisLink], *, silence_s: float) -> None:
        self.all = [Server(index, link) for index, link in enumerate(links)]
        self.count = len(self.all)
        self.quorum = self.count // 2 + 1
        self.blocking = self.count - self.quorum + 1
        self.silence_s = silence_s
        self._errors = driver().exceptions
        self._begin()

    def _begin(self) -> None:
        # After a fork, forget the parent's channels without closing them. Another thread of the
        # parent may have held its mutex.
        self._lanes: dict[int, _Lane] = {}
        # It is locked by itself: an interrupted `with self._changed` could leave it locked.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        for server in self.all:
            server.dialing = None
        self._pid = os.getpid()  # last, so that no thread of a child finds the parent's channels

    # -- channels -----------------------------------------------------------------------------

    @contextmanager
    def channels(self) -> Iterator[Channels]:
        """Lend channels to a call, to a majority at least if possible.

        An interrupted call (a time limit, `GreenletExit`) closes them.
        """
        lane = self._lane()
        try:
            channels = lane.idle.pop()
        except IndexError:
            channels = Channels(self.count)
        is_known = False
        try:
            self.restore(channels)
            yield channels
            is_known = True
        except LockServerUnavailableError:
            is_known = True
            raise
        finally:
            if is_known and len(lane.idle) < _MOST_IDLE:
                lane.idle.append(channels)
            else:
                channels.close()

    def restore(self, channels: Channels) -> None:
        """Discard late replies, replace closed channels, and wait until the servers are ready."""
        if len(channels.ready()) == self.count:
            return
        missing = [server for server in self.all if not self._is_usable(server, channels)]
        if missing:
            self._dial(missing, channels)
        self._settle(channels)

    def close(self) -> None:
        """Close idle channels. Calls in flight go on; later calls connect again."""
        lane, self._lanes = self._lane(), {}
        while lane.idle:
            try:
                lane.idle.pop().close()
            except IndexError:  # another thread was faster
                break
        for channel in [each for spare in lane.spare for each in spare]:
            channel.close()
        for server in self.all:
            server.link.close()

    def _is_usable(self, server: Server, channels: Channels) -> bool:
        """Return True if there is an open channel, which is late for a short while only."""
        channel = channels.all[server.index]
        if channel is not None:
            if channel.owed:
                channel.discard()
            silent_s = SYSTEM_CLOCK.monotonic_s() - channel.owing_since_s if channel.owed else 0.0
            if channel.is_open and silent_s <= self.silence_s:
                return True
            if channel.is_open:
                channel.close(TimeoutError("Timeout reading from socket"))
                server.note_failure(self._unavailable(channel))
            server.error = self._unavailable(channel)
        try:
            channels.all[server.index] = self._lane().spare[server.index].pop()
        except IndexError:
            channels.all[server.index] = None
        return channels.all[server.index] is not None

    def _settle(self, channels: Channels) -> None:
        """Wait for late replies: as long as a majority needs them, else for a moment."""
        began_s = SYSTEM_CLOCK.monotonic_s()
        patience_s = _FIRST_PATIENCE_S
        while True:
            needs_all = len(channels.ready()) < self.quorum
            late = [each for each in channels.open() if each.owed]
            waiting = [each for each in late if needs_all or not each.is_slow]
            if not waiting:
                return
            limit_s = self.silence_s if needs_all else min(SLOW_S, self.silence_s)
            if SYSTEM_CLOCK.monotonic_s() - began_s >= limit_s:
                for channel in waiting:
                    channel.is_slow = True
                return
            for channel in waiting:
                channel.hear(patience_s)
                channel.discard()
            patience_s = min(2 * patience_s, _LONGEST_PATIENCE_S)

    def _dial(self, missing: Iterable[Server], channels: Channels) -> None:
        """Connect to servers, unless they failed a short while ago."""
        now_s = SYSTEM_CLOCK.monotonic_s()
        there = len(channels.open())
        # If a majority is there, one attempt at a time is enough for all calls.
        due = [
            server
            for server in missing
            if server.away_until_s <= now_s and not (there >= self.quorum and server.is_dialed)
        ]
        dials, lane = _Dials(len(due)), self._lane()
        others_s = SLOW_S if any(server.is_well for server in due) else 0.0
        for server in due:
            self._start(server, dials, lane)
        try:
            with self._mutex:
                while dials.left:
                    left_s = now_s + others_s - SYSTEM_CLOCK.monotonic_s()
                    if there + len(dials.made) < self.quorum:
                        left_s = 1.0
                    elif left_s <= 0.0:
                        break
                    self._changed.wait(left_s)
        finally:
            with self._mutex:
                dials.is_over = True
            for channel in dials.made:
                channels.all[channel.index] = channel

    def _start(self, server: Server, dials: _Dials, lane: _Lane) -> None:
        what = server, dials, lane, self._mutex, self._changed
        # A daemon, which the interpreter does not wait for; a greenlet under gevent and eventlet.
        server.dialing = threading.Thread(
            target=self._connect, args=what, name="taskguard-redlock", daemon=True
        )
        try:
            server.dialing.start()
        except RuntimeError:  # the interpreter is about to end, or there are too many threads
            self._connect(*what)

    def _connect(
        self, server: Server, dials: _Dials, lane: _Lane, mutex: Any, changed: threading.Condition
    ) -> None:
        channel = None
        try:
            channel = server.connect(self._errors)
            server.note_success()
        except LockServerUnavailableError as error:
            server.note_failure(error)
        except Exception as error:  # noqa: BLE001  # an unknown host name, for example
            server.note_failure(server.link.unavailable(error))
        finally:
            with mutex:
                dials.left -= 1
                if channel is not None and not dials.is_over:
                    dials.made.append(channel)
                elif channel is not None and lane in self._lanes.values():
                    lane.spare[server.index].append(channel)
                elif channel is not None:
                    channel.close()
                changed.notify_all()

    def _lane(self) -> _Lane:
        if self._pid != os.getpid():
            self._begin()
        # Sockets of gevent and eventlet belong to the native thread that made them.
        plain = socket.socket.__module__ == "socket"
        number = 0 if plain else threading.get_native_id()
        found = self._lanes.get(number)
        return found if found is not None else self._lanes.setdefault(number, _Lane(self.count))

    # -- questions ----------------------------------------------------------------------------

    def ask(
        self,
        channels: Channels,
        calls: Sequence[Call],
        *,
        is_enough: Callable[[Answers], bool],
        others_s: float = SLOW_S,
    ) -> Answers:
        """Send calls to all servers that are ready; return the complete answers by server.

        Waits until `is_enough`, or until all have answered. Once a majority has, the others get
        `others_s`. A server whose idle connection was closed is asked again on a new one.
        """
        answers: Answers = {}
        packed = b"".join([call.packed for call in calls])
        asked = channels.ready()
        for last in (False, True):
            for channel in asked:
                channel.ask(calls, packed)
            if self._listen(asked, calls, answers, is_enough, others_s) or last:
                break
            broken = [channel.index for channel in asked if not channel.is_open]
            if not broken:
                break
            self.restore(channels)
            asked = [channel for channel in channels.ready() if channel.index in broken]
        return answers

    def _listen(
        self,
        waiting: list[Channel],
        calls: Sequence[Call],
        answers: Answers,
        is_enough: Callable[[Answers], bool],
        others_s: float,
    ) -> bool:
        began_s = SYSTEM_CLOCK.monotonic_s()
        patience_s = _FIRST_PATIENCE_S
        while waiting:
            late = []
            for channel in waiting:
                if not channel.answer(calls, patience_s):
                    late.append(channel)
                elif channel.is_open and channel.refusal is None:
                    answers[channel.index] = channel.replies
                    if is_enough(answers):
                        return True
            waiting = late
            has_majority = len(answers) >= self.quorum
            limit_s = min(others_s, self.silence_s) if has_majority else self.silence_s
            if SYSTEM_CLOCK.monotonic_s() - began_s > limit_s:
                for channel in waiting:
                    channel.is_slow = True
                break
            patience_s = min(2 * patience_s, _LONGEST_PATIENCE_S)
        return False

    def tell(self, channels: Channels, calls: Sequence[Call]) -> None:
        """Send calls whose replies are not needed, to late servers as well."""
        for channel in channels.open() if calls else []:
            channel.tell(calls)

    def too_few(self, channels: Channels, answered: int) -> LockServerUnavailableError:
        """Return the error for a missing majority, with one server's reason."""
        found = [self._problem(server, channels.all[server.index]) for server in self.all]
        cause = next((problem for problem in found if problem is not None), None)
        reason = cause or (
            "A server that was just started does not count until every lease that it may have "
            "forgotten has expired."
        )
        error = LockServerUnavailableError(
            f"Only {answered} of {self.count} lock servers gave an answer that counts, but "
            f"{self.quorum} must. {reason}"
        )
        error.__cause__ = cause
        return error

    def _problem(self, server: Server, channel: Channel | None) -> Exception | None:
        if channel is None:
            return server.error
        if channel.refusal is not None:
            return server.link.unavailable(channel.refusal)
        if channel.is_ready:
            return None
        return self._unavailable(channel)

    def _unavailable(self, channel: Channel) -> LockServerUnavailableError:
        """Say why this channel gave no answer."""
        error = channel.error or TimeoutError("Timeout reading from socket")
        return self.all[channel.index].link.unavailable(error)
