"""Messages that supersede older ones: which message runs, which waits, and which does neither.

All tests use one account's key. Each work item has a message of its own, whose number is its send
time.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from typing import Any

import pytest
import sqlalchemy as sa

from support.claims import request
from support.threads import work_off
from taskguard.errors import StaleTokenError
from taskguard.ledger.tables import KEYS
from taskguard.locks.base import Renewal
from taskguard.model.claims import Answer, Busy, Claimed, ClaimRequest, MessageRef, ParkedNewest
from taskguard.model.lease import Owner
from taskguard.model.states import OUTDATED, Decision

KEY = "account:1"
EXPECTED_S = 30.0


def message_of(number: int, retries: int = 0) -> MessageRef:
    return MessageRef(f"m{number}", retries)


def delivery(number: int, newest: str = "latest", **values: Any) -> ClaimRequest:
    """Return a request for a message's work, sent `number` µs after the first one."""
    values = {
        "keys": (KEY,),
        "message": message_of(number),
        "newest": newest,
        "sent_us": 1_000_000 + number,
        **values,
    }
    return request(number, **values)


def claim(book: Any, number: int, newest: str = "latest", **values: Any) -> Claimed:
    found = book.ledger.claim(delivery(number, newest, **values))
    assert isinstance(found, Claimed), found
    return found


def refused(book: Any, number: int, newest: str = "latest", **values: Any) -> bool:
    """Return whether a claim is answered as superseded, and the record says so for good."""
    found = book.ledger.claim(delivery(number, newest, **values))
    if not isinstance(found, Answer):
        return False
    return found.decision is Decision.OUTDATED and is_outdated(book, number)


def is_outdated(book: Any, number: int) -> bool:
    row = book.work(number)
    ended = (str(row.state), bool(row.final), row.owner) == ("FAILED", True, "")
    return ended and row.error.startswith(OUTDATED)


def park(book: Any, number: int, **values: Any) -> ParkedNewest | Answer | None:
    asked = delivery(number, **values)
    call = json.dumps({"queue": "test", "message": asked.message.name})
    found: ParkedNewest | Answer | None = book.ledger.park_newest(
        delivery(number, **{"call": call, **values})
    )
    return found


def parked(book: Any, number: int, **values: Any) -> list[str]:
    """Park it, and return the messages that it superseded."""
    found = park(book, number, **values)
    assert isinstance(found, ParkedNewest), found
    return [each.message.id for each in found.replaced]


def waiting(book: Any) -> list[str]:
    return [each.message for each in book.ledger.waiting()]


