"""Work that waits for its key in the ledger: its position in line, and which message is promoted or
may claim.

All tests use one account's key. Each work item has a message of its own.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import pytest

from support.claims import request
from support.threads import work_off
from support.waiting import wait_until
from taskguard.errors import LineFullError
from taskguard.model.claims import Answer, Busy, Claimed, ClaimRequest, MessageRef
from taskguard.model.delivery import stored_call
from taskguard.model.records import Once
from taskguard.model.states import Decision, State

KEY = "account:1"
EXPECTED_S = 30.0


def message_of(number: int, retries: int = 0, deferrals: int = 0) -> MessageRef:
    return MessageRef(f"m{number}", retries, deferrals)


def delivery(number: int, message: MessageRef | None = None, **values: Any) -> ClaimRequest:
    """Return a request for a message's work, in the line of the account's key."""
    message = message or message_of(number)
    values = {"keys": (KEY,), "in_line": True, **values}
    return request(number, message=message, **values)


def park(book: Any, number: int, message: MessageRef | None = None, **values: Any) -> bool:
    asked = delivery(number, message)
    call = stored_call({"queue": "test"}, asked.message, app="")
    parked: bool = book.ledger.park(delivery(number, message, call=call, **values))
    return parked


def claimed(book: Any, number: int, **values: Any) -> Claimed:
    found = book.ledger.claim(delivery(number, **values))
    assert isinstance(found, Claimed), found
    return found


def call(book: Any, expected_s: float = EXPECTED_S) -> str | None:
    """Promote the next message, and return its id."""
    found = book.ledger.promote_next(KEY, expected_s=expected_s)
    return None if found is None else found.message.id


class TestPark:
    def test_stands_in_the_ledger(self, book: Any) -> None:
        """A parked message is NEW, with its stored message, and not overdue: it is sent only when
        it is promoted."""
        holder = claimed(book, 1)
        assert park(book, 2) is True
        row = book.work(2)
        assert (row.state, row.message, row.attempts, row.due) == ("NEW", "m2", 0, None)
        assert json.loads(row.call)["message"] == "m2"
        assert row.parked is not None
        assert book.ledger.overdue() == []
        book.ledger.complete_alone(holder.claim, None)
        assert book.work(1).parked is None

    def test_whose_claim_it_is(self, book: Any) -> None:
        """A claim says whether its work waited, even if another copy of the message makes it."""
        assert claimed(book, 1).waited is False
        park(book, 2)
        book.expire_all()
        assert claimed(book, 2).waited is True

    def test_again(self, book: Any) -> None:
        """A delivery that comes twice, or was promoted and finds the key taken, keeps its
        position."""
        claimed(book, 1)
        for number in (2, 3):
            park(book, number)
        before = book.work(2).parked
        assert park(book, 2) is True
        assert book.work(2).parked == before
        book.expire_all()
        assert call(book) == "m2"
        assert park(book, 2) is True
        assert book.work(2).parked == before
        assert call(book) == "m2"

    def test_in_the_order_in_which_they_were_sent(self, book: Any) -> None:
        """Messages wait in the order in which they were sent. A sender's clock that is ahead gives
        no later position."""
        claimed(book, 1)
        now_us = book.ledger.now_us()
        for number, sent_us in ((2, now_us - 5), (3, now_us - 7), (4, now_us + 10**12), (5, None)):
            call_of = json.dumps({"queue": "test", "message": f"m{number}"})
            assert book.ledger.park(delivery(number, call=call_of, sent_us=sent_us))
        assert [each.work[-1] for each in book.ledger.waiting()] == ["3", "2", "4", "5"]

    def test_another_message_of_the_work(self, book: Any) -> None:
        """Another message of the work is not parked in its position, because each caller waits for
        its own result."""
        claimed(book, 1)
        park(book, 2)
        before = book.work(2)
        assert park(book, 2, MessageRef("again")) is False
        assert book.work(2) == before

    def test_one_that_was_enqueued(self, book: Any) -> None:
        """Work that was enqueued, in the user's transaction or for a sweep, is parked by its own
        message."""
        claimed(book, 1)
        message = json.dumps({"queue": "test", "message": "m2"})
        with book.transaction() as db:
            book.ledger.enqueue(db, delivery(2, call=message), due_in_s=0)
        assert len(book.ledger.overdue()) == 1
        assert park(book, 2, MessageRef("other")) is False
        assert park(book, 2) is True
        assert book.ledger.overdue() == []
        book.expire_all()
        assert call(book) == "m2"

    def test_enqueued_again(self, book: Any) -> None:
        """If waiting work is enqueued again, it keeps its message and position, and the other
        message is sent, too."""
        claimed(book, 1)
        park(book, 2)
        before = book.work(2)
        again = delivery(2, MessageRef("again"), call='{"queue": "test", "message": "again"}')
        with book.transaction() as db:
            book.ledger.enqueue(db, again, due_in_s=0)
        assert book.work(2) == before
        assert book.ledger.overdue() == []

    def test_one_that_was_replaced(self, book: Any) -> None:
        """If a waiting message is replaced, it never runs, and the newer one is last in line."""
        claimed(book, 1)
        for number in (2, 3):
            park(book, number)
        newer = json.dumps({"queue": "test", "message": "newer"})
        instead = delivery(2, MessageRef("newer"), call=newer)
        with book.transaction() as db:
            once = Once(lambda found: instead, replaces=True)
            book.ledger.enqueue(db, instead, due_in_s=600, once=once)
        assert park(book, 2) is False
        assert json.loads(book.work(2).call)["message"] == "newer"
        book.expire_all()
        assert call(book) == "m3"
        book.ledger.complete_alone(claimed(book, 3).claim, None)
        assert isinstance(book.ledger.claim(delivery(2)), Answer)
        assert isinstance(book.ledger.claim(instead), Claimed)

    @pytest.mark.parametrize("max_waiting", [None, 1], ids=["failed", "refused"])
    @pytest.mark.parametrize("formerly", [(), ("ship order:9",)], ids=["", "formerly"])
    def test_a_replaced_message_never_waits(
        self, book: Any, max_waiting: int | None, formerly: tuple[str, ...]
    ) -> None:
        """A late delivery of it is refused even if the newer message has failed.

        The newer message failed in its body, or because `max_waiting` others wait. In the first
        case the queue may retry it.
        """
        values = {"max_waiting": max_waiting, "formerly": formerly}
        newer = delivery(2, MessageRef("newer"), call='{"queue": "test"}', **values)
        with book.transaction() as db:
            book.ledger.enqueue(db, delivery(2, call='{"queue": "test"}'), due_in_s=600)
        with book.transaction() as db:
            once = Once(lambda found: newer, replaces=True)
            book.ledger.enqueue(db, newer, due_in_s=600, once=once)
        if max_waiting is None:
            book.ledger.fail(claimed(book, 2, message=newer.message).claim, "boom")
        holder = claimed(book, 1)
        if max_waiting is not None:
            park(book, 3)
            with pytest.raises(LineFullError):
                book.ledger.park(newer)
            book.ledger.complete_alone(holder.claim, None)
            holder = claimed(book, 3)
        before = book.work(2)
        assert (before.state, before.message) == ("FAILED", "newer")
        assert park(book, 2, **values) is False
        assert book.work(2) == before
        book.ledger.complete_alone(holder.claim, None)
        assert call(book) is None

    def test_under_another_key(self, book: Any) -> None:
        """The work waits in the line of the key that this delivery requests, whatever its key was
        before."""
        book.ledger.fail(claimed(book, 2, keys=("account:2",)).claim, "boom")
        claimed(book, 1)
        assert park(book, 2, message_of(2, retries=1)) is True
        assert [each.work for each in book.ledger.waiting(KEY)] == ["ship order:2"]
        book.expire_all()
        assert call(book) == "m2"

    def test_a_retry_goes_to_the_end(self, book: Any) -> None:
        """A retry goes to the end of the line, behind the messages that waited meanwhile."""
        holder = claimed(book, 1)
        park(book, 2)
        book.ledger.fail(holder.claim, "boom")
        claimed(book, 3, in_line=False)
        assert park(book, 1, message_of(1, retries=1)) is True
        assert book.work(1).parked > book.work(2).parked
        assert (book.work(1).state, book.work(1).retries) == ("NEW", 1)

    def test_only_what_is_new(self, book: Any) -> None:
        """With only_new, a message is parked only if there is no record of its work or of the
        message."""

        def park_new(number: int) -> bool:
            call_of = json.dumps({"queue": "test", "message": f"m{number}"})
            parked: bool = book.ledger.park(delivery(number, call=call_of), only_new=True)
            return parked

        book.ledger.fail(claimed(book, 1).claim, "boom")
        assert book.ledger.defer(delivery(2), lambda deferrals: None) is True
        before = book.work(1)
        assert [park_new(number) for number in (1, 2, 3, 3)] == [False, False, True, False]
        assert book.work(1) == before
        assert book.work(2) is None
        assert [each.message for each in book.ledger.waiting()] == ["m3"]

    @pytest.mark.parametrize("state", ["in progress", "done", "dead", "revoked", "retried"])
    def test_not_what_needs_no_turn(self, book: Any, state: str) -> None:
        """Work that runs, has ended for good, or belongs to a later message is not parked, and not
        changed."""
        holder = claimed(book, 1, max_crashes=1)
        if state == "done":
            book.ledger.complete_alone(holder.claim, None)
        elif state == "dead":
            book.expire_all()
            book.ledger.claim(delivery(1, MessageRef("x"), max_crashes=1))
        elif state == "revoked":
            book.ledger.revoke("ship order:1", message="m1")
        elif state == "retried":
            book.ledger.fail(holder.claim, "boom")
            claimed(book, 1, message=message_of(1, retries=2))
        before = book.work(1)
        assert park(book, 1) is False
        assert book.work(1) == before


class TestCall:
    def test_in_the_order_in_which_they_came(self, book: Any) -> None:
        """Messages are promoted one by one: the next one only after the one before has arrived and
        ended."""
        claimed(book, 1)
        for number in (4, 2, 3):
            park(book, number)
        book.expire_all()
        for number in (4, 2, 3):
            assert call(book) == f"m{number}"
            assert call(book) is None
            assert book.ledger.look().keys == ()
            holder = claimed(book, number)
            assert call(book) is None  # the holder is at work
            book.ledger.complete_alone(holder.claim, None)
        assert call(book) is None

    def test_none_while_the_key_is_held(self, book: Any) -> None:
        holder = claimed(book, 1)
        park(book, 2)
        assert call(book) is None
        assert book.ledger.look().keys == ()
        book.ledger.complete_alone(holder.claim, None)
        assert book.ledger.look().keys == (KEY,)
        assert call(book) == "m2"

    def test_what_is_sent(self, book: Any) -> None:
        """A promoted message is the stored message, with its highest known numbers."""
        claimed(book, 1)
        park(book, 2, message_of(2, retries=1, deferrals=3))
        book.expire_all()
        found = book.ledger.promote_next(KEY, expected_s=EXPECTED_S)
        assert (found.work, found.task) == ("ship order:2", "ship")
        assert json.loads(found.call)["message"] == "m2"
        assert (found.message.id, found.message.retries) == ("m2", 1)

    def test_whose_deferral_is_recorded_later(self, book: Any) -> None:
        """If a deferred message was parked and promoted before its deferral was recorded, the
        message that was sent is not superseded."""
        claimed(book, 1)
        park(book, 2, message_of(2, deferrals=1))
        book.expire_all()
        sent = book.ledger.promote_next(KEY, expected_s=EXPECTED_S).message
        assert book.ledger.defer(delivery(2), lambda deferrals: None)
        claimed(book, 2, message=sent)

    def test_lost(self, book: Any) -> None:
        """A promoted message that does not arrive is overdue, and blocks no other message."""
        claimed(book, 1)
        for number in (2, 3):
            park(book, number)
        book.expire_all()
        assert call(book) == "m2"
        assert book.ledger.overdue(parked=True) == []
        book.make_due()
        assert [each.message.id for each in book.ledger.overdue(parked=True)] == ["m2"]
        assert call(book) == "m3"
        assert isinstance(book.ledger.claim(delivery(3)), Claimed)

    def test_what_is_a_relays(self, book: Any) -> None:
        """A promoted message is overdue for the relay only. A sweep does not send it."""
        park(book, 2)
        assert call(book) == "m2"
        asked = delivery(3, keys=("account:3",), call=json.dumps({"message": "m3"}))
        with book.transaction() as db:
            book.ledger.enqueue(db, asked, due_in_s=0)
        book.make_due()
        for parked, messages in ((True, {"m2"}), (False, {"m3"}), (None, {"m2", "m3"})):
            assert {each.message.id for each in book.ledger.overdue(parked=parked)} == messages

    def test_expected_for_a_time(self, book: Any) -> None:
        """A promoted message is expected for a time by the database's clock."""
        claimed(book, 1)
        park(book, 2)
        book.expire_all()
        assert call(book, expected_s=0.2) == "m2"
        wait_until(lambda: book.ledger.overdue(parked=True))

    def test_one_that_is_sent_again(self, book: Any) -> None:
        """A promoted message that a relay sends again blocks no other message, and may
        still run."""
        claimed(book, 1)
        for number in (2, 3):
            park(book, number)
        book.expire_all()
        call(book)
        book.make_due()
        assert book.ledger.sent(book.ledger.overdue(parked=True), again_after_s=600.0) == 1
        assert call(book) == "m3"
        assert isinstance(book.ledger.claim(delivery(2)), Claimed)

    def test_one_that_could_not_be_sent_again(self, book: Any) -> None:
        """If the broker was down when a relay sent it, the message remains overdue, and blocks no
        other."""
        claimed(book, 1)
        for number in (2, 3):
            park(book, number)
        book.expire_all()
        call(book)
        book.make_due()
        found = book.ledger.overdue(parked=True)
        assert book.ledger.sent(found, again_after_s=600.0, counted=False) == 0
        assert book.ledger.overdue(parked=True) == found
        assert call(book) == "m3"
        assert isinstance(book.ledger.claim(delivery(3)), Claimed)

    def test_what_was_claimed_is_no_longer_in_line(self, book: Any) -> None:
        """Work that was claimed by any delivery, or revoked while it waited, is no longer
        in line."""
        holder = claimed(book, 1)
        for number in (2, 3, 4):
            park(book, number)
        book.ledger.revoke("ship order:3", message="m3")
        book.ledger.complete_alone(holder.claim, None)
        book.ledger.complete_alone(claimed(book, 2, in_line=False).claim, None)
        assert call(book) == "m4"


