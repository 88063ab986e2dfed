"""How a claim ends, is renewed or deferred: one conditional change each, or none."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from support.claims import request
from taskguard.errors import StaleTokenError
from taskguard.locks.base import Renewal
from taskguard.model.claims import Answer, Claim, Claimed, MessageRef
from taskguard.model.states import Decision, State


def longer(claim: Claim) -> Claim:
    """Return a request with a longer lease."""
    return replace(claim, request=replace(claim.request, ttl_s=100.0))


def test_effects_and_done_commit_together(book: Any) -> None:
    """The effect, the result, DONE and the end of the lease commit in one transaction."""
    claimed = book.claim()
    with book.ledger.transaction(claimed.claim) as tx:
        book.effect(tx.db, 1)
        tx.complete_in_block(claimed.claim, '{"a":1}')
        assert not book.locks_rows or book.effects() == {}
    assert book.effects() == {"1": 1}
    answer = book.ledger.claim(book.request(message="n"))
    assert (answer.decision, answer.result_json) == (Decision.DONE, '{"a":1}')
    assert (answer.same_message, answer.owner) == (False, claimed.claim.owner)
    assert (book.key().owner, book.work().lease_until) == ("", 0)


def test_an_exception_in_the_transaction_leaves_nothing(book: Any) -> None:
    """After an exception in the transaction there is neither effect nor DONE, and the claim remains
    valid."""
    claimed = book.claim()
    with pytest.raises(ZeroDivisionError), book.ledger.transaction(claimed.claim) as tx:
        book.effect(tx.db, 1)
        tx.complete_in_block(claimed.claim, None)
        raise ZeroDivisionError
    assert book.effects() == {}
    book.ledger.complete_alone(claimed.claim, None)


@pytest.mark.parametrize("taken_by", ["the same work", "other work on the key", "nobody"])
def test_a_stale_holder_cannot_commit(book: Any, taken_by: str) -> None:
    """A stale holder is refused at the end of a transaction that began in time, and at the start of
    a later one."""
    claimed = book.claim()
    with pytest.raises(StaleTokenError, match="newer holder"):
        with book.ledger.transaction(claimed.claim) as tx:
            if book.locks_rows:
                _take_away(book, claimed, taken_by)
                book.effect(tx.db, "stale")
            else:
                # SQLite has one writer: the claim was taken before, and this commit is refused as
                # well.
                raise StaleTokenError("newer holder")
            tx.complete_in_block(claimed.claim, None)
    if not book.locks_rows:
        _take_away(book, claimed, taken_by)
    with pytest.raises(StaleTokenError):
        book.ledger.complete_alone(claimed.claim, None)
    assert book.effects() == {}
    assert book.work().state != "DONE"


def _take_away(book: Any, claimed: Claimed, by: str) -> None:
    if by == "nobody":
        book.ledger.give_back(claimed.claim)
        return
    book.expire()
    book.claim(work=claimed.claim.work if by == "the same work" else "other")


def test_a_late_commit_without_another_holder_is_not_stale(book: Any) -> None:
    """If no other claim followed, a commit after the end of the lease counts: fence and owner are
    unchanged."""
    claimed = book.claim()
    book.expire()
    book.ledger.complete_alone(claimed.claim, "1")
    assert book.work().state == "DONE"


def test_progress_is_fenced_and_met_by_the_next_holder(book: Any) -> None:
    """A checkpoint commits effects and progress, but not DONE. A stale checkpoint commits
    nothing."""
    claimed = book.claim()
    with book.ledger.transaction(claimed.claim) as tx:
        book.effect(tx.db, "half")
        tx.checkpoint(claimed.claim, "[1]")
    book.expire()
    second = book.claim()
    assert (second.progress_json, second.attempt) == ("[1]", 2)
    with pytest.raises(StaleTokenError), book.ledger.transaction(claimed.claim) as tx:
        tx.checkpoint(claimed.claim, "[2]")
    assert book.effects() == {"half": 1}


def test_a_failed_work_is_claimed_again_by_a_later_delivery(book: Any) -> None:
    """FAILED ends the lease at once and keeps the error. It counts no crash."""
    claimed = book.claim()
    assert book.ledger.fail(claimed.claim, "bo\0om")
    view = book.ledger.view("ship order:1")
    assert (view.state, view.error, view.final) == (State.FAILED, "bo\\0om", False)
    again = book.claim(retries=1)
    assert (again.attempt, again.crashes) == (2, 0)
    assert not book.ledger.fail(claimed.claim, "late")
    assert not book.ledger.give_back(claimed.claim)


def test_rounds_end_by_failed(book: Any) -> None:
    """If the database ends the body's transaction, the work is NEW at once, and FAILED after too
    many rounds."""
    for number in range(1, 4):
        claimed = book.claim()
        assert claimed.attempt == number
        found = book.ledger.end_round(claimed.claim, f"bo\0om {number}", most=3)
        assert found is (State.NEW if number < 3 else State.FAILED)
        assert book.ledger.end_round(claimed.claim, "late", most=3) is None
        view = book.ledger.view("ship order:1")
        assert (view.state, view.crashes, view.error) == (found, 0, f"bo\\0om {number}")
    again = book.claim(retries=1)
    assert book.ledger.end_round(again.claim, "anew", most=3) is State.NEW


def test_rounds_end_as_a_failure_does(book: Any) -> None:
    """Before the last round the work is open. After it, its message is not sent again."""
    for last in (False, True):
        claimed = book.claim(call='{"queue": "test", "message": "m"}')
        assert book.ledger.end_round(claimed.claim, "idle", most=2 if not last else 1) is not None
        row = book.work()
        assert (row.state, row.due is None) == (("FAILED", True) if last else ("NEW", False))
        assert (row.finished is not None) is last
    assert book.ledger.overdue() == []


def test_given_back_is_free_at_once(book: Any) -> None:
    """Giving work back moves it from PROCESSING to NEW, and counts no crash."""
    claimed = book.claim()
    assert book.ledger.give_back(claimed.claim)
    assert book.work().state == "NEW"
    again = book.claim()
    assert (again.attempt, again.takeover, again.crashes) == (2, False, 0)


def test_a_plain_lock_hears_at_its_end_whether_it_stood(book: Any) -> None:
    """Releasing a plain lock returns False if its key is free or another owner's by then."""
    held = book.claim(work=None)
    assert book.ledger.give_back(held.claim)
    assert not book.ledger.give_back(held.claim)
    held = book.claim(work=None)
    book.expire()
    newer = book.claim(work=None)
    assert not book.ledger.give_back(held.claim)
    assert book.key().owner == str(newer.claim.owner)


