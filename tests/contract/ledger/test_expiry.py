"""Messages that expire while they wait in the line of their key, on every ledger."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from support.claims import request
from taskguard.integration import MessageRef
from taskguard.model.claims import Answer, Claimed, ClaimRequest, ParkedNewest
from taskguard.model.states import Decision

KEY = "account:1"
HOUR_US = 3_600 * 10**6


def delivery(number: int, message: MessageRef | None = None, **values: Any) -> ClaimRequest:
    message = message or MessageRef(f"m{number}")
    values = {"keys": (KEY,), "in_line": True, **values}
    text = json.dumps({"queue": "test", "message": message.name})
    return request(number, message=message, call=text, **values)


def park(book: Any, number: int, in_us: int | None = None, **values: Any) -> None:
    """Park a message that expires in this many µs."""
    expires_us = None if in_us is None else book.ledger.now_us() + in_us
    assert book.ledger.park(delivery(number, expires_us=expires_us, **values))


def claimed(book: Any, number: int, **values: Any) -> Claimed:
    found = book.ledger.claim(delivery(number, **values))
    assert isinstance(found, Claimed), found
    return found


def call(book: Any) -> str | None:
    found = book.ledger.promote_next(KEY, expected_s=30.0)
    return None if found is None else found.message.id


def expire(book: Any, number: int, retries: int = 0) -> bool:
    message = MessageRef(f"m{number}", retries)
    found: bool = book.ledger.expire(f"ship order:{number}", message=message)
    return found


def expired(book: Any, **asked: Any) -> list[str]:
    return [found.message.id for found in book.ledger.expired(**asked)]


class TestWhoWaits:
    def test_is_sent_when_it_has_expired(self, book: Any) -> None:
        """An expired message is sent once, even while the key is held. It is overdue until its end
        is recorded."""
        claimed(book, 1)
        park(book, 2, HOUR_US)
        park(book, 3, -1)
        park(book, 4)
        park(book, 5, -HOUR_US)
        assert expired(book, limit=1) == ["m5"]
        assert expired(book) == ["m3"]
        assert expired(book) == []
        found = book.ledger.overdue(parked=True)
        assert [each.message.id for each in found] == ["m5", "m3"]
        assert book.ledger.sent(found, again_after_s=600.0) == 2
        assert book.ledger.overdue() == []
        assert expired(book) == []

    def test_delays_no_other(self, book: Any) -> None:
        """While an expired message is on its way, messages before and behind it are promoted, and
        begin."""
        holder = claimed(book, 1)
        park(book, 2, -1)
        park(book, 3)
        found = book.ledger.expired()
        book.ledger.complete_alone(holder.claim, None)
        assert call(book) == "m3"
        book.ledger.sent(found, again_after_s=600.0)
        claimed(book, 3)

    def test_of_another_queue_or_application(self, book: Any) -> None:
        """The relays of other queues or applications send their own expired messages."""
        park(book, 1, -1)
        assert expired(book, queues=["other"]) == expired(book, app="other") == []
        assert expired(book, queues=["other", "test"]) == ["m1"]

    @pytest.mark.parametrize("became", ["begun", "revoked", "requeued", "promoted"])
    def test_what_waits_no_more(self, book: Any, became: str) -> None:
        """Work that does not wait, or waits for another message, does not expire."""
        park(book, 1, -1)
        if became == "begun":
            holder = claimed(book, 1)
            assert book.ledger.give_back(holder.claim)
        elif became == "promoted":
            assert call(book) == "m1"
        else:
            book.ledger.revoke("ship order:1", message="m1")
        if became == "requeued":
            book.ledger.requeue("ship order:1", reason="mended")
        assert expired(book) == []


class TestTheEnd:
    @pytest.mark.parametrize("how", ["waits", "promoted", "enqueued"])
    def test_is_noted(self, book: Any, how: str) -> None:
        """Expired work is FAILED, not final, out of the line, and not sent again."""
        if how == "enqueued":
            with book.transaction() as db:
                book.ledger.enqueue(db, delivery(1), due_in_s=0)
        else:
            park(book, 1, -1)
        if how == "promoted":
            assert call(book) == "m1"
        park(book, 2)
        assert expire(book, 1) is True
        row = book.work(1)
        assert (row.state, row.final, row.error) == ("FAILED", 0, "its message expired")
        assert (row.call, row.due, row.parked) == (None, None, None)
        assert expire(book, 1) is False
        book.make_due()
        assert book.ledger.overdue() == []
        assert call(book) == "m2"

    def test_is_noted_when_its_time_is_over(self, book: Any) -> None:
        """A message expires by the ledger's clock, only while it waits in line, and only by the
        number that its queue gave it."""
        message = MessageRef("m1")
        ask = partial(book.ledger.expire, "ship order:1", message=message, retries=0, due=True)
        assert ask() is False
        park(book, 1)
        assert ask() is False
        park(book, 1, HOUR_US)
        assert ask() is False
        # A message that parks again keeps its position and its first deadline.
        for later in (-1, HOUR_US, None):
            park(book, 1, later)
        assert ask() is True
        assert ask() is False
        assert (book.work(1).state, book.work(1).retries) == ("FAILED", 0)
        # A caller's queue delivers it once more, with a new deadline.
        park(book, 1, HOUR_US)
        assert ask() is False
        claimed(book, 1)
        assert ask() is False

    def test_the_newest_keeps_the_first_time_too(self, book: Any) -> None:
        """The newest message keeps its first deadline, too."""
        sent_us = book.ledger.now_us()
        for in_us in (HOUR_US, -1, HOUR_US):
            expires_us = book.ledger.now_us() + in_us
            asked = delivery(1, newest="latest", sent_us=sent_us, expires_us=expires_us)
            assert isinstance(book.ledger.park_newest(asked), ParkedNewest)
        assert expired(book) == ["m1"]

    def test_another_message_of_the_work_runs(self, book: Any) -> None:
        """Another message of the work runs. A copy of the expired message does not run, even after
        the other one has failed, because its caller was notified."""
        park(book, 1, -1)
        assert expire(book, 1)
        for redelivered in (False, True):
            answer = book.ledger.claim(delivery(1, redelivered=redelivered))
            assert isinstance(answer, Answer)
            assert answer.decision is Decision.SUPERSEDED
        other = claimed(book, 1, message=MessageRef("another"))
        assert other.attempt == 1
        assert book.ledger.fail(other.claim, "boom")
        late = book.ledger.claim(delivery(1))
        assert isinstance(late, Answer)
        assert late.decision is Decision.SUPERSEDED
        claimed(book, 1, message=MessageRef("m1", retries=1))

    def test_is_not_that_of_others(self, book: Any) -> None:
        """An expiry does not end another message, a later retry, a holder, or ended work."""
        park(book, 1)
        assert book.ledger.expire("ship order:1", message=MessageRef("other")) is False
        park(book, 2, message=MessageRef("m2", retries=1))
        assert expire(book, 2) is False
        holder = claimed(book, 3, keys=("account:3",))
        assert expire(book, 3) is False
        book.ledger.complete_alone(holder.claim, None)
        assert expire(book, 3) is False
        failed = claimed(book, 4, keys=("account:4",))
        book.ledger.fail(failed.claim, "boom")
        assert expire(book, 4) is False
        assert book.work(4).error == "boom"
        assert expire(book, 5) is False
        assert [each.message for each in book.ledger.waiting()] == ["m1", "m2"]

    def test_of_a_holder_that_died(self, book: Any) -> None:
        """The message of a dead holder that expired is not run again, and the holder's commit is
        refused."""
        holder = claimed(book, 1, strict=True)
        park(book, 2)
        book.expire_all()
        assert call(book) is None
        assert expire(book, 1) is True
        assert (book.work(1).state, book.work(1).parked) == ("FAILED", None)
        assert not book.ledger.fail(holder.claim, "late")
        assert call(book) == "m2"

    def test_of_one_that_keeps_its_place(self, book: Any) -> None:
        """If a retry expires, its position is free."""
        holder = claimed(book, 1, strict=True)
        park(book, 2, strict=True)
        assert book.ledger.fail(holder.claim, "boom")
        assert book.ledger.keep(holder.claim, retries=1, call=None, due_in_s=600.0)
        assert expire(book, 1, retries=0) is False
        assert expire(book, 1, retries=1) is True
        assert call(book) == "m2"

    def test_of_one_that_was_superseded(self, book: Any) -> None:
        """The caller of a superseded message hears once that it expired. The work stays
        superseded."""
        claimed(book, 1, newest="latest")
        now_us = book.ledger.now_us()
        for number in (2, 3):
            asked = delivery(number, newest="latest", sent_us=now_us + number, expires_us=1)
            assert book.ledger.park_newest(asked)
        row = book.work(2)
        assert (row.state, row.final) == ("FAILED", 1)
        assert expire(book, 2) is True
        after = book.work(2)
        assert (after.state, after.final, after.error) == ("FAILED", 1, row.error)
        assert (after.due, after.parked) == (None, None)
