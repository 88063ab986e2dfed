"""Who may see and change what: every route, role and origin, in each framework."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("starlette")

from support.dashboard_clients import FRAMEWORKS, HOST, Ask, asgi
from support.dashboard_sample import Sample
from taskguard.errors import ConfigurationError
from taskguard_dashboard.routes import ROUTES

ORIGINS: dict[str, dict[str, str]] = {
    "same-origin": {"sec_fetch_site": "same-origin"},
    "same-site": {"sec_fetch_site": "same-site", "origin": "http://other.testserver"},
    "cross-site": {"sec_fetch_site": "cross-site", "origin": "http://evil.example"},
    "no headers": {},
    "Origin null": {"origin": "null"},
}
ROLES = (None, "viewer", "operator")
CSP = {
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "form-action 'self'",
    "base-uri 'none'",
    "frame-ancestors 'none'",
}
ASKED = {
    "/find": {"q": "order:42"},
    "/bulk": {"action": "requeue", "state": "DEAD"},
    "/work": {},
    "/actions": {},
    "/waiting": {},
}
NAMED = {"key": "account:42", "work": "shop.ship order:7"}


def expected(route: Any, role: str | None, origin: str) -> set[int]:
    """The status that the table promises. A form without a reason is refused last."""
    if role is None or (route.role == "operator" and role == "viewer"):
        return {403}
    if route.method == "GET":
        return {303} if route.path == "/find" else {200}
    if origin != "same-origin":
        return {403}
    return {200} if route.path == "/doctor" else {400}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_route_asks_for_role_and_origin_first(framework: str, role: str | None) -> None:
    """All routes and origins. Nothing changes, because no form has a reason."""
    tg = Sample()
    ask = FRAMEWORKS[framework](tg)
    headers = {"x_role": role} if role else {}
    seen = 0
    for route in ROUTES:
        for origin, sent in ORIGINS.items():
            answer = ask(
                route.method,
                route.path,
                ASKED.get(route.path, NAMED) if route.method == "GET" else None,
                {} if route.method == "POST" else None,
                **headers,
                **sent,
            )
            what = f"{route.method} {route.path}, {role}, {origin}: {answer.text[-300:]}"
            assert answer.status in expected(route, role, origin), what
            assert set(answer.headers["content-security-policy"].split("; ")) == CSP, what
            assert answer.headers["referrer-policy"] == "same-origin", what
            assert answer.headers["cache-control"] == "no-store", what
            assert answer.headers["x-content-type-options"] == "nosniff", what
            seen += 1
    assert seen == len(ROUTES) * len(ORIGINS)
    assert tg.changed == []


def test_the_table_has_every_promised_route() -> None:
    """The paths that the documentation names."""
    pages = ["/", "/keys", "/key", "/waiting", "/work", "/item", "/dead", "/workers"]
    pages += ["/actions", "/doctor", "/find", "/metrics"]
    changes = ["/release", "/pause", "/resume", "/requeue", "/drop", "/call", "/bulk"]
    table = {(route.method, route.path): route.role for route in ROUTES}
    assert table == {
        **{("GET", path): "viewer" for path in pages},
        **{("GET", path): "operator" for path in changes},
        **{("POST", path): "operator" for path in [*changes, "/doctor"]},
    }


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Any:
    return FRAMEWORKS[request.param]


def test_without_authorize_there_is_no_page(framework: Any) -> None:
    """It is required by each adapter."""
    import taskguard_dashboard

    name = framework.__name__.removeprefix("on_")
    with pytest.raises(TypeError, match="authorize"):
        getattr(taskguard_dashboard, name)(Sample())


def test_an_error_of_authorize_opens_nothing(
    framework: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the answer is 403."""

    def broken(request: Any) -> Any:
        raise KeyError("user")

    with caplog.at_level(logging.WARNING, "taskguard"):
        assert framework(Sample(), authorize=broken)("GET", "/").status == 403
    assert "authorize() raised KeyError" in caplog.text


