"""An operator's changes of work and keys: drop, done, requeue, call, release."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from contract.ledger.conftest import Book

from support.claims import request
from taskguard.errors import StaleTokenError
from taskguard.ledger.tables import ACTIONS, WORK
from taskguard.locks.base import Renewal
from taskguard.model.bounds import Bounds, slots_of
from taskguard.model.changes import Changed, Expected, Said
from taskguard.model.claims import (
    Answer,
    Busy,
    Claimed,
    ClaimRequest,
    MessageRef,
    ParkedNewest,
)
from taskguard.model.delivery import NOT_BEFORE, stored_call
from taskguard.model.history import WORKS_CHARS, Action, read
from taskguard.model.lease import new_owner
from taskguard.model.operating import FROM, TO
from taskguard.model.states import TRANSITIONS, Decision, State

# The statements are the portable ones on all kinds.
pytestmark = pytest.mark.parametrize(
    "make_book",
    [
        "postgresql",
        pytest.param("mariadb", marks=pytest.mark.debian),
        "sqlite",
        pytest.param("memory", marks=pytest.mark.once),
    ],
    indirect=True,
)

ANN = Said("ann", "the carrier is back")
WORK_ID, KEY = "ship order:1", "order:1"
OLD, NEW = "ship order:1", "ship shop:1"
END = [Action.DROP, Action.DONE]


def change(book: Any, action: Action, work: str = WORK_ID, **options: Any) -> Changed:
    changed: Changed = book.ledger.change(work, action, by=ANN, **options)
    return changed


def claim(book: Any, asked: ClaimRequest) -> Claimed:
    found = book.ledger.claim(asked)
    assert isinstance(found, Claimed), found
    return found


def answer(book: Any, asked: ClaimRequest) -> Answer:
    found = book.ledger.claim(asked)
    assert isinstance(found, Answer), found
    return found


def park(book: Any, number: int, **values: Any) -> ClaimRequest:
    """Park the message of a work of its own in the line of order:1."""
    message = MessageRef(f"m{number}")
    call = stored_call({"queue": "test"}, message, app="")
    asked = request(number, message=message, keys=(KEY,), in_line=True, call=call, **values)
    assert book.ledger.park(asked)
    return asked


def enqueue(book: Any, number: int = 1) -> ClaimRequest:
    message = MessageRef(f"m{number}")
    asked = request(number, message=message, call=stored_call({"queue": "test"}, message, app=""))
    book.ledger.enqueue(None, asked, due_in_s=3600.0)
    return asked


def promote(book: Any) -> str | None:
    """Promote the next message in the line of order:1, and return its id."""
    found = book.ledger.promote_next(KEY, expected_s=30.0)
    return None if found is None else found.message.id


def row_in(state: State, **values: Any) -> dict[str, Any]:
    """Return a row of work in this state, whose lease has expired if it had one."""
    new = state is State.NEW
    return {
        "message": "m", "retries": 0, "state": state.value, "final": 0, "fence": 5,
        "owner": "" if new else "x/m", "lease_until": 1, "attempts": 1, "crashes": 2,
        "crashed_owner": "", **values,
    }  # fmt: skip


def key_row(**values: Any) -> dict[str, Any]:
    return {"fence": 5, "owner": "x/m", "lease_until": 1, **values}


def test_each_action_moves_work_as_the_table_says(book: Book) -> None:
    """Work in a state that the table lists moves. Other work stays, and the answer says why."""
    for action, states in FROM.items():
        for state in State:
            call = stored_call({"queue": "test"}, MessageRef("m"), app="")
            book.put(work=row_in(state, call=call), key=key_row(), recorded=(0, 0))
            found = change(book, action)
            after = State(book.work().state)
            assert found.changed is (state in states), (action, state, found)
            assert found.before is state
            assert bool(found.why) is not found.changed
            assert after is (TO.get(action, state) if found.changed else state)
            assert after is state or (state, after) in TRANSITIONS
            assert action is Action.CALL or bool(book.work().final) is (
                found.changed and action is Action.DROP
            )


def test_work_under_a_live_lease_stays(book: Book) -> None:
    """The holder goes on, and can complete. The answer names it."""
    holder = book.claim()
    for action in FROM:
        found = change(book, action)
        assert not found.changed
        assert holder.claim.owner.described in found.why or "not stored" in found.why
    book.ledger.complete_alone(holder.claim, "1")
    assert book.work().state == "DONE"


def test_there_is_no_such_work(book: Book) -> None:
    assert change(book, Action.DROP) == Changed(
        work=WORK_ID, changed=False, why="there is no such work"
    )


def test_work_that_has_changed_since_it_was_seen_stays(book: Book) -> None:
    """A viewer's state, fence and owner are conditions, each by itself."""
    holder = book.claim().claim
    book.ledger.fail(holder, "boom")
    fence, owner = holder.fence, str(holder.owner)
    for seen in (
        Expected(state=State.DEAD),
        Expected(fence=fence - 1),
        Expected(state=State.FAILED, owner="x/m"),
    ):
        found = change(book, Action.DROP, expected=seen)
        assert not found.changed
        assert "it has changed since" in found.why
    seen = Expected(state=State.FAILED, fence=fence, owner=owner)
    assert change(book, Action.DROP, expected=seen).changed


