"""Stored messages: when their work is overdue, and what enqueueing writes."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from taskguard.model.claims import Busy, Claimed
from taskguard.model.states import State

CALL = '{"queue": "test"}'


def overdue(book: Any) -> list[str]:
    return [each.work for each in book.ledger.overdue()]


def enqueue(book: Any, number: int = 1, **values: Any) -> None:
    """Enqueue work in a transaction of the user's, due at once."""
    with book.transaction() as db:
        request = book.request(number, **{"call": CALL, **values})
        book.ledger.enqueue(db, request, due_in_s=0)


def test_work_in_hand_is_not_overdue_until_its_lease_has_run_out(book: Any) -> None:
    """Claimed work is overdue only after its lease has expired, and never without a stored
    message."""
    book.claim(1, call=CALL)
    book.claim(2)
    assert overdue(book) == []
    book.make_due()
    (found,) = book.ledger.overdue()
    assert (found.work, found.call, found.message.id) == ("ship order:1", CALL, "m")


def test_a_renewal_puts_it_off(book: Any) -> None:
    """A renewal moves the due time, because the holder is alive."""
    claimed = book.claim(1, call=CALL)
    book.make_due()
    book.ledger.renew([claimed.claim])
    assert overdue(book) == []


@pytest.mark.parametrize("end", ["complete", "fail", "revoke", "bury"])
def test_work_that_ended_is_not_overdue(book: Any, end: str) -> None:
    """Ended work is not overdue. DONE deletes the stored message, which may contain addresses."""
    claimed = book.claim(1, call=CALL, max_crashes=1)
    if end == "complete":
        book.ledger.complete_alone(claimed.claim, None)
    elif end == "fail":
        book.ledger.fail(claimed.claim, "boom")
    elif end == "revoke":
        book.ledger.revoke("ship order:1", message="m")
    else:
        book.expire()
        book.ledger.claim(book.request(1, message="x", call=CALL, max_crashes=1))
        assert book.work().state == "DEAD"
    assert book.work().due is None
    assert (book.work().call is None) == (end == "complete")
    book.make_due()
    assert overdue(book) == []


def test_work_that_was_given_back_is_overdue_when_its_lease_would_have_been(book: Any) -> None:
    """Work that was given back is overdue when its lease would have expired, if the queue does not
    deliver it."""
    book.ledger.give_back(book.claim(1, call=CALL).claim)
    assert overdue(book) == []
    book.make_due()
    assert overdue(book) == ["ship order:1"]


def test_a_requeued_work_is_overdue_at_once(book: Any) -> None:
    """Requeued work whose message is stored is overdue at once."""
    book.ledger.fail(book.claim(1, call=CALL).claim, "boom")
    book.ledger.requeue("ship order:1", reason="mended")
    assert overdue(book) == ["ship order:1"]


def test_what_was_sent_is_overdue_again_after_a_while(book: Any) -> None:
    """Work that was sent is overdue again after a while, unless it was claimed: then its lease
    counts."""
    enqueue(book, 1)
    enqueue(book, 2)
    found = book.ledger.overdue()
    assert [each.work for each in found] == ["ship order:1", "ship order:2"]
    book.claim(2)
    assert book.ledger.sent(found, again_after_s=3600) == 1
    assert overdue(book) == []
    assert book.work(2).due == book.work(2).lease_until
    book.make_due()
    assert set(overdue(book)) == {"ship order:1", "ship order:2"}


def test_pages_go_on_where_the_last_one_ended(book: Any) -> None:
    """A page goes on where the last one ended, even among work items with the same due time."""
    for number in range(1, 6):
        enqueue(book, number)
    book.make_due()
    first = book.ledger.overdue(limit=2)
    second = book.ledger.overdue(limit=2, after=first[-1])
    third = book.ledger.overdue(limit=2, after=second[-1])
    work_ids = [each.work for page in (first, second, third) for each in page]
    assert work_ids == [f"ship order:{number}" for number in range(1, 6)]


def test_its_message_carries_the_highest_numbers_that_are_known(book: Any) -> None:
    """A message is sent with its highest known numbers. With lower ones it would be superseded by a
    copy that may be lost."""
    book.claim(1, call=CALL, retries=1)
    assert book.ledger.defer(book.request(1, retries=1, deferrals=2), lambda deferrals: None)
    book.make_due()
    (found,) = book.ledger.overdue()
    assert found.message.number == (1, 3)
    book.expire()
    again = book.request(1, message=found.message.id, retries=1, deferrals=3)
    assert isinstance(book.ledger.claim(again), Claimed)


def test_enqueued_work_commits_or_rolls_back_with_its_transaction(book: Any) -> None:
    """Rolled-back work can be claimed as if it had never been enqueued."""
    with book.transaction(commits=False) as db:
        book.ledger.enqueue(db, book.request(1, call=CALL), due_in_s=0)
    assert book.work() is None
    enqueue(book, 1)
    assert book.work().state == "NEW"
    assert book.claim(1).attempt == 1


