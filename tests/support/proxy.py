"""A TCP proxy before a real server that loses replies, freezes and cuts, for fault-injection tests.

    with Proxy(server.port) as proxy:
        client = connect(proxy.port)
        proxy.lose_reply_to(b"COMMIT")      # the server commits, the client gets no reply
        proxy.mode = Mode.BLACK_HOLE        # no data passes, connections stay open
        proxy.mode = Mode.PASS              # connections made from now on work
    proxy.lose_reply_of(pid, asked=is_update)   # for one of several clients

Guarantees: a request whose reply is lost has been sent to the server in full. Does not guarantee
that a connection that lost bytes is usable afterwards, nor that a pattern is found across two
packets or within TLS.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from support.waiting import patience_s

if TYPE_CHECKING:
    from typing import Self


class Mode(enum.Enum):
    """How data pass through the proxy."""

    PASS = "pass"
    SWALLOW = "swallow"  # requests reach the server, replies vanish
    BLACK_HOLE = "black hole"  # neither arrives, connections stay open
    CUT = "cut"  # connections are closed, new ones at once


@dataclass(frozen=True)
class _Loss:
    """A reply that one client is not to get."""

    pid: int
    asked: Callable[[bytes], bool]
    answered: Callable[[bytes], bool]


class Proxy:
    """Listens on a free port of the loopback interface while the `with` block runs.

    Attributes:
        connections: number of accepted connections.
        requests: number of pieces of data from clients; one a round trip if they are short.
        lost: number of bytes of replies that were thrown away.
        hit: number of replies that `lose_reply_of` has kept from their clients.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.requests = 0
        self.lost = 0
        self.hit = 0
        self._mode = Mode.PASS
        self._mutex = threading.Lock()
        self._pairs: list[_Pair] = []
        self._threads: list[threading.Thread] = []
        self._pattern: tuple[bytes, Mode, Mode] | None = None
        self._losses: list[_Loss] = []
        self._late: bytes | None = None
        self._arrive = threading.Event()
        self._closed = False

    @property
    def mode(self) -> Mode:
        """For all connections, present and future; a connection that lost a reply stays deaf."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = mode
        if mode is Mode.CUT:
            self.cut()

    def lose_reply_to(
        self, pattern: bytes, *, then: Mode = Mode.SWALLOW, others: Mode = Mode.PASS
    ) -> None:
        """Lose the reply to the next request that contains `pattern`. The request arrives.

        `then` decides about its connection: SWALLOW (the client runs into its timeout) or CUT (it
        learns at once that the connection broke). `others` is the mode of all other connections
        from then on.
        """
        self._pattern = (pattern, then, others)

    def lose_reply_of(
        self,
        pid: int,
        *,
        asked: Callable[[bytes], bool] = lambda _: True,
        answered: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        """Lose one reply to this process's next requests for which `asked` is true.

        It is the first reply for which `answered` is true. Its connection breaks.
        """
        self._losses.append(_Loss(pid, asked, answered))

    def delay(self, pattern: bytes) -> None:
        """The next request that contains `pattern` arrives when `deliver()` says so.

        Its client hears at once that the connection broke.
        """
        self._arrive.clear()
        self._late = pattern

    def deliver(self) -> None:
        """The request that was delayed arrives."""
        self._arrive.set()

    @property
    def armed(self) -> bool:
        """Whether `lose_reply_to` still waits for its request."""
        return self._pattern is not None

    def cut(self) -> None:
        """Close the connections that there are; new ones pass."""
        with self._mutex:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()

    def close(self) -> None:
        self._closed = True
        # Closing alone does not wake accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._arrive.set()
        self.cut()
        for thread in self._threads:
            thread.join(patience_s())

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection(self._target, 5.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair(client, server)
            with self._mutex:
                self._pairs.append(pair)
            if self._mode is Mode.CUT or self._closed:
                self.cut()
                continue
            self._start(self._requests, pair)
            self._start(self._replies, pair)

    def _requests(self, pair: _Pair) -> None:
        for data in pair.read(pair.client):
            self.requests += 1
            pattern = self._pattern
            if pattern is not None and pattern[0] in data:
                self._pattern = None
                pair.loses, pair.then, pair.others = True, *pattern[1:]
            if self._losses:
                self._prepare_loss(pair, data)
            if self._late is not None and self._late in data:
                self._late = None
                pair.client.shutdown(socket.SHUT_RDWR)
                self._arrive.wait()
            if self._mode is not Mode.BLACK_HOLE and not pair.write(pair.server, data):
                break
        pair.close()

    def _prepare_loss(self, pair: _Pair, data: bytes) -> None:
        losses = [loss for loss in self._losses if loss.asked(data) and pair.is_of(loss.pid)]
        pair.loss = pair.loss or (losses[0] if losses else None)

    def _takes_place(self, loss: _Loss | None, data: bytes) -> bool:
        """Whether this is the reply; of two connections of its client one loses it."""
        with self._mutex:
            if loss is None or not loss.answered(data) or loss not in self._losses:
                return False
            self._losses.remove(loss)
            self.hit += 1
            return True

    def _replies(self, pair: _Pair) -> None:
        for data in pair.read(pair.server):
            if self._takes_place(pair.loss, data):
                self.lost += len(data)
                break
            if pair.loses or self._mode in (Mode.SWALLOW, Mode.BLACK_HOLE):
                pair.loses = True
                self.lost += len(data)
                if pair.then is Mode.CUT:
                    self._mode = pair.others
                    break
            elif not pair.write(pair.client, data):
                break
        pair.close()


class _Pair:
    """One client's connection, and the connection to the server behind the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.loses = False
        self.then = Mode.SWALLOW
        self.others = Mode.PASS
        self.loss: _Loss | None = None

    def is_of(self, pid: int) -> bool:
        """Whether this process has the client's end."""
        with contextlib.suppress(psutil.Error, OSError):
            port = self.client.getpeername()[1]
            found = psutil.Process(pid).net_connections("tcp")
            return any(each.laddr and each.laddr.port == port for each in found)
        return False

    def read(self, source: socket.socket) -> Iterator[bytes]:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                yield data

    def write(self, sink: socket.socket, data: bytes) -> bool:
        with contextlib.suppress(OSError):
            sink.sendall(data)
            return True
        return False

    def close(self) -> None:
        for each in (self.client, self.server):
            # The other thread may be in recv(): shutdown wakes it, close alone does not.
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
