"""`taskguard dashboard`: the page on this machine, for the user that started it.

Guarantees: it listens on the loopback interface, unless an `authorize` is given. The address that
it prints has a token, which one browser exchanges for a cookie. Requests whose Host is another name
are refused, so that a page of another site cannot reach it by DNS rebinding.

Does not guarantee anything against other processes of the same user, or against root.
"""

from __future__ import annotations

import getpass
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable
from platform import node
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import uvicorn

from taskguard_dashboard.http import Role
from taskguard_dashboard.on_starlette import Adapter
from taskguard_dashboard.routes import Dashboard
from taskguard_dashboard.security import HEADERS

if TYPE_CHECKING:
    from taskguard import TaskGuard

__all__ = ["OneTime", "is_loopback", "serve"]

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class OneTime:
    """The page behind a token that works once.

    Args:
        page: the page.
        role: the role of the browser that has the token.
        name: the user, for the record of actions.
        host: the address that it listens on, if it is not one of the usual names of loopback.

    Attributes:
        token: the token.
    """

    def __init__(
        self, page: Dashboard, *, role: Role = "operator", name: str = "", host: str = ""
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._role = role
        # Browsers send a cookie to all ports of a host, so each page has a name of its own.
        self._cookie = f"taskguard_dashboard_{secrets.token_hex(4)}"
        self._hosts = {*_LOOPBACK, f"[{host}]" if ":" in host else host or "localhost"}
        self._used = False
        user = name or f"{_user()}@{node()}"
        self._page = Adapter(page, authorize=self._role_of, actor=lambda _: user)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            headers = {name: text.decode("latin-1") for name, text in scope["headers"]}
            if _host_of(headers.get(b"host", "")) not in self._hosts:
                await _answer(send, 403, {}, "Open the address that taskguard dashboard printed.\n")
                return
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            if given and scope["path"] == "/":
                await self._exchange(given, send)
                return
        await self._page(scope, receive, send)

    async def _exchange(self, given: str, send: Any) -> None:
        """Give a cookie for the token, once."""
        if self._used or not hmac.compare_digest(given.encode(), self.token.encode()):
            text = "This address was used before. Start taskguard dashboard again.\n"
            await _answer(send, 403, {}, text)
            return
        self._used = True
        cookie = f"{self._cookie}={self._session}; Path=/; HttpOnly; SameSite=Strict"
        await _answer(send, 303, {"Location": "./", "Set-Cookie": cookie}, "")

    def _role_of(self, request: Any) -> Role | None:
        given = str(request.cookies.get(self._cookie, ""))
        return self._role if hmac.compare_digest(given.encode(), self._session.encode()) else None


def serve(
    tg: TaskGuard,
    *,
    host: str,
    port: int,
    authorize: Callable[[Any], Any] | None,
    role: Role,
    show_arguments: bool,
    say: Callable[[str], None],
) -> None:
    """Serve the page until the process is interrupted. Raises OSError if it cannot listen.

    Args:
        tg: the locks and the ledger.
        host: the address to listen on. One that is not loopback needs `authorize`.
        port: the port. 0: a free one.
        authorize: grants roles. None: the browser with the printed address has `role`.
        role: the highest role that is granted.
        show_arguments: whether operators see stored arguments.
        say: gets the address once the server listens.
    """
    page = Dashboard(tg, show_arguments=show_arguments)
    app: Any
    if authorize is None:
        app = OneTime(page, role=role, host=host)
        query = f"?token={app.token}"
    else:
        read_only = role == "viewer"
        app = Adapter(page, authorize=authorize, actor=None, read_only=read_only)
        query = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        taken = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        say(f"http://{shown}:{taken}/{query}")
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="off"
        )
        uvicorn.Server(config).run(sockets=[listening])


def _host_of(given: str) -> str:
    """Return the name in a Host header, without the port."""
    if given.startswith("["):
        return given.partition("]")[0] + "]"
    return given.partition(":")[0].lower()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return "unknown"


async def _answer(send: Any, status: int, headers: dict[str, str], text: str) -> None:
    pairs = {"content-type": "text/plain; charset=utf-8", **HEADERS, **headers}
    encoded = [(name.lower().encode(), each.encode("latin-1")) for name, each in pairs.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})
