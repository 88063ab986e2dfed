"""Work that is enqueued once: what a second enqueue learns, and how it replaces a stored
message."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from contract.ledger.test_claims import ClaimByThread
from contract.ledger.test_concurrency import at_once

from taskguard.ledger.tables import MESSAGES, WORK
from taskguard.model.claims import Answer, Busy, Claimed, ClaimRequest, MessageRef, Overdue
from taskguard.model.records import Existing, Once
from taskguard.model.states import Decision, State

ROUNDS = 10


def asked(book: Any, message: str, **values: Any) -> ClaimRequest:
    """Return a request with the stored message."""
    call = json.dumps({"queue": "test", "message": message})
    made: ClaimRequest = book.request(1, message=message, call=call, **values)
    return made


class Enqueued:
    """The work that an enqueue found on record."""

    def __init__(self, instead: ClaimRequest | None = None) -> None:
        self.existing: Existing | None = None
        self.replaced = False
        self._instead = instead

    def found(self, existing: Existing) -> ClaimRequest | None:
        self.existing = existing
        self.replaced = self._instead is not None and not existing.begun
        return self._instead if self.replaced else None


def attach(book: Any, message: str, db: Any = None, **values: Any) -> Enqueued:
    enqueued = Enqueued()
    book.ledger.enqueue(db, asked(book, message, **values), once=Once(enqueued.found))
    return enqueued


def put_instead(book: Any, message: str, db: Any = None, **values: Any) -> Enqueued:
    enqueued = Enqueued(asked(book, message, **values))
    request = asked(book, message, **values)
    book.ledger.enqueue(db, request, once=Once(enqueued.found, replaces=True))
    return enqueued


def decision(found: Any) -> Decision:
    assert isinstance(found, Answer), found
    return found.decision


def test_the_first_enqueue_finds_nothing_and_the_second_finds_the_first(book: Any) -> None:
    """The first enqueue finds nothing, the second one finds the first and writes nothing. The
    transaction may be the user's or the ledger's."""
    with book.transaction() as db:
        assert attach(book, "a", db).existing is None
        second = attach(book, "b", db).existing
        assert second is not None
        assert (second.message, second.begun) == ("a", False)
    before = book.work()
    third = attach(book, "c").existing
    assert third == second
    assert third.call == before.call
    assert book.work() == before


def test_asked_again_for_the_same_message_it_is_no_duplicate(book: Any) -> None:
    """A repeated enqueue of the same message, whose COMMIT got no answer, is no duplicate."""
    attach(book, "a")
    assert attach(book, "a").existing is None
    assert put_instead(book, "a").existing is None


@pytest.mark.parametrize("duplicate", ["answer", "attach", "replace"])
@pytest.mark.parametrize("end", ["waits", "failed"])
def test_a_repeated_enqueue_of_a_replaced_message_writes_nothing(
    book: Any, end: str, duplicate: str
) -> None:
    """If COMMIT got no answer, an enqueue is repeated. Another message may have replaced the first
    one by then. That message remains the work's message, and runs it."""
    attach(book, "a")
    put_instead(book, "b")
    if end == "failed":
        book.ledger.fail(book.claim(message="b").claim, "boom")
    before = book.work()
    if duplicate == "replace":
        assert not put_instead(book, "a").replaced
    elif duplicate == "attach":
        existing = attach(book, "a").existing
        assert (existing and existing.message) == (None if end == "failed" else "b")
    else:
        book.ledger.enqueue(None, asked(book, "a"))
    assert book.work() == before
    assert decision(book.ledger.claim(book.request(message="a"))) is Decision.SUPERSEDED
    book.claim(message="b", retries=int(end == "failed"))


def test_a_replaced_message_is_not_written_in_the_same_transaction(book: Any) -> None:
    """A transaction that enqueues a message again after it replaced it keeps the newer one."""
    with book.transaction() as db:
        attach(book, "a", db)
        assert put_instead(book, "b", db).replaced
        assert not put_instead(book, "a", db).replaced
    assert json.loads(book.work().call)["message"] == "b"
    book.claim(message="b")


