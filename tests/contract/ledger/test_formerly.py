"""Work whose id changed with its guard, while workers with the former guard still run.

The former guard names the work `ship order:1` and holds `order:1`. The new one names it `ship
shop:1`, and holds `shop:1` and, because it declares the former guard, `order:1`.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from contract.ledger.conftest import Book

from taskguard.errors import LineFullError, StaleTokenError
from taskguard.locks.base import Renewal
from taskguard.model.claims import Answer, Busy, Claimed, ClaimRequest
from taskguard.model.states import Decision, State

OLD, NEW = "ship order:1", "ship shop:1"


def old(book: Book, **values: Any) -> ClaimRequest:
    """Return the request of a worker with the former guard."""
    return book.request(1, **values)


def new(book: Book, **values: Any) -> ClaimRequest:
    """Return the request of a worker with the new guard."""
    keys = ("order:1", "shop:1")
    return book.request(1, **{"keys": keys, "work": NEW, "formerly": (OLD,), **values})


def claim(book: Book, request: ClaimRequest) -> Claimed:
    found = book.ledger.claim(request)
    assert isinstance(found, Claimed), found
    return found


ENDS = ("fail", "give_back", "crash", "end_round")
BOTH = [pytest.param(old, new, id="old, then new"), pytest.param(new, old, id="new, then old")]


@pytest.mark.parametrize(("first", "second"), BOTH)
def test_what_is_done_by_one_guard_is_done_for_the_other(
    book: Book, first: Any, second: Any
) -> None:
    """Work that is done under one guard is done for the other, with its result, even if that is
    stored late."""
    claimed = claim(book, first(book))
    book.ledger.complete_alone(claimed.claim, None)
    book.ledger.store_result(claimed.claim, "7")
    for asked in (second(book), second(book, message="n"), first(book)):
        for ask in (book.ledger.claim, book.ledger.peek):
            found = ask(asked)
            assert isinstance(found, Answer)
            assert (found.decision, found.result_json) == (Decision.DONE, "7")
    assert set(book.states().values()) == {"DONE"}


def test_an_answer_names_the_record_that_it_is_from(book: Book) -> None:
    """An answer names the record that it comes from, so that the caller can look it up."""
    book.ledger.complete_alone(claim(book, old(book)).claim, None)
    found = book.ledger.claim(new(book))
    assert isinstance(found, Answer)
    assert found.recorded_as == OLD
    assert book.states() == {OLD: "DONE"}


@pytest.mark.parametrize(("first", "second"), BOTH)
def test_one_guards_holder_keeps_the_others_out(book: Book, first: Any, second: Any) -> None:
    """One guard's holder keeps the other's deliveries out until its lease expires. Then the other
    takes over."""
    claimed = claim(book, first(book))
    with book.ledger.transaction(claimed.claim) as tx:
        tx.checkpoint(claimed.claim, "[1]")
    found = book.ledger.claim(second(book))
    assert isinstance(found, Busy)
    assert (found.same_work, found.owner) == (True, claimed.claim.owner)
    book.expire_all()
    taken = claim(book, second(book))
    assert (taken.takeover, taken.attempt, taken.crashes) == (True, 2, 1)
    assert taken.progress_json == "[1]"
    assert taken.claim.fence > claimed.claim.fence
    with pytest.raises(StaleTokenError):
        book.ledger.complete_alone(claimed.claim, None)
    book.ledger.complete_alone(taken.claim, "2")
    found = book.ledger.claim(first(book))
    assert isinstance(found, Answer)
    assert found.result_json == "2"


@pytest.mark.parametrize(("first", "second"), BOTH)
def test_however_one_ends_the_other_goes_on(book: Book, first: Any, second: Any) -> None:
    """After one guard's work ends, the other goes on at once with the same counts; only an exit is
    a crash."""
    for end in ENDS:
        claimed = claim(book, first(book))
        if end == "give_back":
            assert book.ledger.give_back(claimed.claim)
        elif end == "end_round":
            assert book.ledger.end_round(claimed.claim, "why", most=3) is State.NEW
        else:
            assert getattr(book.ledger, end)(claimed.claim, "why")
        taken = claim(book, second(book, retries=1))
        assert (taken.attempt, taken.crashes) == (2, int(end == "crash"))
        book.ledger.uncount_crash(claimed.claim)
        book.ledger.complete_alone(taken.claim, None)
        for ask in (old, new):
            assert isinstance(book.ledger.claim(ask(book)), Answer)
        assert set(book.states().values()) == {"DONE"}
        book.forget()


@pytest.mark.parametrize(("first", "second"), BOTH)
def test_a_holder_that_was_taken_over_is_refused(book: Book, first: Any, second: Any) -> None:
    """If the other guard has taken over, the former holder's end changes nothing, is reported as
    stale, and counts no crash."""
    for end in ENDS:
        claimed = claim(book, first(book))
        book.expire_all()
        taken = claim(book, second(book))
        if end == "give_back":
            assert not book.ledger.give_back(claimed.claim)
        elif end == "end_round":
            assert book.ledger.end_round(claimed.claim, "why", most=3) is None
        else:
            assert not getattr(book.ledger, end)(claimed.claim, "why")
        book.ledger.uncount_crash(claimed.claim)
        assert isinstance(book.ledger.claim(first(book)), Busy)
        book.ledger.give_back(taken.claim)
        for ask in (old, new):
            again = claim(book, ask(book))
            assert again.crashes == 0
            book.ledger.give_back(again.claim)
        book.forget()


def test_what_a_former_guard_has_buried_is_dead(book: Book) -> None:
    """Work that the former guard has buried is dead, even if the new guard allows more crashes or a
    holder turns out to be alive."""
    for late in ("uncount_crash", "give_back", "fail"):
        first = claim(book, new(book))
        book.expire_all()
        second = claim(book, new(book))
        book.expire_all()
        buried = book.ledger.claim(old(book, max_crashes=2))
        assert isinstance(buried, Answer)
        assert buried.decision is Decision.BURY
        if late == "uncount_crash":
            book.ledger.uncount_crash(first.claim)
        elif late == "give_back":
            assert not book.ledger.give_back(second.claim)
        else:
            assert not book.ledger.fail(second.claim, "why")
        for ask in (new, old):
            found = book.ledger.claim(ask(book, max_crashes=9))
            assert isinstance(found, Answer)
            assert found.decision is Decision.DEAD
        book.forget()


def test_what_is_revoked_under_the_former_id_is_not_done(book: Book) -> None:
    """A worker with the former guard can revoke the work under the former id, which is the only one
    that it knows."""
    taken = claim(book, new(book))
    assert book.ledger.revoke(OLD, message="m")
    assert not book.ledger.give_back(taken.claim)
    for ask in (new, old):
        found = book.ledger.claim(ask(book))
        assert isinstance(found, Answer)
        assert found.decision is Decision.REVOKED


def test_crashes_under_both_guards_are_counted_together(book: Book) -> None:
    """Crashes under both guards count together: DEAD after three, for both. A requeue under either
    id applies to both."""
    for ask in (old, new, old):
        claim(book, ask(book))
        book.expire_all()
    buried = book.ledger.claim(new(book))
    assert isinstance(buried, Answer)
    assert (buried.decision, buried.crashes) == (Decision.BURY, 3)
    assert buried.recorded_as == OLD
    for ask in (old, new):
        found = book.ledger.claim(ask(book))
        assert isinstance(found, Answer)
        assert found.decision is Decision.DEAD
    named = book.ledger.claim(new(book))
    assert isinstance(named, Answer)
    assert book.ledger.requeue(named.recorded_as or NEW, reason="mended")
    assert claim(book, new(book)).crashes == 0


def test_a_dead_work_of_the_new_guard_is_requeued_by_its_own_id(book: Book) -> None:
    """The copy under the former id does not keep the work DEAD."""
    for _ in range(3):
        claim(book, new(book))
        book.expire_all()
    found = book.ledger.claim(new(book))
    assert isinstance(found, Answer)
    assert (found.decision, found.recorded_as) == (Decision.BURY, None)
    assert book.ledger.requeue(NEW, reason="mended")
    taken = claim(book, new(book))
    book.ledger.complete_alone(taken.claim, None)
    assert book.states() == {OLD: "DONE", NEW: "DONE"}


def test_a_claim_asked_again_is_the_same(book: Book) -> None:
    """A repeated claim, whose answer may have been lost, gets the same grant."""
    asked = new(book)
    first, again = claim(book, asked), claim(book, asked)
    assert (again.claim, again.attempt) == (first.claim, 1)


TWO_KEYS: dict[str, Any] = {}
ONE_KEY: dict[str, Any] = {"keys": ("order:1",)}
MORE_IDS_THAN_KEYS: dict[str, Any] = {"formerly": (OLD, "ship a", "ship b")}


def test_renewals_keep_all_records(book: Book) -> None:
    """Renewals keep all records, so that no worker with the former guard takes the holder for
    crashed."""
    for values in (TWO_KEYS, ONE_KEY, MORE_IDS_THAN_KEYS):
        claimed = claim(book, new(book, **values))
        book.expire_all()
        assert book.ledger.renew([claimed.claim]) == [Renewal.RENEWED]
        assert book.is_leased()
        found = book.ledger.claim(old(book, max_crashes=1))
        assert isinstance(found, Busy)
        book.forget()


def test_a_work_remembers_under_which_id_it_began(book: Book) -> None:
    """The work keeps its first id, so that every attempt sends a payment provider the same
    idempotency key."""
    assert claim(book, new(book, message="other", work="w", formerly=("v",))).began_as is None
    book.expire_all()
    book.ledger.give_back(claim(book, old(book)).claim)
    for _ in range(2):
        taken = claim(book, new(book))
        assert taken.began_as == OLD
        book.ledger.give_back(taken.claim)


def test_a_copy_that_the_former_guard_put_off_supersedes(book: Book) -> None:
    """Numbers that the former guard recorded supersede copies."""
    claim(book, old(book, message="holder"))
    assert book.ledger.defer(old(book), lambda deferrals: None)
    book.expire_all()
    found = book.ledger.claim(new(book))
    assert isinstance(found, Answer)
    assert found.decision is Decision.SUPERSEDED
    assert isinstance(book.ledger.claim(new(book, deferrals=1)), Claimed)


def test_what_was_enqueued_and_is_done_under_the_former_id_is_not_sent_again(book: Book) -> None:
    """A sweep does not send work again that is done under its former id."""
    book.ledger.complete_alone(claim(book, old(book)).claim, "7")
    asked = new(book, message="n", call='{"message": "n", "queue": "test"}')
    book.ledger.enqueue(None, asked)
    assert book.states() == {OLD: "DONE", NEW: "NEW"}
    found = book.ledger.claim(asked)
    assert isinstance(found, Answer)
    assert found.result_json == "7"
    assert book.states() == {OLD: "DONE", NEW: "DONE"}
    view = book.ledger.view(NEW)
    assert (view.result_json, view.call) == ("7", None)
    book.make_due()
    assert book.ledger.overdue() == []


def test_a_call_is_stored_once(book: Book) -> None:
    """A sweep sends one message for a work, under its new id."""
    call = '{"message": "m", "queue": "test"}'
    book.ledger.give_back(claim(book, old(book, call=call)).claim)
    book.ledger.give_back(claim(book, new(book, deferrals=1)).claim)
    book.expire_all()
    book.make_due()
    assert [work.work for work in book.ledger.overdue()] == [NEW]


def test_done_under_one_of_several_former_ids_is_done(book: Book) -> None:
    """Each message was work of its own before. Work that is done under one of several former ids is
    not done again."""
    by_message = {"work": "ship message:m order:1"}
    book.ledger.complete_alone(claim(book, old(book, **by_message)).claim, None)
    other = new(book, message="n", formerly=("ship message:n order:1",))
    book.ledger.fail(claim(book, other).claim, "why")
    found = book.ledger.claim(new(book, formerly=("ship message:m order:1",)))
    assert isinstance(found, Answer)
    assert found.decision is Decision.DONE


def test_workers_with_either_guard_have_one_effect(book: Book) -> None:
    """While a deploy replaces workers one by one, each work has one effect, whichever worker claims
    first or dies."""
    rounds, workers = 6, 4
    for number in range(rounds):
        gate = threading.Barrier(workers)
        book.forget()

        def work(place: int, gate: threading.Barrier = gate, item: int = number) -> None:
            ledger = book.again()
            gate.wait()
            for _ in range(200):
                asked = (old if place % 2 else new)(book, max_crashes=1_000)
                found = ledger.claim(asked)
                if isinstance(found, Answer):
                    assert found.decision is Decision.DONE
                    return
                if isinstance(found, Claimed):
                    with ledger.transaction(found.claim) as tx:
                        book.effect(tx.db, item)
                        tx.complete_in_block(found.claim, None)

        threads = [threading.Thread(target=work, args=(place,)) for place in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert book.effects() == {str(number): 1 for number in range(rounds)}


class TestLines:
    """Messages that wait for `order:1` or `shop:1`. Each of them is work of its own."""

    @staticmethod
    def old(book: Book, message: str, **values: Any) -> ClaimRequest:
        call = json.dumps({"queue": "test", "message": message})
        work = f"ship message:{message} order:1"
        return old(book, message=message, work=work, call=call, in_line=True, **values)

    @staticmethod
    def new(book: Book, message: str, **values: Any) -> ClaimRequest:
        call = json.dumps({"queue": "test", "message": message})
        ids = {
            "work": f"ship message:{message} shop:1",
            "formerly": (f"ship message:{message} order:1",),
        }
        values = {"call": call, "in_line": True, "line_key": "shop:1", **ids, **values}
        return new(book, message=message, **values)

    @staticmethod
    def waiting(book: Book) -> list[tuple[str, str]]:
        return [(each.key, each.message) for each in book.ledger.waiting()]

    def test_a_message_is_not_behind_itself(self, book: Book) -> None:
        """A message is not behind its own record that a worker with the former guard has parked and
        promoted."""
        holder = claim(book, old(book, message="holder"))
        assert book.ledger.park(self.old(book, "a"))
        assert book.ledger.park(self.old(book, "b"))
        book.ledger.complete_alone(holder.claim, None)
        assert book.ledger.promote_next("order:1", expected_s=30.0).message.id == "a"
        taken = claim(book, self.new(book, "a"))
        assert taken.claim.keys == ("order:1", "shop:1")
        assert self.waiting(book) == [("order:1", "b")]
        book.ledger.complete_alone(taken.claim, None)
        assert book.ledger.promote_next("order:1", expected_s=30.0).message.id == "b"

    def test_it_takes_its_place_along(self, book: Book) -> None:
        """The work waits once, in the line of its new key, and is sent from there alone."""
        now_us = book.ledger.now_us()
        assert book.ledger.park(self.old(book, "a", sent_us=now_us - 9))
        assert book.ledger.park(self.new(book, "b", sent_us=now_us - 5))
        assert book.ledger.promote_next("order:1", expected_s=30.0).message.id == "a"
        assert book.ledger.park(self.new(book, "a", sent_us=now_us - 9))
        assert self.waiting(book) == [("shop:1", "a"), ("shop:1", "b")]
        book.make_due()
        assert book.ledger.overdue() == []
        assert book.ledger.promote_next("order:1", expected_s=30.0) is None
        assert book.ledger.promote_next("shop:1", expected_s=30.0).message.id == "a"

    def test_no_message_overtakes_the_former_line(self, book: Book) -> None:
        """Neither a message that was sent later nor a new one goes before those in the
        former line."""
        now_us = book.ledger.now_us()
        assert book.ledger.park(self.old(book, "a", sent_us=now_us - 9))
        assert book.ledger.park(self.new(book, "c", sent_us=now_us - 5))
        for message in ("c", "d"):
            assert isinstance(book.ledger.claim(self.new(book, message)), Busy)
        book.ledger.complete_alone(claim(book, self.new(book, "a")).claim, None)
        claim(book, self.new(book, "c"))

    def test_a_retry_of_the_former_guard_keeps_its_place(self, book: Book) -> None:
        """With `order="strict"`, deliveries of the new guard wait for the former guard's retry,
        which keeps its position when it is parked."""
        strict = {"strict": True, "sent_us": book.ledger.now_us() - 9}
        failed = claim(book, self.old(book, "a", **strict))
        assert book.ledger.fail(failed.claim, "boom")
        assert book.ledger.keep(failed.claim, retries=1, call=None, due_in_s=30.0)
        assert isinstance(book.ledger.claim(self.new(book, "b", strict=True)), Busy)
        holder = claim(book, book.request(1, work="x", message="x", keys=("shop:1",)))
        assert book.ledger.park(self.new(book, "b", strict=True))
        assert book.ledger.park(self.new(book, "a", retries=1, strict=True))
        assert self.waiting(book) == [("shop:1", "a"), ("shop:1", "b")]
        book.ledger.complete_alone(holder.claim, None)
        claim(book, self.new(book, "a", retries=1, strict=True))

    @pytest.mark.parametrize("state", ["in progress", "done", "revoked"])
    def test_what_the_former_guard_has_begun_does_not_wait(self, book: Book, state: str) -> None:
        """Work that the former guard has begun does not wait, because its former record says so."""
        begun = claim(book, self.old(book, "a"))
        if state == "done":
            book.ledger.complete_alone(begun.claim, None)
        elif state == "revoked":
            book.ledger.revoke("ship message:a order:1", message="a")
        assert not book.ledger.park(self.new(book, "a"))

    def test_both_lines_count_for_max_waiting(self, book: Book) -> None:
        """A message with a position in the former line is not refused by `max_waiting`."""
        assert book.ledger.park(self.old(book, "a"))
        with pytest.raises(LineFullError):
            book.ledger.park(self.new(book, "b", max_waiting=1))
        assert book.ledger.park(self.new(book, "a", max_waiting=1))
