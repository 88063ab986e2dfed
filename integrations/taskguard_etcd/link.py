"""Calls of etcd's JSON gateway, by urllib3: connections, tokens of authentication, errors, streams.

Guarantees
* An expired token of authentication is renewed, once in each call.
* A refusal by etcd is a RefusedError, whose message says what to do. Every other failure is a
  LockServerUnavailableError. No message shows a password.
* Each try is bounded by the connect time-out and, for each read, by the socket time-out. A member
  that answers with a status of 500 or more has not answered, so the next one is asked.
* Threads may call at once; a forked child opens connections of its own.

Does not guarantee a bound on name resolution, because the system has no time-out for it.
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

# Codes of gRPC; the status of HTTP for them differs between versions.
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
        code: gRPC's code; 0 where the gateway itself refused.
        said: etcd's own words.
    """

    def __init__(self, message: str, *, code: int, said: str) -> None:
        super().__init__(message)
        self.code = code
        self.said = said

    @property
    def is_of_user(self) -> bool:
        """Whether etcd refused the user, the password or the rights."""
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
                    f"{len(messages)} questions."
                )
            answers += [line["result"] for line in lines]
        return answers

    def listen(
        self, path: str, message: Any, *, timeout_s: float
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the answers to one message as they come, until `timeout_s` from now.

        It is tried once, because a caller that waits asks again by itself.
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
                    # http.client's, which urllib3's types leave out.
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
        """Return a member's status, by one request. It may be a refusal."""
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
        # Replaced certificates make another context, and so another pool.
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
                "has no JSON gateway at /v3: it is older than 3.4, or runs with "
                "--enable-grpc-gateway=false, or is no etcd. This is a mistake in the settings."
            )
        elif code == _UNAUTHENTICATED or "authentication failed" in said:
            rest = (
                f"refuses user or password: {said}. This is a mistake in the settings; correct "
                "the URL."
            )
        elif code == _PERMISSION_DENIED or "user name is empty" in said:
            rest = (
                f"forbids what locks need: {said}. This is a mistake in the settings; "
                "taskguard_etcd tells what rights its user needs."
            )
        elif code == _RESOURCE_EXHAUSTED and "space" in said:
            rest = (
                f"is full: {said}. Compact it, defragment it, then `etcdctl alarm disarm`; and "
                "run it with --auto-compaction-retention."
            )
        else:
            rest = f"refused: {said or status}."
        return RefusedError(f"The lock server {self.address} {rest}", code=code, said=said)


@lru_cache(maxsize=4)  # the header is the same for a second
def clock_s(date: str) -> float | None:
    """Return a reply's Date in seconds; None if it has none."""
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
    """Return urllib3's reason, without its object."""
    return f"{endpoint}: {str(error.args[-1]).rstrip('.')}."


def _error_of(reply: BaseHTTPResponse) -> Any:
    try:
        error = json.loads(reply.data)
    except ValueError:
        return reply.data[:200].decode("utf-8", "replace")
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        return error["error"]
    return error
