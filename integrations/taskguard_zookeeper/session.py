"""One session with ZooKeeper, with its own kazoo client.

Guarantees
* A request waits for a connection and for its reply no longer than the timeouts allow. Every
  failure raises LockServerUnavailableError, except the server's errors about nodes.
* A server that accepts a connection and stays silent, or is cut off, costs only a part of the
  session timeout. Then the other servers are tried, and that server again.
* An ended session stays ended, and no reply to another session counts as a reply to it. It ends if
  the server says so, after silence for its timeout, and by `end()`.
* A request without an answer is undone before any later request of this session.
* Threads may call at the same time. A forked child does not use the session: `forget()` closes the
  child's copies.

The server may end a session later than this process does.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kazoo.client import KazooClient, KazooState
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Connect
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from taskguard.errors import LockServerUnavailableError
from taskguard.locks import Tls
from taskguard_zookeeper.address import Address
from taskguard_zookeeper.tokens import NO_EPOCH, Epoch, read_epoch
from taskguard_zookeeper.wire import GetEphemerals, Nodes, Transaction, errors, freeing

__all__ = ["Node", "RefusedError", "Session"]

# Errors about nodes, not about the server.
_OF_NODES = (errors.NoNodeError, errors.NodeExistsError, errors.BadVersionError)
_OF_RIGHTS = (errors.NoAuthError, errors.AuthFailedError, errors.InvalidACLError)
_MOST_DOUBTS = 10_000
_LONGEST_PAUSE_S = 0.3
# A busy server may take this long to open a session, because it writes the session to its disk.
_LEAST_PATIENCE_S = 1.0


class RefusedError(LockServerUnavailableError):
    """ZooKeeper answered with a refusal."""


class Node(NamedTuple):
    """The data of a path."""

    data: bytes
    czxid: int
    session: int


class _Secret(str):
    """A text that is hidden in kazoo's log: kazoo logs everything that it sends."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "…"


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's handler, which also keeps the error of the last failed connection.

    It waits for a connection no longer than `timeout_s()`. With TLS, it connects itself, because
    kazoo also trusts authorities that are not in `ca=`, and does not close failed connections.
    """

    def __init__(self, tls: Tls | None, *, timeout_s: Callable[[], float]) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self._tls = tls
        self._timeout_s = timeout_s

    def create_connection(self, *args: Any, **options: Any) -> Any:
        options["timeout"] = self._timeout_s()
        try:
            if self._tls is None:
                return super().create_connection(*args, **options)
            plain = socket.create_connection(options["address"], options["timeout"])
            with contextlib.closing(plain):  # wrap_socket() takes over its descriptor
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._tls.wrap_socket(plain, server_hostname=options["hostname"])
        except Exception as error:
            self.failure = error
            raise


class Session:
    """A session, which is opened in the background as soon as it is created."""

    def __init__(
        self, address: Address, root: str, *, socket_timeout_s: float, connect_timeout_s: float
    ) -> None:
        self.address = address
        self.root = root
        self.timeout_s = address.session_s  # until the server has granted one
        self.ended = False
        self.epoch = NO_EPOCH
        self._socket_timeout_s = socket_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._opened_at_s = time.monotonic()
        self._was_connected = False
        # Held while requests are queued: the undoing of an acquire precedes its repetition.
        self._order = threading.Lock()
        self._doubts: deque[Nodes] = deque(maxlen=_MOST_DOUBTS)
        self._watches: dict[str, threading.Event] = {}
        self._handler = _Handler(address.tls, timeout_s=self._patience_s)
        user = _Secret(f"{address.user}:{address.password}")
        self.acl = CREATOR_ALL_ACL if address.user else OPEN_ACL_UNSAFE
        self._client = KazooClient(
            hosts=address.hosts,
            timeout=address.session_s,
            handler=self._handler,
            default_acl=self.acl,
            auth_data=[("digest", user)] if address.user else None,
            # Without a deadline, kazoo would try for ever, and keep forgotten locks alive.
            connection_retry=KazooRetry(
                max_tries=-1,
                delay=0.05,
                max_delay=_LONGEST_PAUSE_S,
                deadline=address.session_s,
                sleep_func=self._handler.sleep_func,
            ),
        )
        self._attend_connecting()
        self._client.add_listener(self._heed)
        self._live = self._client.start_async()

    def _patience_s(self) -> float:
        """Return the timeout for each step of connecting to one server, in seconds.

        kazoo would wait for one silent server for the whole session timeout.
        """
        fair_s = self.timeout_s / (len(self.address.endpoints) + 2)
        return min(self.timeout_s, max(_LEAST_PATIENCE_S, fair_s))

    def _attend_connecting(self) -> None:
        """Limit how long kazoo waits for a server, and read the session timeout that it grants.

        kazoo does not publish either of them.
        """
        connection = self._client._connection  # noqa: SLF001  # see above
        invoke = connection._invoke  # noqa: SLF001  # sends the first requests of a connection

        def attended(timeout_s: float, request: Any, xid: int | None = None) -> Any:
            answer = invoke(min(timeout_s, self._patience_s()), request, xid)
            if isinstance(request, Connect) and answer[0].time_out > 0:
                self.timeout_s = answer[0].time_out / 1000
            return answer

        connection._invoke = attended  # noqa: SLF001

    # -- its life -----------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """The server's id of the session, or 0."""
        found = self._client.client_id
        return int(found[0]) if found else 0

    @property
    def wire(self) -> Any:
        """kazoo's client, for other requests."""
        return self._client

    def is_over(self) -> bool:
        """Return True if a new session is needed."""
        age_s = time.monotonic() - self._opened_at_s
        if not self._was_connected and not self.ended and age_s > self.timeout_s:
            self.end()  # kazoo has given up as well, but reports no loss before a connection
        return self.ended

    def connect(self) -> None:
        """Wait until the session is connected. Raises LockServerUnavailableError."""
        if self.ended or not self._live.wait(self._connect_timeout_s):
            raise self._silent() from self._handler.failure

    def end(self) -> threading.Thread:
        """End the session and its locks in a thread, which is returned: kazoo may be slow."""
        self.ended = True
        ending = threading.Thread(target=self._stop, daemon=True)
        ending.start()
        return ending

    def forget(self) -> None:
        """In a forked child, close the child's copies of the parent's sockets. Send nothing."""
        self.ended = True
        atexit.unregister(self._handler.stop)
        connection = self._client._connection  # noqa: SLF001  # only this closes without a request
        for name in ("_socket", "_read_sock", "_write_sock"):
            with contextlib.suppress(AttributeError, OSError):
                getattr(connection, name).close()

    def _stop(self) -> None:
        with contextlib.suppress(Exception):  # the client is not used any more
            self._client.stop()
            self._client.close()

    def _heed(self, state: str) -> None:
        """Handle a change of the connection. kazoo's thread calls this, so it must not block."""
        if state == KazooState.CONNECTED:
            self._was_connected = True
            with self._order:
                self._undo_doubts()
        elif state == KazooState.LOST and not self.ended:
            self.end()

    # -- requests -----------------------------------------------------------------------------

    def send(self, *requests: Callable[[Any], Any]) -> list[Any]:
        """Queue requests at kazoo's client, in order. Return promises of their answers."""
        with self._order:
            self._undo_doubts()
            return [request(self._client) for request in requests]

    def answer(self, promise: Any) -> Any:
        """Wait for a request's answer and return it. Raises the server's errors about nodes."""
        try:
            found = promise.get(timeout=self._socket_timeout_s)
        except _OF_NODES:
            raise
        except _OF_RIGHTS as error:
            raise self._forbidden(error) from error
        # kazoo raises RuntimeError for an answer that it cannot parse.
        except (errors.KazooException, self._handler.timeout_exception, RuntimeError) as error:
            raise self._silent() from error
        if self.ended:
            raise self._silent()
        return found

    def change(self, operations: Sequence[Any]) -> list[Any]:
        """Run all operations or none. Return the answer of each.

        Raises the server's error about the first node that is not as expected.
        """
        results: list[Any] = self.answer(*self.send(_calling(Transaction(operations))))
        for result in results:
            if isinstance(result, _OF_NODES):
                raise result
            if isinstance(result, _OF_RIGHTS):
                raise self._forbidden(result) from result
        for result in results:
            if isinstance(result, Exception):
                raise self._silent() from result
        return results

    def look(self, paths: Iterable[str]) -> list[Node | None]:
        """Return the nodes at these paths, by one request each."""
        return [self._node(promise) for promise in self.send(*(_reading(path) for path in paths))]

    def _node(self, promise: Any) -> Node | None:
        try:
            data, stat = self.answer(promise)
        except errors.NoNodeError:
            return None
        return Node(data, stat.czxid, stat.ephemeralOwner)

    def holds(self) -> set[str]:
        """Return the paths of this session's holds, as the leader knows them, by two requests."""
        synced, found = self.send(
            lambda client: client.sync_async(self.root),
            _calling(GetEphemerals(f"{self.root}/owner/")),
        )
        self.answer(synced)
        return set(self.answer(found))

    def watch(self, path: str) -> threading.Event | None:
        """Return an event that is set when the node changes or is deleted. None without a node."""
        fired = self._watches.get(path)
        if fired is not None and not fired.is_set():
            return fired  # the server has this watch already, and notifies it once
        fired = self._watches[path] = threading.Event()

        def fire(_: Any) -> None:
            fired.set()
            if self._watches.get(path) is fired:
                self._watches.pop(path, None)

        try:
            self.answer(*self.send(lambda client: client.get_async(path, watch=fire)))
        except BaseException as error:
            fire(None)  # so that other waiters for this node try again
            if isinstance(error, errors.NoNodeError):
                return None
            raise
        return fired

    # -- requests without an answer -----------------------------------------------------------

    @contextmanager
    def doubtful(self, nodes: Iterable[Nodes]) -> Iterator[None]:
        """Undo the requests of the block on these nodes if one of them gets no answer."""
        try:
            yield
        except _OF_NODES:
            raise
        except BaseException:
            with self._order:
                self._doubts.extend(nodes)
                if self._live.is_set():
                    self._undo_doubts()
            raise

    def _undo_doubts(self) -> None:
        while self._doubts:
            nodes = self._doubts.popleft()
            done = _calling(Transaction(freeing(nodes)))(self._client)
            done.rawlink(lambda done, nodes=nodes: self._undone(done, nodes))

    def _undone(self, done: Any, nodes: Nodes) -> None:
        """Note a failed undoing, so that it is tried again."""
        if done.successful() or self.ended:
            return
        with self._order:
            self._doubts.append(nodes)
            if self._live.is_set():  # connected again, and nothing else would undo it
                self._undo_doubts()

    # -- folders and the epoch ----------------------------------------------------------------

    def prepare(self) -> None:
        """Create missing folders."""
        parts = self.root.split("/")[1:]
        folders = ["/" + "/".join(parts[: n + 1]) for n in range(len(parts))]
        for folder in [*folders, f"{self.root}/lock", f"{self.root}/owner"]:
            with contextlib.suppress(errors.NodeExistsError):
                self._create(folder, b"")

    def raise_epoch(self) -> None:
        """Begin an epoch, or use one that another session has begun meanwhile."""
        path = f"{self.root}/epoch"
        try:
            before = self._read_epoch()
            packed = str(before).encode()
            stat = self.answer(
                *self.send(lambda client: client.set_async(path, packed, version=before.version))
            )
            self.epoch = read_epoch(packed, stat)
            return
        except errors.NoNodeError:
            with contextlib.suppress(errors.NodeExistsError):
                try:
                    self._create(path, str(NO_EPOCH).encode())
                except errors.NoNodeError:
                    self.prepare()
                    self._create(path, str(NO_EPOCH).encode())
        except errors.BadVersionError:
            pass
        self.epoch = self._read_epoch()

    def heed_epoch(self) -> None:
        """Use the epoch that another session has begun."""
        try:
            self.epoch = self._read_epoch()
        except errors.NoNodeError:
            self.epoch = NO_EPOCH

    def _read_epoch(self) -> Epoch:
        path = f"{self.root}/epoch"
        data, stat = self.answer(*self.send(lambda client: client.get_async(path)))
        return read_epoch(data, stat)

    def _create(self, path: str, data: bytes) -> None:
        self.answer(*self.send(lambda client: client.create_async(path, data)))

    # -- errors -------------------------------------------------------------------------------

    def _silent(self) -> LockServerUnavailableError:
        return LockServerUnavailableError(
            f"The lock server {self.address.hosts} gave no answer: "
            + (
                "the session has ended. Try again."
                if self.ended
                else "the session is not connected, or the server is too slow. Check the server."
            )
        )

    def _forbidden(self, error: Exception) -> RefusedError:
        return RefusedError(
            f"The lock server {self.address.hosts} refused a request ({type(error).__name__}): the "
            f"URL's user lacks rights. Give it all rights on {self.root} and all nodes below it "
            f"(getAcl {self.root})."
        )


def _calling(request: Any) -> Callable[[Any], Any]:
    """Return a request for which kazoo's client has no method."""

    def call(client: Any) -> Any:
        promise = client.handler.async_result()
        client._call(request, promise)  # noqa: SLF001
        return promise

    return call


def _reading(path: str) -> Callable[[Any], Any]:
    return lambda client: client.get_async(path)
