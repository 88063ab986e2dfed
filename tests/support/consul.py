"""A Consul under test: the keys in it, and how it loses them."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from support.lock_servers import LockServer, connect_by_a_lock
from support.proxy import Mode, Proxy
from taskguard.locks.base import LockProvider
from taskguard_consul import ConsulLocks
from taskguard_sandbox.servers import Consul


def ask(server: Consul, method: str, path: str, body: str = "") -> Any:
    """Send a request to Consul without taskguard's code."""
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=10.0)
    ) as connection:
        connection.request(method, path, body)
        reply = connection.getresponse()
        text = reply.read()
        return json.loads(text) if reply.status == 200 else None


def keys_in(server: Consul) -> list[str]:
    """Return all keys in Consul."""
    return [unquote(key) for key in ask(server, "GET", "/v1/kv/?keys&consistent") or []]


def consul_kind(server: Consul) -> LockServer:
    """Describe an empty Consul for the contract suite."""

    def forget() -> None:
        ask(server, "DELETE", "/v1/kv/?recurse")

    def leftovers() -> list[str]:
        return [key for key in keys_in(server) if key != "taskguard/epoch"]

    def end(locks: LockProvider) -> None:
        assert isinstance(locks, ConsulLocks)
        for session in list(locks._sessions.values()):
            ask(server, "PUT", f"/v1/session/destroy/{session.id}")

    forget()
    return LockServer(
        lambda: ConsulLocks(server.url, socket_timeout_s=5.0),
        forget,
        leftovers,
        server.url,
        lambda: _deafened(server.port),
        end,
    )


@contextmanager
def _deafened(port: int) -> Iterator[LockProvider]:
    with Proxy(port) as proxy:
        locks = ConsulLocks(f"consul://127.0.0.1:{proxy.port}", socket_timeout_s=0.3)
        connect_by_a_lock(locks)  # and has a session
        proxy.mode = Mode.SWALLOW
        yield locks
        locks.close()