class TestQueues:
    """Messages of two kinds of queues wait in the line of one key. Each kind has its own
    senders."""

    @pytest.fixture(autouse=True)
    def _of_two(self, book: Any) -> None:
        for number, queue in ((1, "celery"), (2, "rq")):
            call = json.dumps({"queue": queue, "message": f"m{number}"})
            assert book.ledger.park(delivery(number, call=call))

    def test_the_first_is_called_by_his_own(self, book: Any) -> None:
        """A sender that cannot send the first message promotes none, not even a later one, and
        notes nothing."""
        for queues in (["rq"], ["r%"], []):
            assert book.ledger.promote_next(KEY, expected_s=5.0, queues=queues) is None
        found = book.ledger.promote_next(KEY, expected_s=5.0, queues=["rq", "celery"])
        assert found.message.id == "m1"

    def test_whose_keys_are_open(self, book: Any) -> None:
        """A key is open only for the relay of its first message's queue."""
        assert book.ledger.look(queues=["rq"]).keys == ()
        assert book.ledger.look(queues=["other", "celery"]).keys == (KEY,)
        assert book.ledger.look(queues=["r%", "r_"]).keys == ()

    def test_key_after_key(self, book: Any) -> None:
        """One look reads a limited number of messages, and returns the last key. The next look goes
        on there."""
        for number in (3, 4):
            message = MessageRef(f"m{number}")
            call = json.dumps({"queue": "celery", "message": message.name})
            asked = request(number, message=message, keys=("account:2",), call=call)
            assert book.ledger.park(asked)
        seen = book.ledger.look(most=2)
        assert (seen.keys, seen.after) == ((KEY,), KEY)
        seen = book.ledger.look(after=KEY, most=3)
        assert (seen.keys, seen.after) == (("account:2",), None)
        assert (seen.expired, seen.overdue) == (False, False)
        assert book.ledger.promote_next("account:2", expected_s=-60.0, queues=None)
        seen = book.ledger.look(
            after=KEY, most=1
        )  # only a message that was promoted and did not arrive
        assert (seen.keys, seen.after) == (("account:2",), "account:2")
        assert seen.overdue
        [lost] = book.ledger.overdue(parked=True)
        book.ledger.sent([lost], again_after_s=-1.0)  # and it was lost again
        assert book.ledger.look(queues=["celery"]).overdue