class TestDrop:
    def test_work_that_failed_never_runs(self, book: Book) -> None:
        """Later deliveries, of this message and of others, find it revoked."""
        book.ledger.fail(book.claim().claim, "boom")
        assert change(book, Action.DROP).changed
        assert answer(book, book.request(retries=1)).decision is Decision.REVOKED
        found = answer(book, book.request(message="n"))
        assert (found.decision, found.error) == (
            Decision.REVOKED,
            "dropped by ann: the carrier is back",
        )
        assert not change(book, Action.DONE, "ship order:9").changed

    @pytest.mark.parametrize("action", END)
    @pytest.mark.parametrize("store", [enqueue, park])
    def test_its_caller_is_notified(self, book: Book, action: Action, store: Any) -> None:
        """A message that was parked or never published is sent, until its caller was notified."""
        asked = store(book, 1)
        assert change(book, action).changed
        [sent] = book.ledger.overdue(parked=True)
        assert sent.message.id == "m1"
        decision = Decision.REVOKED if action is Action.DROP else Decision.DONE
        assert answer(book, asked).decision is decision
        book.ledger.note_notified(WORK_ID)
        assert (book.ledger.overdue(), book.work().line) == ([], None)

    def test_the_message_that_is_sent_counts(self, book: Book) -> None:
        """Another message of the work had begun, and its own caller was told."""
        asked = enqueue(book)
        book.ledger.give_back(book.claim(message="n").claim)
        assert change(book, Action.DROP).changed
        [sent] = book.ledger.overdue(parked=True)
        assert sent.message.id == "m1"
        assert answer(book, asked).same_message

    @pytest.mark.parametrize("action", END)
    def test_the_caller_of_a_lost_retry_is_notified(self, book: Book, action: Action) -> None:
        """Work that failed keeps its position until its message comes again, which may be lost."""
        asked = park(book, 1, strict=True)
        assert promote(book) == "m1"
        book.ledger.fail(claim(book, asked).claim, "boom")
        assert change(book, action).changed
        [sent] = book.ledger.overdue(parked=True)
        assert sent.message.id == "m1"

    @pytest.mark.parametrize("action", END)
    def test_the_line_goes_on(self, book: Book, action: Action) -> None:
        """The next message may be promoted, whether the dropped one waited, was promoted, or had
        failed and kept its position."""
        park(book, 1)
        park(book, 2)
        assert change(book, action).changed
        assert promote(book) == "m2"
        assert change(book, action, "ship order:2").changed
        asked = park(book, 3, strict=True)
        park(book, 4, strict=True)
        assert promote(book) == "m3"
        book.ledger.fail(claim(book, asked).claim, "boom")
        assert promote(book) is None
        assert change(book, action, "ship order:3").changed
        assert promote(book) == "m4"


class TestDone:
    def test_a_duplicate_is_answered_at_once(self, book: Book) -> None:
        """Its result is null, and the record says which operator ended it."""
        book.ledger.fail(book.claim().claim, "boom")
        assert change(book, Action.DONE).changed
        found = answer(book, book.request(message="n"))
        assert (found.decision, found.result_json) == (Decision.DONE, "null")
        assert found.error == "marked as done by ann: the carrier is back"

    def test_its_result_stays(self, book: Book) -> None:
        """Work that an earlier run gave a result keeps it."""
        book.put(work=row_in(State.DEAD, result="7"), key=None, recorded=(0, 0))
        assert change(book, Action.DONE).changed
        assert answer(book, book.request()).result_json == "7"


