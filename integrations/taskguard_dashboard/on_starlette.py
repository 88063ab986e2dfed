"""The page as an ASGI app, inside the session of Starlette or FastAPI.

Guarantees: `authorize` gets Starlette's own request, with the user and the session that middleware
put there. It and all reading of the ledger run in threads, so that the event loop goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as Native
from starlette.responses import Response as NativeResponse

from taskguard_dashboard.http import (
    MOST_BYTES,
    Request,
    Role,
    fields_of,
    granted,
    is_form,
    refused,
    role_in,
)
from taskguard_dashboard.routes import Dashboard

__all__ = ["Adapter"]


class Adapter:
    """An ASGI app that answers HTTP requests. It ignores websockets and lifespans."""

    def __init__(
        self,
        dashboard: Dashboard,
        *,
        authorize: Callable[[Any], Any],
        actor: Callable[[Any], str] | None,
        read_only: bool = False,
    ) -> None:
        self._dashboard = dashboard
        self._read_only = read_only
        self._authorize = authorize
        self._actor = actor or _name_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close"})
            return
        native = Native(scope, receive)
        role = await self._role(native)
        if role and self._read_only:
            role = "viewer"
        request = Request(
            method=native.method,
            path=_path(scope),
            query=fields_of(scope.get("query_string", b"")) or {},
            form=await _form(native) if native.method == "POST" and role else None,
            headers={name.lower(): each for name, each in native.headers.items()},
            origin=f"{native.url.scheme}://{native.headers.get('host', '')}",
            role=role,
            actor=self._actor(native) if role else "",
        )
        answer = await run_in_threadpool(self._dashboard.respond, request)
        response = NativeResponse(answer.body, answer.status, dict(answer.headers))
        await response(scope, receive, send)

    async def _role(self, native: Any) -> Role | None:
        if not inspect.iscoroutinefunction(self._authorize) and not inspect.iscoroutinefunction(
            getattr(self._authorize, "__call__", None)  # noqa: B004  # of an object
        ):
            role: Role | None = await run_in_threadpool(granted, self._authorize, native)
            return role
        try:
            found = await self._authorize(native)
        except Exception as error:  # noqa: BLE001  # of the user's code: it must open nothing
            refused(error)
            return None
        return role_in(found)


def _path(scope: Any) -> str:
    """Return the path below the mount. Servers differ in whether a path has the prefix."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    return path or "/"


async def _form(native: Any) -> dict[str, str] | None:
    """Return the fields of a form, or None if the body is none, or is too large."""
    if not is_form(native.headers.get("content-type", "")):
        return None
    body = b""
    async for chunk in native.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            return None
    return fields_of(body)


def _name_of(native: Any) -> str:
    """Return the name of the user that Starlette's AuthenticationMiddleware found."""
    user = native.scope.get("user")
    return str(getattr(user, "display_name", "") or "") or "unnamed"
