"""Which request may do what, and the headers that keep a page to itself.

Guarantees: `check_origin()` lets a POST pass only if the browser says that it comes from this very
page. The headers forbid scripts, styles, frames and forms of other origins, and inline ones.

Read next: `routes.py`, which asks for the role first.
"""

from __future__ import annotations

from collections.abc import Collection

from taskguard_dashboard.http import Denied, Request

__all__ = ["CSP", "HEADERS", "check_origin"]

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# With "no-referrer" a browser sends `Origin: null` even with the page's own forms.
HEADERS = {
    "Content-Security-Policy": CSP,
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def check_origin(request: Request, trusted: Collection[str]) -> None:
    """Raise Denied unless a POST comes from this page.

    Browsers say so in Sec-Fetch-Site, but not over plain HTTP to a name. Then they send Origin.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin", "").lower()
    allowed = {each.lower().rstrip("/") for each in (*trusted, *request.native_origins)}
    if site is not None:
        if site == "same-origin" or (origin in allowed and site in ("same-site", "cross-site")):
            return
    elif origin and origin in {request.origin.lower(), *allowed}:
        return
    raise Denied(
        403,
        "This form was not sent by this page. Open the page itself, and repeat the action there. "
        "In a script, use the command taskguard.",
    )