def test_a_body_that_ended_its_process_is_taken_over_at_once(book: Any) -> None:
    """If a body ended its process, its work is taken over without waiting for the lease. It counts
    as one crash, even if reported twice."""
    claimed = book.claim()
    leased_until = book.work().lease_until
    assert book.ledger.crash(claimed.claim, "exit\0: 2")
    view = book.ledger.view("ship order:1")
    assert (view.state, view.error, view.crashes) == (State.PROCESSING, "exit\\0: 2", 0)
    assert book.key().owner == ""
    assert book.work().started <= book.work().lease_until < leased_until
    with pytest.raises(StaleTokenError):
        book.ledger.complete_alone(claimed.claim, None)
    again = book.claim()
    assert (again.attempt, again.takeover, again.crashes) == (2, True, 1)
    assert again.claim.fence > claimed.claim.fence
    assert not book.ledger.crash(claimed.claim, "late")
    book.ledger.complete_alone(again.claim, None)
    assert not book.ledger.crash(again.claim, "late")
    assert book.work().state == "DONE"


def test_a_body_that_ends_its_processes_too_often_is_dead(book: Any) -> None:
    """A body that ends its process too often makes its work DEAD, and the record says how the last
    process ended."""
    for crashes in (0, 1):
        claimed = book.claim(max_crashes=2)
        assert claimed.crashes == crashes
        book.ledger.crash(claimed.claim, "exit: 2")
    for decision in (Decision.BURY, Decision.DEAD):
        answer = book.ledger.claim(book.request(max_crashes=2))
        assert (answer.decision, answer.crashes, answer.error) == (decision, 2, "exit: 2")