class TestRequeueLeft:
    def test_it_counts_a_crash_and_refuses_the_late_holder(self, book: Book) -> None:
        """The next delivery runs the work. Its lease ends now, not in 1970."""
        late = book.claim().claim
        book.expire()
        assert change(book, Action.REQUEUE_LEFT, gone_s=30.0).changed
        row = book.work()
        assert (row.state, row.crashes, row.crashed_owner) == ("NEW", 1, str(late.owner))
        assert row.lease_until > 1
        with pytest.raises(StaleTokenError):
            book.ledger.complete_alone(late, None)
        assert book.ledger.fail(late, "boom") is False
        assert claim(book, book.request()).attempt == 2

    def test_a_lease_that_has_just_expired_is_not_left(self, book: Book) -> None:
        """Its holder may still renew it, if the database or the network stood still."""
        late = book.claim().claim
        book.expire()  # in 1970
        found = change(book, Action.REQUEUE_LEFT, gone_s=1e10)
        assert (found.changed, "counts as left 1e+10 s after that" in found.why) == (False, True)
        book.ledger.complete_alone(late, None)

    def test_its_message_may_be_sent_again(self, book: Book) -> None:
        """It was deferred before, and is sent again by hand, without a number of deferrals."""
        assert book.ledger.defer(book.request(), lambda _: None)
        book.claim(1, deferrals=1)
        book.expire(1)
        assert change(book, Action.REQUEUE_LEFT).changed
        book.claim(1)

    def test_its_message_is_sent_if_its_call_is_stored(self, book: Book) -> None:
        """Otherwise the answer says that it has to be sent again by hand."""
        asked = enqueue(book)
        claim(book, asked)
        book.expire()
        assert "sends its message" in change(book, Action.REQUEUE_LEFT).then or is_memory(book)
        assert [each.work for each in book.ledger.overdue()] == [WORK_ID]
        book.claim(2)
        book.expire(2)
        then = change(book, Action.REQUEUE_LEFT, "ship order:2").then
        assert "send its message again" in then or is_memory(book)


def is_memory(book: Book) -> bool:
    return book.kind == "memory"


def test_superseded_work_is_not_requeued(book: Book) -> None:
    """Its next delivery would find the newer message, too."""
    for number in (2, 1):
        message, values = MessageRef(f"m{number}"), {"newest": "latest", "sent_us": 10**6 + number}
        found = book.ledger.claim(request(number, message=message, keys=(KEY,), **values))
        if isinstance(found, Claimed):
            book.ledger.complete_alone(found.claim, None)
    assert change(book, Action.DROP).changed is False
    found = change(book, Action.REQUEUE)
    assert (found.changed, "send the call again" in found.why) == (False, True)


class TestCall:
    def test_a_waiting_message_goes_first(self, book: Book) -> None:
        for number in (1, 2, 3):
            park(book, number)
        assert change(book, Action.CALL, "ship order:3").changed
        assert [promote(book), book.work(1).line] == ["m3", "waiting"]

    def test_the_newest_message_stays_the_newest(self, book: Book) -> None:
        """It goes before a message of another task. A late message that is older never runs."""

        def sync(number: int, sent_us: int) -> ClaimRequest:
            message = MessageRef(f"m{number}")
            values = {"task": "sync", "newest": "latest", "sent_us": sent_us, "keys": (KEY,)}
            call = stored_call({"queue": "test"}, message, app="")
            return request(number, message=message, call=call, **values)

        park(book, 1, sent_us=1_000)
        assert isinstance(book.ledger.park_newest(sync(2, 3_000)), ParkedNewest)
        assert change(book, Action.CALL, "ship order:2").changed
        late = book.ledger.park_newest(sync(3, 2_000))
        assert isinstance(late, Answer)
        assert late.decision is Decision.OUTDATED
        assert promote(book) == "m2"

    def test_an_enqueued_message_is_due_now(self, book: Book) -> None:
        enqueue(book)
        assert book.ledger.overdue() == []
        assert change(book, Action.CALL).changed
        assert [each.work for each in book.ledger.overdue()] == [WORK_ID]

    @pytest.mark.parametrize("action", [Action.CALL, *END])
    def test_a_delayed_message_is_sent_at_once(self, book: Book, action: Action) -> None:
        """A relay sends what is stored, which does not say any more when it may run."""
        message, app = MessageRef("m1"), "shop"
        delayed = stored_call({"queue": "test", NOT_BEFORE: 9e9}, message, app=app)
        book.ledger.enqueue(None, book.request(1, message="m1", call=delayed), due_in_s=3600.0)
        assert change(book, action).changed
        assert book.work().call == stored_call({"queue": "test"}, message, app=app)

    def test_work_without_a_call_stays(self, book: Book) -> None:
        book.ledger.give_back(book.claim().claim)
        assert "its call is not stored" in change(book, Action.CALL).why


