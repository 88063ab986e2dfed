"""Calls of etcd's JSON gateway: tokens of authentication, errors, answers that are streams.

Guarantees: a token that etcd does not take any more is renewed, once a call; what etcd refuses
comes out as a RefusedError, a LockServerUnavailableError that says what to do; no message holds a
password. What `taskguard.locks.http` guarantees holds here, too.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator
from typing import Any

from taskguard.errors import LockServerUnavailableError
from taskguard.locks import Endpoint, ServerUrl
from taskguard.locks.http import HttpLink, Reply

__all__ = ["EtcdLink", "RefusedError"]

# Codes of gRPC; the status of HTTP for them differs between versions.
_INVALID_ARGUMENT = 3
_PERMISSION_DENIED = 7
_RESOURCE_EXHAUSTED = 8
_UNAUTHENTICATED = 16
_READ_AT_ONCE = 512
_NOT_THROWN_AWAY = 256 * 1024
_OLD_TOKENS = ("invalid auth token", "revision of auth store is old", "user name is empty")


class RefusedError(LockServerUnavailableError):
    """etcd answered, and what it said was no.

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
        """Whether user, password or rights are what is wrong."""
        return self.code in (_PERMISSION_DENIED, _UNAUTHENTICATED) or any(
            words in self.said for words in ("user name is empty", "authentication failed")
        )


class EtcdLink:
    """One etcd or a cluster of them."""

    def __init__(
        self, url: ServerUrl, *, socket_timeout_s: float, connect_timeout_s: float
    ) -> None:
        self.http = HttpLink(
            url, socket_timeout_s=socket_timeout_s, connect_timeout_s=connect_timeout_s
        )
        self.address = self.http.address
        self._user = url.user
        self._password = url.password
        self._token = ""

    def call(
        self, path: str, message: Any, *, on_retry: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """One message, one answer; its `clock_s` is the server's clock. Raises RefusedError."""
        reply = self._ask(path, _packed(message), on_retry)
        answer = self._read(reply.body)
        answer["clock_s"] = reply.clock_s
        return answer

    def call_each(self, path: str, messages: list[Any]) -> list[dict[str, Any]]:
        """Many messages in one request, and the answer to each, in order."""
        answers: list[dict[str, Any]] = []
        while len(answers) < len(messages):
            reply = self._ask(path, _joined(messages[len(answers) :]), lambda: None)
            lines = [self._read(line) for line in reply.body.splitlines()]
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
        """What the answers to one message say, as they come, until `timeout_s` from now."""
        lines = self.http.lines(path, _packed(message), self._headers(), timeout_s=timeout_s)
        with contextlib.closing(lines):
            for line in lines:
                yield self._read(line).get("result", {})

    def status_of(self, endpoint: Endpoint) -> Reply:
        """What one member says of itself, asked once; raises OSError or HTTPException."""
        return self.http.ask_at(endpoint, "POST", "/v3/maintenance/status", b"{}", self._headers())

    def close(self) -> None:
        """Close idle connections. The next call connects again."""
        self.http.close()

    def _ask(self, path: str, body: bytes, on_retry: Callable[[], None]) -> Reply:
        if self._user and not self._token:
            self._authenticate()
        used = self._token
        reply = self.http.ask("POST", path, body, self._headers(), on_retry=on_retry)
        if reply.status == 200:
            return reply
        refused = self._refused(_error_of(reply), reply.status)
        if not (used and any(words in refused.said for words in _OLD_TOKENS)):
            raise refused
        if used == self._token:  # no other thread was faster
            self._authenticate()
        reply = self.http.ask("POST", path, body, self._headers(), on_retry=on_retry)
        if reply.status == 200:
            return reply
        raise self._refused(_error_of(reply), reply.status)

    def _authenticate(self) -> None:
        body = _packed({"name": self._user, "password": self._password})
        reply = self.http.ask("POST", "/v3/auth/authenticate", body)
        if reply.status == 200:
            self._token = self._read(reply.body).get("token", "")
            return
        refused = self._refused(_error_of(reply), reply.status)
        # Whoever gave a user means to be known; an etcd that knows none takes everybody.
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

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _refused(self, error: Any, status: int) -> RefusedError:
        """From the gateway's words, which are a text, or an object within a stream."""
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


def _packed(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def _joined(messages: list[Any]) -> bytes:
    """Many messages as one request.

    Go's HTTP server throws away what it has not read of a request when it begins to answer, unless
    that is 256 KiB or more; and the gateway answers the first message before it has read the last.
    """
    body = b"\n".join(map(_packed, messages))
    return body if len(body) <= _READ_AT_ONCE else body + b"\n" * _NOT_THROWN_AWAY


def _error_of(reply: Reply) -> Any:
    try:
        error = json.loads(reply.body)
    except ValueError:
        return reply.body[:200].decode("utf-8", "replace")
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        return error["error"]
    return error
