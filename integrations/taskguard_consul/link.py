"""Requests to Consul's HTTP interface with urllib3: keys, transactions, sessions, errors.

Guarantees
* A refusal by Consul raises RefusedError, whose message says what to do. Every other failure raises
  LockServerUnavailableError. No message shows the token.
* The connect timeout limits each attempt, and the socket timeout limits each read. If an agent
  answers with a status of 500 or more, the request goes to the next agent.
* Threads may call at the same time. A forked child opens connections of its own.

Name resolution has no timeout, because the system has none for it.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from urllib3 import (
    BaseHTTPResponse,
    HTTPConnectionPool,
    HTTPSConnectionPool,
    PoolManager,
    Timeout,
)
from urllib3.exceptions import HTTPError

from taskguard.errors import LockServerUnavailableError
from taskguard.locks import Endpoint, Endpoints, IdleQueue, PerProcess, ServerUrl

__all__ = [
    "MOST_OPERATIONS",
    "ConsulLink",
    "Entry",
    "Failed",
    "RefusedError",
    "clock_s",
    "encoded",
    "index_of",
]

MOST_OPERATIONS = 64
_MOST_IDLE = 64  # connections to one agent
_MOST_POOLS = 64


class RefusedError(LockServerUnavailableError):
    """Consul answered with a refusal."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value, and its session and indexes."""

    value: bytes
    session: str
    created: int
    changed: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The failed operations of a transaction, none of whose operations was done."""

    errors: dict[int, str]


def encoded(text: str) -> str:
    """Return a key's text for paths and JSON, without '/' and without surrogates."""
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


def index_of(reply: BaseHTTPResponse) -> int:
    """Return the index of the last change of what the request asked for."""
    return int(reply.headers.get("X-Consul-Index") or 0)


def clock_s(reply: BaseHTTPResponse) -> float | None:
    """Return the server's clock in whole seconds, or None if the reply does not contain it."""
    with contextlib.suppress(ValueError):
        return parsedate_to_datetime(reply.headers.get("Date", "")).timestamp()
    return None


class _Plain(HTTPConnectionPool):
    QueueCls = IdleQueue


class _Encrypted(HTTPSConnectionPool):
    QueueCls = IdleQueue


def _pools() -> PoolManager:
    pools = PoolManager(_MOST_POOLS, maxsize=_MOST_IDLE)
    pools.pool_classes_by_scheme = {"http": _Plain, "https": _Encrypted}
    return pools


