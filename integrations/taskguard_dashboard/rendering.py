"""Templates, and the files that pages load.

Guarantees: Jinja escapes everything, and an unknown name in a template is an error. Files have the
hash of their content in their address, so browsers may keep them for a year. Addresses in pages are
relative, so a proxy may put any prefix in front of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from taskguard_dashboard import texts
from taskguard_dashboard.http import Request, Response
from taskguard_dashboard.security import HEADERS

__all__ = ["FILES", "html", "redirect", "render"]

_TYPES = {
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def _file(name: str) -> tuple[str, Response]:
    body = (resources.files(__package__) / "static" / name).read_bytes()
    path = f"/files/{hashlib.sha256(body).hexdigest()[:16]}/{name}"
    kept = {"Cache-Control": "public, max-age=31536000, immutable", "Content-Type": _TYPES[name]}
    return path, Response(status=200, headers={**HEADERS, **kept}, body=body)


FILES: Mapping[str, Response] = dict(map(_file, _TYPES))
_ADDRESSES = {path.rpartition("/")[2]: path[1:] for path in FILES}


def _address(path: str, /, **values: object) -> str:
    """Return a relative address with these values in its query."""
    query = urlencode({name: str(each) for name, each in values.items() if each not in (None, "")})
    return f"{path}?{query}" if query else path


def _hidden(request: Request) -> Markup:
    """Return the hidden fields that every form has to send: the token of Django."""
    field = Markup('<input type="hidden" name="{}" value="{}">')
    return Markup("").join(field.format(*each) for each in request.hidden().items())


def _block(text: str) -> Markup:
    """Return a text with its lines, each of them printable."""
    return Markup("\n").join(texts.printable(line) for line in text.splitlines())


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("taskguard_dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=texts.finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(address=_address, files=_ADDRESSES, hidden=_hidden)
    made.filters.update(
        ago=texts.ago,
        block=_block,
        clock=texts.clock,
        iso=texts.iso,
        lasts=texts.lasts,
        number=texts.number,
    )
    return made


_TEMPLATES = _environment()


def render(template: str, request: Request, **values: Any) -> bytes:
    """Return a page."""
    depth = max(request.path.count("/") - 1, 0)
    text: str = _TEMPLATES.get_template(template).render(
        request=request,
        root="../" * depth or "./",
        is_operator=request.role == "operator",
        **values,
    )
    return text.encode("utf-8", "replace")


def html(template: str, request: Request, *, status: int = 200, **values: Any) -> Response:
    """Return a response with a page."""
    return Response(
        status=status,
        headers={"Content-Type": "text/html; charset=utf-8", **HEADERS},
        body=render(template, request, **values),
    )


def redirect(path: str, /, **values: object) -> Response:
    """Return a response that sends a browser to a page of ours."""
    return Response(status=303, headers={"Location": _address(path, **values), **HEADERS})