class TestLatest:
    def test_a_newer_one_waits_for_the_one_at_work(self, book: Any) -> None:
        """With `busy="latest"`, the holder is left alone, and completes."""
        holder = claim(book, 1)
        assert isinstance(book.ledger.claim(delivery(2)), Busy)
        book.ledger.complete_alone(holder.claim, None)
        claim(book, 2)

    def test_an_older_one_that_comes_late(self, book: Any) -> None:
        """An older message that arrives late never runs, even long after the newer one has run."""
        book.ledger.complete_alone(claim(book, 2).claim, None)
        assert refused(book, 1)
        assert refused(book, 1)

    def test_an_older_one_that_comes_while_a_newer_one_is_at_work(self, book: Any) -> None:
        claim(book, 2)
        assert refused(book, 1)

    def test_a_newer_one_that_failed(self, book: Any) -> None:
        """If a newer message has failed, older ones are still superseded, and its retry runs."""
        book.ledger.fail(claim(book, 2).claim, "boom")
        assert refused(book, 1)
        claim(book, 2, message=message_of(2, retries=1))

    def test_a_retry_of_an_older_one(self, book: Any) -> None:
        """The retry of an older message is superseded if a newer one has begun meanwhile."""
        book.ledger.fail(claim(book, 1).claim, "boom")
        book.ledger.complete_alone(claim(book, 2).claim, None)
        assert refused(book, 1, message=message_of(1, retries=1))

    def test_a_redelivery_of_the_newest(self, book: Any) -> None:
        """If the newest message's holder dies, a redelivery takes it over. If it was given back, it
        runs again."""
        claim(book, 2)
        book.expire_all()
        found = claim(book, 2, redelivered=True)
        assert found.takeover
        assert book.ledger.give_back(found.claim)
        claim(book, 2, redelivered=True)

    def test_a_dead_holder_that_is_superseded(self, book: Any) -> None:
        """If a dead holder is superseded, its work ends for good, and counts no crash."""
        holder = claim(book, 1)
        book.expire_all()
        newer = claim(book, 2)
        assert not newer.takeover
        assert is_outdated(book, 1)
        assert refused(book, 1, redelivered=True)
        with pytest.raises(StaleTokenError):
            book.ledger.complete_alone(holder.claim, None)
        book.ledger.complete_alone(newer.claim, None)

    def test_a_dead_holder_whose_lease_another_owner_has(self, book: Any) -> None:
        """If a task without `busy="latest"` took over the lease, the next newest message ends the
        older work."""
        claim(book, 1)
        book.expire_all()
        other = book.ledger.claim(request(7, keys=(KEY,), task="other"))
        book.ledger.complete_alone(other.claim, None)
        claim(book, 2)
        assert is_outdated(book, 1)

    def test_one_that_kills_its_workers(self, book: Any) -> None:
        """Work that kills its workers is DEAD, unless a newer message has begun."""
        claim(book, 1, max_crashes=1)
        book.expire_all()
        assert book.ledger.claim(delivery(1, max_crashes=1)).decision is Decision.BURY
        claim(book, 2, max_crashes=1)

    def test_sent_at_the_same_moment(self, book: Any) -> None:
        """Of messages sent at the same moment, the one that arrives later is newer. They do not
        supersede each other in turn."""
        book.ledger.complete_alone(claim(book, 1, sent_us=5).claim, None)
        book.ledger.fail(claim(book, 2, sent_us=5).claim, "boom")
        book.ledger.complete_alone(claim(book, 3, sent_us=5).claim, None)
        claim(book, 2, sent_us=5, message=message_of(2, retries=1))

    def test_without_a_stamp(self, book: Any) -> None:
        """A message without a send time counts as sent when it first arrived, also when it arrives
        again."""
        book.ledger.fail(claim(book, 1, sent_us=None).claim, "boom")
        book.ledger.complete_alone(claim(book, 2, sent_us=None).claim, None)
        assert refused(book, 1, sent_us=None, message=message_of(1, retries=1))

    def test_sent_by_a_clock_that_is_ahead(self, book: Any) -> None:
        """A message from a clock that is ahead counts as sent when it arrived, so it does not
        supersede later ones."""
        ahead_us = 2**52
        book.ledger.fail(claim(book, 1, sent_us=ahead_us).claim, "boom")
        book.ledger.complete_alone(claim(book, 2, sent_us=ahead_us).claim, None)
        assert refused(book, 1, sent_us=ahead_us, message=message_of(1, retries=1))
        claim(book, 3, sent_us=None)

    def test_other_tasks_of_the_key(self, book: Any) -> None:
        """Each task of a key has its own newest message. Tasks wait for each other, and supersede
        none of the other's."""
        book.ledger.complete_alone(claim(book, 5).claim, None)
        other = claim(book, 3, task="other", newest="supersede")
        assert isinstance(book.ledger.claim(delivery(6, "supersede")), Busy)
        book.ledger.complete_alone(other.claim, None)
        claim(book, 6, newest="supersede")

    def test_asked_twice(self, book: Any) -> None:
        """A repeated claim of one owner is one grant."""
        asked = delivery(1)
        first, second = book.ledger.claim(asked), book.ledger.claim(asked)
        assert (first.claim, first.attempt) == (second.claim, second.attempt)
        book.ledger.complete_alone(first.claim, None)

    def test_asked_twice_while_a_newer_one_waits(self, book: Any) -> None:
        """A repeated claim by the same owner, whose answer was lost, does not supersede a newer
        waiting message."""
        asked = delivery(1)
        first = book.ledger.claim(asked)
        assert isinstance(park(book, 2), ParkedNewest)
        assert book.ledger.claim(asked).claim == first.claim
        assert [each.work for each in book.ledger.waiting()] == [delivery(2).work]
        book.ledger.complete_alone(first.claim, None)
        claim(book, 2)