def test_revoked_work_is_never_claimed_again(book: Any) -> None:
    """Only the work's own message can be revoked. DONE stays DONE, and the running holder cannot
    commit."""
    claimed = book.claim()
    assert not book.ledger.revoke("ship order:1", message="other")
    assert book.ledger.revoke("ship order:1", message="m")
    with pytest.raises(StaleTokenError):
        book.ledger.complete_alone(claimed.claim, None)
    answer = book.ledger.claim(book.request())
    assert (answer.decision, answer.error) == (Decision.REVOKED, "revoked")
    book.ledger.complete_alone(book.claim(2).claim, None)
    assert not book.ledger.revoke("ship order:2", message="m")


def test_a_crash_too_many_is_dead(book: Any) -> None:
    """After max_crashes holders have vanished, the work is DEAD for all messages, and stays
    DEAD."""
    for crashes in (0, 1):
        assert book.claim(max_crashes=3).crashes == crashes
        book.expire()
    third = book.claim(max_crashes=3)
    assert third.crashes == 2
    book.expire()
    why = f"{third.claim.owner.described} vanished"
    buried = book.ledger.claim(book.request(max_crashes=3))
    assert buried == Answer(Decision.BURY, crashes=3, error=why)
    answer = book.ledger.claim(book.request(max_crashes=9))
    assert (answer.decision, answer.crashes, answer.error) == (Decision.DEAD, 3, why)
    with pytest.raises(StaleTokenError):
        book.ledger.complete_alone(third.claim, None)
    assert book.work().state == "DEAD"


def test_a_result_is_stored_by_the_claim_that_completed(book: Any) -> None:
    """Only the claim that completed the work can store its result."""
    first = book.claim()
    book.expire()
    second = book.claim()
    book.ledger.complete_alone(second.claim, None)
    book.ledger.store_result(first.claim, "1")
    assert book.work().result is None
    book.ledger.store_result(second.claim, "2")
    assert book.work().result == "2"


def test_a_note_is_stored_by_whoever_holds_the_work(book: Any) -> None:
    """The work's holder can store a note. The next holder finds it, even after the work was given
    back; a stale holder changes nothing."""
    first = book.claim()
    assert book.ledger.note(first.claim, '{"n":1}')
    assert book.ledger.note(first.claim, '{"n":1}')
    book.expire()
    second = book.claim()
    assert second.progress_json.strip() == '{"n":1}'
    assert not book.ledger.note(first.claim, '{"n":2}')
    assert book.ledger.note(second.claim, '{"n":3}')
    assert book.ledger.give_back(second.claim)
    assert not book.ledger.note(second.claim, '{"n":4}')
    assert book.claim().progress_json.strip() == '{"n":3}'


# -- renewals ---------------------------------------------------------------------------------


def test_renewals_say_what_became_of_each(book: Any) -> None:
    """A renewal reports for each claim whether it was renewed, taken, given back or done: in order,
    with several keys and plain locks."""
    held = book.claim(1)
    taken = book.claim(2)
    book.expire(2)
    book.claim(2)
    done = book.claim(3)
    book.ledger.complete_alone(done.claim, None)
    given_back = book.claim(4)
    book.ledger.give_back(given_back.claim)
    both = book.claim(5, keys=("order:5", "order:6"))
    plain = book.claim(7, work=None)
    claims = [longer(each.claim) for each in (held, taken, done, given_back, both, plain)]
    before = {number: book.key(number).lease_until for number in (1, 5, 6, 7)}
    assert book.ledger.renew(claims) == [
        Renewal.RENEWED, Renewal.TAKEN, Renewal.SKIPPED, Renewal.TAKEN,
        Renewal.RENEWED, Renewal.RENEWED,
    ]  # fmt: skip
    for number, lease_until in before.items():
        assert book.key(number).lease_until > lease_until + 60e6
    assert book.work(1).lease_until == book.key(1).lease_until
    assert book.ledger.renew([]) == []


