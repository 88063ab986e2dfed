"""Runs: work that is unique until it has ended (`once_per="run"`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from contract.ledger.test_unique import Enqueued

from support.proxy import Proxy
from taskguard.errors import AlreadyEnqueuedError
from taskguard.ledger.parts import messages, outbox
from taskguard.ledger.statements import runs as claiming
from taskguard.ledger.tables import MESSAGES, RUNS, WORK
from taskguard.model.bounds import Bounds, rate_of
from taskguard.model.changes import Said
from taskguard.model.claims import Answer, Busy, Claimed, ClaimRequest, MessageRef
from taskguard.model.history import Action
from taskguard.model.records import Once
from taskguard.model.runs import run_id
from taskguard.model.states import Decision, State

BASE = "ship order:1"


class Runs:
    """A ledger, and short ways to use the runs of `order:1`."""

    def __init__(self, book: Any) -> None:
        self.book = book
        self.ledger = book.ledger

    def request(self, message: str, **values: Any) -> ClaimRequest:
        """Return a request whose work has runs. Its call is stored with `stored=True`."""
        values.setdefault("by_run", True)
        if values.pop("stored", False):
            values["call"] = json.dumps({"queue": "test", "message": message})
        made: ClaimRequest = self.book.request(1, message=message, **values)
        return made

    def claim(self, message: str, **values: Any) -> Claimed:
        found = self.ledger.claim(self.request(message, **values))
        assert isinstance(found, Claimed), found
        return found

    def answer(self, message: str, **values: Any) -> Answer:
        """Return the same answer of a claim and of a peek."""
        peeked = self.ledger.peek(self.request(message, **values))
        found = self.ledger.claim(self.request(message, **values))
        assert isinstance(found, Answer), found
        assert isinstance(peeked, Answer), peeked
        assert peeked.decision is found.decision
        return found

    def busy(self, message: str, **values: Any) -> Busy:
        """Return the answer of a claim that finds its own work in progress."""
        peeked = self.ledger.peek(self.request(message, **values))
        found = self.ledger.claim(self.request(message, **values))
        assert isinstance(found, Busy), found
        assert isinstance(peeked, Busy), peeked
        assert found.same_work == peeked.same_work
        return found

    def done(self, message: str, result: str = '"done"', **values: Any) -> Claimed:
        claimed = self.claim(message, **values)
        self.ledger.complete_alone(claimed.claim, result)
        return claimed

    def fail(self, message: str, *, again_in_s: float | None, **values: Any) -> Claimed:
        claimed = self.claim(message, **values)
        assert self.ledger.fail(claimed.claim, "ValueError: boom", again_in_s=again_in_s)
        return claimed

    def record(self, message: str) -> Any:
        """Return the record of the run that this message opened."""
        with self.book.engine.connect() as db:
            select = sa.select(WORK).where(WORK.c.id == run_id(BASE, message))
            return db.execute(select).first()

    def pointer(self) -> tuple[str | None, str | None]:
        """Return which messages opened the open run and the one that follows."""
        with self.book.engine.connect() as db:
            row = db.execute(sa.select(RUNS).where(RUNS.c.work == BASE)).first()
        ids = (None, None) if row is None else (row.open, row.follows)
        first, second = (None if each is None else each.rpartition(":")[2] for each in ids)
        return first, second

    def members(self) -> dict[str, str]:
        """Return the opener of the run that each message has joined."""
        with self.book.engine.connect() as db:
            rows = db.execute(sa.select(MESSAGES)).all()
        return {row.message: row.work.rpartition(":")[2] for row in rows if " run:" in row.work}

    def enqueue(self, message: str, db: Any = None, **values: Any) -> str:
        request = self.request(message, stored=True, **values)
        work: str = self.ledger.enqueue(db, request)
        return work.rpartition(":")[2]

    def attach(self, message: str, db: Any = None) -> str | None:
        """Enqueue unless the same work is on record. Return the message that is found there."""
        enqueued = Enqueued()
        once = Once(enqueued.found)
        self.ledger.enqueue(db, self.request(message, stored=True), once=once)
        return None if enqueued.existing is None else enqueued.existing.message

    def put(self, message: str, db: Any = None) -> str:
        """Enqueue with `duplicate="replace"`. Return the opener of the run that has the call."""
        request = self.request(message, stored=True)
        once = Once(lambda existing: request, replaces=True)
        work: str = self.ledger.enqueue(db, request, once=once)
        return work.rpartition(":")[2]

    def defer(self, message: str) -> None:
        """Defer as a delivery does: the message joins, and its number is raised."""
        request = self.request(message)
        self.ledger.join(request)
        assert self.ledger.defer(request, lambda number: None)

    def overdue(self) -> list[str]:
        self.book.make_due()
        return [each.message.name for each in self.ledger.overdue()]


@pytest.fixture
def runs(book: Any) -> Runs:
    if book.kind == "memory":
        pytest.skip("the simulation's ledger has its own tests of runs")
    return Runs(book)


# -- (a) a run opens ------------------------------------------------------------------------------


def test_the_first_claim_opens_a_run_and_the_next_message_after_its_end_another(runs: Runs) -> None:
    """A granted claim opens a run with a record of its own. After its end the next message opens
    the next run, with new attempts and a higher fence."""
    first = runs.done("a", '"one"')
    second = runs.done("b", '"two"')
    assert (first.attempt, second.attempt) == (1, 1)
    assert second.claim.fence > first.claim.fence
    assert runs.record("a").result == '"one"'
    assert runs.record("b").result == '"two"'
    assert runs.pointer() == ("b", None)
    assert runs.book.work() is None  # there is no record of the base


def test_a_refused_delivery_opens_nothing(runs: Runs) -> None:
    """A delivery that is refused because other work holds the key belongs to no run."""
    runs.book.claim(work="other order:1")
    assert not runs.busy("a").same_work
    assert runs.pointer() == (None, None)
    assert runs.members() == {}


def test_parking_opens_a_run(runs: Runs) -> None:
    """A message that is parked opens a run, and other messages join it."""
    runs.book.claim(work="other order:1")
    assert runs.ledger.park(runs.request("a", stored=True, in_line=True))
    assert runs.pointer() == ("a", None)
    assert runs.members() == {"a": "a"}
    assert not runs.ledger.park(runs.request("b", stored=True, in_line=True))
    runs.ledger.join(runs.request("b"))
    assert runs.members() == {"a": "a", "b": "a"}


def test_enqueue_opens_a_run_with_its_commit(runs: Runs) -> None:
    """`enqueue()` opens a run if its transaction commits, and none after a rollback."""
    with runs.book.transaction(commits=False) as db:
        runs.enqueue("a", db)
    assert runs.pointer() == (None, None)
    with runs.book.transaction() as db:
        runs.enqueue("a", db)
    assert runs.pointer() == ("a", None)
    assert runs.overdue() == ["a"]
    runs.done("a")
    assert runs.overdue() == []


# -- (b) members ----------------------------------------------------------------------------------


def test_a_message_that_is_deferred_joins_the_open_run(runs: Runs) -> None:
    """A message that meets its own work in progress joins that run. It is answered by it."""
    first = runs.claim("a")
    assert runs.busy("b").same_work
    runs.defer("b")
    runs.ledger.complete_alone(first.claim, '"one"')
    assert runs.answer("b", deferrals=1).result_json == '"one"'
    runs.done("c", '"two"')
    assert runs.answer("b", deferrals=1).result_json == '"one"'


def test_a_message_that_never_joined_begins_the_next_run(runs: Runs) -> None:
    """A copy that was still in the broker when the run ended starts the next one."""
    first = runs.claim("a")
    runs.ledger.complete_alone(first.claim, '"one"')
    assert runs.claim("b").attempt == 1


def test_an_enqueued_message_joins_the_open_run(runs: Runs) -> None:
    """With `duplicate="answer"` a second message is sent, and belongs to the run that was open."""
    first = runs.claim("a")
    assert runs.enqueue("b") == "a"
    runs.ledger.complete_alone(first.claim, '"one"')
    assert runs.answer("b").result_json == '"one"'


def test_a_redelivery_of_an_ended_run_is_answered_while_a_later_run_works(runs: Runs) -> None:
    """A redelivery of run 1's message gets its result, although run 2 is at work."""
    runs.done("a", '"one"')
    second = runs.claim("b")
    assert runs.answer("a", redelivered=True).result_json == '"one"'
    assert runs.busy("b").same_work  # another delivery of the message of run 2
    runs.ledger.complete_alone(second.claim, '"two"')
    assert runs.answer("a", redelivered=True).result_json == '"one"'