def test_work_in_progress_is_found_as_begun(book: Any) -> None:
    """Work in progress is reported as begun, even after its lease if a sweep sends it again."""
    book.claim(message="a")
    enqueued = attach(book, "b").existing
    assert enqueued is not None
    assert (enqueued.message, enqueued.begun) == ("a", True)
    book.expire()
    # No sweep would send this holder's message again.
    assert attach(book, "b").existing is None
    enqueued = attach(book, "c").existing
    assert enqueued is not None
    assert (enqueued.message, enqueued.begun) == ("b", True)


@pytest.mark.parametrize("end", ["done", "failed", "dead", "revoked"])
def test_work_that_has_ended_is_no_duplicate(book: Any, end: str) -> None:
    """Ended work is no duplicate. FAILED is NEW again; other work stays, and the message gets its
    answer."""
    claimed = book.claim(message="a", call="{}", max_crashes=1)
    if end == "done":
        book.ledger.complete_alone(claimed.claim, "1")
    elif end == "failed":
        book.ledger.fail(claimed.claim, "boom")
    elif end == "revoked":
        book.ledger.revoke("ship order:1", message="a")
    else:
        book.expire()
        book.ledger.claim(book.request(message="x", max_crashes=1))
    state = book.work().state
    assert attach(book, "b").existing is None
    assert book.work().state == (State.NEW if end == "failed" else state)


def test_a_replaced_call_does_not_run_and_the_newer_one_does(book: Any) -> None:
    """A replaced message never runs, whether its work waits, runs, failed, crashed or was requeued.
    The newer one does."""
    attach(book, "a")
    assert put_instead(book, "b").replaced
    assert put_instead(book, "c").replaced
    assert json.loads(book.work().call)["message"] == "c"
    superseded = Answer(Decision.SUPERSEDED, replaced_by="c")
    for older in ("a", "b"):
        assert book.ledger.claim(book.request(message=older)) == superseded
    claimed = book.claim(message="c")
    assert (claimed.attempt, book.work().final) == (1, 0)
    assert book.ledger.claim(book.request(message="a")) == superseded
    book.expire()
    assert book.ledger.claim(book.request(message="b")) == superseded
    book.ledger.fail(book.claim(message="c").claim, "boom")
    assert book.ledger.claim(book.request(message="a")) == superseded
    book.ledger.requeue("ship order:1", reason="mended")
    assert book.ledger.claim(book.request(message="a")) == superseded
    book.ledger.complete_alone(book.claim(message="c").claim, "1")
    assert decision(book.ledger.claim(book.request(message="a"))) is Decision.DONE


def test_the_older_message_is_not_put_off_either(book: Any) -> None:
    """The older message is dropped, not deferred, if it finds the key taken."""
    attach(book, "a")
    put_instead(book, "b")
    book.claim(message="b")
    assert not book.ledger.defer(book.request(message="a"), lambda _: pytest.fail("published"))


def test_what_is_sent_again_is_the_newer_message(book: Any) -> None:
    """A sweep sends the newer message, with its own numbers."""
    attach(book, "a")
    book.ledger.enqueue(
        None,
        asked(book, "b"),
        due_in_s=0,
        once=Once(Enqueued(asked(book, "b")).found, replaces=True),
    )
    (found,) = book.ledger.overdue()
    assert (found.message.name, found.message.number) == ("b", (0, 0))


def test_rolled_back_the_first_call_remains(book: Any) -> None:
    """If the replacement is rolled back, the first message remains."""
    attach(book, "a")
    with book.transaction(commits=False) as db:
        assert put_instead(book, "b", db).replaced
    assert json.loads(book.work().call)["message"] == "a"
    book.claim(message="a")


@pytest.mark.parametrize("how", ["at work", "given back after progress"])
def test_a_call_that_was_begun_is_not_replaced(book: Any, how: str) -> None:
    """Work that has begun is not replaced, because part of it may be done with the older
    arguments."""
    attach(book, "a")
    claimed = book.claim(message="a")
    if how != "at work":
        book.ledger.note(claimed.claim, "1")
        book.ledger.give_back(claimed.claim)
    enqueued = put_instead(book, "b")
    assert enqueued.existing is not None
    assert enqueued.existing.begun
    assert not enqueued.replaced
    assert json.loads(book.work().call)["message"] == "a"


