"""Combined options: the newest message of a key with a rate, and a strict line with a rate.

All tests use one account's key, which may start once an hour. Each message is work of its own, and
its number is its send time.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.claims import request
from taskguard.errors import StaleTokenError
from taskguard.model.bounds import Bounds, rate_of
from taskguard.model.claims import Answer, Busy, Claimed, ClaimRequest, MessageRef, ParkedNewest
from taskguard.model.states import OUTDATED, Decision

KEY = "account:1"
HOUR_US = 3_600_000_000
BOUNDS = Bounds(KEY, 1, rate_of("1/h", 1))


def delivery(number: int, *, retries: int = 0, **values: Any) -> ClaimRequest:
    message = MessageRef(f"m{number}", retries)
    call = json.dumps({"queue": "test", "message": message.name})
    values = {"call": call, "in_line": True, "bounds": BOUNDS, **values}
    return request(number, keys=(KEY,), message=message, sent_us=1_000_000 + number, **values)


def newest(number: int, mode: str = "latest", **values: Any) -> ClaimRequest:
    return delivery(number, newest=mode, **values)


def strict(number: int, **values: Any) -> ClaimRequest:
    return delivery(number, strict=True, **values)


def claimed(book: Any, asked: ClaimRequest) -> Claimed:
    found = book.ledger.claim(asked)
    assert isinstance(found, Claimed), found
    return found


def refused(book: Any, asked: ClaimRequest) -> Busy:
    found = book.ledger.claim(asked)
    assert isinstance(found, Busy), found
    return found


def too_early(book: Any, asked: ClaimRequest) -> bool:
    return refused(book, asked).too_early


def parked(book: Any, asked: ClaimRequest) -> list[str]:
    """Park it as the newest. Return the superseded messages that are sent for it."""
    found = book.ledger.park_newest(asked)
    assert isinstance(found, ParkedNewest), found
    return [each.message.id for each in found.replaced]


def promoted(book: Any, *, ahead_s: float = 0.0, bounds: Bounds | None = BOUNDS) -> str | None:
    """Promote the next message, and return its id."""
    found = book.ledger.promote_next(KEY, expected_s=30.0, bounds=bounds, ahead_s=ahead_s)
    return None if found is None else found.message.id


def waiting(book: Any) -> list[str]:
    return [each.message for each in book.ledger.waiting()]


def is_outdated(book: Any, number: int) -> bool:
    row = book.work(number)
    return (row.state, bool(row.final)) == ("FAILED", True) and row.error.startswith(OUTDATED)


class TestNewestAtARate:
    @pytest.mark.parametrize("mode", ["latest", "supersede"])
    def test_the_newest_waits_for_the_next_start(self, book: Any, mode: str) -> None:
        """The newest message takes an older one's position while the rate keeps the key closed."""
        book.ledger.complete_alone(claimed(book, newest(1, mode)).claim, None)
        assert too_early(book, newest(2, mode))
        assert parked(book, newest(2, mode)) == []
        assert too_early(book, newest(3, mode))
        assert parked(book, newest(3, mode)) == ["m2"]
        assert is_outdated(book, 2)
        assert waiting(book) == ["m3"]
        assert promoted(book) is None
        assert book.ledger.look().keys == ()
        book.pass_time(HOUR_US)
        assert book.ledger.look().keys == (KEY,)
        assert promoted(book) == "m3"
        book.ledger.complete_alone(claimed(book, newest(3, mode)).claim, None)
        assert too_early(book, newest(4, mode))

    @pytest.mark.parametrize("mode", ["latest", "supersede"])
    def test_an_older_one_that_comes_too_early(self, book: Any, mode: str) -> None:
        """A message that is older than one that waits or has begun is superseded at once, and never
        runs."""
        book.ledger.complete_alone(claimed(book, newest(2, mode)).claim, None)
        for asked in (newest(1, mode), newest(3, mode)):
            if asked.message.id == "m3":
                parked(book, newest(4, mode))
            answer = book.ledger.claim(asked)
            assert isinstance(answer, Answer), answer
            assert answer.decision is Decision.OUTDATED
        assert waiting(book) == ["m4"]

    def test_a_newer_one_while_the_older_is_on_its_way(self, book: Any) -> None:
        """If a newer message supersedes one that was promoted ahead of its start, it is promoted in
        turn. The caller of the older one is notified when that message arrives."""
        book.ledger.complete_alone(claimed(book, newest(1)).claim, None)
        parked(book, newest(2))
        assert promoted(book, ahead_s=7_200.0) == "m2"
        assert too_early(book, newest(3))
        assert parked(book, newest(3)) == []  # its message is on its way
        assert promoted(book, ahead_s=7_200.0) == "m3"
        book.pass_time(HOUR_US)
        assert isinstance(book.ledger.claim(newest(2)), Answer)
        claimed(book, newest(3))

    def test_a_start_that_was_refused(self, book: Any) -> None:
        """A start that was refused is not charged, and an older waiting message keeps its
        position."""
        book.ledger.complete_alone(claimed(book, newest(1)).claim, None)
        parked(book, newest(2))
        noted = book.key_named(KEY).next_start
        assert too_early(book, newest(3))
        assert book.key_named(KEY).next_start == noted
        assert waiting(book) == ["m2"]
        book.pass_time(HOUR_US)
        claimed(book, newest(2))
        assert book.key_named(KEY).next_start > book.ledger.now_us()

    def test_a_relay_knows_the_rate_on_record(self, book: Any) -> None:
        book.ledger.complete_alone(claimed(book, newest(1)).claim, None)
        parked(book, newest(2))
        assert promoted(book, bounds=None) is None
        book.pass_time(HOUR_US)
        assert promoted(book, bounds=None) == "m2"

    def test_asked_twice(self, book: Any) -> None:
        """A repeated claim of one owner is one grant, and one start."""
        asked = newest(1)
        first = claimed(book, asked)
        noted = book.key_named(KEY).next_start
        assert claimed(book, asked).claim == first.claim
        assert book.key_named(KEY).next_start == noted

    def test_no_message_takes_the_key_too_early(self, book: Any) -> None:
        """A newer message supersedes the holder only when the rate allows another start."""
        older = claimed(book, newest(1, "supersede"))
        assert too_early(book, newest(2, "supersede"))
        assert book.work(1).state == "PROCESSING"
        parked(book, newest(2, "supersede"))
        book.pass_time(HOUR_US)
        newer = claimed(book, newest(3, "supersede"))
        assert newer.over == older.claim.owner
        assert [each.message.id for each in newer.replaced] == ["m2"]
        with pytest.raises(StaleTokenError):
            book.ledger.complete_alone(older.claim, None)
        assert too_early(book, newest(4, "supersede"))

    def test_strict_work_from_before_a_deploy(self, book: Any) -> None:
        """Strict work from before a deploy keeps a position, which a newer message takes over."""
        assert book.ledger.fail(claimed(book, strict(1)).claim, "boom")
        with book.transaction() as db:
            book.ledger.enqueue(db, strict(2), due_in_s=600.0)
        assert parked(book, newest(3)) == []  # the older message is on its way
        assert is_outdated(book, 2)
        for asked in (newest(1, retries=1), newest(2)):
            answer = book.ledger.claim(asked)
            assert isinstance(answer, Answer), answer
            assert answer.decision is Decision.OUTDATED
        book.pass_time(HOUR_US)
        assert promoted(book) == "m3"

    def test_the_latest_leaves_the_holder_alone(self, book: Any) -> None:
        """`busy="latest"` does not supersede a holder, even if the rate allows a start."""
        older = claimed(book, newest(1))
        book.pass_time(HOUR_US)
        noted = book.key_named(KEY).next_start
        assert not too_early(book, newest(2))
        assert book.key_named(KEY).next_start == noted
        book.ledger.complete_alone(older.claim, None)
        claimed(book, newest(2))


