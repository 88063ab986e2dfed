"""Requests and responses without a framework.

Guarantees: values of a query and of a form are texts, at most one for each name. `role_in()` turns
what `authorize` returned into a role, and never grants one that it did not return.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl

from taskguard.errors import ConfigurationError

__all__ = [
    "MOST_BYTES",
    "Denied",
    "Request",
    "Response",
    "Role",
    "fields_of",
    "granted",
    "is_form",
    "refused",
    "role_in",
]

Role = Literal["viewer", "operator"]
ROLES = ("viewer", "operator")
# The maximum size of a form, which has a reason and a few names.
MOST_BYTES = 65_536
_MOST_FIELDS = 500
logger = logging.getLogger("taskguard")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, as an adapter made it from its framework's own.

    Attributes:
        method: "GET", "HEAD" or "POST".
        path: the path below the page's own address, with the slash: "/keys".
        query: the values behind the question mark.
        form: the values of the body of a POST, or None if the body is no form.
        headers: the headers, with their names in lower case.
        origin: scheme and host of this server, as the browser sees it: "https://ops.example.com".
        role: what `authorize` granted, or None.
        actor: the name of the user, for the record of actions.
        hidden: further fields that a form has to send: the token of Django.
        native_origins: origins that the framework trusts itself.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    role: Role | None = None
    actor: str = ""
    hidden: Callable[[], Mapping[str, str]] = dict
    native_origins: tuple[str, ...] = ()

    def value(self, name: str) -> str:
        """Return a value of the form, or else of the query, or ""."""
        return (self.form or {}).get(name) or self.query.get(name, "")


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response: its status, its headers and its body."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class Denied(Exception):  # noqa: N818  # an answer, and no error of the page
    """A request is refused, with this status and this text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def fields_of(text: str | bytes) -> dict[str, str] | None:
    """Return the values of a query or of a form's body, the last one for each name.

    None: there are too many.
    """
    decoded = text.decode("latin-1") if isinstance(text, bytes) else text
    try:
        pairs = parse_qsl(
            decoded, keep_blank_values=True, errors="replace", max_num_fields=_MOST_FIELDS
        )
    except ValueError:
        return None
    return dict(pairs)


def is_form(content_type: str | None) -> bool:
    """Return True for the only type of forms that the page sends."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/x-www-form-urlencoded"


def role_in(found: Any) -> Role | None:
    """Return the role that `authorize` returned. Raises ConfigurationError if it is none."""
    if not found and not hasattr(found, "__await__"):
        return None
    for role in ROLES:
        if isinstance(found, str) and found == role:
            return role  # type: ignore[return-value]
    close = getattr(found, "close", None)
    if close is not None and hasattr(found, "__await__"):
        close()  # a coroutine of which nothing will be awaited
    raise ConfigurationError(
        f'authorize() returned {type(found).__name__}: return None, "viewer" or "operator".'
    )


def granted(authorize: Callable[[Any], Any], request: Any) -> Role | None:
    """Return the role of a framework's request. An error of `authorize` grants none."""
    try:
        found = authorize(request)
    except Exception as error:  # noqa: BLE001  # of the user's code: it must open nothing
        refused(error)
        return None
    return role_in(found)


def refused(error: Exception) -> None:
    """Log that `authorize` failed."""
    logger.warning(
        "The dashboard refused a request, because authorize() raised %s. Correct authorize(), or "
        "return None.",
        type(error).__name__,
        exc_info=error,
    )