def test_a_key_that_was_taken_by_other_work_is_a_loss(book: Any) -> None:
    """If other work took the key, a renewal reports a loss, although the work is still PROCESSING
    by this holder."""
    held = book.claim()
    book.expire()
    book.claim(work="other")
    assert book.ledger.renew([held.claim]) == [Renewal.TAKEN]
    assert book.work().lease_until == 1


@pytest.mark.parametrize("table", ["keys", "work"])
def test_a_locked_row_is_skipped_and_the_others_are_renewed(book: Any, table: str) -> None:
    """A holder that is frozen inside its transaction does not block the renewals of other
    claims."""
    if not book.locks_rows:
        pytest.skip("SQLite has no row locks")
    first, second = book.claim(1), book.claim(2)
    with book.locked(table):
        answers = book.ledger.renew([each.claim for each in (first, second)])
    assert answers == [Renewal.SKIPPED, Renewal.RENEWED]


def test_more_leases_than_one_statement_takes_are_renewed(
    book: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL renews so many leases by one statement, and the rest by further ones."""
    monkeypatch.setattr("taskguard.ledger.statements.postgresql._CLAIMS_PER_STATEMENT", 20)
    claims = [book.claim(number).claim for number in range(50)]
    assert set(book.ledger.renew(claims)) == {"renewed"}


# -- deferrals --------------------------------------------------------------------------------


def test_fifty_duplicates_leave_one_copy(book: Any) -> None:
    """The first of fifty duplicates publishes a copy. The others learn that they are superseded."""
    published: list[int] = []
    answers: list[bool] = []

    def put_off() -> None:
        answers.append(book.ledger.defer(book.request(), published.append))

    threads = [threading.Thread(target=put_off) for _ in range(50 if book.locks_rows else 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert published == [1]
    assert answers.count(True) == 1
    assert book.ledger.claim(book.request()) == Answer(Decision.SUPERSEDED)
    assert isinstance(book.ledger.claim(book.request(deferrals=1)), Claimed)


def test_a_copy_that_was_not_published_is_not_recorded(book: Any) -> None:
    """If the broker refuses the copy, the delivery remains the live copy."""

    def refuse(deferrals: int) -> None:
        raise ConnectionError(deferrals)

    with pytest.raises(ConnectionError):
        book.ledger.defer(book.request(), refuse)
    assert isinstance(book.ledger.claim(book.request()), Claimed)
    assert book.numbers() == {}


def test_an_older_retry_is_superseded_and_a_newer_one_is_not(book: Any) -> None:
    """Numbers belong to a message. Another message of the same work is not superseded by them."""
    book.ledger.fail(book.claim(retries=2).claim, "x")
    assert book.ledger.claim(book.request(retries=1)) == Answer(Decision.SUPERSEDED)
    assert isinstance(book.ledger.claim(book.request(retries=0, message="n")), Claimed)


def test_a_retry_is_not_dropped_for_a_deferral_of_the_try_before_it(book: Any) -> None:
    """If an earlier retry is deferred and a later retry was claimed, one of the two stays alive."""
    book.claim(retries=1)
    assert book.ledger.defer(book.request(retries=0), lambda deferrals: None)
    assert book.numbers() == {("m", "ship order:1"): (0, 1)}
    book.expire()
    assert book.ledger.claim(book.request(retries=0, deferrals=1)) == Answer(Decision.SUPERSEDED)
    assert book.claim(retries=1).takeover
    assert book.ledger.defer(book.request(retries=1), lambda deferrals: None)
    assert book.numbers() == {("m", "ship order:1"): (1, 1)}
    assert not book.ledger.defer(book.request(retries=0, deferrals=7), lambda deferrals: None)


def test_numbers_of_a_message_are_those_of_its_work(book: Any) -> None:
    """If a message id is used for two work items, a deferral of one work does not supersede the
    other."""
    assert book.ledger.defer(book.request(1, retries=1, deferrals=2), lambda deferrals: None)
    book.ledger.give_back(book.claim(2).claim)
    assert book.ledger.defer(book.request(2), lambda deferrals: None)
    assert book.numbers() == {("m", "ship order:1"): (1, 3), ("m", "ship order:2"): (0, 1)}
    assert not book.ledger.defer(book.request(2), lambda deferrals: None)
    assert book.ledger.claim(book.request(2)) == Answer(Decision.SUPERSEDED)
    assert book.ledger.claim(book.request(1, deferrals=3)) == Answer(Decision.SUPERSEDED)
    assert isinstance(book.ledger.claim(book.request(1, retries=1, deferrals=3)), Claimed)


def test_an_id_that_is_sent_again_is_another_message(book: Any) -> None:
    """If an id is sent again, it counts as another message of the same work, and its numbers start
    again.

    Deferrals and retries of the first sending still supersede its own deliveries.
    """

    def asked(retries: int, deferrals: int, sending: str) -> Any:
        return request(1, message=MessageRef("m", retries, deferrals, sending))

    first = book.ledger.claim(asked(2, 0, "monday"))
    book.ledger.fail(first.claim, "x")
    assert book.ledger.defer(asked(2, 0, "monday"), lambda deferrals: None)
    assert book.ledger.claim(asked(2, 0, "monday")) == Answer(Decision.SUPERSEDED)
    assert book.ledger.claim(asked(1, 5, "monday")) == Answer(Decision.SUPERSEDED)
    again = book.ledger.claim(asked(0, 0, "tuesday"))
    assert isinstance(again, Claimed)
    book.ledger.give_back(again.claim)
    assert book.ledger.defer(asked(0, 0, "tuesday"), lambda deferrals: None)
    assert book.ledger.claim(asked(0, 0, "tuesday")) == Answer(Decision.SUPERSEDED)
    assert isinstance(book.ledger.claim(asked(0, 1, "tuesday")), Claimed)


def test_a_requeue_forgets_the_numbers_of_its_own_work(book: Any) -> None:
    """Other work of the same message id keeps its numbers."""
    for number in (1, 2):
        book.ledger.fail(book.claim(number).claim, "boom")
        assert book.ledger.defer(book.request(number), lambda deferrals: None)
    assert book.ledger.requeue("ship order:1", reason="mended")
    assert book.numbers() == {("m", "ship order:2"): (0, 1)}
    assert isinstance(book.ledger.claim(book.request(1)), Claimed)
    assert book.ledger.claim(book.request(2)) == Answer(Decision.SUPERSEDED)


def test_a_checkpoint_is_fenced_by_its_keys(book: Any) -> None:
    """If other work took the key, a checkpoint writes nothing, although this work's row is
    unchanged."""
    old = book.claim()
    book.expire()
    book.claim(work="other")
    with pytest.raises(StaleTokenError), book.ledger.transaction(old.claim) as tx:
        book.effect(tx.db, "stale")
        tx.checkpoint(old.claim, "1")
    assert book.effects() == {}


def test_a_message_older_than_the_record_is_refused_where_nothing_is_known(book: Any) -> None:
    """may_create=False creates no record. Work on record is answered as usual."""
    assert book.ledger.claim(book.request(may_create=False)) == Answer(Decision.TOO_OLD)
    assert book.key() is None or book.key().owner == ""
    book.ledger.complete_alone(book.claim().claim, "1")
    assert book.ledger.claim(book.request(may_create=False)).decision is Decision.DONE


def test_the_view_shows_a_work(book: Any) -> None:
    """The view shows a work in words and seconds, and None for missing values."""
    assert book.ledger.view("nothing") is None
    claimed = book.claim(retries=2)
    view = book.ledger.view("ship order:1")
    assert (view.task, view.key, view.message, view.retries) == ("ship", "order:1", "m", 2)
    assert (view.state, view.fence) == (State.PROCESSING, claimed.claim.fence)
    assert view.lease_until_s - view.started_s == pytest.approx(30, abs=0.01)
    assert book.work().created / 1e6 == view.created_s