class TestRanks:
    """`order="priority"`: messages of a lower rank go first."""

    def test_the_order_of_promotion(self, book: Any) -> None:
        """Messages are promoted by rank, and within a rank in the order in which they were sent."""
        holder = claimed(book, 1)
        sent_us = book.ledger.now_us() - 100
        for number, rank in ((2, 5), (3, -1), (4, 0), (5, -1)):
            park(book, number, rank=rank, sent_us=sent_us + number)
        book.ledger.complete_alone(holder.claim, None)
        promoted = []
        while (message := call(book)) is not None:
            promoted.append(message)
            number = int(message[1:])
            book.ledger.complete_alone(claimed(book, number).claim, None)
        assert promoted == ["m3", "m5", "m4", "m2"]

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_who_may_claim(self, book: Any, redelivered: bool) -> None:
        """A message may claim before those of a higher rank, but not before those of its own or a
        lower rank, promoted or not."""
        holder = claimed(book, 1)
        for number in (2, 3):
            park(book, number, rank=5)
        book.ledger.complete_alone(holder.claim, None)
        assert call(book) == "m2"
        for rank in (5, 6):
            answer = book.ledger.claim(delivery(4, rank=rank, redelivered=redelivered))
            assert isinstance(answer, Busy)
        first = claimed(book, 4, rank=4, redelivered=redelivered)
        book.ledger.complete_alone(first.claim, None)
        assert isinstance(book.ledger.claim(delivery(3, rank=5)), Busy)
        claimed(book, 2, rank=5, redelivered=redelivered)

    def test_comes_again_with_another_one(self, book: Any) -> None:
        """If a message is sent with another priority, its new rank counts."""
        claimed(book, 1)
        park(book, 2, rank=3)
        park(book, 3, rank=2)
        park(book, 2, rank=1)
        assert [each.message for each in book.ledger.waiting()] == ["m2", "m3"]


