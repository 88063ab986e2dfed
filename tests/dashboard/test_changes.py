"""Each change on a real ledger: what it does, what it refuses, and what is on record of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from platform import node

import pytest
import sqlalchemy as sa

pytest.importorskip("jinja2")

from support import claims
from support.dashboard_clients import Answer
from support.guarded_shop import GuardedShop
from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.claims import Claim, Claimed, MessageRef
from taskguard.model.lease import new_owner
from taskguard.model.states import State
from taskguard_dashboard.http import Request
from taskguard_dashboard.routes import ROUTES, Dashboard

CALL = '{"queue": "test", "message": "m"}'
SAME = {"sec-fetch-site": "same-origin"}


class Operator:
    """A ledger, and an operator before the page."""

    def __init__(self, url: str) -> None:
        self.shop = GuardedShop(url)
        self.page = Dashboard(self.shop.tg)

    def get(self, path: str, **query: str) -> Answer:
        asked = Request(method="GET", path=path, role="operator", actor="ann", query=query)
        return self._answer(asked)

    def post(self, path: str, **form: str) -> Answer:
        """Send a form, by default with a reason."""
        form = {"reason": "the carrier is back", **form}
        asked = Request(
            method="POST", path=path, role="operator", actor="ann", form=form, headers=SAME
        )
        return self._answer(asked)

    def confirm(self, path: str, **query: str) -> dict[str, str]:
        """Open the page that asks for the reason, and return what its form carries."""
        page = self.get(path, **query)
        assert page.status == 200, page.text
        fields = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.text)
        return {**query, **dict(fields)}

    def _answer(self, asked: Request) -> Answer:
        answer = self.page.respond(asked)
        return Answer(answer.status, dict(answer.headers), answer.body)

    def claim(self, order: int = 1) -> Claim:
        claimed = self.shop.ledger.claim(claims.request(order, ttl_s=600.0))
        assert isinstance(claimed, Claimed)
        return claimed.claim

    def dead(self, order: int = 1) -> None:
        """Work whose holders vanished too often."""
        self.claim(order)
        self.vanish(order)
        self.shop.ledger.claim(claims.request(order, owner=new_owner("again"), max_crashes=1))
        assert self.state(order) == "DEAD"

    def vanish(self, order: int = 1) -> None:
        """The lease of its holder has expired."""
        with self.shop.engine.begin() as db:
            db.execute(sa.update(KEYS).where(KEYS.c.key == f"order:{order}").values(lease_until=1))
            mine = WORK.c.id == f"ship order:{order}"
            db.execute(sa.update(WORK).where(mine).values(lease_until=1))

    def state(self, order: int = 1) -> str:
        view = self.shop.ledger.view(f"ship order:{order}")
        assert view is not None
        return view.state.value

    def done(self) -> list[tuple[str, str, str]]:
        """What is on record."""
        found = self.shop.tg.operations.actions().items
        return [(each.action, each.actor, each.reason) for each in found]


@pytest.fixture(params=["sqlite_url", "pg_url"])
def operator(request: pytest.FixtureRequest) -> Iterator[Operator]:
    made = Operator(request.getfixturevalue(request.param))
    yield made
    made.shop.close()


def test_every_page_is_shown(operator: Operator) -> None:
    """With DEAD, FAILED, held, waiting and paused names in a real ledger."""
    operator.dead(1)
    operator.shop.ledger.fail(operator.claim(2), "TimeoutError: <bank>")
    operator.claim(3)
    assert operator.shop.ledger.park(claims.request(4, keys=("order:3",), call=CALL))
    assert operator.post("/pause", key="order:9").status == 303
    queries = [
        {"key": "order:3", "work": "ship order:1", "action": "requeue", "state": "DEAD"},
        {"key": "order:9", "work": "ship order:2", "q": "order:3"},
        {"key": "order:2", "q": "ship order:2", "state": "FAILED", "action": "drop"},
    ]
    for query in queries:
        for route in ROUTES:
            if route.method == "GET":
                answer = operator.get(route.path, **query)
                assert answer.status in (200, 303, 400), (route.path, query, answer.text)
    overview = operator.get("/").text
    assert "1 work item is DEAD" in overview
    assert "order:9 has been paused" in overview
    key = operator.get("/key", key="order:3").text
    assert "1 message," in key
    assert "ship order:4" in key
    assert "TimeoutError: &lt;bank&gt;" in operator.get("/item", work="ship order:2").text


def test_the_search_takes_a_key_work_a_message_a_task_or_a_beginning(operator: Operator) -> None:
    """One match is opened. Several are listed."""
    for order in (1, 2):
        operator.shop.ledger.claim(claims.request(order, message=MessageRef(f"m{order}")))
    for text, page in (
        ("order:1", "key?key=order%3A1"),
        ("ship order:1", "item?work=ship+order%3A1"),
        ("m1", "item?work=ship+order%3A1"),
        ("ship", "work?task=ship"),
    ):
        answer = operator.get("/find", q=text)
        assert (answer.status, answer.headers["Location"]) == (303, page), text
    listed = operator.get("/find", q="order:").text
    assert listed.count('href="find?q=order') == 2


def test_metrics_are_those_of_the_exporter(operator: Operator) -> None:
    """A viewer reads them, for example Prometheus with a token that `authorize` knows."""
    pytest.importorskip("prometheus_client")
    operator.dead()
    answer = operator.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'taskguard_work{state="dead",task="ship"} 1.0' in answer.text
    assert "taskguard_build_info" in answer.text


def test_the_doctor_leaves_the_application_usable(operator: Operator) -> None:
    """It closes nothing that the application uses further."""
    assert "Ledger" in operator.post("/doctor").text
    assert operator.get("/workers").status == 200


def test_no_page_shows_a_password(sqlite_url: str) -> None:
    """The doctor names a lock server that is down, without the password in its URL."""
    shop = GuardedShop(sqlite_url, locks="redis://worker:s3cret-horse@127.0.0.1:1/0")
    page = Dashboard(shop.tg, show_arguments=True)
    for route in ROUTES:
        form = {"reason": "it is down", "key": "order:1"} if route.method == "POST" else None
        asked = Request(
            method=route.method,
            path=route.path,
            role="operator",
            form=form,
            query={"key": "order:1", "work": "ship order:1", "q": "order:1"},
            headers=SAME,
        )
        text = page.respond(asked).body.decode()
        assert "s3cret-horse" not in text, route
        if route.path == "/doctor" and form:
            assert "127.0.0.1:1" in text
    shop.close()


def test_a_key_is_released_from_the_holder_that_was_seen(operator: Operator) -> None:
    """Its late commit is refused. A holder that came meanwhile keeps the key. The record of the
    change names the former holder."""
    operator.claim()
    form = operator.confirm("/release", key="order:1")
    assert operator.post("/release", **{**form, "fence": "17"}).status == 409
    answer = operator.post("/release", **form)
    assert (answer.status, answer.headers["Location"]) == (
        303,
        "key?key=order%3A1&said=release",
    )
    record = operator.get("/actions").text
    assert "Released" in record
    assert f" on {node()}, pid {os.getpid()}, message m with fence " in record
    assert operator.post("/release", **form).status == 409
    assert operator.done() == [("release", "ann", "the carrier is back")]


def test_a_key_is_paused_and_resumed(operator: Operator) -> None:
    """Both are on record, and a paused key cannot be paused again."""
    operator.claim()
    form = operator.confirm("/pause", key="order:1")
    assert operator.post("/pause", **form, now="1").status == 303
    assert "the carrier is back" in operator.get("/key", key="order:1").text
    assert f" on {node()}, pid {os.getpid()}, message m" in operator.get("/actions").text
    assert operator.post("/pause", **form).status == 409
    assert operator.post("/resume", **operator.confirm("/resume", key="order:1")).status == 303
    assert [action for action, _, _ in operator.done()] == ["resume", "pause"]
    # On record as well, because it refuses a pause that waits for its holders.
    assert operator.post("/resume", key="order:1").status == 409


def test_dead_work_is_requeued_if_it_is_as_it_was_seen(operator: Operator) -> None:
    """A form that another operator was faster than is refused, and says why."""
    operator.dead()
    form = operator.confirm("/requeue", work="ship order:1")
    assert form["state"] == "DEAD"
    assert operator.post("/requeue", **{**form, "fence": "17"}).status == 409
    assert operator.state() == "DEAD"
    assert operator.post("/requeue", **form).status == 303
    assert operator.state() == "NEW"
    late = operator.post("/requeue", **form, reason="me too")
    assert late.status == 409
    assert "it has changed since" in late.text
    assert operator.done() == [("requeue", "ann", "the carrier is back")]
    assert "the carrier is back" in operator.get("/item", work="ship order:1").text


def test_work_that_no_worker_is_at_is_requeued(operator: Operator) -> None:
    """Its lease expired long ago. Work under a live lease is refused."""
    operator.claim()
    live = operator.confirm("/requeue", work="ship order:1") | {"state": "PROCESSING"}
    assert operator.post("/requeue", **live).status == 409
    operator.vanish()
    form = operator.confirm("/requeue", work="ship order:1")
    assert operator.post("/requeue", **form).status == 303
    assert operator.state() == "NEW"
    assert operator.done()[0][0] == "requeue_left"


def test_work_is_dropped_and_called(operator: Operator) -> None:
    """Parked work is sent, and FAILED work never runs."""
    operator.claim()
    assert operator.shop.ledger.park(claims.request(2, keys=("order:1",), call=CALL))
    form = operator.confirm("/call", work="ship order:2")
    assert operator.post("/call", **form).status == 303
    operator.shop.ledger.fail(operator.claim(3), "TimeoutError")
    assert operator.post("/drop", **operator.confirm("/drop", work="ship order:3")).status == 303
    item = operator.shop.tg.operations.work("ship order:3")
    assert item is not None
    assert (item.state, item.final) == (State.FAILED, True)
    assert [action for action, _, _ in operator.done()] == ["drop", "call"]


def test_all_that_match_are_requeued(operator: Operator) -> None:
    """Work that died after the operator looked stays as it is."""
    operator.dead(1)
    operator.dead(2)
    form = operator.confirm("/bulk", action="requeue", state="DEAD")
    assert form["count"] == "2"
    operator.dead(3)
    with operator.shop.engine.begin() as db:
        later = sa.update(WORK).where(WORK.c.id == "ship order:3")
        db.execute(later.values(since=WORK.c.since + 3_600_000_000))
    answer = operator.post("/bulk", **form)
    assert answer.status == 303
    assert answer.headers["Location"].endswith("said=requeue&n=2")
    assert [operator.state(order) for order in (1, 2, 3)] == ["NEW", "NEW", "DEAD"]
    assert [each[0] for each in operator.done()] == ["requeue", "requeue"]


@pytest.mark.parametrize(
    "form",
    [
        {"action": "requeue"},
        {"action": "requeue", "state": "DONE"},
        {"action": "erase", "state": "DEAD"},
        {"action": "drop", "overdue": "1"},
        {"action": "requeue", "state": "DEAD", "since": "yesterday"},
    ],
)
def test_bulk_needs_a_filter_and_a_change(operator: Operator, form: dict[str, str]) -> None:
    """Otherwise a slip of the hand would change everything."""
    operator.dead()
    assert operator.post("/bulk", **form).status == 400
    assert operator.state() == "DEAD"
