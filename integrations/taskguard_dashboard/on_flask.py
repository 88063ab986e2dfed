"""The page as a blueprint, inside Flask's request context.

Guarantees: `authorize` gets Flask's own request, and `flask.session` and `current_user` work in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flask

from taskguard_dashboard.http import (
    MOST_BYTES,
    Request,
    fields_of,
    granted,
    is_form,
)
from taskguard_dashboard.routes import Dashboard

__all__ = ["blueprint"]

# Flask would refuse others, and answer OPTIONS, before `authorize`.
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def blueprint(
    dashboard: Dashboard,
    *,
    authorize: Callable[[Any], Any],
    actor: Callable[[Any], str] | None,
) -> Any:
    """Return the blueprint."""
    made = flask.Blueprint("taskguard_dashboard", __name__)
    name_of = actor or _name_of

    def respond(path: str = "") -> Any:
        native = flask.request
        role = granted(authorize, native)
        answer = dashboard.respond(
            Request(
                method=native.method,
                path=f"/{path}",
                query=fields_of(native.query_string) or {},
                form=_form(native) if native.method == "POST" and role else None,
                headers={name.lower(): each for name, each in native.headers.items()},
                origin=native.host_url.rstrip("/"),
                role=role,
                actor=name_of(native) if role else "",
            )
        )
        return flask.Response(answer.body, answer.status, dict(answer.headers))

    options: Any = {"methods": _METHODS, "provide_automatic_options": False}
    made.add_url_rule("/", "page", respond, **options)
    made.add_url_rule("/<path:path>", "page", respond, **options)
    return made


def _form(native: Any) -> dict[str, str] | None:
    """Return the fields of a form, or None if the body is none, or is too large."""
    if not is_form(native.mimetype) or (native.content_length or 0) > MOST_BYTES:
        return None
    return fields_of(native.get_data(cache=True))


def _name_of(native: Any) -> str:
    """Return the name of HTTP's basic authentication, or of the server in front."""
    given = native.authorization
    return str((given and given.username) or native.remote_user or "unnamed")