def strict(number: int, message: MessageRef | None = None, **values: Any) -> ClaimRequest:
    """Return a request for work that keeps its position, with the stored message to send again."""
    message = message or message_of(number)
    call_of = json.dumps({"queue": "test", "message": message.name})
    return delivery(number, message, strict=True, call=call_of, **values)


class TestStrict:
    """`order="strict"`: work that has begun keeps its position until it has ended."""

    @staticmethod
    def begin(book: Any, number: int = 1, **values: Any) -> Claimed:
        found = book.ledger.claim(strict(number, **values))
        assert isinstance(found, Claimed), found
        return found

    @staticmethod
    def fail(book: Any) -> Claimed:
        """Let the head begin and fail, while two messages wait behind it."""
        head = TestStrict.begin(book)
        for number in (2, 3):
            assert book.ledger.park(strict(number))
        assert book.ledger.fail(head.claim, "boom")
        return head

    def test_a_place_is_taken_with_the_claim(self, book: Any) -> None:
        """A claim takes a position by the send time, even if the message never waited. DONE frees
        it."""
        sent_us = book.ledger.now_us() - 1_000_000
        holder = self.begin(book, sent_us=sent_us)
        row = book.work(1)
        assert (row.state, row.parked, row.rank, row.strict) == ("PROCESSING", sent_us, 0, 1)
        assert row.due == row.lease_until
        book.ledger.complete_alone(holder.claim, None)
        assert (book.work(1).state, book.work(1).parked) == ("DONE", None)

    def test_in_a_transaction_of_the_body(self, book: Any) -> None:
        """A completion in the body's transaction frees the position, too."""
        holder = self.begin(book)
        with book.ledger.transaction(holder.claim) as tx:
            tx.complete_in_block(holder.claim, None)
        assert (book.work(1).state, book.work(1).parked) == ("DONE", None)

    def test_no_message_goes_before_a_retry(self, book: Any) -> None:
        """No waiting or new message, and none of a task that is not strict, goes before a retry."""
        self.fail(book)
        assert call(book) is None
        assert book.ledger.look().keys == ()
        for request_of in (strict, delivery):
            for number in (2, 4):
                assert isinstance(book.ledger.claim(request_of(number)), Busy)
        assert isinstance(book.ledger.claim(delivery(4, redelivered=True)), Busy)
        assert book.work(4) is None
        book.make_due()  # however late it is
        assert call(book) is None
        assert isinstance(book.ledger.claim(strict(2)), Busy)
        assert [each.message for each in book.ledger.waiting()] == ["m1", "m2", "m3"]
        assert [each.failed for each in book.ledger.waiting()] == [True, False, False]
        retry = self.begin(book, message=message_of(1, retries=1))
        assert retry.attempt == 2
        book.ledger.complete_alone(retry.claim, None)
        assert call(book) == "m2"

    def test_a_retry_that_finds_the_key_taken(self, book: Any) -> None:
        """A retry that finds the key taken by a delivery without a line waits in its old
        position."""
        self.fail(book)
        before = book.work(1).parked
        other = claimed(book, 9, in_line=False)
        assert isinstance(book.ledger.claim(strict(1, message_of(1, retries=1))), Busy)
        assert book.ledger.park(strict(1, message_of(1, retries=1)))
        assert book.work(1).parked == before
        book.ledger.complete_alone(other.claim, None)
        assert call(book) == "m1"

    def test_a_retry_is_expected(self, book: Any) -> None:
        """A retry is expected after its queue has sent it. If it is sent again, it has the retry's
        number and message."""
        head = self.fail(book)
        assert book.ledger.overdue(parked=True) == []
        newer = json.dumps({"queue": "test", "message": "m1", "args": "newer"})
        assert book.ledger.keep(head.claim, retries=1, call=newer, due_in_s=600.0) is True
        assert book.ledger.overdue(parked=True) == []
        book.make_due()
        [overdue] = book.ledger.overdue(parked=True)
        assert (overdue.message.id, overdue.message.retries) == ("m1", 1)
        assert json.loads(overdue.call)["args"] == "newer"
        # It is sent again until it is claimed. Then an older copy is superseded.
        assert book.ledger.sent([overdue], again_after_s=600.0) == 1
        assert book.ledger.overdue(parked=True) == []
        assert isinstance(book.ledger.claim(strict(1, message_of(1))), Answer)
        assert self.begin(book, message=message_of(1, retries=1)).attempt == 2
        assert book.ledger.keep(head.claim, retries=1, call=None, due_in_s=1.0) is False

    def test_unknown_whether_it_is_retried(self, book: Any) -> None:
        """If the process died that decides about a retry, the message is sent again after a
        while."""
        self.fail(book)
        due = book.work(1).due
        assert due is not None
        assert due > book.ledger.now_us()
        book.make_due()
        [overdue] = book.ledger.overdue(parked=True)
        assert (overdue.message.id, overdue.message.retries) == ("m1", 0)
        assert self.begin(book).attempt == 2

    def test_sent_but_never_claimed(self, book: Any) -> None:
        """A retry that never arrives frees its position in the end."""
        self.fail(book)
        book.make_due()
        [overdue] = book.ledger.overdue(parked=True)
        assert book.ledger.abandon(overdue, error="in vain") is True
        assert (book.work(1).state, book.work(1).parked) == ("FAILED", None)
        assert book.ledger.overdue(parked=True) == []
        assert call(book) == "m2"

    def test_failed_for_good(self, book: Any) -> None:
        """Work that failed for good frees its position. A copy of its message does nothing, and
        another message may take the position."""
        head = self.fail(book)
        assert book.ledger.leave(head.claim, retries=1) is True
        row = book.work(1)
        assert (row.state, row.final, row.parked, row.due) == ("FAILED", 0, None, None)
        assert book.ledger.leave(head.claim, retries=1) is False
        assert book.ledger.look().keys == (KEY,)
        assert call(book) == "m2"
        for again in (strict(1), delivery(1, redelivered=True)):
            answer = book.ledger.claim(again)
            assert isinstance(answer, Answer)
            assert answer.decision is Decision.SUPERSEDED
        book.make_due()
        for number in (2, 3):
            book.ledger.revoke(f"ship order:{number}", message=f"m{number}")
        self.begin(book, message=MessageRef("another"))

    def test_failed_by_its_rounds(self, book: Any) -> None:
        """If the database ended its transactions, the queue decides about a retry, as after a
        failure."""
        head = self.begin(book)
        assert book.ledger.park(strict(2))
        assert book.ledger.end_round(head.claim, "idle", most=1) is State.FAILED
        assert book.work(1).due > book.ledger.now_us()
        assert call(book) is None
        assert book.ledger.keep(head.claim, retries=1, call=None, due_in_s=600.0)
        retry = self.begin(book, message=message_of(1, retries=1))
        assert book.ledger.end_round(retry.claim, "idle", most=1) is State.FAILED
        assert book.ledger.leave(retry.claim, retries=2)
        assert call(book) == "m2"

    def test_whose_queue_counts_no_retries(self, book: Any) -> None:
        """If a queue counts no retries, all deliveries of a message have one number. It is retried,
        and runs again if it is sent after it has failed for good."""
        head = self.fail(book)
        assert book.ledger.keep(head.claim, retries=0, call=None, due_in_s=600.0)
        retry = self.begin(book)
        assert retry.attempt == 2
        assert book.ledger.fail(retry.claim, "boom")
        assert book.ledger.leave(retry.claim, retries=0)
        assert isinstance(book.ledger.claim(strict(1)), Busy)  # two messages are before it
        assert book.ledger.park(strict(1))
        for number in (2, 3):
            book.ledger.revoke(f"ship order:{number}", message=f"m{number}")
        assert self.begin(book).attempt == 3

    def test_another_message_of_the_work(self, book: Any) -> None:
        """The position belongs to the message that is retried. Another message of the work does not
        get it."""
        self.fail(book)
        before = book.work(1)
        again = MessageRef("again")
        for redelivered in (False, True):
            assert isinstance(book.ledger.claim(strict(1, again, redelivered=redelivered)), Busy)
        assert book.ledger.park(strict(1, again)) is False
        assert book.work(1) == before

    def test_a_retry_that_was_faster(self, book: Any) -> None:
        """If a retry has claimed the work before its sending was recorded, nothing changes."""
        head = self.fail(book)
        self.begin(book, message=message_of(1, retries=1))
        before = book.work(1)
        assert book.ledger.leave(head.claim, retries=1) is False
        assert book.ledger.keep(head.claim, retries=1, call=None, due_in_s=1.0) is False
        assert book.work(1) == before

    @pytest.mark.parametrize("ending", ["revoked", "dead", "replaced", "requeued"])
    def test_what_else_frees_the_place(self, book: Any, ending: str) -> None:
        """A position is also freed by a revocation, by too many crashes, by a replacement, and by
        an operator's requeue."""
        head = self.fail(book)
        if ending == "revoked":
            book.ledger.revoke("ship order:1", message="m1")
        elif ending == "dead":
            self.begin(book, message=message_of(1, retries=1), max_crashes=1)
            book.expire_all()
            answer = book.ledger.claim(strict(1, message_of(1, retries=1), max_crashes=1))
            assert isinstance(answer, Answer)
        elif ending == "replaced":
            newer = json.dumps({"queue": "test", "message": "newer"})
            instead = delivery(1, MessageRef("newer"), call=newer)
            with book.transaction() as db:
                once = Once(lambda found: instead, replaces=True)
                book.ledger.enqueue(db, instead, due_in_s=600, once=once)
        else:
            book.ledger.leave(head.claim, retries=1)
            book.ledger.requeue("ship order:1", reason="mended")
        assert book.work(1).parked is None
        assert call(book) == "m2"

    def test_whose_holder_died(self, book: Any) -> None:
        """If a strict holder dies, its message is sent again after the lease. Until then no other
        message begins."""
        self.begin(book)
        assert book.ledger.park(strict(2))
        assert book.ledger.overdue(parked=True) == []
        book.expire_all()
        book.make_due()
        assert call(book) is None
        assert book.ledger.look().keys == ()
        assert isinstance(book.ledger.claim(strict(2)), Busy)
        assert [each.message.id for each in book.ledger.overdue(parked=True)] == ["m1"]
        assert self.begin(book, redelivered=True).takeover

    def test_given_back(self, book: Any) -> None:
        """Work that was given back, for example at a shutdown, is delivered again, and goes
        first."""
        head = self.begin(book)
        assert book.ledger.park(strict(2))
        assert book.ledger.give_back(head.claim)
        assert call(book) is None
        assert isinstance(book.ledger.claim(strict(2)), Busy)
        book.make_due()
        assert call(book) is None
        assert [each.message.id for each in book.ledger.overdue(parked=True)] == ["m1"]
        self.begin(book)

    def test_one_that_was_called_and_got_lost(self, book: Any) -> None:
        """If a promoted strict message is lost, it is sent again. Until it arrives no other message
        of its line begins."""
        head = self.begin(book)
        for number in (2, 3):
            assert book.ledger.park(strict(number))
        book.ledger.complete_alone(head.claim, None)
        assert call(book) == "m2"
        book.make_due()
        overdue = book.ledger.overdue(parked=True)
        assert book.ledger.sent(overdue, again_after_s=600.0) == 1
        assert [each.sent_again for each in book.ledger.waiting()] == [1, 0]
        assert call(book) is None
        assert isinstance(book.ledger.claim(strict(3)), Busy)
        self.begin(book, 2)

    def test_one_that_was_sent_before(self, book: Any) -> None:
        """A message that was sent first and arrives late goes first."""
        now_us = book.ledger.now_us()
        head = self.begin(book, sent_us=now_us - 5)
        assert book.ledger.park(strict(2, sent_us=now_us - 9))
        book.ledger.fail(head.claim, "boom")
        assert call(book) == "m2"
        self.begin(book, 2)

    def test_has_its_place_from_its_enqueueing(self, book: Any) -> None:
        """Enqueued strict work has its position from its transaction on: messages sent after the
        COMMIT are behind it. After a rollback it is in no line."""
        now_us = book.ledger.now_us()
        with book.transaction() as db:
            book.ledger.enqueue(db, strict(1, sent_us=now_us - 5), due_in_s=600.0)
        with book.transaction(commits=False) as db:
            book.ledger.enqueue(db, strict(7, sent_us=now_us - 9), due_in_s=600.0)
        assert isinstance(book.ledger.claim(strict(2)), Busy)
        assert book.ledger.park(strict(2))
        assert call(book) is None
        head = self.begin(book)
        book.ledger.complete_alone(head.claim, None)
        assert call(book) == "m2"

    def test_a_purge_leaves_what_keeps_its_place(self, book: Any) -> None:
        """A purge keeps work that waits for its retry, with its progress and attempts."""
        head = self.begin(book)
        assert book.ledger.park(strict(2))
        assert book.ledger.note(head.claim, '{"step": 1}')
        assert book.ledger.fail(head.claim, "boom")
        assert book.purge() == 0
        assert book.ledger.keep(head.claim, retries=1, call=None, due_in_s=600.0)
        assert book.purge() == 0
        book.make_due()
        assert book.purge() == 0
        assert isinstance(book.ledger.claim(strict(2)), Busy)
        again = self.begin(book, message=message_of(1, retries=1))
        assert (again.attempt, again.progress_json) == (2, '{"step": 1}')
        assert book.ledger.fail(again.claim, "boom")
        assert book.ledger.leave(again.claim, retries=2)
        assert book.purge() == 1
        assert call(book) == "m2"

    def test_one_that_was_enqueued_and_has_not_come(self, book: Any) -> None:
        """Enqueued work that has not arrived waits in its position. Its promotion counts as the
        first sending."""
        head = self.begin(book)
        with book.transaction() as db:
            book.ledger.enqueue(db, strict(2), due_in_s=0.0)
        assert book.ledger.park(strict(3))
        [overdue] = book.ledger.overdue(parked=True)
        assert (overdue.keeps_position, overdue.sends) == (True, 0)
        assert book.ledger.sent([overdue], again_after_s=None) == 1
        assert book.ledger.sent([overdue], again_after_s=None) == 0
        assert call(book) is None
        book.ledger.complete_alone(head.claim, None)
        for queues, keys in ((["test", "x"], [KEY]), (["x"], [])):
            assert list(book.ledger.look(queues=queues).keys) == keys
        assert call(book) == "m2"
        book.make_due()
        [overdue] = book.ledger.overdue(parked=True)
        assert (overdue.keeps_position, overdue.sends) == (True, 1)
        begun = self.begin(book, 2)
        assert book.ledger.fail(begun.claim, "boom")
        book.make_due()
        [overdue] = book.ledger.overdue(parked=True)
        assert overdue.keeps_position is False
        assert book.ledger.sent([overdue], again_after_s=None) == 0

    def test_who_was_enqueued_holds_up_only_those_behind(self, book: Any) -> None:
        """Enqueued strict work blocks only later messages: an earlier one is promoted as soon as
        the key is free."""
        now_us = book.ledger.now_us()
        head = self.begin(book, sent_us=now_us - 9)
        assert book.ledger.park(strict(2, sent_us=now_us - 7))
        with book.transaction() as db:
            book.ledger.enqueue(db, strict(3, sent_us=now_us - 5), due_in_s=600.0)
        book.ledger.complete_alone(head.claim, None)
        assert book.ledger.look().keys == (KEY,)
        assert call(book) == "m2"