def test_a_call_that_was_given_back_untouched_is_replaced(book: Any) -> None:
    """Work that was given back untouched, as at a shutdown, is replaced. Its message comes again,
    and does not run."""
    attach(book, "a")
    book.ledger.give_back(book.claim(message="a").claim)
    assert put_instead(book, "b").replaced
    assert decision(book.ledger.claim(book.request(message="a"))) is Decision.SUPERSEDED
    book.claim(message="b")


def test_a_failed_call_whose_retry_may_come_is_replaced(book: Any) -> None:
    """Failed work whose retry may come is replaced. The retry would run with the older
    arguments."""
    attach(book, "a")
    book.ledger.fail(book.claim(message="a").claim, "boom")
    assert put_instead(book, "b").existing is None
    late = book.ledger.claim(book.request(message="a", retries=1))
    assert decision(late) is Decision.SUPERSEDED
    assert book.claim(message="b").attempt == 2


def test_a_replaced_call_that_cannot_be_sent_is_failed_and_not_revoked(book: Any) -> None:
    """If the replacing message cannot be sent, the work is FAILED and not revoked, so it can be
    enqueued again."""
    attach(book, "a")
    put_instead(book, "b")
    (found,) = book.ledger.overdue(work="ship order:1")
    assert book.ledger.abandon(found, error="no such task")
    assert (book.work().state, book.work().final) == (State.FAILED, 0)
    assert attach(book, "c").existing is None
    book.claim(message="c")


def test_work_that_has_failed_for_good_is_not_abandoned(book: Any) -> None:
    """A sweep that found its message overdue leaves FAILED, final work as it is."""
    final = {"state": "FAILED", "final": 1, "fence": 7, "owner": "", "lease_until": 0}
    stored = {"message": "m", "retries": 0, "call": "{}", "due": 1, "error": "revoked"}
    numbers = {"attempts": 0, "crashes": 0, "crashed_owner": ""}
    book.put(work={**final, **stored, **numbers}, key=None, recorded=(0, 0))
    before = book.work()
    found = Overdue("ship order:1", "ship", MessageRef("m"), "{}", due_us=1)
    assert book.ledger.abandon(found, error="no such task") is False
    assert book.work() == before


def test_a_message_of_another_sender_may_begin_what_waits(book: Any) -> None:
    """A message that was sent without enqueue() may begin the waiting work, because it was not
    replaced."""
    attach(book, "a")
    put_instead(book, "b")
    book.claim(message="sent without enqueue()")
    assert book.work().final == 0


def test_a_claim_that_is_asked_again_with_its_key_in_hand_gets_what_was_replaced(book: Any) -> None:
    """A repeated claim gets the replaced work's answer if the first answer was lost between key and
    work."""
    attach(book, "a")
    put_instead(book, "b")
    asking = book.request(message="b")
    assert isinstance(book.ledger.claim(replace(asking, work=None)), Claimed)
    assert isinstance(book.ledger.claim(asking), Claimed)


def test_a_newer_call_may_have_another_fingerprint(book: Any) -> None:
    """A newer message may have another fingerprint: the newest arguments count."""
    attach(book, "a", fingerprint="1")
    put_instead(book, "b", fingerprint="2")
    book.claim(message="b", fingerprint="2")


def test_eight_enqueue_at_once_and_one_is_the_first(book: Any) -> None:
    """Of eight enqueues at once, one is the first. The others learn of its message, and one message
    is stored."""
    for _ in range(3):
        enqueued: list[Enqueued] = []
        at_once(8, lambda number, t=enqueued: t.append(attach(book, f"m{number}")))  # type: ignore[misc]
        first = json.loads(book.work().call)["message"]
        assert [each.existing and each.existing.message for each in enqueued].count(None) == 1
        assert {each.existing.message for each in enqueued if each.existing} == {first}
        book.ledger.complete_alone(book.claim(message=first).claim, None)
        book.forget()


