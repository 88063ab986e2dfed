"""The page in a real browser: Debian's Chromium, driven by playwright.

Each test fails if a page violates the policy of its own headers, writes an error to the console, or
requests anything from another host.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("starlette")
pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")

from support.dashboard_clients import actor_of
from support.dashboard_sample import Sample
from support.needs import missing
from support.waiting import patience_s, wait_until

pytestmark = pytest.mark.debian

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# The page of an address that does not exist. A page that asks again after its server has stopped.
EXPECTED = re.compile(r"status of 404|net::ERR_")
PAGES = [
    "/",
    "/keys",
    "/key?key=account:42",
    "/waiting",
    "/work?state=FAILED",
    "/item?work=shop.ship+order:7",
    "/dead",
    "/workers",
    "/actions",
    "/doctor",
    "/find?q=account:",
    "/release?key=account:42",
    "/bulk?action=requeue&state=DEAD",
    "/nothing",
]
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
KINDS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "phone": {**PHONE, "color_scheme": "light"},
}


@contextmanager
def served(tg: Any, role: str = "operator") -> Iterator[str]:
    """The page on a free port. Yields its address."""
    import uvicorn

    import taskguard_dashboard

    app = taskguard_dashboard.starlette(tg, authorize=lambda _: role, actor=actor_of)
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, message="the page is served")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(patience_s())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    missing(None if CHROMIUM else "chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open a page. At the end nothing may have gone wrong in any of them."""
    contexts, wrong = [], []

    def open_page(address: str, **options: Any) -> Any:
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(patience_s() * 1_000)
        host = urlsplit(address).netloc
        page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
        page.on(
            "console",
            lambda said: (
                wrong.append(f"{page.url}: {said.text}")
                if said.type in ("error", "warning") and not EXPECTED.search(said.text)
                else None
            ),
        )
        page.on(
            "request",
            lambda each: wrong.append(each.url) if urlsplit(each.url).netloc != host else None,
        )
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_page_is_accessible(opened: Any, kind: str) -> None:
    """axe finds nothing to correct, in light, in dark and on a phone, and no page is wider than its
    window."""
    from axe_playwright_python.sync_playwright import Axe

    axe, found = Axe(), []
    with served(Sample()) as address:
        page = opened(f"{address}/", **KINDS[kind])
        for path in PAGES:
            page.goto(f"{address}{path}")
            results = axe.run(page)
            found += [
                (path, each["id"], [node["html"][:200] for node in each["nodes"]])
                for each in results.response["violations"]
            ]
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, (path, wide)
    assert found == []


def questions(page: Any) -> list[str]:
    """Collect the addresses that the page's script asks from now on.

    Other requests are the browser's own. It may load the icon long after the page.
    """
    asked: list[str] = []
    page.on(
        "request", lambda each: asked.append(each.url) if each.resource_type == "fetch" else None
    )
    return asked


def test_a_page_updates_itself_while_it_is_visible_and_nobody_uses_it(opened: Any) -> None:
    """It replaces its content without a shift of its layout. The button stops that."""
    tg = Sample()
    with served(tg) as address:
        page = opened(address)
        page.evaluate(
            "window.shift = 0; new PerformanceObserver((list) => {"
            "for (const each of list.getEntries()) window.shift += each.value;"
            "}).observe({type: 'layout-shift', buffered: true})"
        )
        before = page.inner_text(".lead")
        tg.now_s += 60  # the next snapshot
        page.wait_for_function(
            "(was) => document.querySelector('.lead').innerText !== was", arg=before
        )
        assert page.evaluate("window.shift") < 0.01
        page.click("text=Pause updates")
        assert page.inner_text("#live") == "Resume updates"
        asked = questions(page)
        page.click("text=Resume updates")
        wait_until(lambda: asked or page.wait_for_timeout(50), message="it asks at once")


def test_a_phone_shows_the_newest_deliveries_and_wraps_long_names(opened: Any) -> None:
    """A chart that is wider than the window begins at its end. A long name is in its card."""

    class Long(Sample):
        def process(self, number: int = 3, pid: int = 4711) -> Any:
            return replace(super().process(number, pid), label=f"{'c0ffee' * 12}, pid {pid}")

    with served(Long()) as address:
        page = opened(address, **PHONE)
        left = "document.querySelector('.latest').getBoundingClientRect().right"
        newest = "document.querySelector('.latest svg').getBoundingClientRect().right"
        assert abs(page.evaluate(f"{left} - {newest}")) < 2
        for path in ("/", "/key?key=account:42", "/dead", "/item?work=shop.ship+order:7"):
            page.goto(f"{address}{path}")
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, path