class TestStrictLineAtARate:
    def test_one_after_another_has_ended_at_the_rate(self, book: Any) -> None:
        """The message that was sent first is promoted when its start is allowed. The next one
        follows after it has ended."""
        book.ledger.complete_alone(claimed(book, strict(1)).claim, None)
        assert too_early(book, strict(3))
        assert book.ledger.park(strict(3))
        assert not too_early(
            book, strict(2)
        )  # behind a message that waits, until it has its own position
        assert book.ledger.park(strict(2))
        assert promoted(book) is None
        book.pass_time(HOUR_US)
        assert promoted(book) == "m2"
        assert promoted(book, ahead_s=7_200.0) is None  # behind work that has not ended
        assert not too_early(book, strict(3))
        second = claimed(book, strict(2))
        book.pass_time(HOUR_US)
        assert promoted(book) is None
        assert not too_early(book, strict(3))
        book.ledger.complete_alone(second.claim, None)
        assert promoted(book) == "m3"
        claimed(book, strict(3))

    def test_a_retry_keeps_its_position(self, book: Any) -> None:
        """A retry counts as a start: it waits for the rate, and later messages wait for it."""
        first = claimed(book, strict(1))
        assert book.ledger.park(strict(2))
        book.ledger.fail(first.claim, "boom")
        assert book.ledger.keep(first.claim, retries=1, call=None, due_in_s=60.0)
        early = refused(book, strict(1, retries=1))
        assert (early.too_early, early.started) == (True, True)
        assert book.ledger.park(strict(1, retries=1))
        assert promoted(book) is None
        book.pass_time(HOUR_US)
        assert book.ledger.look().keys == (KEY,)
        assert promoted(book) == "m1"
        again = claimed(book, strict(1, retries=1))
        assert again.attempt == 2
        book.pass_time(HOUR_US)
        book.ledger.complete_alone(again.claim, None)
        assert promoted(book) == "m2"

    def test_a_takeover_is_a_start(self, book: Any) -> None:
        """The work of a dead holder keeps its position until the rate allows it again."""
        claimed(book, strict(1))
        book.expire_all()
        assert book.ledger.park(strict(2))
        assert too_early(book, strict(1, redelivered=True))
        assert not book.ledger.park(strict(1, redelivered=True))  # its message is deferred
        book.pass_time(HOUR_US)
        assert promoted(book) is None
        assert isinstance(book.ledger.claim(strict(2)), Busy)
        assert claimed(book, strict(1, redelivered=True)).takeover

    def test_enqueued_work_has_its_position_before_it_comes(self, book: Any) -> None:
        """A message that was sent later waits for enqueued work, although it arrives first and the
        rate allows it."""
        with book.transaction() as db:
            book.ledger.enqueue(db, strict(1), due_in_s=600.0)
        assert not too_early(book, strict(2))
        assert book.ledger.park(strict(2))
        assert promoted(book) is None
        book.ledger.complete_alone(claimed(book, strict(1)).claim, None)
        assert promoted(book) is None
        assert promoted(book, ahead_s=7_200.0) == "m2"