def test_eight_replace_at_once_and_the_last_one_runs(book: Any) -> None:
    """Of eight replacements at once, the last one runs, and every other message is superseded."""
    for _ in range(3):
        enqueued: list[Enqueued] = []
        at_once(8, lambda number, t=enqueued: t.append(put_instead(book, f"m{number}")))  # type: ignore[misc]
        assert [each.replaced for each in enqueued].count(False) == 1
        last = json.loads(book.work().call)["message"]
        for number in range(8):
            if f"m{number}" != last:
                late = book.ledger.claim(book.request(message=f"m{number}"))
                assert decision(late) is Decision.SUPERSEDED
        book.ledger.complete_alone(book.claim(message=last).claim, None)
        book.forget()


def test_of_a_claim_and_a_replacement_at_once_one_wins(book: Any) -> None:
    """If a claim and a replacement meet, either the older message gets the work, or it is
    superseded and never runs."""
    seen = set()
    for number in range(ROUNDS):
        older, newer = f"a{number}", f"b{number}"
        attach(book, older)
        found: dict[int, Any] = {}

        def race(side: int, older: str = older, newer: str = newer, at: Any = found) -> None:
            if side == 0:
                at[side] = book.ledger.claim(book.request(message=older))
            else:
                at[side] = put_instead(book, newer)

        at_once(2, race)
        claimed = isinstance(found[0], Claimed)
        seen.add(claimed)
        assert found[1].replaced is not claimed
        if claimed:
            assert found[1].existing.begun
            assert json.loads(book.work().call)["message"] == older
            book.ledger.complete_alone(found[0].claim, None)
        else:
            assert isinstance(found[0], Busy) or found[0].decision is Decision.SUPERSEDED
            again = book.ledger.claim(book.request(message=older))
            assert decision(again) is Decision.SUPERSEDED
            book.ledger.complete_alone(book.claim(message=newer).claim, None)
        book.forget()


@pytest.mark.parametrize("then", [State.NEW, State.FAILED])
def test_a_claim_that_waited_for_a_replacement_does_not_run_the_older_call(
    book: Any, then: State
) -> None:
    """A claim that waited for a replacement reads the newest record, and does not run the older
    message.

    That holds even if the newer message was delivered in that time and will be retried, or was
    given back.
    """
    if not book.locks_rows or book.kind == "memory":
        pytest.skip("one writer at a time, or no server that shows which session waits")
    with closing(book.again(lock_timeout_s=30.0)) as patient:
        book = replace(book, ledger=patient)
        attach(book, "m")
        with ClaimByThread(book) as answers, book.transaction() as db:
            assert put_instead(book, "b", db).replaced
            answers.begin()
            if then is State.FAILED:
                claimed_since = {"state": then.value, "final": 0, "attempts": 1}
                now = {"fence": int(time.time() * 1e6), "owner": ""}
                db.execute(sa.update(WORK).values(**claimed_since, **now))
        assert decision(answers.found) is Decision.SUPERSEDED
        assert book.key() is None or book.key().owner == ""
        book.claim(message="b")


def test_a_replacement_that_waited_for_a_claim_finds_the_work_begun(book: Any) -> None:
    """A replacement that waited for an uncommitted claim learns that the work has begun."""
    if not book.locks_rows or book.kind == "memory":
        pytest.skip("one writer at a time, or no statement to set it going by")
    attach(book, "a")
    enqueued: list[Enqueued] = []
    thread = threading.Thread(target=lambda: enqueued.append(put_instead(book, "b")))
    with book.engine.begin() as db:
        set_going = {"state": State.PROCESSING.value, "owner": "x:a", "lease_until": 2**60}
        sets = ", ".join(f"{name} = :{name}" for name in set_going)
        db.execute(sa.text(f"update taskguard_work set {sets}"), set_going)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join()
    assert enqueued[0].existing is not None
    assert enqueued[0].existing.begun
    assert not enqueued[0].replaced


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_second_waits_for_the_transaction_of_the_first(book: Any, end: str) -> None:
    """The second enqueue waits for the first one's transaction. After a rollback there is no first
    one."""
    if not book.locks_rows:
        pytest.skip("one writer at a time")
    enqueued: list[Enqueued] = []
    thread = threading.Thread(target=lambda: enqueued.append(attach(book, "b")))
    with book.transaction(commits=end == "commit") as db:
        attach(book, "a", db)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join()
    assert (enqueued[0].existing is not None) == (end == "commit")
    assert json.loads(book.work().call)["message"] == ("a" if end == "commit" else "b")