def test_a_hidden_page_asks_nothing(opened: Any) -> None:
    """It asks again as soon as it is visible."""
    with served(Sample()) as address:
        page = opened(address)
        page.evaluate(
            "window.away = true;"
            "Object.defineProperty(document, 'hidden', {get: () => window.away});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        asked = questions(page)
        for _ in range(2):  # pause and resume
            page.click("#live")
        assert asked == []
        with page.expect_request(f"{address}/"):
            page.evaluate(
                "window.away = false; document.dispatchEvent(new Event('visibilitychange'))"
            )


def test_without_javascript_everything_works(opened: Any) -> None:
    """Search, pages, and a change with its reason."""
    tg = Sample()
    with served(tg) as address:
        page = opened(address, java_script_enabled=False)
        page.fill("#q", "account:42")
        page.press("#q", "Enter")
        assert page.inner_text("h1") == "account:42"
        page.click("text=Release")
        page.click("text=Release the key")
        assert page.url.startswith(f"{address}/release"), "the reason is required"
        page.fill("#reason", "its host burned")
        page.press("#reason", "Enter")
        assert page.inner_text("[role=status]").startswith("The key is released.")
    [(what, key, _, said)] = tg.changed
    assert (what, key, said["reason"]) == ("release", "account:42", "its host burned")


def test_it_is_used_by_keyboard(opened: Any) -> None:
    """The first Tab shows a link to the content. Each control shows that it has the focus."""
    with served(Sample()) as address:
        page = opened(f"{address}/release?key=account:42")
        assert page.evaluate("document.activeElement.id") == "reason"
        page.goto(f"{address}/keys")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        assert page.locator(".skip").bounding_box()["x"] >= 0
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate("document.getElementById('main').contains(document.activeElement)")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"


CHANGES = {
    "release": ("/key?key=account:42", "Release", "The key is released."),
    "pause": ("/key?key=account:42", "Pause", "The key is paused."),
    "resume": ("/key?key=tenant:9", "Resume", "The key is resumed."),
    "requeue": ("/item?work=shop.ship+order:7", "Requeue", "Requeued."),
    "drop": ("/item?work=shop.ship+order:7", "Drop", "Dropped."),
    "call": ("/item?work=new+order:7", "Call now", "Its message goes to the queue now."),
    "requeue all": ("/work?state=DEAD", "Requeue all that match", "Requeued. 1 work item"),
    "drop all": ("/work?state=FAILED", "Drop all that match", "Dropped."),
}


def test_an_operator_makes_each_change(opened: Any) -> None:
    """By a button, a page that asks for the reason, and a page that says what was done."""
    tg = Sample()
    with served(tg) as address:
        page = opened(f"{address}/")
        for change, (path, button, said) in CHANGES.items():
            page.goto(f"{address}{path}")
            page.locator("main").get_by_role("link", name=button, exact=True).click()
            page.wait_for_selector("#reason")
            page.fill("#reason", f"to test {change}")
            page.locator("main form button").click()
            page.wait_for_selector("[role=status]")
            assert page.inner_text("[role=status]").startswith(said), change
    changes = [change.partition(" ")[0] for change in CHANGES]
    assert [what for what, *_ in tg.changed] == changes
    assert [said["reason"] for *_, said in tg.changed] == [f"to test {each}" for each in CHANGES]


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_a_role_sees_its_buttons(opened: Any, role: str) -> None:
    """Those of operators are not shown to viewers."""
    with served(Sample(), role) as address:
        page = opened(f"{address}/item?work=shop.ship+order:7")
        assert page.locator("text=Requeue").count() == (role == "operator")


def test_targets_are_large_enough_for_a_finger(opened: Any) -> None:
    """Buttons, fields and the links of the navigation are at least 24 pixels high."""
    with served(Sample()) as address:
        page = opened(f"{address}/key?key=account:42", **PHONE)
        for each in page.locator("button:visible, .button, .nav a, input:visible").all():
            assert each.bounding_box()["height"] >= 24


@pytest.mark.skipif("TASKGUARD_PICTURES" not in os.environ, reason="draws the pictures of the docs")
def test_pictures_for_the_docs(opened: Any) -> None:
    """`TASKGUARD_PICTURES=docs/pictures` writes them."""
    folder = Path(os.environ["TASKGUARD_PICTURES"])
    with served(Sample()) as address:
        view = {"viewport": {"width": 1100, "height": 760}}
        for name, path in {"overview": "/", "key": "/key?key=account:42"}.items():
            page = opened(f"{address}{path}", **view)
            page.evaluate("document.querySelector('footer').remove()")
            page.screenshot(path=folder / f"dashboard-{name}.png")
            assert re.search(r"\w", page.inner_text("h1"))