class TestMaxWaiting:
    """`max_waiting` limits how many messages wait for a key."""

    def test_one_too_many(self, book: Any) -> None:
        """A message beyond the limit raises an error that names the key, and leaves no record. The
        next message gets the next free position."""
        claimed(book, 1)
        for number in (2, 3):
            assert park(book, number, max_waiting=2)
        with pytest.raises(LineFullError, match="2 messages wait") as caught:
            park(book, 4, max_waiting=2)
        assert caught.value.key == KEY
        assert book.work(4) is None
        park(book, 4, keys=("account:2",), max_waiting=2)
        book.expire_all()
        claimed(book, 2)
        assert park(book, 5, max_waiting=2)

    def test_who_has_a_place_or_has_begun(self, book: Any) -> None:
        """A queued message, or one whose work has begun, is never refused: it could be lost."""
        begun = claimed(book, 1)
        book.ledger.fail(begun.claim, "boom")
        claimed(book, 2)
        assert park(book, 3, max_waiting=1)
        assert park(book, 3, max_waiting=1)
        assert park(book, 1, message_of(1, retries=1), max_waiting=1)

    def test_one_that_was_enqueued(self, book: Any) -> None:
        """If an enqueued message is refused, its caller is notified, and the message is not sent
        again."""
        claimed(book, 1)
        park(book, 2)
        message = json.dumps({"queue": "test", "message": "m3"})
        with book.transaction() as db:
            book.ledger.enqueue(db, delivery(3, call=message), due_in_s=0)
        with pytest.raises(LineFullError):
            park(book, 3, max_waiting=1)
        assert (book.work(3).state, book.work(3).due) == ("FAILED", None)
        assert park(book, 3, max_waiting=2)  # the refusal is not final

    @pytest.mark.parametrize("formerly", [(), ("ship order:9",)], ids=["", "formerly"])
    def test_a_replaced_message(self, book: Any, formerly: tuple[str, ...]) -> None:
        """A replaced message is answered as replaced, not refused, whether or not its line is
        full."""
        claimed(book, 1)
        park(book, 2)
        newer = delivery(3, MessageRef("newer"), call='{"queue": "test"}')
        with book.transaction() as db:
            book.ledger.enqueue(db, delivery(3, call='{"queue": "test"}'), due_in_s=600)
        with book.transaction() as db:
            once = Once(lambda found: newer, replaces=True)
            book.ledger.enqueue(db, newer, due_in_s=600, once=once)
        before = book.work(3)
        assert park(book, 3, max_waiting=1, formerly=formerly) is False
        assert book.work(3) == before
        answer = book.ledger.peek(delivery(3))
        assert isinstance(answer, Answer)
        assert answer.replaced_by == "newer"

    def test_revoked_work(self, book: Any) -> None:
        """A message whose work was revoked is answered as revoked, not refused, whether or not its
        line is full."""
        claimed(book, 1)
        park(book, 2)
        with book.transaction() as db:
            book.ledger.enqueue(db, delivery(3, call='{"queue": "test"}'), due_in_s=600)
        book.ledger.revoke("ship order:3", message="m3")
        assert park(book, 3, max_waiting=1) is False
        assert (book.work(3).state, book.work(3).final) == ("FAILED", 1)

    def test_a_replaced_message_leaves_nothing(self, book: Any) -> None:
        """A replaced message under a former id changes no record."""
        former = delivery(9, call='{"queue": "test"}')
        newer = delivery(9, MessageRef("newer"), call='{"queue": "test"}')
        with book.transaction() as db:
            book.ledger.enqueue(db, former, due_in_s=600)
        with book.transaction() as db:
            once = Once(lambda found: newer, replaces=True)
            book.ledger.enqueue(db, newer, due_in_s=600, once=once)
        book.ledger.fail(claimed(book, 9, message=newer.message).claim, "boom")
        claimed(book, 1)
        before = book.work(9)
        old = former.message
        assert park(book, 3, old, formerly=("ship order:9",)) is False
        assert book.work(9) == before
        assert book.work(3) is None


