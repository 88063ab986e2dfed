"""Calls of Consul's HTTP interface: keys, transactions, sessions, errors.

Guarantees: what Consul refuses comes out as a LockServerUnavailableError that says what to do; no
message holds the token. What `taskguard.locks.http` guarantees holds here, too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from taskguard.errors import LockServerUnavailableError
from taskguard.locks import Endpoint, ServerUrl
from taskguard.locks.http import HttpLink, Reply

__all__ = ["MOST_OPERATIONS", "ConsulLink", "Entry", "Failed", "RefusedError", "encoded"]

MOST_OPERATIONS = 64


class RefusedError(LockServerUnavailableError):
    """Consul answered, and what it said was no."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands under a key."""

    value: bytes
    session: str
    created: int
    changed: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Which operations of a transaction failed, and how: nothing of it was done."""

    errors: dict[int, str]


def encoded(text: str) -> str:
    """A key's text as Consul takes it in paths and in JSON: no '/' in it, and no surrogates."""
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


class ConsulLink:
    """One agent, or several of one datacenter."""

    def __init__(
        self,
        url: ServerUrl,
        *,
        socket_timeout_s: float,
        connect_timeout_s: float,
        longest_block_s: float,
    ) -> None:
        self._prompt = HttpLink(
            url, socket_timeout_s=socket_timeout_s, connect_timeout_s=connect_timeout_s
        )
        # A query that blocks answers late by design.
        self._patient = HttpLink(
            url,
            socket_timeout_s=socket_timeout_s + 1.5 * longest_block_s,
            connect_timeout_s=connect_timeout_s,
        )
        self.address = self._prompt.address
        self.endpoints = url.endpoints
        self._headers = {"X-Consul-Token": url.password} if url.password else {}

    def look(self, name: str) -> tuple[Entry | None, Reply]:
        """What stands under a key now."""
        reply = self._ask("GET", f"/v1/kv/{quote(name)}?consistent", accepted=(200, 404))
        if reply.status == 404:
            return None, reply
        (found,) = json.loads(reply.body)
        return _entry(found), reply

    def change(
        self, operations: Sequence[dict[str, Any]], *, on_retry: Callable[[], None] = lambda: None
    ) -> dict[str, Entry] | Failed:
        """All operations or none: how the keys stand then, without values; or which failed."""
        body = json.dumps([{"KV": each} for each in operations]).encode()
        reply = self._ask("PUT", "/v1/txn", body, accepted=(200, 409), on_retry=on_retry)
        said = json.loads(reply.body)
        if reply.status == 409:
            return Failed({each["OpIndex"]: each["What"] for each in said["Errors"]})
        return {each["KV"]["Key"]: _entry(each["KV"]) for each in said["Results"] or []}

    def open_session(self, ttl_s: int) -> tuple[str, Reply]:
        """A new session, whose keys go with it at once."""
        body = {"Name": "taskguard", "TTL": f"{ttl_s}s", "Behavior": "delete", "LockDelay": "0s"}
        reply = self._ask("PUT", "/v1/session/create", json.dumps(body).encode())
        return str(json.loads(reply.body)["ID"]), reply

    def keep_session(self, session: str) -> bool:
        """False if there is none any more."""
        path = f"/v1/session/renew/{session}"
        return self._ask("PUT", path, accepted=(200, 404)).status == 200

    def end_session(self, session: str) -> None:
        self._ask("PUT", f"/v1/session/destroy/{session}")

    def wait(self, name: str, *, index: int, timeout_s: float) -> None:
        """Until something has changed under the key since that index."""
        path = f"/v1/kv/{quote(name)}?index={index}&wait={max(10, int(timeout_s * 1000))}ms"
        self._checked(self._patient.ask("GET", path, headers=self._headers), (200, 404))

    def try_rights(self, name: str) -> None:
        """Ask for what needs the rights of locks, and changes nothing. Raises RefusedError."""
        session, _ = self.open_session(10)
        self.end_session(session)
        # An index that no key has.
        self.change([{"Verb": "delete-cas", "Key": name, "Index": 1}])

    def leader_of(self, endpoint: Endpoint) -> str:
        """Who leads, as one agent has it; "" for nobody. Raises OSError or HTTPException."""
        reply = self._prompt.ask_at(endpoint, "GET", "/v1/status/leader", b"", self._headers)
        return (
            reply.body.decode("utf-8", "replace").strip().strip('"') if reply.status == 200 else ""
        )

    def close(self) -> None:
        """Close idle connections."""
        self._prompt.close()
        self._patient.close()

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        accepted: Sequence[int] = (200,),
        on_retry: Callable[[], None] = lambda: None,
    ) -> Reply:
        reply = self._prompt.ask(method, path, body, self._headers, on_retry=on_retry)
        return self._checked(reply, accepted)

    def _checked(self, reply: Reply, accepted: Sequence[int]) -> Reply:
        if reply.status in accepted:
            return reply
        said = reply.body[:200].decode("utf-8", "replace").strip().rstrip(".")
        rest = f"refused: {said or reply.status}."
        if reply.status == 403:
            rest = (
                f"forbids what locks need: {said}. This is a mistake in the settings: correct the "
                "token; taskguard_consul tells what rights it needs."
            )
        raise RefusedError(f"The lock server {self.address} {rest}")


def _entry(found: dict[str, Any]) -> Entry:
    return Entry(
        value=base64.b64decode(found.get("Value") or ""),
        session=found.get("Session", ""),
        created=int(found["CreateIndex"]),
        changed=int(found["ModifyIndex"]),
    )
