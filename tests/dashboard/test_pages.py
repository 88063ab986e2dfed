"""What the pages show, with ordinary names, hostile ones, and behind a proxy."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("starlette")

from jinja2 import UndefinedError

from support.dashboard_clients import FRAMEWORKS, Answer
from support.dashboard_sample import Sample
from taskguard.errors import ConfigurationError
from taskguard.integration import printable
from taskguard_dashboard.http import Request
from taskguard_dashboard.rendering import html
from taskguard_dashboard.routes import ROUTES, Dashboard

NAMED = {"key": "account:42", "work": "shop.ship order:7", "q": "account:"}
PAGES = [each.path for each in ROUTES if each.method == "GET" and each.path != "/metrics"]
HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)> ' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "safe\u202etxt.exe\u2066",
    "a\x00b\x1b[31m\x9bc\r\nSet-Cookie: x=1",
    "=cmd|' /C calc'!A0",
    "x" * 10_000,
    "../../key?key=a&b=c#d%2F%00;é 😀",
)


def get(tg: Any, path: str, **query: str) -> Answer:
    """A page for an operator that sees everything."""
    page = Dashboard(tg, show_arguments=True)
    answer = page.respond(
        Request(method="GET", path=path, role="operator", actor="ann", query=query)
    )
    return Answer(answer.status, dict(answer.headers), answer.body)


def query_of(path: str) -> dict[str, str]:
    only = {
        "/bulk": {"action": "requeue", "state": "DEAD"},
        "/work": {"state": "FAILED"},
        "/actions": {},
        "/find": {"q": "account:"},
        "/waiting": {},
    }
    return only.get(path, NAMED)


class Page(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def shape(self) -> list[tuple[str, list[str]]]:
        return [(tag, sorted(attrs)) for tag, attrs in self.elements]

    def values(self, *names: str) -> list[str]:
        return [each for _, attrs in self.elements for n in names if (each := attrs.get(n) or "")]


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_add_nothing_to_a_page(hostile: str) -> None:
    """Keys, tasks, errors, messages, reasons and names of workers: the page has the elements and
    attributes that it has with ordinary names, and shows each control character as an escape."""
    for path in PAGES:
        plain = Page(get(Sample(), path, **query_of(path)).text)
        answer = get(Sample(hostile=hostile), path, **query_of(path))
        page = Page(answer.text)
        assert answer.status == 200, path
        assert {tag for tag, _ in page.shape()} <= {tag for tag, _ in plain.shape()} | {"pre"}
        for _, attrs in page.elements:
            assert not [name for name in attrs if name.startswith("on")], path
            assert "style" not in attrs, path
        for link in page.values("href", "src", "action"):
            assert urljoin("https://host/ops/page", link).startswith("https://host/ops/"), link
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page.text)


def test_links_to_hostile_names_lead_to_them() -> None:
    """The query of a link has the exact name, although the page shows it printably."""
    for hostile in HOSTILE:
        page = Page(get(Sample(hostile=hostile), "/keys").text)
        links = [urlsplit(each) for each in page.values("href")]
        keys = [parse_qs(each.query)["key"] for each in links if each.path == "./key"]
        assert keys[0] == [hostile]
        assert printable(hostile) in page.text


def test_a_form_carries_the_exact_name() -> None:
    """Hidden fields would lose NUL and change line ends. So the address of the form has it."""
    for hostile in HOSTILE:
        page = Page(get(Sample(hostile=hostile), "/release", key="account:42").text)
        [action] = [each for each in page.values("action") if each.startswith("release")]
        assert parse_qs(urlsplit(action).query)["key"] == [hostile]


@pytest.mark.parametrize("path", ["/work", "/actions"])
@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_csv_has_no_formulas_and_no_further_lines(path: str, hostile: str) -> None:
    """A spreadsheet runs cells that begin with =, +, - or @."""
    answer = get(Sample(hostile=hostile), path, **{"as": "csv", "state": "FAILED"})
    assert answer.headers["Content-Type"].startswith("text/csv")
    assert answer.headers["Content-Disposition"].startswith("attachment")
    rows = list(csv.reader(io.StringIO(answer.text)))
    plain = list(
        csv.reader(io.StringIO(get(Sample(), path, **{"as": "csv", "state": "FAILED"}).text))
    )
    assert [len(row) for row in rows] == [len(row) for row in plain]
    for cell in (cell for row in rows for cell in row):
        assert not cell.lstrip().startswith(("=", "+", "-", "@"))
        assert "\n" not in cell


def test_the_first_page_shows_troubles_first() -> None:
    """Dead work is named before any number. A leader that holds its lease for a day is none."""
    text = Page(get(Sample(), "/").text).text
    order = ["2 work items are DEAD", "account:42 has been held for", "tenant:9 has been paused"]
    order.append("Deliveries")
    found = [text.index(each) for each in order]
    assert found == sorted(found)
    assert "leader:relay" not in text
    assert "leader:relay" in get(Sample(), "/keys").text


def test_a_key_shows_its_holder_line_and_past() -> None:
    """All that an operator asks about a key is on one page."""
    page = Page(get(Sample(), "/key", key="account:42").text)
    for each in (
        "celery@web-3, pid 4711",
        "shop.rebalance account:42",
        "312 messages",
        "Taken over",
        "Late commit refused",
        "TimeoutError: bank.example",
        "Requeued",
        "py-spy dump",
    ):
        assert each in page.text
    [picture] = [attrs for tag, attrs in page.elements if tag == "svg" and "role" in attrs]
    assert "holders and" in str(picture["aria-label"])


def test_a_link_puts_no_text_into_the_note_of_a_change() -> None:
    """Only a number of changes may come from an address."""
    assert "1 work item changed" in get(Sample(), "/work", state="DEAD", said="drop", n="1").text
    assert "9 work items changed" in get(Sample(), "/work", state="DEAD", said="drop", n="9").text
    text = get(Sample(), "/work", state="DEAD", said="drop", n="Call 555-0100. 9").text
    assert "555-0100" not in text


def test_what_happened_names_processes_and_says_nothing_twice() -> None:
    """A takeover names the process that took over, and not its owner. A duplicate has a message."""
    text = " ".join(Page(get(Sample(), "/key", key="account:42").text).text.split())
    assert "Taken over from celery@web-1, pid 90" in text
    assert "by celery@web-3, pid 4711, message 8d3f6a1e" in text
    assert "message 51c2" in text
    assert "duplicate: message" not in text
    for path in ("/dead", "/item", "/work"):
        error = Page(get(Sample(), path, **query_of(path)).text).text
        assert "worker 0a000002" not in error, path
        assert "celery@web-2, pid 71, message 91ab77f0" in error, path


def test_one_of_something_is_singular() -> None:
    """Tiles, attempts and the pages of changes."""

    class One(Sample):
        def list_work(self, *args: Any, **options: Any) -> Any:
            rows = super().list_work(*args, **options)
            return replace(rows, items=tuple(replace(each, attempts=1) for each in rows.items[:1]))

        def work(self, work: str, *, arguments: bool = False) -> Any:
            found = super().work(work, arguments=arguments)
            return found and replace(found, attempts=1)

    assert "1 attempt, " in Page(get(One(), "/dead").text).text
    bulk = Page(get(One(), "/bulk", action="requeue", state="DEAD").text).text
    assert "1 work item" in bulk
    assert "1 work items" not in bulk


def test_an_empty_page_says_what_is_not_there() -> None:
    """An empty list of keys depends on its filter."""

    class Empty(Sample):
        def keys(self, **options: Any) -> Any:
            return replace(super().keys(**options), items=(), after=None)

    assert "No key is held for 10m or longer." in get(Empty(), "/keys", longer="10m").text
    assert "No key is held." in get(Empty(), "/keys").text
    assert "No key is paused." in get(Empty(), "/keys", paused="1").text


def test_viewers_see_no_buttons_of_operators() -> None:
    """A button that only answers 403 helps nobody."""
    page = Dashboard(Sample())
    for path in ("/key", "/item", "/dead", "/work", "/doctor"):
        asked = Request(method="GET", path=path, role="viewer", query=query_of(path))
        text = page.respond(asked).body.decode()
        for change in ("release", "pause", "requeue", "drop", "call", "bulk", 'method="post"'):
            assert f'"{change}?' not in text
            assert 'method="post"' not in text


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("account:42", "key?key=account%3A42"),
        ("shop.ship order:7", "item?work=shop.ship+order%3A7"),
        ("", "./"),
    ],
)
def test_the_search_leads_to_a_key_or_to_work(text: str, where: str) -> None:
    """One match is opened at once."""
    answer = get(Sample(), "/find", q=text)
    assert (answer.status, answer.headers["Location"]) == (303, where)


def test_an_error_of_the_ledger_is_a_page() -> None:
    """The page says what failed and what to do, without a traceback."""
    from taskguard.errors import LedgerUnavailableError

    class Away(Sample):
        def workers(self, **_: Any) -> Any:
            raise LedgerUnavailableError("The ledger gives no answer. Start its database.")

    answer = get(Away(), "/workers")
    assert answer.status == 503
    assert "Start its database." in answer.text


def test_a_wrong_request_is_not_an_outage() -> None:
    """A cursor that is none is the fault of the request. Missing tables are not."""
    from taskguard.errors import LedgerSchemaError

    class Wrong(Sample):
        def keys(self, **_: Any) -> Any:
            raise ConfigurationError("That is not the cursor of a page.")

        def workers(self, **_: Any) -> Any:
            raise LedgerSchemaError("The tables are missing.")

    assert get(Wrong(), "/keys", after="x").status == 400
    assert get(Wrong(), "/workers").status == 503


def test_viewers_of_a_ledger_that_is_down_do_not_wait_for_each_other() -> None:
    """One of them waits until the ledger's deadline, and the others share its error."""
    from taskguard.errors import LedgerUnavailableError

    class Frozen(Sample):
        asked = 0

        def lines(self, *, limit: int = 50) -> Any:
            Frozen.asked += 1
            raise LedgerUnavailableError("The ledger gives no answer.")

    page = Dashboard(Frozen())
    for _ in range(20):
        answer = page.respond(Request(method="GET", path="/waiting", role="viewer"))
        assert answer.status == 503
    assert Frozen.asked == 1