@pytest.mark.parametrize("role", [True, "admin", 1, b"operator"])
def test_a_truthy_value_that_is_no_role_is_an_error(role: Any) -> None:
    """It must not count as any role."""
    from taskguard_dashboard.http import role_in

    with pytest.raises(ConfigurationError, match=r"None, \"viewer\" or \"operator\""):
        role_in(role)


def test_a_falsy_value_is_no_role(framework: Any) -> None:
    """As in `request.user and "operator"`."""
    for value in (None, False, "", 0):
        assert framework(Sample(), authorize=lambda _, value=value: value)("GET", "/").status == 403


def test_authorize_sees_the_session_of_flask() -> None:
    """`flask.session` works in it, and the name comes from the session, too."""
    import flask

    import taskguard_dashboard

    tg: Any = Sample()
    app = flask.Flask(__name__)
    app.secret_key = "only for this test"
    page = taskguard_dashboard.flask(
        tg,
        authorize=lambda _: flask.session.get("role"),
        actor=lambda _: flask.session["name"],
    )
    app.register_blueprint(page, url_prefix="/ops")
    with app.test_client() as client:
        assert client.get("/ops/workers").status_code == 403
        with client.session_transaction() as session:
            session.update(role="operator", name="olga")
        assert client.get("/ops/workers").status_code == 200
        answer = client.post(
            "/ops/release", data=RELEASE, headers={"Sec-Fetch-Site": "same-origin"}
        )
        assert answer.status_code == 303
    assert tg.changed[0][3]["actor"] == "olga"


def test_authorize_sees_the_user_of_starlette() -> None:
    """AuthenticationMiddleware's user has the role, and is the actor by default."""
    from starlette.applications import Starlette
    from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
    from starlette.middleware import Middleware
    from starlette.middleware.authentication import AuthenticationMiddleware

    import taskguard_dashboard

    class ByHeader(AuthenticationBackend):
        async def authenticate(self, conn: Any) -> Any:
            name = conn.headers.get("x-user")
            return name and (AuthCredentials([]), SimpleUser(name))

    tg: Any = Sample()
    app = Starlette(middleware=[Middleware(AuthenticationMiddleware, backend=ByHeader())])
    role = taskguard_dashboard.starlette(
        tg, authorize=lambda request: "operator" if request.user.is_authenticated else None
    )
    app.mount("/ops", role)
    ask = asgi(app)
    assert ask("GET", "/ops/workers").status == 403
    sent = {"x_user": "olga", "sec_fetch_site": "same-origin"}
    assert ask("POST", "/ops/release", None, RELEASE, **sent).status == 303
    assert tg.changed[0][3]["actor"] == "olga"


def test_authorize_may_be_a_coroutine_on_starlette() -> None:
    """A plain framework would take the coroutine for a truthy value."""

    async def role_of(request: Any) -> str | None:
        return "viewer" if request.headers.get("x-role") == "viewer" else None

    ask = FRAMEWORKS["starlette"](Sample(), authorize=role_of)
    assert ask("GET", "/workers", x_role="viewer").status == 200
    assert ask("GET", "/workers").status == 403


RELEASE = {"key": "account:42", "reason": "its host burned", "fence": "1795695247113204"}


def release(ask: Ask, **headers: str) -> int:
    return ask("POST", "/release", None, RELEASE, x_role="operator", **headers).status


def test_without_sec_fetch_site_the_origin_decides(framework: Any) -> None:
    """Browsers send no Sec-Fetch-Site over plain HTTP to a name."""
    tg = Sample()
    ask = framework(tg, trusted_origins=["https://ops.example"])
    assert release(ask, origin=f"http://{HOST}") == 303
    assert release(ask, origin="https://ops.example") == 303
    assert release(ask, origin="https://ops.example", sec_fetch_site="cross-site") == 303
    for other in ("http://evil.example", f"https://{HOST}", f"http://{HOST}.evil.example", "null"):
        assert release(ask, origin=other) == 403, other
    assert release(ask, origin=f"http://{HOST}", sec_fetch_site="cross-site") == 403
    assert len(tg.changed) == 3


