"""The way to lock servers that speak JSON over HTTP: several endpoints, kept connections, TLS.

Guarantees
* A call is tried at every endpoint, at least twice in all, and first at the one that answered last.
  Each try is bounded by `connect_timeout_s` and, for each reply, `socket_timeout_s`.
* An endpoint that answers with a status of 500 or more has not answered: the next one is asked.
* Whatever goes wrong comes out as LockServerUnavailableError, which names the endpoints, and never
  a password.
* A connection whose reply is not known to be complete is closed, never used again: also when the
  call was interrupted by a time limit, a signal or `GreenletExit`.
* Threads may call at once; a fork starts with no connection; under gevent and eventlet native
  threads and greenlets share none.

Not guaranteed: a bound on name resolution, which the system does without a time-out, and that a
call that failed had no effect. That is why every step may be asked twice.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache

from taskguard.errors import LockServerUnavailableError
from taskguard.locks.endpoints import Endpoint, ServerUrl
from taskguard.values import value

__all__ = ["HttpLink", "Reply"]

_MOST_IDLE = 64


@value
class Reply:
    """One answer: its status, its text, and the server's clock in whole seconds, if it says so.

    `index` is Consul's: of the last change of what was asked for.
    """

    status: int
    body: bytes
    clock_s: float | None
    index: int = 0


class HttpLink:
    """Requests to the endpoints of one server or cluster."""

    def __init__(self, url: ServerUrl, *, socket_timeout_s: float, connect_timeout_s: float):
        self.endpoints = url.endpoints
        self.address = ",".join(map(str, url.endpoints))
        self._tls = url.tls
        self._socket_timeout_s = socket_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._idle = _Idle()
        self._first = 0  # the number of the endpoint that answered last

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        on_retry: Callable[[], None] = lambda: None,
    ) -> Reply:
        """One request, one reply. `on_retry` is called before it is asked again."""
        count = len(self.endpoints)
        first = self._first
        failure = ""
        cause: Exception | None = None
        for number in range(first, first + max(2, count)):
            endpoint = self.endpoints[number % count]
            if failure:
                on_retry()
            try:
                reply = self.ask_at(endpoint, method, path, body, headers)
            except (OSError, http.client.HTTPException) as error:
                failure, cause = f"{endpoint}: {_said(error)}", error
                # The idle ones are as old as the one that failed: the next one is fresh.
                self._idle.close(endpoint)
                continue
            if reply.status < 500:
                self._first = number % count
                return reply
            failure, cause = f"{endpoint}: {_text(reply)}", None
        raise self._unavailable(failure) from cause

    def ask_at(
        self,
        endpoint: Endpoint,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """The same of one endpoint, once; raises OSError or HTTPException."""
        connection = self._idle.take(endpoint) or self._connect(endpoint)
        known = False
        try:
            connection.request(method, path, body, dict(headers or {}))
            with connection.getresponse() as response:
                text = response.read()
                known = not response.will_close
                return Reply(
                    response.status,
                    text,
                    _clock_s(response.getheader("Date", "")),
                    int(response.getheader("X-Consul-Index") or 0),
                )
        finally:
            if known:
                self._idle.put(endpoint, connection)
            else:
                connection.close()

    def lines(
        self, path: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float
    ) -> Generator[bytes, None, None]:
        """The lines of an answer that does not end by itself, until `timeout_s` from now.

        On a connection of its own, and not tried again: whoever listens asks again by itself.
        """
        until_s = time.monotonic() + timeout_s
        endpoint = self.endpoints[self._first]
        try:
            with contextlib.closing(self._connect(endpoint)) as connection:
                connection.request("POST", path, body, dict(headers))
                # Kept here: http.client takes the socket away where an answer has no known end.
                sock = connection.sock
                with connection.getresponse() as response:
                    while (left_s := until_s - time.monotonic()) > 0:
                        sock.settimeout(left_s)
                        line = response.readline()
                        if not line:
                            return
                        yield line
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) and time.monotonic() >= until_s:
                return
            raise self._unavailable(f"{endpoint}: {_said(error)}") from error

    def close(self) -> None:
        """Close what is idle. Calls in flight go on; later calls connect again."""
        for endpoint in self.endpoints:
            self._idle.close(endpoint)

    def _unavailable(self, failure: str) -> LockServerUnavailableError:
        return LockServerUnavailableError(
            f"The lock server {self.address} gave no answer: {failure}."
        )

    def _connect(self, endpoint: Endpoint) -> http.client.HTTPConnection:
        host, port, timeout_s = endpoint.host, endpoint.port, self._connect_timeout_s
        connection = (
            http.client.HTTPConnection(host, port, timeout=timeout_s)
            if self._tls is None
            else http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=self._tls.context()
            )
        )
        try:
            connection.connect()
            connection.sock.settimeout(self._socket_timeout_s)
        except BaseException:  # a handshake that was refused, or interrupted
            connection.close()
            raise
        return connection


class _Idle:
    """Idle connections of each endpoint, the latest used first."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, Endpoint], deque[http.client.HTTPConnection]] = {}
        self._pid = os.getpid()

    def take(self, endpoint: Endpoint) -> http.client.HTTPConnection | None:
        try:
            return self._lane(endpoint).pop()
        except IndexError:
            return None

    def put(self, endpoint: Endpoint, connection: http.client.HTTPConnection) -> None:
        lane = self._lane(endpoint)
        if len(lane) < _MOST_IDLE:
            lane.append(connection)
        else:
            connection.close()

    def close(self, endpoint: Endpoint) -> None:
        """Those of this lane; those of others are closed by their own failures."""
        while connection := self.take(endpoint):
            connection.close()

    def __del__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            for connection in lane:
                connection.close()

    def _lane(self, endpoint: Endpoint) -> deque[http.client.HTTPConnection]:
        if self._pid != os.getpid():
            # The parent's connections: closed here, not shut down, for they are still the parent's.
            self._pid = os.getpid()
            self._drop()
        # Sockets of gevent and eventlet belong to the native thread that made them.
        plain = socket.socket.__module__ == "socket"
        key = (0 if plain else threading.get_native_id(), endpoint)
        found = self._lanes.get(key)
        return found if found is not None else self._lanes.setdefault(key, deque())


@lru_cache(maxsize=4)
def _clock_s(date: str) -> float | None:
    """What an answer's Date says. Remembered, since it is the same for a second."""
    with contextlib.suppress(ValueError):
        return parsedate_to_datetime(date).timestamp()
    return None


def _said(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


def _text(reply: Reply) -> str:
    return reply.body[:200].decode("utf-8", "replace").strip() or f"status {reply.status}"
