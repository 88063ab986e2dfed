"""A lock provider on ZooKeeper: each change is one transaction that names the keys' owner.

The package's docstring has the guarantees and the data in the server.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.locks import (
    Finding,
    Granted,
    Held,
    Hold,
    Holder,
    Owner,
    Renewal,
    Traits,
    check_number,
    greenlets,
)
from taskguard_zookeeper.address import parse_address
from taskguard_zookeeper.session import Node, Session
from taskguard_zookeeper.tokens import NO_EPOCH, Epoch
from taskguard_zookeeper.wire import (
    CheckVersion,
    Nodes,
    SetData,
    ZnodeStat,
    creating,
    errors,
    freeing,
    handing,
)

__all__ = ["ZooKeeperLocks"]

_WAIT_SLICE_S = 1.0
_NO_EXPIRY_S = 86_400.0
# How often a step is repeated because the nodes that it read have changed meanwhile.
_TRIES = 50
_ANY_VERSION = -1
_NO_TOKEN = "-"  # noqa: S105  # taken without a token


class _Lock(NamedTuple):
    """The data of a lock.

    Attributes:
        owner: its owner.
        token: its token, or 0 if it has none or an election made it invalid.
        lasts_s: the timeout of the session in which it was taken, in seconds.
        session: the id of its session.
    """

    owner: Owner
    token: int
    lasts_s: float
    session: int


class ZooKeeperLocks:
    """A `LockProvider` on ZooKeeper 3.6 or later.

    Args:
        server: zookeeper://[user:password@]host[:port],…[/chroot], or zookeepers:// for TLS.
            `?session_s=10` sets the session timeout in seconds. The locks of a process that is
            silent for longer are free. Default: 10.
        namespace: the first part of every path in the server. Default: "taskguard".
        socket_timeout_s: the timeout for one reply, in seconds. Default: 1.
        connect_timeout_s: how long a call waits for a connection, in seconds. Default: 1.

    Raises:
        ConfigurationError: an argument is wrong, or gevent or eventlet has replaced threads.
    """

    def __init__(
        self,
        server: str,
        *,
        namespace: str = "taskguard",
        socket_timeout_s: float = 1.0,
        connect_timeout_s: float = 1.0,
    ) -> None:
        if not namespace or not namespace.isprintable():
            raise ConfigurationError(
                f"The namespace {namespace!r} cannot begin a path: it is empty or has unprintable "
                "characters. Choose another one."
            )
        if (kind := greenlets()) is not None:
            raise ConfigurationError(
                f"Locks on ZooKeeper need real threads, and {kind} has replaced them. Use another "
                "lock server, or a pool of processes or threads."
            )
        check_number("socket_timeout_s", socket_timeout_s, at_least=0.001)
        check_number("connect_timeout_s", connect_timeout_s, at_least=0.001)
        self.namespace = namespace
        self._address = parse_address(server)
        self._root = f"{self._address.chroot}/{_encoded(namespace)}"
        self._socket_timeout_s = socket_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._current: Session | None = None
        self._min_ttl_s = self._address.session_s

    @property
    def traits(self) -> Traits:
        """Locks of a session, with tokens. They last as long as the session."""
        return Traits(session=True, min_ttl_s=self._min_ttl_s)

    def __repr__(self) -> str:
        return f"<ZooKeeperLocks {self._address.hosts} namespace={self.namespace!r}>"

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys or none: one round trip if they are free, two if one is held."""
        del ttl_s, wait_s  # the session decides how long it lasts, and notifies all waiters
        nodes = self._nodes(keys, owner)
        found: list[_Lock | None] = [None] * len(keys)
        for _ in range(_TRIES):
            session = self._session()
            if with_fence and session.epoch == NO_EPOCH:
                session.raise_epoch()
            with session.doubtful(nodes):
                token = self._take(session, nodes, found, owner, with_fence=with_fence)
            if token is not None:
                return Granted(token if with_fence else 0, session.timeout_s)
            found = self._look(session, nodes)
            for key, lock in zip(keys, found, strict=True):
                if lock is not None and lock.owner != owner:
                    return Held(key=key, owner=lock.owner, remaining_s=lock.lasts_s)
        raise self._restless(keys)

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys that the owner still has, in one round trip. Return False if it has none.

        If there is no answer, the keys are freed as soon as there is a connection.
        """
        nodes = self._nodes(keys, owner)
        session = self._present_session()
        with session.doubtful(nodes):
            session.connect()
            if _done(session, [step for each in nodes for step in freeing(each)]):
                return True
            if len(nodes) == 1:
                return False
            # The owner may have lost or handed over some of them.
            freed = [_done(session, freeing(each)) for each in nodes]
            return any(freed)

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that `owner` still has over to the owner `to`.

        They stay in this session until the next renewal by `to`, and last as long as this session.
        """
        del ttl_s
        session = self._session()
        handed = False
        nodes, others = self._nodes(keys, owner), self._nodes(keys, to)
        for mine, theirs, lock in zip(nodes, others, self._look(session, nodes), strict=True):
            if lock is not None and lock.owner == owner:
                value = _value(session, to, lock.token)
                handed |= _done(session, handing(mine, theirs, value, session.acl))
            elif lock is not None and lock.owner == to:
                handed = True
        return handed

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Read the session's keys, by two requests for all holds, then read missing keys."""
        if not holds:
            return []
        session = self._session()
        held = session.holds()
        wanted = [self._nodes(hold.keys, hold.owner) for hold in holds]
        answers = {
            number: Renewal.RENEWED
            for number, nodes in enumerate(wanted)
            if all(each.hold in held for each in nodes)
        }
        rest = [number for number in range(len(holds)) if number not in answers]
        seen = iter(self._look(session, [each for number in rest for each in wanted[number]]))
        for number in rest:
            found = [next(seen) for _ in wanted[number]]
            answers[number] = self._renew_one(session, holds[number], wanted[number], found)
        return [answers[number] for number in range(len(holds))]

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """Block until the key is released, for at most a second. Then the caller tries again."""
        del owner
        if timeout_s <= 0:
            return
        until_s = time.monotonic() + min(timeout_s, _WAIT_SLICE_S)
        fired = self._session().watch(self._lock_path(key))
        if fired is not None:
            fired.wait(max(0.0, until_s - time.monotonic()))

    def holders(self, key: str) -> list[Holder]:
        """Return the holder of a key, by one request."""
        [found] = self._session().look([self._lock_path(key)])
        if found is None:
            return []
        lock = _read(found)
        return [Holder(key, lock.owner, lock.token, lock.lasts_s)]

    def check(self) -> list[Finding]:
        """Return what is wrong with the servers of the URL and the rights of its user.

        Opens a session and ends it, because a worker's parent process calls this before it forks.
        """
        from taskguard_zookeeper import health  # not for deliveries

        return health.check(self._address, self._open, timeout_s=self._connect_timeout_s)

    def close(self) -> None:
        """End the session, which frees its keys."""
        self._after_fork()
        with self._mutex:
            session, self._current = self._current, None
        if session is not None:
            session.end().join(self._socket_timeout_s)  # afterwards it ends in its thread

    # -- the session --------------------------------------------------------------------------

    def _session(self) -> Session:
        """Return the session, connected."""
        session = self._present_session()
        session.connect()
        self._min_ttl_s = session.timeout_s
        return session

    def _present_session(self) -> Session:
        self._after_fork()
        with self._mutex:
            if self._current is None or self._current.is_over():
                self._current = self._open()
            return self._current

    def _open(self) -> Session:
        return Session(
            self._address,
            self._root,
            socket_timeout_s=self._socket_timeout_s,
            connect_timeout_s=self._connect_timeout_s,
        )

    def _after_fork(self) -> None:
        """Forget the parent's session in a forked child, which opens its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._mutex = threading.Lock()
            if self._current is not None:
                self._current.forget()
                self._current = None

    # -- keys ---------------------------------------------------------------------------------

    def _take(
        self,
        session: Session,
        nodes: list[Nodes],
        found: list[_Lock | None],
        owner: Owner,
        *,
        with_fence: bool,
    ) -> int | None:
        """Take the keys and return their token (0 without one), or None if a key has changed."""
        epoch = session.epoch if with_fence else NO_EPOCH
        operations: list[Any] = []
        new: list[Nodes] = []
        tokens = [0]
        for each, lock in zip(nodes, found, strict=True):
            if lock is None or (with_fence and not lock.token):
                operations += [] if lock is None else freeing(each)
                operations += creating(each, _value(session, owner, epoch), session.acl)
                new.append(each)
            else:
                tokens.append(lock.token)
                if lock.session == session.id:
                    operations.append(CheckVersion(each.hold, _ANY_VERSION))
                else:
                    operations += _moving(session, each, owner, lock.token)
        if with_fence and new:
            # First, because the server stops at the first operation that fails.
            operations.insert(0, CheckVersion(f"{self._root}/epoch", epoch.version))
            # Only the reply to a write contains the number of its transaction.
            operations.append(SetData(new[0].lock, _value(session, owner, epoch), _ANY_VERSION))
        try:
            results = session.change(operations)
        except errors.NoNodeError:
            # One key was released, or all folders are gone.
            session.prepare()
            session.heed_epoch()
            return None
        except errors.BadVersionError:
            session.heed_epoch()
            return None
        except errors.NodeExistsError:
            return None
        if with_fence and new:
            created = next(each for each in results if isinstance(each, ZnodeStat))
            token = epoch.token(created.czxid)
            if token is None:  # there was an election: begin again, with a new epoch
                _done(session, [step for each in new for step in freeing(each)])
                session.epoch = NO_EPOCH
                return None
            tokens.append(token)
        return max(tokens)

    def _renew_one(
        self, session: Session, hold: Hold, nodes: list[Nodes], found: list[_Lock | None]
    ) -> str:
        """Renew a hold if the session does not have all of its keys."""
        for _ in range(_TRIES):
            if any(each is not None and each.owner != hold.owner for each in found):
                return Renewal.TAKEN
            if None in found:
                return Renewal.GONE
            # The keys were handed over, or taken in another session: move them to this one.
            moves = [
                step
                for each, lock in zip(nodes, found, strict=True)
                if lock is not None and lock.session != session.id
                for step in _moving(session, each, hold.owner, lock.token)
            ]
            if _done(session, moves):
                return Renewal.RENEWED
            found = self._look(session, nodes)
        raise self._restless(hold.keys)

    def _look(self, session: Session, nodes: Iterable[Nodes]) -> list[_Lock | None]:
        found = session.look(each.lock for each in nodes)
        return [None if node is None else _read(node) for node in found]

    def _nodes(self, keys: tuple[str, ...], owner: Owner) -> list[Nodes]:
        nonce = _encoded(owner.nonce)
        return [
            Nodes(self._lock_path(key), f"{self._root}/owner/{nonce},{_encoded(key)}")
            for key in keys
        ]

    def _lock_path(self, key: str) -> str:
        return f"{self._root}/lock/{_encoded(key)}"

    def _restless(self, keys: tuple[str, ...]) -> LockServerUnavailableError:
        return LockServerUnavailableError(
            f"The lock server {self._address.hosts} gave {_TRIES} answers about {', '.join(keys)} "
            "that were outdated when they arrived, so nothing was taken. Try again.",
            key=", ".join(keys),
        )


def _encoded(text: str) -> str:
    """Return a text as the name of a node: without '/' and '.', and not empty."""
    return quote(text.encode("utf-8", "surrogatepass"), safe="").replace(".", "%2E") or "%"


def _value(session: Session, owner: Owner, token: int | Epoch) -> bytes:
    """Return the data of a lock. A new one has the epoch, from which its token is computed."""
    if token in (0, NO_EPOCH):
        said = _NO_TOKEN
    else:
        said = str(token) if isinstance(token, Epoch) else f"={token}"
    return f"{said}:{session.timeout_s:g}:{owner}".encode("utf-8", "surrogatepass")


def _read(node: Node) -> _Lock:
    text = node.data.decode("utf-8", "surrogatepass")
    said, _, rest = text.partition(":")
    lasts_s, _, owner = rest.partition(":")
    try:
        if said == _NO_TOKEN:
            token = 0
        elif said.startswith("="):
            token = int(said[1:])
        else:
            token = Epoch.parse(said).token(node.czxid) or 0
        return _Lock(Owner.parse(owner), token, float(lasts_s), node.session)
    except ValueError:  # the node of another program
        return _Lock(Owner.parse(text), 0, _NO_EXPIRY_S, node.session)


def _done(session: Session, operations: Sequence[Any]) -> bool:
    """Run the operations. Return False if a node was missing or in the way."""
    try:
        session.change(operations)
    except (errors.NoNodeError, errors.NodeExistsError):
        return False
    return True


def _moving(session: Session, nodes: Nodes, owner: Owner, token: int) -> list[Any]:
    """Return the operations that move the owner's key to this session."""
    return [*freeing(nodes), *creating(nodes, _value(session, owner, token), session.acl)]