class TestNamespaces:
    """Two applications in one ledger, each with a broker of its own."""

    @pytest.fixture(autouse=True)
    def _of_two(self, book: Any) -> None:
        self.park_each(book)

    @staticmethod
    def park_each(book: Any) -> None:
        """Park a message of each application, and of one whose name is nearly a pattern of
        another."""
        for number, app in ((1, ""), (2, "eu"), (3, "e%")):
            key = f"{app}:account" if app else "account"
            owned = {"app": app} if app else {}
            message = f'm", "app": "{number}'  # the longest allowed name
            call = json.dumps({"queue": "test", "message": message, **owned})
            asked = request(number, message=MessageRef(message), keys=(key,), call=call)
            assert book.ledger.park(asked)

    def test_whose_keys_are_open(self, book: Any) -> None:
        assert book.ledger.look().keys == ("account",)
        assert book.ledger.look(app="eu").keys == ("eu:account",)
        assert book.ledger.look(app="e%").keys == ("e%:account",)
        assert book.ledger.look(app="us").keys == ()

    def test_which_message_is_promoted(self, book: Any) -> None:
        """No application promotes another one's message, because it would send it to its own
        broker."""
        for app in ("", "us"):
            assert book.ledger.promote_next("eu:account", expected_s=5.0, app=app) is None
        assert book.ledger.promote_next("account", expected_s=5.0, app="eu") is None
        assert book.ledger.promote_next("eu:account", expected_s=5.0, app="eu") is not None
        assert book.ledger.promote_next("account", expected_s=5.0) is not None