def test_a_second_message_takes_over_the_run(runs: Runs) -> None:
    """After a crash another message continues the run. Both messages get its result."""
    runs.claim("a")
    runs.book.expire_all()
    second = runs.claim("b")
    assert (second.attempt, second.takeover) == (2, True)
    runs.ledger.complete_alone(second.claim, '"one"')
    assert runs.answer("a").result_json == '"one"'
    assert runs.answer("b").result_json == '"one"'


def test_two_first_messages_at_once_open_one_run(runs: Runs) -> None:
    """Of two messages that claim at the same moment, one opens the run, and the other meets it."""
    found: list[Any] = []

    def claim(message: str) -> None:
        ledger = runs.book.again()
        found.append(ledger.claim(runs.request(message)))

    threads = [threading.Thread(target=claim, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(each).__name__ for each in found) == ["Busy", "Claimed"]
    [busy] = [each for each in found if isinstance(each, Busy)]
    assert busy.same_work or busy.started  # never dropped
    assert runs.pointer()[1] is None


@pytest.mark.parametrize("step", ["claim", "peek", "join"])
def test_a_run_that_ends_within_a_claim_does_not_answer_a_new_message(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """If the open run ends after a claim has read it, a message that has not joined it is late. It
    begins the next run."""
    if not runs.book.locks_rows:
        pytest.skip("a claim stops all writers")
    first, holder = runs.claim("a"), runs.book.again()

    def end(known: Callable[..., Any]) -> Callable[..., Any]:
        def found(*args: Any, **kwargs: Any) -> Any:
            run = known(*args, **kwargs)
            if runs.record("a").state == State.PROCESSING:
                holder.complete_alone(first.claim, '"one"')
            return run

        return found

    with monkeypatch.context() as patch:
        patch.setattr(claiming, "run_of", end(claiming.run_of))
        patch.setattr(messages.runs, "run_of", end(messages.runs.run_of))
        if step == "claim":
            assert runs.claim("b").claim.work == run_id(BASE, "b")
        elif step == "peek":
            assert isinstance(runs.ledger.peek(runs.request("b")), Busy)
        else:
            runs.ledger.join(runs.request("b"))
            assert "b" not in runs.members()


@pytest.mark.parametrize("how", ["replace", "attach", "answer"])
@pytest.mark.parametrize("ends", ["open", "following", "next"])
def test_a_run_that_ends_within_an_enqueue_takes_no_message(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, ends: str, how: str
) -> None:
    """If the open run ends after `enqueue()` has read it, its message opens the next one. The same
    holds if the next one is revoked. If that one still follows, the message is for the open run."""
    if not runs.book.locks_rows:
        pytest.skip("an enqueue stops all writers")
    first, holder, ended = runs.claim("a"), runs.book.again(), []
    if ends != "open":
        runs.put("b")
    if ends == "next":
        holder.complete_alone(first.claim, '"one"')
    known = outbox.run_of

    def find(*args: Any, **kwargs: Any) -> Any:
        run = known(*args, **kwargs)
        if not ended:
            if ends == "open":
                holder.complete_alone(first.claim, '"one"')
            else:
                holder.revoke(run_id(BASE, "b"), message="b")
            ended.append(ends)
        return run

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "run_of", find)
        {"replace": runs.put, "attach": runs.attach, "answer": runs.enqueue}[how]("c")
    if ends != "following":
        assert runs.pointer() == ("c", None)
        assert runs.claim("c").attempt == 1
    elif how == "replace":
        assert runs.pointer() == ("a", "c")
    else:
        assert runs.members().get("c") == ("a" if how == "answer" else None)


# -- (c) members of an ended run ------------------------------------------------------------------


def test_members_of_a_failed_run_read_its_error(runs: Runs) -> None:
    """The members of a run that gave up are answered FAILED with its error. They never run."""
    first = runs.claim("a")
    runs.defer("b")
    assert runs.ledger.fail(first.claim, "ValueError: boom", again_in_s=None)
    for message in ("a", "b"):
        answer = runs.answer(message, deferrals=int(message == "b"))
        assert (answer.decision, answer.error) == (Decision.FAILED, "ValueError: boom")
        assert answer.recorded_as == run_id(BASE, "a")
        assert answer.later is None
    runs.claim("c")
    assert runs.answer("a").later == run_id(BASE, "c")


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_members_of_a_revoked_or_expired_run_are_revoked(runs: Runs, end: str) -> None:
    """The members of a run that was revoked, or whose message expired, read REVOKED. A new message
    opens the next run."""
    runs.enqueue("a")
    runs.enqueue("b")
    run = run_id(BASE, "a")
    if end == "revoked":
        assert runs.ledger.revoke(run, message="a")
    else:
        assert runs.ledger.expire(run, message=MessageRef("a"))
    assert runs.answer("b").decision is Decision.REVOKED
    assert runs.claim("c").attempt == 1


def test_a_member_of_a_purged_run_is_too_old(runs: Runs) -> None:
    """A member whose run was purged does not run again, whatever its own age."""
    runs.done("a")
    assert runs.book.purge() == 1
    assert runs.answer("a").decision is Decision.TOO_OLD
    assert runs.answer("b", may_create=False).decision is Decision.TOO_OLD
    assert runs.claim("b").attempt == 1


def test_a_purge_deletes_run_members_and_pointer(runs: Runs) -> None:
    """If the memberships are as old as the record, a purge deletes all rows of the run."""
    runs.done("a")
    with runs.book.engine.begin() as db:
        db.execute(sa.update(MESSAGES).values(updated=1))
        db.execute(sa.update(RUNS).values(updated=1))
    assert runs.book.purge() == 1
    assert runs.members() == {}
    with runs.book.engine.connect() as db:
        assert db.execute(sa.select(sa.func.count()).select_from(RUNS)).scalar() == 0


# -- (d) how a run ends ---------------------------------------------------------------------------


def test_a_promised_retry_keeps_the_run_open(runs: Runs) -> None:
    """A run whose message is retried stays open. Its retry, or another message, makes the next
    attempt."""
    runs.fail("a", again_in_s=60.0)
    second = runs.claim("b")
    assert second.attempt == 2
    assert runs.ledger.fail(second.claim, "ValueError: boom", again_in_s=60.0)
    assert runs.claim("a", retries=1).attempt == 3
    assert runs.pointer() == ("a", None)


def test_a_promised_retry_silences_enqueue_until_it_is_overdue(runs: Runs) -> None:
    """While a retry is promised, `attach` finds the run. Once it is overdue, the call is sent."""
    runs.fail("a", again_in_s=60.0)
    assert runs.attach("b") == "a"
    runs.book.expire_all()
    assert runs.attach("c") is None
    assert runs.members()["c"] == "a"
    assert runs.claim("c").attempt == 2


def test_a_retry_that_expires_ends_the_run(runs: Runs) -> None:
    """If the message of a promised retry expires, its run ends, and the next message opens
    another."""
    runs.enqueue("a")
    runs.fail("a", again_in_s=60.0)
    assert runs.ledger.expire(run_id(BASE, "a"), message=MessageRef("a", retries=1))
    assert runs.overdue() == []
    assert runs.answer("a", retries=2).decision is Decision.REVOKED
    assert runs.claim("b").claim.work == run_id(BASE, "b")


def test_dead_stays_open_until_an_operator_requeues_it(runs: Runs) -> None:
    """A DEAD run answers all messages of its work. After a requeue the next one continues it."""
    runs.claim("a")
    for message in ("b", "c"):
        runs.book.expire_all()
        answer = runs.ledger.claim(runs.request(message, max_crashes=2))
    assert isinstance(answer, Answer)
    assert (answer.decision, answer.crashes) == (Decision.BURY, 2)
    # A peek writes no membership. So it answers members only.
    assert isinstance(runs.ledger.peek(runs.request("d")), Busy)
    assert isinstance(runs.ledger.claim(runs.request("d")), Answer)
    assert runs.answer("d").decision is Decision.DEAD
    assert runs.members() == dict.fromkeys("abcd", "a")
    assert runs.ledger.requeue(run_id(BASE, "a"), reason="fixed")
    assert runs.claim("c").attempt == 3
    assert runs.members() == dict.fromkeys("abcd", "a")


def test_revoking_another_member_ends_that_member_alone(runs: Runs) -> None:
    """If a member that did not open the run is revoked at work, the run is NEW again."""
    runs.claim("a")
    runs.book.expire_all()
    runs.claim("b")
    assert runs.ledger.revoke(run_id(BASE, "a"), message="b")
    assert runs.record("a").state == State.NEW
    runs.book.expire_all()  # its holder releases the key
    assert runs.claim("a").attempt == 3
    assert runs.ledger.revoke(run_id(BASE, "a"), message="a")
    assert runs.answer("b").decision is Decision.REVOKED


def test_revoking_a_replaced_message_does_not_end_the_newer_call(runs: Runs) -> None:
    """After a call was replaced, only the newest message ends the run if it is revoked."""
    runs.enqueue("a")
    assert runs.put("b") == "a"
    assert not runs.ledger.revoke(run_id(BASE, "a"), message="a")
    assert runs.overdue() == ["b"]
    assert runs.ledger.revoke(run_id(BASE, "a"), message="b")
    assert runs.answer("b").decision is Decision.REVOKED


def test_a_call_that_is_stored_during_a_revocation_is_not_lost(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call replaces the one whose message is being revoked. It replaces it before, so that the
    older message ends nothing, or it opens the next run."""
    runs.enqueue("a")
    other, known = Runs(runs.book), messages._may_end
    other.ledger = runs.book.again()
    replacing = threading.Thread(target=other.put, args=("b",))

    def may_end(*args: Any) -> bool:
        replacing.start()
        replacing.join(0.2)  # it waits for the lock of the revocation
        return known(*args)

    monkeypatch.setattr(messages, "_may_end", may_end)
    runs.ledger.revoke(run_id(BASE, "a"), message="a")
    replacing.join()
    assert runs.overdue() == ["b"]
    assert runs.claim("b").attempt == 1


@pytest.mark.parametrize("how", ["fails", "loses its transaction"])
def test_a_run_that_gave_up_leaves_its_line(runs: Runs, how: str) -> None:
    """Work with `order="strict"` keeps its position for a retry. A run that has no retry left gives
    the position up."""
    claimed = runs.claim("a", stored=True, in_line=True, strict=True)
    if how == "fails":
        assert runs.ledger.fail(claimed.claim, "boom", again_in_s=None)
    else:
        ended = runs.ledger.end_round(claimed.claim, "boom", most=1, again_in_s=None)
        assert ended is State.FAILED
    record = runs.record("a")
    assert (record.final, record.line, record.parked, record.due) == (2, None, None, None)
    assert runs.answer("a").decision is Decision.FAILED


# -- (e) a lapsed run -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["crashed", "given back"])
def test_a_lapsed_run_never_silences_enqueue(runs: Runs, how: str) -> None:
    """If nothing is known that continues a run, an `attach` sends its message, which joins and
    continues the run."""
    first = runs.claim("a")
    if how == "given back":
        runs.ledger.give_back(first.claim)
    runs.book.expire_all()
    assert runs.attach("b") is None
    assert runs.members()["b"] == "a"
    assert runs.overdue() == ["b"]
    second = runs.claim("b")
    assert (second.attempt, second.takeover) == (2, how == "crashed")


# -- (f) requeue ----------------------------------------------------------------------------------


def test_an_operator_resumes_a_failed_run_unless_a_later_one_is_open(runs: Runs) -> None:
    """A requeue resumes a FAILED run. If a later run is open, it is refused, and names that run."""
    run = run_id(BASE, "a")
    runs.fail("a", again_in_s=None)
    assert runs.ledger.requeue(run, reason="fixed")
    runs.fail("a", again_in_s=None)
    second = runs.claim("b")
    with pytest.raises(AlreadyEnqueuedError, match="run:b"):
        runs.ledger.requeue(run, reason="fixed")
    runs.ledger.complete_alone(second.claim, None)
    assert runs.ledger.requeue(run, reason="fixed")
    assert runs.pointer() == ("a", None)
    assert runs.claim("a").attempt == 3


@pytest.mark.parametrize("how", ["dead", "left"])
def test_an_operator_requeues_a_run_that_another_one_follows(runs: Runs, how: str) -> None:
    """It is still the open run, and the one that follows waits for its end."""
    runs.claim("a", stored=True)
    assert runs.put("b") == "b"
    runs.book.expire_all()
    if how == "dead":
        assert isinstance(runs.ledger.claim(runs.request("a", max_crashes=1)), Answer)
    runs.busy("b")
    action = Action.REQUEUE if how == "dead" else Action.REQUEUE_LEFT
    by = Said("ann", "fixed")
    assert runs.ledger.change(run_id(BASE, "a"), action, by=by).changed
    assert runs.pointer() == ("a", "b")
    runs.busy("b")
    runs.done("a")
    assert runs.claim("b").claim.work == run_id(BASE, "b")


@pytest.mark.parametrize("how", ["sent again", "requeued"])
def test_a_message_that_is_sent_again_resumes_its_failed_run(runs: Runs, how: str) -> None:
    """A person sends the id of a FAILED run's message again, or requeues its job. That resumes the
    run, unless a later one is open."""
    again = {"resumes": True} if how == "requeued" else {}

    def request(sending: str) -> ClaimRequest:
        ref = MessageRef("a", sending=sending if how == "sent again" else "1")
        return _with(runs.request("a", **again), ref)

    first = runs.ledger.claim(_with(runs.request("a"), MessageRef("a", sending="1")))
    assert runs.ledger.fail(first.claim, "boom", again_in_s=None)
    second = runs.ledger.claim(request("2"))
    assert isinstance(second, Claimed)
    assert second.attempt == 2
    assert runs.ledger.fail(second.claim, "boom", again_in_s=None)
    runs.claim("b")
    refused = runs.ledger.claim(request("3"))
    assert isinstance(refused, Answer)
    assert refused.decision is Decision.FAILED
    assert refused.later == run_id(BASE, "b")


def test_an_enqueued_run_that_failed_is_resumed_by_its_id(runs: Runs) -> None:
    """The id of a message that `enqueue()` stored is sent again after its run has failed. It runs,
    and the stored call names the new message from then on."""
    call = json.dumps({"queue": "test", "message": "a@1"})
    first = _with(runs.request("a", call=call), MessageRef("a", sending="1"))
    runs.ledger.enqueue(None, first)
    claimed = runs.ledger.claim(first)
    assert runs.ledger.fail(claimed.claim, "boom", again_in_s=None)
    again = _with(runs.request("a"), MessageRef("a", sending="2"))
    resumed = runs.ledger.claim(again)
    assert isinstance(resumed, Claimed)
    assert resumed.attempt == 2
    assert runs.ledger.fail(resumed.claim, "boom", again_in_s=60.0)
    assert runs.overdue() == ["a@2"]


def test_a_run_whose_pointer_was_purged_is_the_open_one_after_a_requeue(runs: Runs) -> None:
    """A requeue writes the pointer again, so that the next message meets the requeued run."""
    runs.fail("a", again_in_s=None)
    with runs.book.engine.begin() as db:
        db.execute(sa.delete(RUNS))
    assert runs.ledger.requeue(run_id(BASE, "a"), reason="fixed")
    assert runs.pointer() == ("a", None)
    assert runs.claim("b").attempt == 2


def test_an_id_that_is_sent_again_after_done_begins_the_next_run(runs: Runs) -> None:
    """An id that is sent again after its run is DONE is a new message."""
    first = runs.ledger.claim(_with(runs.request("a"), MessageRef("a", sending="1")))
    runs.ledger.complete_alone(first.claim, '"one"')
    again = runs.ledger.claim(_with(runs.request("a"), MessageRef("a", sending="2")))
    assert isinstance(again, Claimed)
    assert again.attempt == 1


# -- the run that follows -------------------------------------------------------------------------


def test_replace_while_a_body_runs_stores_the_run_that_follows(runs: Runs) -> None:
    """`duplicate="replace"` during a body stores the call for the run that follows. Its message is
    deferred until the open run has ended. The newest call wins."""
    first = runs.claim("a")
    assert runs.put("b") == "b"
    assert runs.put("c") == "b"
    assert runs.pointer() == ("a", "b")
    assert runs.busy("c").same_work
    runs.defer("c")
    runs.ledger.complete_alone(first.claim, '"one"')
    assert runs.answer("b").decision is Decision.SUPERSEDED
    second = runs.claim("c", deferrals=1)
    assert (second.attempt, second.claim.work) == (1, run_id(BASE, "b"))
    assert runs.pointer() == ("b", None)
    runs.ledger.complete_alone(second.claim, '"two"')
    assert runs.answer("a").result_json == '"one"'


def test_a_replaced_message_of_a_run_that_follows_reads_that(runs: Runs) -> None:
    """While a run waits for the open one to end, its replaced message reads what replaced it. Its
    deferral is refused."""
    runs.claim("a")
    runs.put("b")
    runs.put("c")
    assert not runs.ledger.defer(runs.request("b"), lambda number: None)
    found = runs.ledger.peek(runs.request("b"))
    assert isinstance(found, Answer)
    assert (found.decision, found.replaced_by) == (Decision.SUPERSEDED, "c")


@pytest.mark.parametrize("waits", ["open", "following"])
def test_replace_follows_a_body_that_began_after_the_snapshot(runs: Runs, waits: str) -> None:
    """Under REPEATABLE READ, `replace` learns that a body has begun the call that waits in its own
    snapshot. It stores the run that follows."""
    if runs.book.kind not in ("mariadb", "mariadb in steps", "mysql"):
        pytest.skip("PostgreSQL refuses to write there, and SQLite has one writer")
    if waits == "following":
        first = runs.claim("first")
        runs.put("a")
    else:
        runs.enqueue("a")
    with runs.book.engine.execution_options(isolation_level="REPEATABLE READ").begin() as db:
        db.execute(sa.select(WORK)).all()
        if waits == "following":
            runs.ledger.complete_alone(first.claim, None)
        runs.claim("a")
        assert runs.put("b", db) == "b"
    assert runs.pointer() == ("a", "b")


def test_attach_looks_at_the_run_that_follows_first(runs: Runs) -> None:
    """While a run follows, `attach` finds its message, and an answering message joins it."""
    first = runs.claim("a")
    runs.put("b")
    assert runs.attach("c") == "b"
    assert runs.enqueue("d") == "b"
    runs.ledger.complete_alone(first.claim, '"one"')
    second = runs.claim("b")
    runs.ledger.complete_alone(second.claim, '"two"')
    assert runs.answer("d").result_json == '"two"'


def test_another_message_does_not_run_with_older_arguments(runs: Runs) -> None:
    """A run with a stored call runs by the message of that call. Another one waits for it."""
    first = runs.claim("a")
    runs.put("b")
    runs.ledger.complete_alone(first.claim, None)
    assert runs.busy("older").same_work
    runs.defer("older")
    assert runs.members()["older"] == "b"
    runs.done("b", '"two"')
    assert runs.answer("older", deferrals=1).result_json == '"two"'


def test_a_run_that_failed_is_continued_by_its_stored_call(runs: Runs) -> None:
    """The stored call of a run is due again after a failure, because only its message may run."""
    runs.enqueue("a")
    runs.fail("a", again_in_s=60.0)
    assert runs.busy("b").same_work
    assert runs.overdue() == ["a"]
    assert runs.claim("a", retries=1).attempt == 2


def test_a_following_run_that_was_revoked_follows_no_more(runs: Runs) -> None:
    """If the message of the run that follows is revoked, the next message opens a run of its
    own."""
    first = runs.claim("a")
    runs.put("b")
    assert runs.ledger.revoke(run_id(BASE, "b"), message="b")
    runs.ledger.complete_alone(first.claim, None)
    assert runs.answer("b").decision is Decision.REVOKED
    runs.done("c")
    assert runs.pointer() == ("c", None)


@pytest.mark.parametrize("how", ["replace", "attach", "answer"])
def test_enqueue_joins_no_following_run_that_was_revoked(runs: Runs, how: str) -> None:
    """The message of the run that follows is revoked while a body runs. After that `enqueue()`
    looks at the open run. A `replace` stores the run that follows anew."""
    first = runs.claim("a")
    runs.put("b")
    assert runs.ledger.revoke(run_id(BASE, "b"), message="b")
    if how == "attach":
        assert runs.attach("c") == "a"
    elif how == "answer":
        assert runs.enqueue("c") == "a"
    else:
        assert runs.put("c") == "c"
        assert runs.pointer() == ("a", "c")
        runs.ledger.complete_alone(first.claim, None)
        assert runs.claim("c").attempt == 1


def test_a_run_whose_call_is_sent_no_more_runs_by_any_message(runs: Runs) -> None:
    """A sweep that has sent a call in vain gives up. Then no message waits for that one."""
    runs.enqueue("a")
    runs.book.make_due()
    [overdue] = runs.ledger.overdue()
    assert runs.ledger.abandon(overdue, error="sent in vain")
    runs.done("b", '"one"')
    assert runs.answer("a").result_json == '"one"'


def test_a_replaced_holder_may_end_its_own_run_late(runs: Runs) -> None:
    """`replace` stores the run that follows even if the holder's lease has ended, because the
    holder may still complete its run with the older arguments."""
    first = runs.claim("a")
    runs.book.expire_all()
    assert runs.put("b") == "b"
    assert runs.pointer() == ("a", "b")
    runs.ledger.complete_alone(first.claim, '"older"')
    runs.done("b", '"newer"')
    assert runs.answer("a").result_json == '"older"'


def test_the_run_that_follows_ends_a_lapsed_one(runs: Runs) -> None:
    """If nothing continues the open run, the message of the run that follows ends it as FAILED, and
    begins. The commit of its paused holder is refused."""
    first = runs.claim("a")
    runs.put("b")
    runs.book.expire_all()
    second = runs.claim("b")
    assert second.claim.work == run_id(BASE, "b")
    assert runs.record("a").state == State.FAILED
    assert runs.answer("a").decision is Decision.FAILED
    assert not runs.ledger.fail(first.claim, "late")


def test_a_deferral_does_not_end_a_lapsed_run(runs: Runs) -> None:
    """If the message of the run that follows is deferred because other work has the key, the open
    run stays open, although it has lapsed."""
    runs.claim("a")
    runs.put("b")
    runs.book.expire_all()
    runs.book.claim(work="other order:1")
    assert not runs.ledger.park(runs.request("b", stored=True, in_line=True))
    runs.ledger.join(runs.request("b"))
    assert runs.pointer() == ("a", "b")
    assert runs.record("a").state == State.PROCESSING


def test_a_sweep_leaves_the_message_that_waits_to_its_queue(runs: Runs) -> None:
    """A deferral of the message of the run that follows puts its sweep off."""
    runs.claim("a")
    runs.put("b")
    assert runs.overdue() == ["b"]
    runs.defer("b")
    assert runs.ledger.overdue() == []


def test_a_repeated_enqueue_writes_nothing(runs: Runs) -> None:
    """An enqueue whose COMMIT got no answer is repeated, and changes no run."""
    runs.enqueue("a")
    first = runs.claim("a")
    runs.put("b")
    pointer = runs.pointer()
    assert runs.enqueue("a") == "a"
    assert runs.put("b") == "b"
    assert runs.attach("b") is None
    assert runs.pointer() == pointer
    runs.ledger.complete_alone(first.claim, None)
    assert runs.enqueue("a") == "a"
    assert runs.pointer() == pointer


# -- with other options ---------------------------------------------------------------------------


def test_a_rate_holds_the_next_run_back(runs: Runs) -> None:
    """With `rate=`, the next run starts when the rate allows it. The refused message opens
    nothing."""
    bounds = Bounds("order:1", 1, rate_of("1/h", 1))
    runs.done("a", bounds=bounds)
    found = runs.ledger.claim(runs.request("b", bounds=bounds))
    assert isinstance(found, Busy)
    assert found.too_early
    assert "b" not in runs.members()
    runs.book.pass_time(3_600_000_000)
    assert runs.claim("b", bounds=bounds).attempt == 1


def test_a_parked_message_opens_a_run_that_is_promoted_by_its_id(runs: Runs) -> None:
    """A parked message of a run is promoted, claims that run, and ends it."""
    other = runs.book.claim(work="other order:1")
    assert runs.ledger.park(runs.request("a", stored=True, in_line=True))
    runs.ledger.complete_alone(other.claim, None)
    promoted = runs.ledger.promote_next("order:1", expected_s=30.0)
    assert promoted is not None
    assert (promoted.work, promoted.message.name) == (run_id(BASE, "a"), "a")
    claimed = runs.claim("a", stored=True, in_line=True)
    assert (claimed.waited, claimed.claim.work) == (True, promoted.work)
    runs.ledger.complete_alone(claimed.claim, '"one"')
    assert runs.ledger.promote_next("order:1", expected_s=30.0) is None


# -- a guard that had once_per="key" --------------------------------------------------------------


def test_a_record_of_the_former_option_answers_the_message_that_it_names(runs: Runs) -> None:
    """After `"key"` was changed to `"run"`, an old DONE answers only its own message. Others open
    runs."""
    runs.done("old", '"before"', by_run=False)
    assert runs.claim("new").attempt == 1
    assert runs.answer("old").result_json == '"before"'


@pytest.mark.parametrize("state", [State.FAILED, State.NEW])
def test_a_record_of_the_former_option_is_continued_by_the_message_that_it_names(
    runs: Runs, state: State
) -> None:
    """An old FAILED or NEW record is continued by its own message. Others open runs."""
    if state is State.NEW:
        runs.enqueue("old", by_run=False)
    else:
        old = runs.claim("old", by_run=False)
        assert runs.ledger.fail(old.claim, "ValueError: boom", again_in_s=60.0)
    runs.done("new")
    again = runs.claim("old", retries=1)
    assert again.claim.work == BASE
    runs.ledger.complete_alone(again.claim, '"again"')
    assert runs.answer("new").result_json == '"done"'


def test_a_message_that_was_replaced_before_the_change_never_runs(runs: Runs) -> None:
    """`duplicate="replace"` replaced a call before `"key"` was changed to `"run"`. Its message is
    superseded after that, too."""
    runs.enqueue("older", by_run=False)
    newer = runs.request("newer", stored=True, by_run=False)
    runs.ledger.enqueue(None, newer, once=Once(lambda existing: newer, replaces=True))
    assert runs.answer("older").decision is Decision.SUPERSEDED
    runs.done("newer")
    assert runs.pointer() == (None, None)


def test_an_old_holder_blocks_by_its_key(runs: Runs) -> None:
    """A body that began before the change keeps its key, and commits."""
    old = runs.claim("old", by_run=False)
    assert not runs.busy("new").same_work
    runs.ledger.complete_alone(old.claim, '"before"')
    runs.claim("new")


def _with(request: ClaimRequest, message: MessageRef) -> ClaimRequest:
    return replace(request, message=message)


# -- what a claim costs ---------------------------------------------------------------------------


def test_a_claim_of_a_run_takes_sixteen_round_trips_on_postgresql(
    runs: Runs, postgres: Any
) -> None:
    """A claim that opens a run takes sixteen round trips, and one more for the first run of a key.
    A message of an ended run is answered in eight, and a completion alone takes one."""
    if runs.book.kind != "postgresql":
        pytest.skip("only PostgreSQL's protocol is counted")
    with Proxy(postgres.port) as proxy:
        url = runs.book.url.replace(f":{postgres.port}/", f":{proxy.port}/")
        runs.ledger = runs.book.again(url)

        def trips(ask: Callable[[], Any]) -> tuple[int, Any]:
            before = proxy.requests
            found = ask()
            return proxy.requests - before, found

        for number in range(8):  # connected and prepared
            runs.done(f"w{number}")
            runs.answer(f"w{number}")
        count, claimed = trips(lambda: runs.claim("a"))
        assert count == 16
        assert trips(lambda: runs.ledger.complete_alone(claimed.claim, None))[0] == 1
        asked = runs.request("a")
        assert trips(lambda: runs.ledger.claim(asked))[0] == 8
        first = replace(runs.request("b"), keys=("order:2",), work="ship order:2")
        assert trips(lambda: runs.ledger.claim(first))[0] == 17