class TestSupersede:
    def test_a_living_holder(self, book: Any) -> None:
        """The newer message has the key at once, with a higher fence. The older one's commit is
        refused, its next renewal reports it, and it never runs again."""
        older = claim(book, 1, "supersede")
        newer = claim(book, 2, "supersede")
        assert newer.claim.fence > older.claim.fence
        assert book.ledger.renew([older.claim, newer.claim]) == [Renewal.TAKEN, Renewal.RENEWED]
        with pytest.raises(StaleTokenError), book.ledger.transaction(older.claim) as tx:
            book.effect(tx.db, 1, older.claim.fence)
            tx.complete_in_block(older.claim, None)
        with book.ledger.transaction(newer.claim) as tx:
            book.effect(tx.db, 2, newer.claim.fence)
            tx.complete_in_block(newer.claim, None)
        assert dict(book.effects()) == {"2": 1}
        assert is_outdated(book, 1)
        assert refused(book, 1, "supersede", redelivered=True)

    def test_what_a_superseded_holder_still_says(self, book: Any) -> None:
        """A superseded holder's failure or giving back changes nothing, and counts no crash."""
        older = claim(book, 1, "supersede")
        newer = claim(book, 2, "supersede")
        assert not book.ledger.fail(older.claim, "boom")
        assert not book.ledger.give_back(older.claim)
        assert not book.ledger.crash(older.claim, "exit")
        book.ledger.uncount_crash(older.claim)
        assert is_outdated(book, 1)
        book.ledger.complete_alone(newer.claim, None)

    def test_an_older_one_does_not(self, book: Any) -> None:
        newer = claim(book, 2, "supersede")
        assert refused(book, 1, "supersede")
        book.ledger.complete_alone(newer.claim, None)

    def test_the_same_message(self, book: Any) -> None:
        """A duplicate of the holder's own message supersedes nothing."""
        claim(book, 1, "supersede")
        found = book.ledger.claim(delivery(1, "supersede", redelivered=True))
        assert isinstance(found, Busy)
        assert found.same_work

    def test_who_holds_the_key_for_something_else(self, book: Any) -> None:
        """A plain lock, or a task without `busy="supersede"`, is not superseded."""
        book.ledger.complete_alone(claim(book, 1, "supersede").claim, None)
        lock = book.ledger.claim(request(9, work=None, keys=(KEY,)))
        assert isinstance(book.ledger.claim(delivery(2, "supersede")), Busy)
        book.ledger.give_back(lock.claim)
        claim(book, 2, "supersede")

    def test_whom_the_lock_server_knows(self, book: Any) -> None:
        """A holder at the lock server that is not in the ledger is about to claim or to end. It is
        not superseded."""
        stranger = Owner("f" * 24, "x")
        assert isinstance(book.ledger.claim(delivery(1, "supersede", held_by=stranger)), Busy)
        older = claim(book, 1, "supersede")
        assert older.over is None
        assert claim(book, 2, "supersede", held_by=stranger).over == older.claim.owner
        book.expire_all()
        assert isinstance(book.ledger.claim(delivery(3, "supersede", held_by=stranger)), Busy)
        last = Owner.parse(book.work(2).owner)
        assert claim(book, 3, "supersede", held_by=last).over is None

    def test_several_in_a_row(self, book: Any) -> None:
        """Each newer message takes the key from the one before. The last one commits."""
        claims = [claim(book, number, "supersede") for number in (1, 2, 3)]
        for each in claims[:2]:
            with pytest.raises(StaleTokenError):
                book.ledger.complete_alone(each.claim, None)
        book.ledger.complete_alone(claims[2].claim, None)
        assert [is_outdated(book, number) for number in (1, 2)] == [True, True]


