"""A lock server of sessions, in memory: a lock lasts as long as its owner's session.

It replaces ZooKeeper and similar servers. Guarantees what `taskguard.locks.base` says of a provider
whose `traits.session` is True. An open provider keeps its session alive by itself. So a session
ends by `close()`, by `SessionServer.end()`, or because its connection is `deaf`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass

from support.lock_servers import LockServer
from taskguard.errors import LockServerUnavailableError
from taskguard.integration import Finding
from taskguard.locks import Granted, Held, Hold, Holder, LockProvider, Owner, Renewal, Traits

SESSION_S = 2.0


@dataclass
class Node:
    """A key that is taken."""

    owner: Owner
    session: int
    token: int


class SessionServer:
    """The nodes and the sessions. Every change wakes all waiters."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.nodes: dict[str, Node] = {}
        self._open: set[int] = set()
        self._sessions = itertools.count(1)
        self._revision = 0

    def open(self) -> int:
        """A new session.

        It lifts the revision to the clock, in µs: so the tokens that follow are above those that
        another kind of server has issued meanwhile.
        """
        with self.changed:
            self._revision = max(self._revision, time.time_ns() // 1000)
            session = next(self._sessions)
            self._open.add(session)
            return session

    def knows(self, session: int) -> bool:
        """Return True unless the session has ended."""
        return session in self._open

    def end(self, session: int) -> None:
        """The session ends, and its nodes go with it."""
        with self.changed:
            self._open.discard(session)
            self.nodes = {key: n for key, n in self.nodes.items() if n.session != session}
            self.changed.notify_all()

    def revision(self) -> int:
        """One more than the last."""
        self._revision += 1
        return self._revision

    def forget(self) -> None:
        """Delete every node, without telling a session."""
        with self.changed:
            self.nodes.clear()


class SessionLocks:
    """A `LockProvider` on a `SessionServer`; no reply reaches one that is `deaf`."""

    def __init__(self, server: SessionServer, *, deaf: bool = False) -> None:
        self.server = server
        self.deaf = deaf
        self._session: int | None = None

    @property
    def traits(self) -> Traits:
        return Traits(session=True, min_ttl_s=SESSION_S)

    @property
    def session(self) -> int:
        """The provider's session, which its first call opens, and the first call after a loss."""
        if self._session is None or not self.server.knows(self._session):
            self._session = self.server.open()
        return self._session

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        with self.server.changed:
            session, nodes = self.session, self.server.nodes
            for key in keys:
                if key in nodes and nodes[key].owner != owner:
                    return Held(key, nodes[key].owner, SESSION_S)
            if all(key in nodes for key in keys):
                token = max(nodes[key].token for key in keys)
            else:
                token = self.server.revision()
                nodes.update({key: Node(owner, session, token) for key in keys})
        self._hear()
        return Granted(token if with_fence else 0, SESSION_S)

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        with self.server.changed:
            mine = self._owned(keys, owner)
            for key in mine:
                del self.server.nodes[key]
            self.server.changed.notify_all()
        return bool(mine)

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        with self.server.changed:
            mine, handed = self._owned(keys, owner), self._owned(keys, to)
            for key in mine:
                self.server.nodes[key].owner = to
        return bool(mine or handed)

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        with self.server.changed:
            return [self._renew(hold) for hold in holds]

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        with self.server.changed:
            self.server.changed.wait_for(
                lambda: key not in self.server.nodes, min(max(timeout_s, 0.0), 1.0)
            )

    def holders(self, key: str) -> list[Holder]:
        with self.server.changed:
            node = self.server.nodes.get(key)
        return [] if node is None else [Holder(key, node.owner, node.token, SESSION_S)]

    def check(self) -> list[Finding]:
        return []

    def close(self) -> None:
        if self._session is not None:
            self.server.end(self._session)

    def _hear(self) -> None:
        """Handle the reply. If there is none, give the session up, because its locks are
        unknown."""
        if self.deaf:
            self.close()
            raise LockServerUnavailableError("No reply came.")

    def _owned(self, keys: tuple[str, ...], owner: Owner) -> list[str]:
        nodes = self.server.nodes
        return [key for key in keys if key in nodes and nodes[key].owner == owner]

    def _renew(self, hold: Hold) -> str:
        nodes = self.server.nodes
        if any(key in nodes and nodes[key].owner != hold.owner for key in hold.keys):
            return Renewal.TAKEN
        return Renewal.RENEWED if all(key in nodes for key in hold.keys) else Renewal.GONE


def session_kind(server: SessionServer, kind: type[SessionLocks] = SessionLocks) -> LockServer:
    """The server, and a kind of provider, as the contract suite wants them described."""

    def end(locks: LockProvider) -> None:
        assert isinstance(locks, SessionLocks)
        server.end(locks.session)

    def deafened() -> AbstractContextManager[LockProvider]:
        return closing(kind(server, deaf=True))

    return LockServer(
        connect=lambda: kind(server),
        forget=server.forget,
        leftovers=lambda: sorted(server.nodes),
        deafened=deafened,
        end_session=end,
    )
