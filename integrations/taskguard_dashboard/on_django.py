"""The page as URL patterns, inside Django's middleware.

Guarantees: `authorize` gets Django's own request, with its user and session. Django's CSRF
middleware stays on: forms send its token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.middleware.csrf import get_token
from django.urls import re_path

from taskguard_dashboard.http import (
    MOST_BYTES,
    Request,
    fields_of,
    granted,
    is_form,
)
from taskguard_dashboard.routes import Dashboard

__all__ = ["patterns"]


def patterns(
    dashboard: Dashboard,
    *,
    authorize: Callable[[Any], Any],
    actor: Callable[[Any], str] | None,
) -> list[Any]:
    """Return the URL patterns, for `include()`."""
    name_of = actor or _name_of

    def respond(native: Any, path: str) -> Any:
        role = granted(authorize, native)
        answer = dashboard.respond(
            Request(
                method=native.method,
                path=f"/{path}",
                query=fields_of(native.META.get("QUERY_STRING", "")) or {},
                form=_form(native) if native.method == "POST" and role else None,
                headers={name.lower(): each for name, each in native.headers.items()},
                origin=f"{native.scheme}://{native.get_host()}",
                role=role,
                actor=name_of(native) if role else "",
                hidden=lambda: {"csrfmiddlewaretoken": get_token(native)},
                native_origins=tuple(settings.CSRF_TRUSTED_ORIGINS),
            )
        )
        return HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers))

    return [re_path(r"^(?P<path>.*)$", respond, name="taskguard_dashboard")]


def _form(native: Any) -> dict[str, str] | None:
    """Return the fields of a form, or None if the body is none, or is too large."""
    if not is_form(native.content_type) or int(native.META.get("CONTENT_LENGTH") or 0) > MOST_BYTES:
        return None
    return fields_of(native.body)


def _name_of(native: Any) -> str:
    return str(native.user.get_username()) or "unnamed"