class TestWaiting:
    def test_one_waits(self, book: Any) -> None:
        """Only the newest message waits. The superseded ones are sent, to notify their callers, and
        never run."""
        holder = claim(book, 1)
        assert parked(book, 2) == []
        assert parked(book, 3) == ["m2"]
        assert waiting(book) == ["m3"]
        assert is_outdated(book, 2)
        assert refused(book, 2)
        book.ledger.complete_alone(holder.claim, None)
        assert book.ledger.promote_next(KEY, expected_s=EXPECTED_S).message.id == "m3"
        claim(book, 3, in_line=True)
        assert waiting(book) == []

    def test_an_older_one_that_comes_late(self, book: Any) -> None:
        """An older message that comes late neither waits nor runs."""
        holder = claim(book, 1)
        parked(book, 3)
        assert isinstance(park(book, 2), Answer)
        assert is_outdated(book, 2)
        book.ledger.complete_alone(holder.claim, None)
        assert refused(book, 0)
        claim(book, 3)

    def test_a_late_claim_of_one_that_has_crashed(self, book: Any) -> None:
        """A claim that the database executes late, after its own work has crashed, is no grant if a
        newer message waits by then."""
        asked = delivery(1)
        older = book.ledger.claim(asked)
        book.ledger.crash(older.claim, "killed")
        parked(book, 2)
        assert isinstance(book.ledger.claim(asked), Answer)
        assert is_outdated(book, 1)
        assert waiting(book) == ["m2"]

    def test_one_that_comes_when_the_key_is_free(self, book: Any) -> None:
        """A newer message that finds the key free goes before the waiting older one, and supersedes
        it."""
        holder = claim(book, 1)
        parked(book, 2)
        book.ledger.complete_alone(holder.claim, None)
        newer = claim(book, 3, in_line=True)
        assert [each.message.id for each in newer.replaced] == ["m2"]
        assert refused(book, 2)

    def test_a_promoted_message(self, book: Any) -> None:
        """A superseded message that was promoted is on its way already. It is not sent a second
        time."""
        holder = claim(book, 1)
        parked(book, 2)
        book.ledger.complete_alone(holder.claim, None)
        book.ledger.promote_next(KEY, expected_s=EXPECTED_S)
        assert claim(book, 3, in_line=True).replaced == ()
        assert refused(book, 2)

    def test_only_what_is_new(self, book: Any) -> None:
        """With only_new, a message waits only if there is no record of its work or of the
        message."""
        book.ledger.fail(claim(book, 1).claim, "boom")
        assert book.ledger.defer(delivery(2), lambda deferrals: None) is True
        before, found = book.work(1), []
        for number in (1, 2, 3, 3):
            call = json.dumps({"queue": "test", "message": f"m{number}"})
            found.append(book.ledger.park_newest(delivery(number, call=call), only_new=True))
        assert found == [None, None, ParkedNewest(), None]
        assert book.work(1) == before
        assert waiting(book) == ["m3"]

    def test_its_caller_was_not_notified(self, book: Any) -> None:
        """A superseded message is overdue until it has arrived, and blocks no other."""
        claim(book, 1)
        parked(book, 2)
        parked(book, 3)
        book.expire_all()
        assert book.ledger.promote_next(KEY, expected_s=EXPECTED_S).message.id == "m3"
        book.make_due()
        overdue = book.ledger.overdue(parked=True)
        assert sorted(each.message.id for each in overdue) == ["m2", "m3"]
        assert book.ledger.overdue() == overdue  # a sweep sends them, too
        assert book.ledger.sent(overdue, again_after_s=0.0) == 2
        assert refused(book, 2)
        for number in (2, 3):
            book.ledger.note_notified(f"ship order:{number}")
        assert [each.message.id for each in book.ledger.overdue(parked=True)] == ["m3"]

    def test_a_purge_keeps_unnotified_work(self, book: Any) -> None:
        """A purge keeps a superseded message until its caller has been notified."""
        claim(book, 1)
        parked(book, 2)
        parked(book, 3)
        assert book.purge() == 0
        book.make_due()
        assert [each.message.id for each in book.ledger.overdue(parked=True)] == ["m2"]
        book.ledger.note_notified("ship order:2")
        assert book.purge() == 1

    def test_it_keeps_its_place(self, book: Any) -> None:
        """A delivery that comes twice, or finds the key taken after all, keeps its position."""
        claim(book, 1)
        parked(book, 2)
        before = book.work(2)
        assert parked(book, 2) == []
        assert book.work(2) == before

    def test_a_retry(self, book: Any) -> None:
        """A retry waits with its message's send time, unless a newer message has begun or waits."""
        book.ledger.fail(claim(book, 1).claim, "boom")
        other = book.ledger.claim(request(9, work=None, keys=(KEY,)))
        assert parked(book, 1, message=message_of(1, retries=1)) == []
        assert book.work(1).parked == 1_000_001
        book.ledger.give_back(other.claim)
        claim(book, 1, message=message_of(1, retries=1))

    def test_tasks_of_one_key(self, book: Any) -> None:
        """Of each task of a key one message waits, in the order in which they were sent."""
        claim(book, 1)
        assert parked(book, 3) == []
        assert parked(book, 2, task="other") == []
        assert parked(book, 4, task="other") == ["m2"]
        assert waiting(book) == ["m3", "m4"]
        book.expire_all()
        assert isinstance(book.ledger.claim(delivery(4, task="other", in_line=True)), Busy)
        claim(book, 3, in_line=True)

    @pytest.mark.parametrize("state", ["in progress", "done", "dead", "revoked", "superseded"])
    def test_not_what_needs_no_turn(self, book: Any, state: str) -> None:
        """Work that runs or has ended for good is not parked, and not changed."""
        holder = claim(book, 1, max_crashes=1)
        if state == "done":
            book.ledger.complete_alone(holder.claim, None)
        elif state == "dead":
            book.expire_all()
            book.ledger.claim(delivery(1, max_crashes=1))
        elif state == "revoked":
            book.ledger.revoke("ship order:1", message="m1")
        elif state == "superseded":
            book.expire_all()
            claim(book, 2)
        before = book.work(1)
        assert park(book, 1) is None
        assert book.work(1) == before

    def test_supersedes_while_others_wait(self, book: Any) -> None:
        """A message that supersedes the holder takes no other message's turn, and ends the older
        one's wait."""
        lock = book.ledger.claim(request(9, work=None, keys=(KEY,)))
        parked(book, 1)
        book.ledger.give_back(lock.claim)
        claim(book, 2, "supersede")
        other = json.dumps({"queue": "test", "message": "m8"})
        assert book.ledger.park(delivery(8, task="other", newest=None, call=other))
        newer = claim(book, 3, "supersede", in_line=True)
        assert newer.replaced == ()
        assert [is_outdated(book, number) for number in (1, 2)] == [True, True]
        assert waiting(book) == ["m8"]


