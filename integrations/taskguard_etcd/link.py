"""Requests to etcd's JSON gateway with urllib3: connections, authentication, errors, streams.

Guarantees
* An expired authentication token is renewed, once per call.
* A refusal by etcd raises RefusedError, whose message says what to do. Every other failure raises
  LockServerUnavailableError. No message shows a password.
* The connect timeout limits each attempt, and the socket timeout limits each read. If a member
  answers with a status of 500 or more, the request goes to the next member.
* Threads may call at the same time. A forked child opens connections of its own.

Name resolution has no timeout, because the system has none for it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

from urllib3 import (
    BaseHTTPResponse,
    HTTPConnectionPool,
    HTTPSConnectionPool,
    PoolManager,
    Timeout,
)
from urllib3.exceptions import HTTPError, ReadTimeoutError

from taskguard.errors import LockServerUnavailableError
from taskguard.locks import Endpoint, Endpoints, IdleQueue, PerProcess, ServerUrl

__all__ = ["EtcdLink", "RefusedError", "clock_s"]

# Codes of gRPC. Their HTTP status differs between versions.
_INVALID_ARGUMENT = 3
_PERMISSION_DENIED = 7
_RESOURCE_EXHAUSTED = 8
_UNAUTHENTICATED = 16
_MOST_IDLE = 64  # connections to one member
_MOST_POOLS = 64
_READ_AT_ONCE = 512
_NOT_THROWN_AWAY = 256 * 1024
_OLD_TOKENS = ("invalid auth token", "revision of auth store is old", "user name is empty")


class RefusedError(LockServerUnavailableError):
    """etcd answered with a refusal.

    Attributes:
        code: gRPC's code, or 0 if the gateway itself refused.
        said: etcd's own message.
    """

    def __init__(self, message: str, *, code: int, said: str) -> None:
        super().__init__(message)
        self.code = code
        self.said = said

    @property
    def is_of_user(self) -> bool:
        """True if etcd refused the user, the password or the rights."""
        return self.code in (_PERMISSION_DENIED, _UNAUTHENTICATED) or any(
            words in self.said for words in ("user name is empty", "authentication failed")
        )


class _Plain(HTTPConnectionPool):
    QueueCls = IdleQueue


class _Encrypted(HTTPSConnectionPool):
    QueueCls = IdleQueue


def _pools() -> PoolManager:
    pools = PoolManager(_MOST_POOLS, maxsize=_MOST_IDLE)
    pools.pool_classes_by_scheme = {"http": _Plain, "https": _Encrypted}
    return pools


class EtcdLink:
    """Requests to one etcd or to the members of a cluster.

    Attributes:
        endpoints: the members that the URL names.
    """

    def __init__(
        self, url: ServerUrl, *, socket_timeout_s: float, connect_timeout_s: float
    ) -> None:
        self.endpoints = Endpoints(url.endpoints)
        self.address = self.endpoints.hosts
        self._tls = url.tls
        self._connect_timeout_s = connect_timeout_s
        self._timeout = Timeout(connect=connect_timeout_s, read=socket_timeout_s)
        self._pools = PerProcess(_pools)
        self._user = url.user
        self._password = url.password
        self._token = ""

    def call(
        self, path: str, message: Any, *, on_retry: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Return the answer to one message, with the server's clock as `clock_s`.

        Raises RefusedError.
        """
        reply = self._ask(path, _packed(message), on_retry)
        answer = self._read(reply.data)
        answer["clock_s"] = clock_s(reply.headers.get("Date", ""))
        return answer

    def call_each(self, path: str, messages: list[Any]) -> list[dict[str, Any]]:
        """Send many messages in one request, and return their answers in order."""
        answers: list[dict[str, Any]] = []
        while len(answers) < len(messages):
            reply = self._ask(path, _joined(messages[len(answers) :]), lambda: None)
            lines = [self._read(line) for line in reply.data.splitlines()]
            for line in lines:
                if "error" in line:
                    raise self._refused(line["error"], reply.status)
            if not lines:
                raise LockServerUnavailableError(
                    f"The lock server {self.address} gave {len(answers)} answers to "
                    f"{len(messages)} requests. Try again."
                )
            answers += [line["result"] for line in lines]
        return answers

    def listen(
        self, path: str, message: Any, *, timeout_s: float
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the answers to one message as they come, until `timeout_s` from now.

        It tries once, because a caller that waits will call again.
        """
        until_s = time.monotonic() + timeout_s
        endpoint = self.endpoints.first
        timeout = Timeout(connect=self._connect_timeout_s, total=timeout_s)
        try:
            reply = self._send(
                endpoint,
                path,
                _packed(message),
                self._token,
                timeout=timeout,
                preload_content=False,
            )
            with contextlib.closing(reply):
                for line in reply:
                    yield self._read(line).get("result", {})
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        return
                    # The socket of http.client, which urllib3's types do not have.
                    sock = getattr(reply.connection, "sock", None)
                    if sock is not None:
                        sock.settimeout(left_s)
        except ReadTimeoutError:
            return
        except HTTPError as error:
            raise LockServerUnavailableError(
                f"The lock server {self.address} gave no answer: {_said(endpoint, error)}"
            ) from error

    def status_of(self, endpoint: Endpoint) -> BaseHTTPResponse:
        """Return a member's reply to one request for its status. It may be a refusal."""
        return self._answer(endpoint, "/v3/maintenance/status", b"{}", self._token)

    def close(self) -> None:
        """Close idle connections. The next call connects again."""
        self._pools.get().clear()

    def _ask(self, path: str, body: bytes, on_retry: Callable[[], None]) -> BaseHTTPResponse:
        if self._user and not self._token:
            self._authenticate()
        used = self._token
        reply = self._post(path, body, token=used, on_retry=on_retry)
        if reply.status == 200:
            return reply
        refused = self._refused(_error_of(reply), reply.status)
        if not (used and any(words in refused.said for words in _OLD_TOKENS)):
            raise refused
        if used == self._token:  # no other thread was faster
            self._authenticate()
        reply = self._post(path, body, token=self._token, on_retry=on_retry)
        if reply.status == 200:
            return reply
        raise self._refused(_error_of(reply), reply.status)

    def _post(
        self,
        path: str,
        body: bytes,
        *,
        token: str,
        on_retry: Callable[[], None] = lambda: None,
    ) -> BaseHTTPResponse:
        """Return the reply of the first member that answers with a status below 500."""

        def post(endpoint: Endpoint) -> BaseHTTPResponse:
            reply = self._answer(endpoint, path, body, token)
            if reply.status < 500:
                return reply
            said = reply.data[:200].decode("utf-8", "replace").strip() or f"status {reply.status}"
            raise LockServerUnavailableError(f"{endpoint}: {said}")

        return self.endpoints.ask(post, on_retry=on_retry)

    def _answer(self, endpoint: Endpoint, path: str, body: bytes, token: str) -> BaseHTTPResponse:
        try:
            return self._send(endpoint, path, body, token, timeout=self._timeout)
        except HTTPError as error:
            raise LockServerUnavailableError(_said(endpoint, error)) from error

    def _send(
        self, endpoint: Endpoint, path: str, body: bytes, token: str, **options: Any
    ) -> BaseHTTPResponse:
        # After certificates were replaced, the context is new, and so is the pool.
        tls = {} if self._tls is None else {"ssl_context": self._tls.context()}
        pool = self._pools.get().connection_from_host(
            endpoint.host, endpoint.port, "https" if tls else "http", tls
        )
        headers = {"Authorization": token} if token else {}
        return pool.urlopen("POST", path, body, headers, retries=False, **options)

    def _authenticate(self) -> None:
        body = _packed({"name": self._user, "password": self._password})
        reply = self._post("/v3/auth/authenticate", body, token="")
        if reply.status == 200:
            self._token = self._read(reply.data).get("token", "")
            return
        refused = self._refused(_error_of(reply), reply.status)
        # An etcd without users accepts every request, also one that names a user.
        if "not enabled" not in refused.said:
            raise refused

    def _read(self, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise LockServerUnavailableError(
                f"The lock server {self.address} gave an answer that is not etcd's: {text[:60]!r}."
            )
        return found

    def _refused(self, error: Any, status: int) -> RefusedError:
        """Return the error for the gateway's words: a text, or an object within a stream."""
        code = 0
        said = error
        if isinstance(error, dict):
            code = error.get("code") or error.get("grpc_code") or 0
            said = error.get("message") or error.get("error") or ""
        said = str(said).strip().rstrip(".")
        if status == 404 and not code:
            rest = (
                "has no JSON gateway at /v3: it is older than 3.4, runs with "
                "--enable-grpc-gateway=false, or is not an etcd. This is a mistake in the settings."
            )
        elif code == _UNAUTHENTICATED or "authentication failed" in said:
            rest = (
                f"refuses user or password: {said}. This is a mistake in the settings: correct "
                "the URL."
            )
        elif code == _PERMISSION_DENIED or "user name is empty" in said:
            rest = (
                f"forbids what locks need: {said}. This is a mistake in the settings: give the "
                "user the rights that docs/how-to/etcd.md lists."
            )
        elif code == _RESOURCE_EXHAUSTED and "space" in said:
            rest = (
                f"is full: {said}. Compact and defragment it, and run `etcdctl alarm disarm`. Set "
                "--auto-compaction-retention."
            )
        else:
            rest = f"refused the request: {said or status}."
        return RefusedError(f"The lock server {self.address} {rest}", code=code, said=said)


@lru_cache(maxsize=4)  # the header is the same for a second
def clock_s(date: str) -> float | None:
    """Return a reply's Date in seconds since 1970, or None if it has none."""
    with contextlib.suppress(ValueError):
        return parsedate_to_datetime(date).timestamp()
    return None


def _packed(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def _joined(messages: list[Any]) -> bytes:
    """Return many messages as the body of one request.

    The gateway answers the first message before it has read the last. When Go's HTTP server begins
    to answer, it discards the unread rest of a request, unless that is 256 KiB or more.
    """
    body = b"\n".join(map(_packed, messages))
    return body if len(body) <= _READ_AT_ONCE else body + b"\n" * _NOT_THROWN_AWAY


def _said(endpoint: Endpoint, error: HTTPError) -> str:
    """Return urllib3's reason, without the object that it names."""
    return f"{endpoint}: {str(error.args[-1]).rstrip('.')}."


def _error_of(reply: BaseHTTPResponse) -> Any:
    try:
        error = json.loads(reply.data)
    except ValueError:
        return reply.data[:200].decode("utf-8", "replace")
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        return error["error"]
    return error
