"""The table of routes, and the one function that answers all requests.

Guarantees: `Dashboard.respond()` looks at the role before it looks at the path, at the origin of a
POST before its form, and at the form last. So a request that may do nothing learns nothing. Each
route names the role that it needs. An error of a server becomes a page that names the reason.

Read next: `pages.py`, what is shown; `changes.py`, what is changed; `security.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from taskguard.errors import ConfigurationError, LedgerSchemaError, TaskguardError
from taskguard_dashboard import changes, pages
from taskguard_dashboard.board import Board
from taskguard_dashboard.http import Denied, Request, Response, Role
from taskguard_dashboard.rendering import FILES, render
from taskguard_dashboard.security import HEADERS, check_origin

__all__ = ["ROUTES", "Dashboard", "Route"]

_RANK = {None: 0, "viewer": 1, "operator": 2}


@dataclass(frozen=True)
class Route:
    """A path with a method.

    Attributes:
        method: "GET", which includes HEAD, or "POST".
        path: the path below the page's own address.
        role: the role that it needs.
        handler: makes the answer.
    """

    method: str
    path: str
    role: Role
    handler: Callable[[Any, Request], Response]


ROUTES: tuple[Route, ...] = (
    *(Route("GET", path, "viewer", handler) for path, handler in pages.PAGES.items()),
    *(Route("GET", path, "operator", handler) for path, handler in changes.CONFIRMED.items()),
    *(Route("POST", path, "operator", handler) for path, handler in changes.CHANGES.items()),
)
_TABLE = {(route.method, route.path): route for route in ROUTES}
_PATHS = {route.path for route in ROUTES}


class Dashboard(Board):
    """The page of one application, without a framework. Safe for threads."""

    def respond(self, request: Request) -> Response:
        """Answer a request. Raises nothing that the ledger or the request is the cause of."""
        try:
            response = self._respond(request)
        except Denied as denied:
            response = self._problem(request, denied.status, str(denied))
        except TaskguardError as error:
            wrong = isinstance(error, ConfigurationError)
            wrong = wrong and not isinstance(error, LedgerSchemaError)
            response = self._problem(request, 400 if wrong else 503, str(error))
        if request.method == "HEAD":
            return Response(status=response.status, headers=response.headers)
        return response

    def _respond(self, request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        if method == "GET" and request.path in FILES:
            return FILES[request.path]
        if request.role is None:
            raise Denied(403, "You may not see this page. Ask for the role of a viewer.")
        route = _TABLE.get((method, request.path))
        if route is None:
            if request.path not in _PATHS:
                raise Denied(404, "There is no such page.")
            raise Denied(405, "This address does not take such a request.")
        if _RANK[request.role] < _RANK[route.role]:
            raise Denied(403, "Only operators may do this. You are a viewer.")
        if route.method == "POST":
            check_origin(request, self.trusted_origins)
            if request.form is None:
                raise Denied(400, "The request has no form of at most 64 kB.")
        return route.handler(self, request)

    def _problem(self, request: Request, status: int, text: str) -> Response:
        """Return a page that says why there is no other one."""
        body = render("problem.html", request, title=_TITLES.get(status, "Refused"), text=text)
        return Response(
            status=status,
            headers={"Content-Type": "text/html; charset=utf-8", **HEADERS},
            body=body,
        )


_TITLES = {
    400: "The request is wrong",
    403: "Not allowed",
    404: "Not found",
    405: "Not allowed here",
    409: "It has changed",
    503: "No answer",
}
