"""The rest of the servers: locks that are kept for longer than a few milliseconds stand there, too.

A majority has been asked when a lock is granted. As long as these all remember it, nobody else gets
it; on the rest it stands so that some of them may forget.

Guarantees: a lock that is released before its turn costs the rest nothing; one that is released in
its turn is released on all. Does not guarantee a time, and tells nobody of a failure: the lock
stands by its majority.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

from taskguard.clock import SYSTEM_CLOCK
from taskguard.locks.redlock.asking import hear
from taskguard.locks.redlock.commands import Call, Commands
from taskguard.locks.redlock.line import Line
from taskguard.locks.redlock.servers import Lines, Servers
from taskguard.model.lease import Owner

__all__ = ["Spread"]

logger = logging.getLogger("taskguard")

_DELAY_S = 0.01
_LINGER_S = 1.0
# More locks than these are not remembered: they are taken to stand everywhere.
_MOST = 10_000
_MOST_AT_ONCE = 200


class _Stand:
    """Where the keys of one owner stand.

    Attributes:
        keys: those of its first grant, which are told to the rest.
        held: all that it was granted, and has not released.
    """

    __slots__ = (
        "asked_at_s",
        "ended",
        "everywhere",
        "held",
        "keys",
        "only",
        "owner",
        "told",
        "ttl_s",
    )

    def __init__(
        self,
        keys: tuple[str, ...],
        owner: Owner,
        ttl_s: float,
        asked_at_s: float,
        only: frozenset[int],
    ) -> None:
        self.keys = keys
        self.owner = owner
        self.ttl_s = ttl_s
        self.asked_at_s = asked_at_s
        self.only = only
        self.held = set(keys)
        self.ended = False
        self.everywhere = False
        self.told = False


class Spread:
    """Remembers where locks stand, and takes them at the rest of the servers."""

    def __init__(self, servers: Servers, commands: Commands) -> None:
        self._servers = servers
        self._commands = commands
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Condition()
        self._stands: dict[str, _Stand] = {}
        self._due: deque[_Stand] = deque()
        self._runs = False

    def note(
        self,
        keys: tuple[str, ...],
        owner: Owner,
        ttl_s: float,
        asked_at_s: float,
        asked: dict[int, Line],
    ) -> None:
        """A lock was granted by those that were asked."""
        if self._pid != os.getpid():
            self._begin()
        stand = _Stand(keys, owner, ttl_s, asked_at_s, frozenset(asked))
        stand.everywhere = len(asked) == self._servers.count
        with self._mutex:
            before = self._stands.get(owner.nonce)
            if before is None and len(self._stands) >= _MOST:
                return
            if before is not None:
                # Asked for again: on more servers than these, and some may have it already.
                before.only |= stand.only
                before.held |= stand.held
                return
            self._stands[owner.nonce] = stand
            if stand.everywhere:
                return
            self._due.append(stand)
            start, self._runs = not self._runs, True
        if start:
            running = threading.Thread(target=self._run, name="taskguard-redlock", daemon=True)
            try:
                running.start()
            except RuntimeError:  # the interpreter is about to end, or there are too many threads
                self._runs = False

    def held(self, owner: Owner) -> frozenset[str]:
        """What an owner was granted before, for what is known."""
        if self._pid != os.getpid():
            self._begin()
        stand = self._stands.get(owner.nonce)
        if stand is None:
            return frozenset()
        with self._mutex:
            return frozenset(stand.held)

    def end(self, keys: tuple[str, ...], owner: Owner) -> frozenset[int] | None:
        """The servers on which the keys of an owner stand; None: on all, for what is known."""
        if self._pid != os.getpid():
            self._begin()
        with self._mutex:
            stand = self._stands.get(owner.nonce)
            if stand is None:
                return None
            stand.held.difference_update(keys)
            if not stand.held:
                del self._stands[owner.nonce]
            while stand.told:  # just now, which takes a few milliseconds
                self._mutex.wait()
            stand.ended = True
            return None if stand.everywhere else stand.only

    def _run(self) -> None:
        worked_at_s = SYSTEM_CLOCK.monotonic_s()
        while True:
            SYSTEM_CLOCK.sleep(_DELAY_S)
            now_s = SYSTEM_CLOCK.monotonic_s()
            with self._mutex:
                batch = self._take(now_s)
                if batch or self._due:
                    worked_at_s = now_s
                elif now_s - worked_at_s > _LINGER_S:
                    self._runs = False
                    return
            if batch:
                try:
                    self._tell(batch)
                except Exception as error:  # noqa: BLE001  # the others' turn has to come
                    logger.debug("%d locks stand on a majority alone: %s", len(batch), error)

    def _take(self, now_s: float) -> list[_Stand]:
        batch: list[_Stand] = []
        due = self._due
        while due and len(batch) < _MOST_AT_ONCE:
            if due[0].asked_at_s > now_s - _DELAY_S:
                break
            stand = due.popleft()
            if not stand.ended and stand.asked_at_s + stand.ttl_s > now_s:
                batch.append(stand)
        return batch

    def _tell(self, batch: list[_Stand]) -> None:
        lines = self._servers.take()
        known = False
        try:
            with self._mutex:
                batch = [stand for stand in batch if not stand.ended]
                for stand in batch:
                    stand.told = stand.everywhere = True
            self._ask(lines, batch)
            known = True
        finally:
            with self._mutex:
                for stand in batch:
                    stand.told = False
                self._mutex.notify_all()
            if known:
                self._servers.put(lines)
            else:
                lines.close()

    def _ask(self, lines: Lines, batch: list[_Stand]) -> None:
        now_s = SYSTEM_CLOCK.monotonic_s()
        todo: list[tuple[Line, list[Call]]] = []
        for line in lines.there():
            if line.late_at_s:
                continue  # what it is told now it may do much later
            calls = [
                self._commands.acquire(s.keys, s.owner, s.ttl_s - (now_s - s.asked_at_s), 0.0)
                for s in batch
                if line.index not in s.only
            ]
            if calls:
                line.send(b"".join(call.packed for call in calls), len(calls))
                todo.append((line, calls))
        for line, calls in todo:
            hear(line, calls)