def test_an_older_snapshot_finds_what_was_enqueued_since(book: Any) -> None:
    """Under REPEATABLE READ, the default of MariaDB and MySQL, an enqueue learns of work that was
    enqueued after its snapshot."""
    if book.kind not in ("mariadb", "mariadb in steps", "mysql"):
        pytest.skip("PostgreSQL refuses to write there, and SQLite has one writer")
    level: Callable[[], Any] = book.engine.execution_options(
        isolation_level="REPEATABLE READ"
    ).begin
    with level() as db:
        if book.ledger.database.dialect.keeps_snapshot(db):
            pytest.skip("this server refuses to write to what has changed since")
        assert db.execute(sa.text("select count(*) from taskguard_work")).scalar() == 0
        attach(book, "a")
        enqueued = attach(book, "b", db).existing
        assert enqueued is not None
        assert enqueued.message == "a"
        assert put_instead(book, "c", db).replaced
    assert json.loads(book.work().call)["message"] == "c"


@pytest.mark.parametrize("duplicate", ["answer", "attach", "replace"])
@pytest.mark.parametrize("end", ["waits", "failed"])
def test_an_older_snapshot_learns_that_its_message_was_replaced(
    book: Any, end: str, duplicate: str
) -> None:
    """Under REPEATABLE READ, a repeated enqueue writes nothing, even if another message has
    replaced its message after its snapshot."""
    if book.kind not in ("mariadb", "mariadb in steps", "mysql"):
        pytest.skip("PostgreSQL refuses to write there, and SQLite has one writer")
    attach(book, "a")
    with book.engine.execution_options(isolation_level="REPEATABLE READ").begin() as db:
        if book.ledger.database.dialect.keeps_snapshot(db):
            pytest.skip("this server refuses to write to what has changed since")
        assert db.execute(sa.text("select count(*) from taskguard_work")).scalar() == 1
        assert put_instead(book, "b").replaced
        if end == "failed":
            book.ledger.fail(book.claim(message="b").claim, "boom")
        before = book.work()
        if duplicate == "replace":
            assert not put_instead(book, "a", db).replaced
        elif duplicate == "attach":
            attach(book, "a", db)
        else:
            book.ledger.enqueue(db, asked(book, "a"))
    assert book.work() == before


def test_replaced_messages_are_forgotten_with_their_work(book: Any) -> None:
    """Each replaced message leaves one row until its work is purged."""
    if book.kind == "memory":
        pytest.skip("it forgets no work")
    attach(book, "a")
    for number in range(3):
        put_instead(book, f"b{number}")
    with book.engine.connect() as db:
        assert db.execute(sa.select(sa.func.count()).select_from(MESSAGES)).scalar() == 3
    book.ledger.complete_alone(book.claim(message="b2").claim, None)
    with book.engine.begin() as db:
        db.execute(sa.text("update taskguard_work set finished = 1"))
        db.execute(sa.text("update taskguard_messages set updated = 1"))
    assert book.ledger.purge(older_than_s=3600).messages == 3


def test_the_request_may_be_made_anew_from_the_record(book: Any) -> None:
    """The replacing request may be built from the work on record, as Celery's, which keeps the
    first id."""
    attach(book, "a")
    mine = asked(book, "b")

    def found(existing: Existing) -> ClaimRequest:
        call = json.dumps({"message": "a again"})
        named = replace(mine.message, id=f"{existing.message} again")
        return replace(mine, message=named, call=call)

    book.ledger.enqueue(None, mine, once=Once(found, replaces=True))
    assert book.work().message == "a again"
    assert decision(book.ledger.claim(book.request(message="a"))) is Decision.SUPERSEDED
    book.claim(message="a again")