def test_each_of_several_keys_has_its_link() -> None:
    """Work that holds two keys names both."""

    class Two(Sample):
        def work(self, work: str, *, arguments: bool = False) -> Any:
            found = super().work(work, arguments=arguments)
            return found and replace(found, key="a:1,b:2")

    page = get(Two(), "/item", work="shop.ship order:7").text
    assert 'key=a%3A1"' in page
    assert 'key=b%3A2"' in page


def test_many_viewers_cost_what_one_costs() -> None:
    """The first page is read once in some seconds, however many look at it."""

    class Counting(Sample):
        read = 0

        def lines(self, *, limit: int = 50) -> Any:
            Counting.read += 1
            return super().lines(limit=limit)

    page = Dashboard(Counting())
    for _ in range(100):
        asked = Request(method="GET", path="/", role="viewer")
        assert page.respond(asked).status == 200
    assert Counting.read == 1


def test_a_template_that_names_a_missing_value_fails() -> None:
    """It would show an empty text otherwise, for example in the place of an owner."""
    with pytest.raises(UndefinedError):
        html("problem.html", Request(method="GET", path="/", role="viewer"))


def test_the_first_view_is_small() -> None:
    """A page with its style, script and icon, before compression."""
    page = Page(get(Sample(), "/").text)
    size = len(get(Sample(), "/").body)
    for link in page.values("href", "src"):
        if link.startswith("./files/"):
            size += len(get(Sample(), link.removeprefix(".")).body)
    assert size < 60_000


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_link_works_behind_a_proxy_that_strips_a_prefix(framework: str) -> None:
    """The browser sees /intern/ops/taskguard/…, and the app /taskguard/…. All links, forms and
    redirections stay below that prefix."""
    ask = FRAMEWORKS[framework](Sample(), mounted="/taskguard")
    outside, seen, left = "https://proxy.example/intern/ops", set(), ["/taskguard/"]

    def through(url: str) -> Answer:
        parts = urlsplit(url)
        assert url.startswith(f"{outside}/taskguard/"), url
        path = parts.path.removeprefix("/intern/ops")
        query = {name: each[0] for name, each in parse_qs(parts.query).items()}
        return ask("GET", path, query, x_role="operator")

    left = [f"{outside}/taskguard/"]
    while left:
        url = left.pop()
        path = urlsplit(url).path
        if path in seen:
            continue
        seen.add(path)
        answer = through(url)
        assert answer.status in (200, 303), (url, answer.text[-300:])
        if answer.status == 303:
            left.append(urljoin(url, answer.headers["location"]))
        elif answer.headers["content-type"].startswith("text/html"):
            page = Page(answer.text)
            left += [urljoin(url, each) for each in page.values("href", "src")]
            left += [urljoin(url, each) for each in page.values("action") if "doctor" not in each]
    names = {path.rpartition("/")[2] for path in seen}
    assert {path[1:] for path in PAGES} - {"find"} <= names | {
        "resume",
        "call",
        "find",
    }
    form = {"reason": "x", "key": "account:42"}
    done = ask(
        "POST", "/taskguard/release", None, form, x_role="operator", sec_fetch_site="same-origin"
    )
    back = urljoin(f"{outside}/taskguard/release", done.headers["location"])
    assert back == f"{outside}/taskguard/key?key=account%3A42&said=release"