class TestClaim:
    def test_behind_the_waiting_messages(self, book: Any) -> None:
        """A new message is refused while earlier ones wait, although the key is free."""
        holder = claimed(book, 1)
        park(book, 2)
        book.ledger.complete_alone(holder.claim, None)
        answer = book.ledger.claim(delivery(3))
        assert isinstance(answer, Busy)
        assert (answer.owner, answer.same_work, answer.started) == (None, False, False)
        assert book.work(3) is None
        assert isinstance(book.ledger.claim(delivery(2)), Claimed)

    def test_behind_a_promoted_message(self, book: Any) -> None:
        """While a promoted message is on its way, no other message claims the key."""
        holder = claimed(book, 1)
        for number in (2, 3):
            park(book, number)
        book.ledger.complete_alone(holder.claim, None)
        call(book)
        for number in (3, 4):
            assert isinstance(book.ledger.claim(delivery(number)), Busy)
        book.make_due()
        assert isinstance(book.ledger.claim(delivery(3)), Claimed)

    def test_work_that_has_begun_goes_first(self, book: Any) -> None:
        """Work whose holder died is in no line, and is taken over before waiting messages."""
        claimed(book, 1)
        park(book, 2)
        book.expire_all()
        assert call(book) == "m2"
        found = book.ledger.claim(delivery(1, redelivered=True))
        assert isinstance(found, Claimed)
        assert found.takeover

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_behind_the_message_that_waits_for_it(self, book: Any, redelivered: bool) -> None:
        """A message does not claim work for which another message waits. The waiting message was
        acknowledged, and gets its answer only when it arrives. It is certainly on its way only
        after it was sent again."""
        holder = claimed(book, 1)
        for number in (2, 3):
            park(book, number)
        book.ledger.complete_alone(holder.claim, None)
        again = {"message": MessageRef("again"), "redelivered": redelivered}
        for calls in (None, "m2"):
            assert calls is None or call(book) == calls
            assert isinstance(book.ledger.claim(delivery(2, **again)), Busy)
        book.make_due()
        assert call(book) == "m3"
        book.ledger.complete_alone(claimed(book, 3).claim, None)
        assert isinstance(book.ledger.claim(delivery(2, **again)), Busy)
        book.ledger.sent(book.ledger.overdue(parked=True), again_after_s=600.0)
        assert isinstance(book.ledger.claim(delivery(2, **again)), Claimed)

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_behind_it_also_with_a_lower_rank(self, book: Any, redelivered: bool) -> None:
        """The same holds if the message has a lower rank, because the waiting one would never be
        answered."""
        holder = claimed(book, 1)
        park(book, 2, rank=5)
        book.ledger.complete_alone(holder.claim, None)
        again = {"message": MessageRef("again"), "redelivered": redelivered, "rank": 1}
        assert isinstance(book.ledger.claim(delivery(2, **again)), Busy)
        assert call(book) == "m2"
        assert isinstance(book.ledger.claim(delivery(2, **again)), Busy)
        book.make_due()
        book.ledger.sent(book.ledger.overdue(parked=True), again_after_s=600.0)
        assert isinstance(book.ledger.claim(delivery(2, **again)), Claimed)

    def test_redelivered(self, book: Any) -> None:
        """The same holds for a redelivery, which uses the full statement."""
        holder = claimed(book, 1)
        park(book, 2)
        book.ledger.complete_alone(holder.claim, None)
        assert isinstance(book.ledger.claim(delivery(3, redelivered=True)), Busy)
        assert isinstance(book.ledger.claim(delivery(2, redelivered=True)), Claimed)

    def test_a_message_that_does_not_stand_in_line(self, book: Any) -> None:
        """A message of a task that defers claims the key alone, and may overtake the line."""
        holder = claimed(book, 1)
        park(book, 2)
        book.ledger.complete_alone(holder.claim, None)
        assert isinstance(book.ledger.claim(delivery(3, in_line=False)), Claimed)

    def test_ends_the_waiting(self, book: Any) -> None:
        """A claim ends the waiting: the record then looks like that of other work."""
        claimed(book, 1)
        park(book, 2)
        book.expire_all()
        call(book)
        found = claimed(book, 2)
        row = book.work(2)
        assert (row.state, row.parked, row.attempts) == ("PROCESSING", None, 1)
        assert found.attempt == 1
        book.ledger.complete_alone(found.claim, None)
        assert (book.work(2).state, book.work(2).call) == ("DONE", None)

    def test_one_that_fails_goes_on(self, book: Any) -> None:
        """The retry of failed work that waited is like that of work that never waited."""
        claimed(book, 1)
        park(book, 2)
        book.expire_all()
        book.ledger.fail(claimed(book, 2).claim, "boom")
        assert book.work(2).state == State.FAILED.value
        assert claimed(book, 2, message=message_of(2, retries=1)).attempt == 2