def test_the_mark_is_no_key(book: Any) -> None:
    """The newest message's stamp holds no key. It is purged as keys are."""
    if book.kind == "memory":
        pytest.skip("the simulation's ledger purges as it likes")
    book.ledger.complete_alone(claim(book, 1).claim, None)
    with book.engine.connect() as db:
        rows = {row.key: row for row in db.execute(sa.select(KEYS))}
    assert len(rows) == 2
    mark = rows[f"{KEY}#newest ship"]
    assert (mark.lease_until, mark.owner, mark.stamp) == (0, "ship order:1", 1_000_001)
    with book.engine.begin() as db:
        db.execute(sa.update(KEYS).values(fence=1))
    assert book.ledger.purge(older_than_s=7200).keys == 2


@pytest.mark.parametrize("mode", ["latest", "supersede"])
def test_no_message_is_forgotten(book: Any, mode: str) -> None:
    """Without a lock server and a relay, each message runs, or is answered that it never runs. None
    begins after a newer one, and the newest runs."""
    count = 24
    queue = deque(random.Random(7).sample(range(count), count))
    outdated: set[int] = set()
    done: list[int] = []
    failures: list[str] = []

    def deliver(number: int) -> None:
        answer = book.ledger.claim(delivery(number, mode, in_line=True))
        replaced: Any = ()
        if isinstance(answer, Claimed):
            replaced = answer.replaced
            time.sleep(0.002)
            try:
                with book.ledger.transaction(answer.claim) as tx:
                    book.effect(tx.db, number, answer.claim.fence)
                    tx.complete_in_block(answer.claim, None)
                done.append(number)
            except StaleTokenError:
                outdated.add(number)
        elif isinstance(answer, Busy) and not answer.same_work:
            answer = park(book, number, newest=mode)
            replaced = answer.replaced if isinstance(answer, ParkedNewest) else ()
            if answer is None:
                queue.append(number)
        if isinstance(answer, Answer):
            outdated.add(number)
            book.ledger.note_notified(f"ship order:{number}")
            if answer.decision not in (Decision.OUTDATED, Decision.DONE):
                failures.append(f"{number}: {answer}")
        queue.extend(int(each.message.id[1:]) for each in replaced)
        found = book.ledger.promote_next(KEY, expected_s=600.0)
        if found is not None:
            queue.append(int(found.message.id[1:]))

    work_off(queue, deliver, failures, lambda: len(outdated | set(done)) == count)
    assert dict(book.effects()) == {str(number): 1 for number in done}
    assert count - 1 in done
    assert all(is_outdated(book, number) for number in set(range(count)) - set(done))
    fences = [book.work(number).fence for number in done]
    assert sorted(done) == [number for _, number in sorted(zip(fences, done, strict=True))]