def test_an_enqueued_work_is_not_due_before_its_process_could_send_it(book: Any) -> None:
    """For some seconds, a relay leaves new work to the process that committed it."""
    with book.transaction() as db:
        book.ledger.enqueue(db, book.request(1, call=CALL), due_in_s=60)
    assert overdue(book) == []
    assert [each.work for each in book.ledger.overdue(work="ship order:1")] == ["ship order:1"]


def test_enqueueing_leaves_work_that_is_known_but_starts_failed_work_again(book: Any) -> None:
    """Enqueueing restarts FAILED work only. DONE and revoked work stay so, and a holder keeps its
    lease."""
    done = book.claim(1, message="first")
    enqueue(book, 1)
    assert (book.work().state, book.work().message) == ("PROCESSING", "first")
    assert isinstance(book.ledger.claim(book.request(1)), Busy)
    book.ledger.complete_alone(done.claim, None)
    enqueue(book, 1)
    assert (book.work().state, book.work().due) == ("DONE", None)

    book.ledger.fail(book.claim(2, message="first").claim, "boom")
    enqueue(book, 2)
    assert (book.work(2).state, book.work(2).message, book.work(2).error) == ("NEW", "m", None)
    assert "ship order:2" in overdue(book)

    book.claim(3, message="first")
    book.ledger.revoke("ship order:3", message="first")
    enqueue(book, 3)
    assert book.ledger.view("ship order:3").state is State.FAILED


def test_revoked_before_it_was_claimed_it_is_never_overdue(book: Any) -> None:
    """Work that was revoked by its message's id is never overdue."""
    enqueue(book, 1)
    assert book.ledger.revoke("ship order:1", message="m")
    book.make_due()
    assert overdue(book) == []


def test_a_call_is_sent_with_the_numbers_of_its_own_message(book: Any) -> None:
    """If another message without a stored call claimed the work, the stored message keeps its own
    numbers."""
    own = CALL[:-1] + ', "message": "m"}'
    enqueue(book, 1, call=own)
    book.claim(1, message="other", retries=2)
    assert book.ledger.defer(book.request(1), lambda deferrals: None)
    book.make_due()
    (found,) = book.ledger.overdue()
    assert (found.message.id, found.message.number) == ("m", (0, 1))
    book.expire()
    assert isinstance(book.ledger.claim(book.request(1, deferrals=1)), Claimed)


def test_a_call_is_sent_with_the_numbers_of_its_own_work(book: Any) -> None:
    """If a message id was used for other work, too, the deferrals of that work do not count."""
    for number in (1, 2):
        enqueue(book, number)
    assert book.ledger.defer(book.request(1, deferrals=4), lambda deferrals: None)
    book.make_due()
    found = {each.work: each.message.number for each in book.ledger.overdue()}
    assert found == {"ship order:1": (0, 5), "ship order:2": (0, 0)}


@pytest.mark.parametrize("left", ["given back", "requeued", "crashed"])
def test_enqueueing_stores_the_call_of_open_work_that_has_none(book: Any, left: str) -> None:
    """Enqueueing stores a message for open work that has none, because its own message may
    be lost."""
    claimed = book.claim(1, message="first")
    if left == "given back":
        book.ledger.give_back(claimed.claim)
    elif left == "requeued":
        book.ledger.fail(claimed.claim, "boom")
        book.ledger.requeue("ship order:1", reason="mended")
    else:
        book.expire()
    enqueue(book, 1)
    assert overdue(book) == ["ship order:1"]


def test_enqueueing_starts_no_failed_work_of_other_arguments(book: Any) -> None:
    """FAILED work is not restarted with other arguments, because it keeps the results of
    its steps."""
    claimed = book.claim(1, message="first", fingerprint="10", call=CALL)
    book.ledger.fail(claimed.claim, "boom")
    enqueue(book, 1, fingerprint="20")
    assert (book.work().state, book.work().fingerprint) == ("FAILED", "10")
    enqueue(book, 1, fingerprint="10")
    assert (book.work().state, book.work().message) == ("NEW", "m")
    assert overdue(book) == ["ship order:1"]


def test_work_that_another_session_has_locked_is_left_alone(book: Any) -> None:
    """Work whose row is locked by a long transaction is not sent, and does not block other
    messages."""
    if not book.locks_rows:
        pytest.skip("one writer at a time")
    enqueue(book, 1)
    enqueue(book, 2)
    found = book.ledger.overdue()
    with book.locked("work", 1):
        assert overdue(book) == ["ship order:2"]
        assert book.ledger.sent(found, again_after_s=3600) == 1
    assert overdue(book) == ["ship order:1"]


def test_the_indexes_of_what_is_due_and_of_what_waits_are_there(book: Any) -> None:
    """`ledger create --sql` creates the indexes of due, waiting and flagged work. Running it again
    does nothing."""
    if book.kind == "memory":
        pytest.skip("it has no indexes")
    book.ledger.create_schema()
    names = {each["name"] for each in sa.inspect(book.engine).get_indexes("taskguard_work")}
    assert names == {"taskguard_work_due", "taskguard_work_parked", "taskguard_work_flag"}