class TestPeople:
    def test_who_waits(self, book: Any) -> None:
        """The line of one key, or of every key, is listed in order, with promoted messages
        marked."""
        holder = claimed(book, 1)
        for number in (3, 2):
            park(book, number)
        found = book.ledger.waiting()
        assert [(each.key, each.work, each.message) for each in found] == [
            (KEY, "ship order:3", "m3"),
            (KEY, "ship order:2", "m2"),
        ]
        assert found[0].parked_s < found[1].parked_s
        assert found[0].expected_until_s is None
        book.ledger.complete_alone(holder.claim, None)
        call(book)
        first, second = book.ledger.waiting(KEY)
        assert first.expected_until_s > second.parked_s
        assert second.expected_until_s is None
        assert book.ledger.waiting("account:2") == []
        assert len(book.ledger.waiting(limit=1)) == 1

    def test_revoked_and_requeued(self, book: Any) -> None:
        """Requeued work is no longer in line: it comes by its message, like other requeued work."""
        claimed(book, 1)
        park(book, 2)
        book.ledger.revoke("ship order:2", message="m2")
        assert book.ledger.waiting() == []
        assert book.ledger.requeue("ship order:2", reason="after all") is True
        assert book.ledger.waiting() == []
        book.expire_all()
        assert call(book) is None


def test_no_message_is_forgotten(book: Any) -> None:
    """Without a lock server and a relay, each parked message is promoted by a delivery that parks
    or ends. No two run at once."""
    count = 24
    queue: deque[int] = deque(range(count))
    inside, done, failures = [0], [], []

    def deliver(number: int) -> None:
        answer = book.ledger.claim(delivery(number))
        if isinstance(answer, Claimed):
            inside[0] += 1
            if inside[0] > 1:
                failures.append(f"{number} while another one is at work")
            time.sleep(0.001)
            inside[0] -= 1
            book.ledger.complete_alone(answer.claim, None)
            done.append(number)
        elif isinstance(answer, Busy) and not answer.same_work:
            if not park(book, number):
                queue.append(number)
                return
        else:
            failures.append(f"{number}: {answer}")
        found = book.ledger.promote_next(KEY, expected_s=600.0)
        if found is not None:
            queue.append(int(found.message.id[1:]))

    work_off(queue, deliver, failures, lambda: len(done) == count)
    assert sorted(done) == list(range(count))