def test_a_change_names_actor_reason_and_what_was_seen(framework: Any) -> None:
    """The record of actions has them."""
    tg = Sample()
    assert release(framework(tg), sec_fetch_site="same-origin", x_actor="ben") == 303
    [(what, key, fence, said)] = tg.changed
    assert (what, key, fence) == ("release", "account:42", 1795695247113204)
    assert said == {"reason": "its host burned", "actor": "ben"}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (b"", "application/x-www-form-urlencoded"),
        (b"key=a&reason=" + b"x" * 301, "application/x-www-form-urlencoded"),
        (b"key=a&reason=" + b"x" * 70_000, "application/x-www-form-urlencoded"),
        (b"key=a&reason=x&fence=now", "application/x-www-form-urlencoded"),
        (b"reason=x", "application/x-www-form-urlencoded"),
        (b"&".join(b"a%d=1" % n for n in range(600)), "application/x-www-form-urlencoded"),
    ],
)
def test_a_form_that_is_wrong_is_refused(framework: Any, form: bytes, kind: str) -> None:
    """Without a reason, too long, with too many fields, or with a fence that is no number."""
    tg = Sample()
    sent = {"x_role": "operator", "sec_fetch_site": "same-origin"}
    assert framework(tg)("POST", "/release", None, form, **sent).status == 400
    assert tg.changed == []


def test_other_methods_and_paths_are_refused(framework: Any) -> None:
    """A path that does not exist is 404 only for those that may see something."""
    ask = framework(Sample())
    assert ask("GET", "/nothing", x_role="viewer").status == 404
    assert ask("GET", "/nothing").status == 403
    assert ask("POST", "/keys", None, {}, x_role="viewer").status == 405
    assert ask("GET", "/key", {"key": "nothing"}, x_role="viewer").status == 404
    assert ask("GET", "/key", x_role="viewer").status == 400
    assert ask("HEAD", "/workers", x_role="viewer").body == b""


def test_other_methods_are_refused_by_the_role_first(framework: Any) -> None:
    """Also OPTIONS, which Flask would answer before `authorize`."""
    ask = framework(Sample())
    for method in ("OPTIONS", "PUT", "DELETE", "PATCH"):
        for role, status in ((None, 403), ("viewer", 405)):
            answer = ask(method, "/keys", **({"x_role": role} if role else {}))
            assert (answer.status, "allow" in answer.headers) == (status, False), (method, role)
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_arguments_are_shown_only_to_operators_and_only_if_allowed(framework: Any) -> None:
    """By default nobody sees them."""
    work = {"work": "shop.ship order:7"}
    for allowed, role, shown in (
        (False, "operator", False),
        (True, "viewer", False),
        (True, "operator", True),
    ):
        ask = framework(Sample(), show_arguments=allowed)
        assert ("secret-argument" in ask("GET", "/item", work, x_role=role).text) is shown


def test_files_are_public_and_have_their_hash_in_the_address(framework: Any) -> None:
    """A page that is refused needs its style, too."""
    import re

    ask = framework(Sample())
    links = re.findall(r'(?:href|src)="\./(files/[^"]+)"', ask("GET", "/").text)
    assert len(links) == 3
    for link in links:
        answer = ask("GET", f"/{link}")
        assert answer.status == 200
        assert "immutable" in answer.headers["cache-control"]
    assert ask("GET", "/files/0/style.css").status == 403
    assert ask("GET", "/files/../http.py").status in (403, 404)


def test_djangos_own_check_of_forms_stays_on() -> None:
    """Pages have its token, and a form without it is refused."""
    import re

    tg = Sample()
    ask = FRAMEWORKS["django"](tg, checks_csrf=True)
    page = ask("GET", "/release", {"key": "account:42"}, x_role="operator").text
    [token] = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
    assert release(ask, sec_fetch_site="same-origin") == 403
    form = {**RELEASE, "csrfmiddlewaretoken": token}
    sent = {"x_role": "operator", "sec_fetch_site": "same-origin"}
    assert ask("POST", "/release", None, form, **sent).status == 303
    assert len(tg.changed) == 1