class ConsulLink:
    """Requests to one agent, or to several of one datacenter.

    Attributes:
        endpoints: the agents that the URL names.
    """

    def __init__(
        self,
        url: ServerUrl,
        *,
        socket_timeout_s: float,
        connect_timeout_s: float,
        longest_block_s: float,
    ) -> None:
        self.endpoints = Endpoints(url.endpoints)
        self.address = self.endpoints.hosts
        self._tls = url.tls
        self._prompt = Timeout(connect=connect_timeout_s, read=socket_timeout_s)
        # Consul answers a blocking query late by design.
        blocks_s = 1.5 * longest_block_s
        self._patient = Timeout(connect=connect_timeout_s, read=socket_timeout_s + blocks_s)
        self._pools = PerProcess(_pools)
        self._headers = {"X-Consul-Token": url.password} if url.password else {}

    def look(self, name: str) -> tuple[Entry | None, BaseHTTPResponse]:
        """Return a key's entry, if there is one, and the reply that has it."""
        reply = self._ask("GET", f"/v1/kv/{quote(name)}?consistent", accepted=(200, 404))
        if reply.status == 404:
            return None, reply
        (found,) = json.loads(reply.data)
        return _entry(found), reply

    def change(
        self, operations: Sequence[dict[str, Any]], *, on_retry: Callable[[], None] = lambda: None
    ) -> dict[str, Entry] | Failed:
        """Do all operations or none.

        Return the entries afterwards, without values, or the operations that failed.
        """
        body = json.dumps([{"KV": each} for each in operations]).encode()
        reply = self._ask("PUT", "/v1/txn", body, accepted=(200, 409), on_retry=on_retry)
        said = json.loads(reply.data)
        if reply.status == 409:
            return Failed({each["OpIndex"]: each["What"] for each in said["Errors"]})
        return {each["KV"]["Key"]: _entry(each["KV"]) for each in said["Results"] or []}

    def open_session(self, ttl_s: int) -> tuple[str, BaseHTTPResponse]:
        """Open a session and return its id and the reply. At its end, Consul deletes its keys."""
        body = {"Name": "taskguard", "TTL": f"{ttl_s}s", "Behavior": "delete", "LockDelay": "0s"}
        reply = self._ask("PUT", "/v1/session/create", json.dumps(body).encode())
        return str(json.loads(reply.data)["ID"]), reply

    def keep_session(self, session: str) -> bool:
        """Renew a session; return False if it has ended."""
        path = f"/v1/session/renew/{session}"
        return self._ask("PUT", path, accepted=(200, 404)).status == 200

    def end_session(self, session: str) -> None:
        self._ask("PUT", f"/v1/session/destroy/{session}")

    def wait(self, name: str, *, index: int, timeout_s: float) -> None:
        """Return when the key has changed since that index, or after `timeout_s`."""
        path = f"/v1/kv/{quote(name)}?index={index}&wait={max(10, int(timeout_s * 1000))}ms"
        self._ask("GET", path, accepted=(200, 404), timeout=self._patient)

    def try_rights(self, name: str) -> None:
        """Try requests that need the rights of locks, and change nothing. Raises RefusedError."""
        session, _ = self.open_session(10)
        self.end_session(session)
        # An index that no key has.
        self.change([{"Verb": "delete-cas", "Key": name, "Index": 1}])

    def leader_of(self, endpoint: Endpoint) -> str:
        """Return the leader that one agent knows, or "". Sends one request."""
        reply = self._send(endpoint, "GET", "/v1/status/leader", b"", self._prompt)
        return (
            reply.data.decode("utf-8", "replace").strip().strip('"') if reply.status == 200 else ""
        )

    def close(self) -> None:
        """Close idle connections. The next call connects again."""
        self._pools.get().clear()

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        accepted: Sequence[int] = (200,),
        on_retry: Callable[[], None] = lambda: None,
        timeout: Timeout | None = None,
    ) -> BaseHTTPResponse:
        def ask(endpoint: Endpoint) -> BaseHTTPResponse:
            reply = self._send(endpoint, method, path, body, timeout or self._prompt)
            if reply.status < 500:
                return reply
            said = reply.data[:200].decode("utf-8", "replace").strip() or f"status {reply.status}"
            raise LockServerUnavailableError(f"{endpoint}: {said}")

        return self._checked(self.endpoints.ask(ask, on_retry=on_retry), accepted)

    def _send(
        self, endpoint: Endpoint, method: str, path: str, body: bytes, timeout: Timeout
    ) -> BaseHTTPResponse:
        # After certificates were replaced, the context is new, and so is the pool.
        tls = {} if self._tls is None else {"ssl_context": self._tls.context()}
        pool = self._pools.get().connection_from_host(
            endpoint.host, endpoint.port, "https" if tls else "http", tls
        )
        try:
            return pool.urlopen(method, path, body, self._headers, retries=False, timeout=timeout)
        except HTTPError as error:
            # The last argument is the reason. The others are objects of urllib3.
            raise LockServerUnavailableError(
                f"{endpoint}: {str(error.args[-1]).rstrip('.')}."
            ) from error

    def _checked(self, reply: BaseHTTPResponse, accepted: Sequence[int]) -> BaseHTTPResponse:
        if reply.status in accepted:
            return reply
        said = reply.data[:200].decode("utf-8", "replace").strip().rstrip(".")
        rest = f"refused the request: {said or reply.status}."
        if reply.status == 403:
            rest = (
                f"forbids what locks need: {said}. This is a mistake in the settings: correct the "
                "token, or give it the rights that docs/how-to/consul.md lists."
            )
        raise RefusedError(f"The lock server {self.address} {rest}")


def _entry(found: dict[str, Any]) -> Entry:
    return Entry(
        value=base64.b64decode(found.get("Value") or ""),
        session=found.get("Session", ""),
        created=int(found["CreateIndex"]),
        changed=int(found["ModifyIndex"]),
    )
