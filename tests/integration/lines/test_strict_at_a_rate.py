"""If the head of a strict line with a rate fails, the next message is promoted in time for the next
start.

With a ledger on SQLite. The queue only notes what is sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from support.claims import request
from taskguard.events import Events
from taskguard.integration import Delivery, MessageRef
from taskguard.ledger.sql import SqlLedger
from taskguard.model.bounds import Bounds, rate_of
from taskguard.model.claims import Claim, Claimed, ClaimRequest
from taskguard.model.delivery import NOT_BEFORE
from taskguard.model.policy import Policy
from taskguard.run.parking import Line

KEY, OTHER = "account:1", "account:2"


class Sent:
    """Sends messages, and notes them."""

    queue = "test"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def call(self) -> None:
        """Not used here."""

    def send(self, call: dict[str, Any], message: MessageRef) -> None:
        del message
        self.calls.append(call)

    def failed(self, claim: Claim) -> None:
        """Not used here."""


@pytest.fixture
def ledger(sqlite_url: str) -> Iterator[SqlLedger]:
    made = SqlLedger(sqlite_url, pooled=False)
    made.create_schema()
    yield made
    made.close()


def strict(number: int, rate: str, key: str = KEY) -> ClaimRequest:
    message = MessageRef(f"m{number}")
    call = json.dumps({"queue": "test", "message": message.name})
    bounds = Bounds(key, 1, rate_of(rate, 1))
    values: dict[str, Any] = {"keys": (key,), "call": call, "in_line": True, "strict": True}
    return request(number, message=message, bounds=bounds, sent_us=number + 1, **values)


def failed_head(ledger: SqlLedger, rate: str) -> Claim:
    """The first of a line has begun and failed, and another one waits."""
    found = ledger.claim(strict(1, rate))
    assert isinstance(found, Claimed)
    assert ledger.park(strict(2, rate))
    assert ledger.fail(found.claim, "boom")
    return found.claim


@pytest.mark.parametrize(("rate", "promoted"), [("1/s", ["m2"]), ("1/h", [])])
def test_the_next_one_when_the_head_gives_up(
    ledger: SqlLedger, rate: str, promoted: list[str]
) -> None:
    """If the next start is less than two seconds away, the message is sent for that moment.
    Otherwise a relay sends it."""
    head, sent = failed_head(ledger, rate), Sent()
    Line(None, ledger, Events()).gave_up(head, sent, retries=1, app="")
    assert [call["message"] for call in sent.calls] == promoted
    assert all(call.get(NOT_BEFORE, 0.0) <= time.time() + 1.0 for call in sent.calls)


def test_a_retry_for_another_key(ledger: SqlLedger) -> None:
    """A retry for another key leaves its line, and gets a position in the line and at the rate of
    its new key."""
    head, sent = failed_head(ledger, "1/h"), Sent()
    moved = strict(1, "1/h", OTHER)
    again = Delivery(
        keys=(OTHER,),
        work="ship order:1 moved",
        task="ship",
        message=replace(moved.message, retries=1),
        policy=Policy(busy="park", order="strict", rate="1/h", recoverable=True),
        bounds=moved.bounds,
        call=moved.call,
        strict=True,
    )
    line = Line(None, ledger, Events())
    line.retried(head, sent, retries=1, call=None, again=again, app="", in_s=0.0)
    view = ledger.view("ship order:1 moved")
    assert view is not None
    assert view.key == OTHER
    assert sent.calls == []
