"""Requests to the page in each framework, in this process and without a server.

The header X-Role is the role, and X-Actor the name, as a session would have them.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

__all__ = ["FRAMEWORKS", "Answer", "Ask", "actor_of", "role_of"]

HOST = "testserver"
FORM = "application/x-www-form-urlencoded"


@dataclass
class Answer:
    """A response of any framework. The names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


Ask = Callable[..., Answer]


def role_of(request: Any) -> Any:
    """Return the role in a header, which each framework's request has."""
    return request.headers.get("X-Role")


def actor_of(request: Any) -> str:
    return str(request.headers.get("X-Actor", "ann"))


def on_starlette(tg: Any, *, authorize: Any = role_of, mounted: str = "", **options: Any) -> Ask:
    from starlette.applications import Starlette

    import taskguard_dashboard

    app = Starlette()
    page = taskguard_dashboard.starlette(tg, authorize=authorize, actor=actor_of, **options)
    app.mount(mounted, page)
    return asgi(app)


def asgi(app: Any) -> Ask:
    """Return how to ask an ASGI app."""

    def ask(
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        form: Mapping[str, str] | bytes | None = None,
        **headers: str,
    ) -> Answer:
        sent: list[Any] = []
        body = form if isinstance(form, bytes) else urlencode(form or {}).encode()
        named = {"host": HOST, **_named(headers)}
        if form is not None:
            named.setdefault("content-type", FORM)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": urlencode(query or {}).encode(),
            "root_path": "",
            "headers": [(name.encode(), text.encode("latin-1")) for name, text in named.items()],
            "client": ("127.0.0.1", 1),
            "server": (HOST, 80),
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(app(scope, receive, send))
        start, *parts = sent
        found = {name.decode().lower(): text.decode("latin-1") for name, text in start["headers"]}
        return Answer(start["status"], found, b"".join(each.get("body", b"") for each in parts))

    return ask


def on_flask(tg: Any, *, authorize: Any = role_of, mounted: str = "", **options: Any) -> Ask:
    import flask

    import taskguard_dashboard

    app = flask.Flask(__name__)
    page = taskguard_dashboard.flask(tg, authorize=authorize, actor=actor_of, **options)
    app.register_blueprint(page, url_prefix=mounted or None)

    def ask(
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        form: Mapping[str, str] | bytes | None = None,
        **headers: str,
    ) -> Answer:
        with app.test_client() as client:
            answer = client.open(
                path,
                method=method,
                query_string=dict(query or {}),
                data=form,
                content_type=None if form is None else FORM,
                base_url=f"http://{HOST}",
                headers=_named(headers),
            )
            found = {name.lower(): text for name, text in answer.headers.items()}
            return Answer(answer.status_code, found, answer.get_data())

    return ask


def on_django(
    tg: Any,
    *,
    authorize: Any = role_of,
    mounted: str = "",
    checks_csrf: bool = False,
    **options: Any,
) -> Ask:
    import taskguard_dashboard
    from support.django_shop import set_up

    set_up()
    from django.conf import settings
    from django.test import Client, override_settings
    from django.urls import include
    from django.urls import path as django_path

    urls = types.ModuleType("urls")
    page = taskguard_dashboard.django(tg, authorize=authorize, actor=actor_of, **options)
    urls.urlpatterns = [django_path(mounted.strip("/") + "/" * bool(mounted), include(page))]  # type: ignore[attr-defined]
    middleware = list(settings.MIDDLEWARE)
    if checks_csrf:
        middleware.append("django.middleware.csrf.CsrfViewMiddleware")
    client = Client(enforce_csrf_checks=checks_csrf)

    def ask(
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        form: Mapping[str, str] | bytes | None = None,
        **headers: str,
    ) -> Answer:
        body = form if isinstance(form, bytes) else urlencode(form or {}).encode()
        with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=middleware):
            answer = client.generic(
                method,
                path + ("?" + urlencode(query) if query else ""),
                body,
                **({} if form is None else {"CONTENT_TYPE": FORM}),
                **{f"HTTP_{name.upper()}": text for name, text in headers.items()},
            )
        found = {name.lower(): text for name, text in answer.headers.items()}
        return Answer(answer.status_code, found, answer.content)

    return ask


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower().replace("_", "-"): text for name, text in headers.items()}


FRAMEWORKS: dict[str, Callable[..., Ask]] = {
    "starlette": on_starlette,
    "flask": on_flask,
    "django": on_django,
}
