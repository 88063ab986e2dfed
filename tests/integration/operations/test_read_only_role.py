"""A role with the grants of the production page asks all questions, and changes nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa

import taskguard
from support import claims
from support.guarded_shop import GuardedShop
from support.pages import blocks_of
from taskguard.cli import main
from taskguard.ledger.operations import snapshot
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import SNAPSHOT
from taskguard.model.claims import Claimed, MessageRef
from taskguard.operations.collector import exposition

ROLE, PASSWORD = "taskguard_reader", "change me"
QUESTIONS = (
    ["explain", "order:1"],
    ["explain", "--message", "m1"],
    ["keys"],
    ["keys", "--paused"],
    ["work", "list", "--state", "FAILED"],
    ["work", "list", "--overdue"],
    ["work", "show", "ship order:1"],
    ["waiting"],
    ["waiting", "--by-line"],
    ["workers"],
    ["actions"],
    ["top", "--once"],
)
CHANGES = (
    ["work", "requeue", "ship order:1", "--reason", "x"],
    ["work", "drop", "--state", "FAILED", "--yes", "--reason", "x"],
    ["work", "done", "ship order:1", "--reason", "x"],
    ["keys", "release", "order:2", "--reason", "x"],
    ["keys", "pause", "order:3", "--reason", "x"],
    ["purge"],
)

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def shop(pg_url: str) -> Iterator[GuardedShop]:
    """Return a shop with FAILED work and a held key, on PostgreSQL."""
    made = GuardedShop(pg_url)
    for number in (1, 2):
        claimed = made.ledger.claim(claims.request(number, message=MessageRef(f"m{number}")))
        assert isinstance(claimed, Claimed)
        if number == 1:
            made.ledger.fail(claimed.claim, "TimeoutError: bank")
    yield made
    made.close()


@pytest.fixture
def reader(shop: GuardedShop, pg_url: str) -> Iterator[str]:
    """Return the URL of the role, which is dropped at the end."""
    [grants] = [
        block.text
        for block in blocks_of("docs/how-to/production.md", "text")
        if "create role" in block.text
    ]
    role = f"reader_{uuid.uuid4().hex[:8]}"
    with shop.engine.begin() as db:
        for statement in grants.replace(ROLE, role).split(";"):
            if statement.strip():
                db.exec_driver_sql(statement)
    url = sa.engine.make_url(pg_url).set(username=role, password=PASSWORD)
    yield url.render_as_string(hide_password=False)
    with shop.engine.begin() as db:
        db.exec_driver_sql(f"drop owned by {role}")
        db.exec_driver_sql(f"drop role {role}")


def rows_of(shop: GuardedShop) -> dict[str, list[str]]:
    """Return all rows of taskguard's tables, by table."""
    with shop.engine.connect() as db:
        return {
            name: sorted(map(str, db.execute(sa.select(table))))
            for name, table in SNAPSHOT.metadata.tables.items()
        }


def test_the_role_reads_and_does_not_write(
    shop: GuardedShop, reader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each question is answered. Each change exits with status 1, and says what its user needs."""
    before = rows_of(shop)
    for question in QUESTIONS:
        assert main([*question, "--url", reader]) == 0, (question, capsys.readouterr().err)
    main(["doctor", "--ledger", reader, "--json"])
    assert "Traceback" not in capsys.readouterr().err
    for change in CHANGES:
        assert main([*change, "--url", reader]) == 1, change
        said = capsys.readouterr()
        assert said.out == "", change
        assert "permission denied for table taskguard_" in said.err, change
        assert re.search("SELECT, INSERT and UPDATE on", said.err), change
    assert rows_of(shop) == before


def test_the_exporter_of_a_role_that_only_reads_takes_its_own_snapshot(
    shop: GuardedShop, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares none, and takes a stored one that is newer. One process takes one in 15 seconds."""
    taken = []
    ask = snapshot._asked
    monkeypatch.setattr(snapshot, "_asked", lambda *args: taken.append(args[1]) or ask(*args))
    with closing(SqlLedger(reader)) as ledger:
        for _ in range(2):
            assert b'taskguard_work{state="failed",task="ship"} 1.0' in exposition(ledger)
        assert taken == list(snapshot.QUESTIONS)
        before = ledger.snapshot()
        shop.ledger.snapshot(max_age_s=0.0)
        stored = ledger.snapshot()
        assert len(taken) == 2 * len(snapshot.QUESTIONS)
        assert stored.taken_s > before.taken_s
        assert stored.values["work"] == before.values["work"] == [["ship", "failed", 1]]


def test_the_command_serves_metrics_to_a_role_that_only_reads(
    shop: GuardedShop, reader: str
) -> None:
    """`taskguard exporter` does not need the privileges of a worker."""
    command = [sys.executable, "-m", "taskguard", "exporter", "--url", reader, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            with urllib.request.urlopen(process.stdout.readline().strip(), timeout=60) as answer:
                assert b'taskguard_work{state="failed",task="ship"} 1.0' in answer.read()
        finally:
            process.terminate()


def test_the_web_page_of_a_role_that_only_reads_shows_all(shop: GuardedShop, reader: str) -> None:
    """Each page is shown, and none writes."""
    pytest.importorskip("jinja2")
    from taskguard_dashboard.http import Request
    from taskguard_dashboard.routes import ROUTES, Dashboard

    before = rows_of(shop)
    with closing(taskguard.connect(locks=None, ledger=reader)) as tg:
        page = Dashboard(tg)
        query = {"key": "order:2", "work": "ship order:1", "q": "order:2", "action": "requeue"}
        for route in ROUTES:
            if route.method == "GET":
                asked = Request(method="GET", path=route.path, role="operator", query=query)
                answer = page.respond(asked)
                assert answer.status in (200, 303, 400), (route.path, answer.body)
    assert rows_of(shop) == before
