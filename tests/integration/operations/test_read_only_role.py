"""A role with the grants of the production page asks all questions, and changes nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from support import claims
from support.guarded_shop import GuardedShop
from support.pages import blocks_of
from taskguard.cli import main
from taskguard.model.claims import Claimed

ROLE, PASSWORD = "taskguard_reader", "change me"
QUESTIONS = (
    ["explain", "order:1"],
    ["keys"],
    ["keys", "--paused"],
    ["work", "list", "--state", "FAILED"],
    ["work", "show", "ship order:1"],
    ["waiting", "--by-line"],
    ["workers"],
    ["actions"],
    ["top", "--once"],
)


@pytest.fixture
def reader(pg: GuardedShop, pg_url: str) -> Iterator[str]:
    """Return the URL of the role, which is dropped at the end."""
    [grants] = [
        block.text
        for block in blocks_of("docs/how-to/production.md", "text")
        if "create role" in block.text
    ]
    role = f"reader_{uuid.uuid4().hex[:8]}"
    with pg.engine.begin() as db:
        for statement in grants.replace(ROLE, role).split(";"):
            if statement.strip():
                db.exec_driver_sql(statement)
    url = sa.engine.make_url(pg_url).set(username=role, password=PASSWORD)
    yield url.render_as_string(hide_password=False)
    with pg.engine.begin() as db:
        db.exec_driver_sql(f"drop owned by {role}")
        db.exec_driver_sql(f"drop role {role}")


def test_the_role_reads_and_does_not_write(
    pg: GuardedShop, reader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each question is answered. A change is refused with the database's reason."""
    claimed = pg.ledger.claim(claims.request())
    assert isinstance(claimed, Claimed)
    pg.ledger.fail(claimed.claim, "TimeoutError: bank")
    for question in QUESTIONS:
        assert main([*question, "--url", reader]) == 0, capsys.readouterr().err
    change = ["work", "requeue", "ship order:1", "--reason", "x", "--url", reader]
    assert main(change) == 1
    assert "permission denied" in capsys.readouterr().err
    assert pg.states == ["FAILED"]