class TestTwoGuards:
    """While a guard is changed, one claim has a record under each id."""

    @staticmethod
    def both(book: Book) -> ClaimRequest:
        return book.request(1, keys=("order:1", "shop:1"), work=NEW, formerly=(OLD,))

    @pytest.mark.parametrize("named", [OLD, NEW])
    @pytest.mark.parametrize("action", [Action.DROP, Action.DONE, Action.REQUEUE])
    def test_a_change_of_one_changes_both(self, book: Book, action: Action, named: str) -> None:
        book.ledger.fail(claim(book, self.both(book)).claim, "boom")
        found = change(book, action, named)
        assert (found.changed, {named, *found.also}) == (True, {OLD, NEW})
        assert set(book.states().values()) == {TO[action].value}
        if action is not Action.REQUEUE:
            former = answer(book, book.request(1, message="n"))
            assert former.decision in (Decision.REVOKED, Decision.DONE)

    @pytest.mark.parametrize("named", [OLD, NEW])
    def test_left_work(self, book: Book, named: str) -> None:
        late = claim(book, self.both(book)).claim
        book.expire_all()
        assert change(book, Action.REQUEUE_LEFT, named).changed
        assert set(book.states().values()) == {"NEW"}
        with pytest.raises(StaleTokenError):
            book.ledger.complete_alone(late, None)

    @pytest.mark.parametrize("named", [OLD, NEW])
    def test_work_that_was_given_back(self, book: Book, named: str) -> None:
        """Workers with either guard find it revoked."""
        book.ledger.give_back(claim(book, self.both(book)).claim)
        assert change(book, Action.DROP, named).changed
        assert set(book.states().values()) == {"FAILED"}

    @pytest.mark.parametrize("named", [OLD, NEW])
    @pytest.mark.parametrize("action", END)
    def test_it_changes_both_long_after(self, book: Book, action: Action, named: str) -> None:
        """Even if so much other work had the keys that their rows name this work no more."""
        book.ledger.give_back(claim(book, self.both(book)).claim)
        for number in (2, 3):
            later = book.request(number, keys=("order:1", "shop:1"), work=f"{number}" * WORKS_CHARS)
            book.ledger.give_back(claim(book, later).claim)
        assert change(book, action, named).changed
        states = book.states()
        assert states[OLD] == states[NEW] == TO[action].value

    @pytest.mark.parametrize("named", [OLD, NEW])
    @pytest.mark.parametrize("action", END)
    def test_work_that_waits_for_its_retry(self, book: Book, action: Action, named: str) -> None:
        """Only the record under its present id was parked. The other one is still FAILED."""
        call = stored_call({"queue": "test"}, MessageRef("m"), app="")
        asked = replace(self.both(book), in_line=True, line_key="order:1", call=call)
        book.ledger.fail(claim(book, asked).claim, "boom")
        again = replace(asked, owner=new_owner("m"), message=MessageRef("m", 1))
        assert book.ledger.park(again)
        assert change(book, action, named).changed
        assert set(book.states().values()) == {TO[action].value}
        assert isinstance(book.ledger.claim(book.request(1, retries=1)), Answer)

    @pytest.mark.parametrize("named", [OLD, "x order:1"])
    @pytest.mark.parametrize("action", [*END, Action.REQUEUE])
    def test_a_task_that_was_renamed(self, book: Book, action: Action, named: str) -> None:
        """The former record has the former name of the task."""
        book.ledger.fail(book.claim().claim, "boom")
        asked = book.request(1, retries=1, work="x order:1", task="x", formerly=(OLD,))
        book.ledger.fail(claim(book, asked).claim, "boom")
        assert change(book, action, named).changed
        assert set(book.states().values()) == {TO[action].value}

    @pytest.mark.parametrize("action", [*END, Action.REQUEUE])
    def test_a_record_that_does_not_count(self, book: Book, action: Action) -> None:
        """A worker with the former guard has run the work since. Its record decides for both."""
        book.ledger.fail(claim(book, self.both(book)).claim, "boom")
        book.ledger.fail(book.claim(1, retries=1).claim, "boom")
        found = change(book, action, NEW)
        assert (found.changed, OLD in found.why) == (False, True)
        assert change(book, action, OLD).changed
        again = replace(self.both(book), message=MessageRef("m", 2))
        assert isinstance(book.ledger.claim(again), Claimed) is (action is Action.REQUEUE)
        if action is not Action.REQUEUE:  # so that no list has it any more
            assert change(book, action, NEW).changed
            assert isinstance(book.ledger.claim(again), Answer)

    def test_left_work_that_is_done_under_its_former_id(self, book: Book) -> None:
        """No worker finds it any more. An operator ends it in two steps."""
        claim(book, self.both(book))
        book.expire_all()
        taken_over = claim(book, book.request(1, message="n"))
        book.ledger.complete_alone(taken_over.claim, "1")
        assert change(book, Action.REQUEUE_LEFT, NEW).changed
        assert change(book, Action.DONE, NEW).changed
        assert set(book.states().values()) == {"DONE"}

    def test_the_message_may_be_sent_again_to_workers_with_either_guard(self, book: Book) -> None:
        """It was deferred under both ids. A worker with the former guard has buried its record."""
        for asked in (book.request(1), self.both(book)):
            assert book.ledger.defer(asked, lambda _: None)
        claim(book, replace(self.both(book), message=MessageRef("m", 0, 1)))
        book.expire_all()
        assert answer(book, book.request(1, deferrals=1, max_crashes=1)).decision is Decision.BURY
        assert change(book, Action.REQUEUE, OLD).changed
        assert isinstance(book.ledger.claim(self.both(book)), Claimed)

    def test_a_claim_that_comes_in_between(self, book: Book) -> None:
        """A worker with the new guard makes the second record while the change begins."""
        if not book.locks_rows or is_memory(book):
            pytest.skip("no other transaction comes in between")
        book.ledger.fail(book.claim().claim, "boom")
        other, read = book.again(), []

        def claims(_db: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "also" in statement and not read:
                read.append(statement)
                again = other.claim(replace(self.both(book), message=MessageRef("m", 1)))
                assert isinstance(again, Claimed)
                other.fail(again.claim, "boom")

        with book.ledger.database.pools.ledgers as engine:
            sa.event.listen(engine, "after_cursor_execute", claims)
        assert change(book, Action.DROP).changed
        again = replace(self.both(book), message=MessageRef("m", 2))
        for asked in (again, book.request(1, retries=2)):
            assert answer(book, asked).decision is Decision.REVOKED

    def test_work_whose_key_has_slots(self, book: Book) -> None:
        slots = slots_of(KEY, 2)
        bounds = Bounds(KEY, 2, None, slots)
        asked = book.request(1, keys=slots[:1], work=NEW, formerly=(OLD,), bounds=bounds)
        book.ledger.give_back(claim(book, asked).claim)
        assert change(book, Action.DROP, NEW).changed
        assert set(book.states().values()) == {"FAILED"}

    def test_a_release_ends_the_lease_of_both(self, book: Book) -> None:
        """A worker with the former guard takes the work over at once."""
        late = claim(book, self.both(book)).claim
        assert book.ledger.release("shop:1", fence=late.fence, owner=str(late.owner), by=ANN)
        assert claim(book, book.request(1, message="n")).takeover

    def test_other_work_of_the_key_stays(self, book: Book) -> None:
        """Only records of the same claim change."""
        book.ledger.fail(book.claim(1).claim, "boom")
        book.ledger.fail(claim(book, request(2, keys=(KEY,))).claim, "boom")
        if not is_memory(book):
            with book.engine.begin() as db:
                db.execute(sa.update(WORK).values(also="ship order:2\nship order:1\n"))
        assert change(book, Action.DROP).also == ()
        assert book.work(2).final == 0


class TestRelease:
    def test_the_late_commit_is_refused(self, book: Book) -> None:
        """Even if no other delivery has claimed the key. The next delivery counts a crash."""
        late = book.claim().claim
        owner = str(late.owner)
        assert not book.ledger.release(KEY, fence=late.fence - 1, owner=owner, by=ANN)
        assert book.ledger.release(KEY, fence=late.fence, owner=owner, by=ANN)
        assert book.work().lease_until > 1
        with pytest.raises(StaleTokenError):
            book.ledger.complete_alone(late, None)
        taken = claim(book, book.request())
        assert (taken.takeover, taken.crashes) == (True, 1)
        assert not book.ledger.release(KEY, fence=late.fence - 1, owner=owner, by=ANN)

    @pytest.mark.parametrize("work", [WORK_ID, None])
    def test_all_keys_of_its_claim_are_free(self, book: Book, work: str | None) -> None:
        """Without one of its keys its late commit is refused, so it needs none of them. Keys of
        others stay."""
        late = claim(book, book.request(1, keys=("order:1", "order:2", "order:3"), work=work)).claim
        other = claim(book, request(4, message=MessageRef("m")))
        named = {"fence": late.fence, "owner": str(late.owner), "by": ANN}
        assert book.ledger.release("order:2", **named) == late.keys
        assert book.held_keys() == list(other.claim.keys)
        assert claim(book, request(3)).claim.fence > late.fence
        assert book.ledger.renew([late]) == [Renewal.TAKEN]

    def test_its_stored_call_is_due(self, book: Book) -> None:
        late = claim(book, enqueue(book)).claim
        assert book.ledger.release(KEY, fence=late.fence, owner=str(late.owner), by=ANN)
        assert [each.work for each in book.ledger.overdue()] == [WORK_ID]
        assert isinstance(book.ledger.claim(book.request(message="m1")), Claimed | Busy)


class TestRecord:
    """Of each change, in its transaction."""

    @pytest.fixture(autouse=True)
    def _in_a_database(self, book: Book) -> None:
        if is_memory(book):
            pytest.skip("it has no table of actions")

    @staticmethod
    def actions(book: Book) -> list[Any]:
        with book.engine.connect() as db:
            return list(db.execute(sa.select(ACTIONS).order_by(ACTIONS.c.id)))

    def test_who_did_what_and_why(self, book: Book) -> None:
        book.ledger.fail(book.claim().claim, "boom")
        change(book, Action.REQUEUE)
        change(book, Action.REQUEUE_LEFT)  # refused
        change(book, Action.DROP)
        found = [
            (each.action, each.actor, each.reason, each.key, each.task, each.work)
            for each in self.actions(book)
        ]
        told = "ann", "the carrier is back", KEY, "ship", WORK_ID
        assert found == [("requeue", *told), ("drop", *told)]
        history = [each.text for each in read(book.work().history)]
        assert history[-2:] == [
            "requeued by ann: the carrier is back",
            "dropped by ann: the carrier is back",
        ]

    @pytest.mark.parametrize(
        "action", [Action.DROP, Action.DONE, Action.REQUEUE, Action.REQUEUE_LEFT]
    )
    def test_a_repeated_call_records_one_action(self, book: Book, action: Action) -> None:
        """A COMMIT may get no answer, and then the call is repeated."""
        holder = book.claim().claim
        if action is Action.REQUEUE_LEFT:
            book.expire()
        else:
            book.ledger.fail(holder, "boom")
        assert [change(book, action).changed for _ in range(2)] == [True, True]
        assert len(self.actions(book)) == 1

    def test_a_repeated_release_records_one_action(self, book: Book) -> None:
        late = book.claim().claim
        named = {"fence": late.fence, "owner": str(late.owner), "by": ANN}
        assert [book.ledger.release(KEY, **named) for _ in range(2)] == [(KEY,), (KEY,)]
        assert [each.action for each in self.actions(book)] == ["release"]
