"""Keys that several deliveries may hold at once, and whose bodies start no more often than the rate
allows.

All tests use one account's key. Each work item has a message of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from support.claims import request
from support.threads import at_once
from taskguard.errors import StaleTokenError
from taskguard.model.bounds import Bounds, Rate, rate_of, slots_of
from taskguard.model.claims import Answer, Busy, Claimed, ClaimRequest, MessageRef
from taskguard.model.states import Decision

KEY = "account:1"
HOUR_US = 3_600_000_000


def delivery(number: int, limit: int = 1, rate: Rate | None = None, **values: Any) -> ClaimRequest:
    """Return a request for work of its own, which may have any slot of the account's key."""
    slots = slots_of(KEY, limit) if limit > 1 else ()
    bounds = Bounds(KEY, limit, rate, slots)
    values = {"message": MessageRef(f"m{number}"), "keys": (slots or (KEY,))[:1], **values}
    return request(number, bounds=bounds, **values)


def claimed(book: Any, *args: Any, **values: Any) -> Claimed:
    found = book.ledger.claim(delivery(*args, **values))
    assert isinstance(found, Claimed), found
    return found


def refused(book: Any, *args: Any, **values: Any) -> Busy:
    found = book.ledger.claim(delivery(*args, **values))
    assert isinstance(found, Busy), found
    return found


def slot_of(claim: Claimed) -> str:
    (key,) = claim.claim.keys
    return key


def park(book: Any, number: int, limit: int = 1, rate: Rate | None = None) -> None:
    call = json.dumps({"queue": "test", "message": f"m{number}"})
    asked = replace(delivery(number, limit, rate, call=call, in_line=True), keys=(KEY,))
    assert book.ledger.park(asked)


def call(book: Any, limit: int = 1, rate: Rate | None = None, ahead_s: float = 0.0) -> str | None:
    """Promote the next message, and return its id."""
    bounds = Bounds(KEY, limit, rate)
    found = book.ledger.promote_next(KEY, expected_s=30.0, bounds=bounds, ahead_s=ahead_s)
    return None if found is None else found.message.id


def in_turn(book: Any, asked: ClaimRequest) -> Claimed | Busy | Answer:
    """Read the answer from the rows. A row that others have locked for too long gives no answer."""
    for _ in range(100):
        found = book.ledger.claim(asked)
        if not isinstance(found, Busy) or found.owner or found.retry_after_s is not None:
            return found
    raise AssertionError("its row was locked all the time")


class TestLimit:
    def test_so_many_at_once(self, book: Any) -> None:
        """Each of `limit` holders has its own slot and fence. One more is refused, with the time
        until a slot becomes free."""
        holders = [claimed(book, number, 3) for number in range(3)]
        assert sorted(map(slot_of, holders)) == ["account:1#0", "account:1#1", "account:1#2"]
        assert all(holder.claim.fence > 0 for holder in holders)
        busy = refused(book, 4, 3)
        assert (busy.owner, busy.same_work, busy.started, busy.too_early) == (None,) + (False,) * 3
        assert busy.retry_after_s == pytest.approx(30.0, abs=25.0)
        book.ledger.complete_alone(holders[1].claim, None)
        assert slot_of(claimed(book, 4, 3)) == slot_of(holders[1])
        for number in (0, 2):
            book.ledger.complete_alone(holders[number].claim, '"done"')
        assert {book.work(number).state for number in (0, 1, 2)} == {"DONE"}

    def test_its_record_is_with_the_key(self, book: Any) -> None:
        """The record of work names the key, because the next run may get another slot."""
        claimed(book, 1, 3)
        assert book.work(1).key == KEY

    def test_only_the_slot_that_the_lock_server_gave(self, book: Any) -> None:
        """If the lock server's slot is held in the ledger, the refusal names its owner, although
        another slot is free."""
        first = claimed(book, 1, 3)
        bounds = Bounds(KEY, 3, None, (slot_of(first),))
        busy = book.ledger.claim(replace(delivery(2, 3), bounds=bounds))
        assert isinstance(busy, Busy)
        assert busy.owner == first.claim.owner

    def test_asked_again(self, book: Any) -> None:
        """A repeated claim of one owner gets the same slot and fence, even if other slots
        are free."""
        asked = replace(delivery(1, 3), keys=("account:1#1",))
        asked = replace(asked, bounds=replace(asked.bounds, slots=slots_of(KEY, 3)[::-1]))
        first = book.ledger.claim(asked)
        again = book.ledger.claim(replace(asked, bounds=Bounds(KEY, 3, None, slots_of(KEY, 3))))
        assert (slot_of(again), again.claim.fence) == (slot_of(first), first.claim.fence)
        assert book.work(1).attempts == 1

    def test_the_same_work_once(self, book: Any) -> None:
        """A second delivery of work learns that it is in progress, or gets its result."""
        holder = claimed(book, 1, 3)
        assert refused(book, 1, 3).same_work
        book.ledger.complete_alone(holder.claim, '"done"')
        answer = book.ledger.claim(delivery(1, 3))
        assert (answer.decision, answer.result_json) == (Decision.DONE, '"done"')

    def test_a_dead_holder(self, book: Any) -> None:
        """When a dead holder's lease expires, its slot and its work are free, and the holder is
        refused."""
        dead = claimed(book, 1, 2)
        claimed(book, 2, 2)
        book.expire_all()
        others = [claimed(book, number, 2) for number in (3, 4)]
        assert isinstance(refused(book, 1, 2), Busy)
        book.ledger.complete_alone(others[0].claim, None)
        found = claimed(book, 1, 2)
        assert (found.takeover, found.crashes) == (True, 1)
        with pytest.raises(StaleTokenError):
            book.ledger.complete_alone(dead.claim, None)
        book.ledger.complete_alone(found.claim, None)
        assert book.work(1).state == "DONE"

    def test_the_fence_of_its_work_grows(self, book: Any) -> None:
        """The work's fence grows in another slot, too, and if the clock was set back after
        a claim."""
        book.ledger.complete_alone(claimed(book, 2, 2).claim, None)
        book.set_fence(book.ledger.now_us() + HOUR_US)
        dead = claimed(book, 1, 2)
        assert slot_of(dead) == "account:1#0"
        book.expire_all()
        other = replace(delivery(1, 2).bounds, slots=("account:1#1",))
        found = book.ledger.claim(replace(delivery(1, 2), bounds=other))
        assert found.claim.fence > dead.claim.fence
        assert book.work(1).fence == found.claim.fence
        book.ledger.complete_alone(found.claim, None)

    def test_renewed(self, book: Any) -> None:
        """A lease of a slot is renewed for its slot and its work."""
        holders = [claimed(book, number, 2) for number in (1, 2)]
        book.expire_all()
        assert book.ledger.renew([holder.claim for holder in holders]) == ["renewed"] * 2
        assert isinstance(refused(book, 3, 2), Busy)

    def test_every_ending_frees_its_slot(self, book: Any) -> None:
        ledger = book.ledger
        for end in (
            lambda claim: ledger.fail(claim, "boom"),
            ledger.give_back,
            lambda claim: ledger.crash(claim, "exit"),
            lambda claim: ledger.end_round(claim, "idle", most=4),
        ):
            holders = [claimed(book, number, 2) for number in (1, 2)]
            refused(book, 3, 2)
            for holder in holders:
                end(holder.claim)

    def test_a_lower_limit_while_more_are_at_work(self, book: Any) -> None:
        """After a deploy with a lower limit, work starts only when fewer holders than the new limit
        remain."""
        holders = {slot_of(one): one for one in (claimed(book, number, 4) for number in range(4))}
        for slot in ("account:1#0", "account:1#1"):
            book.ledger.complete_alone(holders[slot].claim, None)
            refused(book, 10, 2)
        book.ledger.complete_alone(holders["account:1#2"].claim, None)
        assert slot_of(claimed(book, 10, 2)) == "account:1#0"
        refused(book, 11, 2)

    def test_a_higher_limit_while_one_has_the_key(self, book: Any) -> None:
        """After a deploy with a first limit, a holder of the key itself counts as one holder."""
        alone = book.ledger.claim(request(1, keys=(KEY,), message=MessageRef("m1")))
        claimed(book, 2, 2)
        refused(book, 3, 2)
        book.ledger.complete_alone(alone.claim, None)
        claimed(book, 3, 2)

    def test_other_keys(self, book: Any) -> None:
        """Keys with the same prefix, or with a '#' in their template, are not slots of the key."""
        for number, key in enumerate(("account:10#0", "account:1#x", "account:1!", "account:1$")):
            book.ledger.claim(request(50 + number, keys=(key,)))
        for number in (1, 2):
            claimed(book, number, 2)

    def test_the_last_slot(self, book: Any) -> None:
        """Of many claims at once, one gets the last slot, and no slot has two holders."""
        claimed(book, 100, 3)
        claimed(book, 101, 3)
        answers: list[Any] = []
        at_once(8, lambda number: answers.append(in_turn(book, delivery(number, 3))))
        assert sum(isinstance(answer, Claimed) for answer in answers) == 1
        assert book.held_keys() == list(slots_of(KEY, 3))

    def test_purged_while_in_use(self, book: Any) -> None:
        """The key's own row has no lease. A purge keeps it if it was claimed a short while ago."""
        claimed(book, 1, 2)
        if book.kind != "memory":  # the purge may delete all ended rows at once
            assert book.ledger.purge(older_than_s=3_600).keys == 0


class TestLineOfSlots:
    def test_as_many_are_called_as_there_is_room_for(self, book: Any) -> None:
        """Messages are promoted in order. Each promoted message counts as the holder of a slot."""
        holders = [claimed(book, number, 3) for number in range(3)]
        for number in range(10, 15):
            park(book, number, 3)
        assert call(book, 3) is None
        assert book.ledger.look().keys == ()
        for holder in holders[:2]:
            book.ledger.complete_alone(holder.claim, None)
        assert book.ledger.look().keys == (KEY,)
        assert [call(book, 3) for _ in range(3)] == ["m10", "m11", None]
        assert book.ledger.look().keys == ()
        claimed(book, 11, 3, in_line=True)  # m11 arrives before m10
        assert call(book, 3) is None
        claimed(book, 10, 3, in_line=True)
        assert call(book, 3) is None

    def test_a_relay_goes_by_what_was_noted(self, book: Any) -> None:
        """A relay uses the limit of the last claim."""
        holder = claimed(book, 1, 2)
        for number in (10, 11, 12):
            park(book, number, 2)
        found = book.ledger.promote_next(KEY, expected_s=30.0, ahead_s=0.0)
        assert found.message.id == "m10"
        assert book.ledger.promote_next(KEY, expected_s=30.0, ahead_s=0.0) is None
        book.ledger.complete_alone(holder.claim, None)
        assert book.ledger.look().keys == (KEY,)
        assert book.ledger.promote_next(KEY, expected_s=30.0, ahead_s=0.0).message.id == "m11"

    def test_behind_the_waiting_messages(self, book: Any) -> None:
        """A new message is refused while earlier ones wait, even if a slot is free, unless the
        slots suffice for all."""
        holder = claimed(book, 1, 2)
        claimed(book, 2, 2)
        park(book, 10, 2)
        book.ledger.complete_alone(holder.claim, None)
        refused(book, 11, 2, in_line=True)
        assert call(book, 2) == "m10"
        refused(book, 11, 2, in_line=True)  # the free slot belongs to m10
        assert isinstance(book.ledger.claim(delivery(11, 3, in_line=True)), Claimed)


class TestRate:
    def test_the_next_start(self, book: Any) -> None:
        """A refused claim gets the exact time of the next start, and is not charged. Then it may
        begin."""
        rate = rate_of("1/h", 1)
        book.ledger.complete_alone(claimed(book, 1, 1, rate).claim, None)
        busy = refused(book, 2, 1, rate)
        assert (busy.owner, busy.same_work, busy.too_early) == (None, False, True)
        assert busy.retry_after_s == pytest.approx(3_600, abs=60)
        noted = book.key_named(KEY).next_start
        book.pass_time(HOUR_US - 60_000_000)
        assert refused(book, 2, 1, rate).retry_after_s == pytest.approx(60, abs=60)
        book.pass_time(60_000_000)
        claimed(book, 2, 1, rate)
        assert book.key_named(KEY).next_start >= noted

    def test_a_burst(self, book: Any) -> None:
        """After a pause, `burst` bodies may start at once, then one in each interval."""
        rate = rate_of("1/h", 3)
        for number in range(3):
            book.ledger.complete_alone(claimed(book, number, 1, rate).claim, None)
        assert refused(book, 3, 1, rate).too_early
        book.pass_time(HOUR_US)
        book.ledger.complete_alone(claimed(book, 3, 1, rate).claim, None)
        assert refused(book, 4, 1, rate).too_early

    def test_asked_again(self, book: Any) -> None:
        """A repeated claim of one owner is charged once."""
        asked = delivery(1, 1, rate_of("1/h", 1))
        first = book.ledger.claim(asked)
        noted = book.key_named(KEY).next_start
        again = book.ledger.claim(asked)
        assert again.claim.fence == first.claim.fence
        assert book.key_named(KEY).next_start == noted

    def test_asked_again_after_another_start(self, book: Any) -> None:
        """If its lease has expired and other work has begun, a repeated claim is charged again, or
        comes too early."""
        rate = rate_of("1/h", 2)
        asked = delivery(1, 1, rate)
        assert isinstance(book.ledger.claim(asked), Claimed)
        book.expire_all()
        book.ledger.complete_alone(claimed(book, 2, 1, rate).claim, None)
        busy = book.ledger.claim(asked)
        assert isinstance(busy, Busy)
        assert busy.too_early
        book.pass_time(HOUR_US)
        assert isinstance(book.ledger.claim(asked), Claimed)

    def test_a_takeover(self, book: Any) -> None:
        """A takeover counts as a start."""
        rate = rate_of("1/h", 1)
        claimed(book, 1, 1, rate)
        book.expire_all()
        busy = refused(book, 1, 1, rate)
        assert (busy.too_early, busy.started) == (True, True)
        book.pass_time(HOUR_US)
        assert claimed(book, 1, 1, rate).takeover
        assert book.key_named(KEY).next_start > book.ledger.now_us()

    def test_what_does_not_start(self, book: Any) -> None:
        """A duplicate or a claim of a held key is not charged."""
        rate = rate_of("1/h", 2)
        holder = claimed(book, 1, 1, rate)
        noted = book.key_named(KEY).next_start
        assert refused(book, 1, 1, rate).same_work
        assert refused(book, 2, 1, rate).owner == holder.claim.owner
        book.ledger.complete_alone(holder.claim, None)
        assert isinstance(book.ledger.claim(delivery(1, 1, rate)), Answer)
        assert book.key_named(KEY).next_start == noted

    def test_a_clock_that_is_set_back(self, book: Any) -> None:
        """A clock that is set back delays a start by at most one interval."""
        rate = rate_of("10/h", 1)
        book.ledger.complete_alone(claimed(book, 1, 1, rate).claim, None)
        book.pass_time(-24 * HOUR_US)
        assert refused(book, 2, 1, rate).retry_after_s <= 360
        assert book.key_named(KEY).next_start <= book.ledger.now_us() + HOUR_US // 10
        book.pass_time(HOUR_US // 10)
        claimed(book, 2, 1, rate)

    @pytest.mark.parametrize(("text", "burst"), [("1/d", 1), ("4/h", 5)])
    def test_a_purge(self, book: Any, text: str, burst: int) -> None:
        """A purge keeps the next start and the used part of a burst, if the next start lies within
        the retention time."""
        rate = rate_of(text, burst)
        book.ledger.complete_alone(claimed(book, 1, 1, rate).claim, None)
        book.set_fence(1)  # as if it were long ago
        if book.kind == "memory":
            book.ledger.starts_kept_us = HOUR_US
            assert book.ledger.purge_keys() == 0
        else:
            assert book.ledger.purge(older_than_s=3_600).keys == 0
        for number in range(2, burst + 1):
            book.ledger.complete_alone(claimed(book, number, 1, rate).claim, None)
        assert refused(book, burst + 1, 1, rate).too_early

    def test_with_slots(self, book: Any) -> None:
        """The rate applies to the key, not to each slot."""
        rate = rate_of("1/h", 2)
        for number in range(2):
            claimed(book, number, 5, rate)
        assert refused(book, 3, 5, rate).too_early

    def test_the_last_start(self, book: Any) -> None:
        """Of many claims at once, one gets the last start."""
        rate = rate_of("1/h", 2)
        claimed(book, 100, 20, rate)
        answers: list[Any] = []
        at_once(8, lambda number: answers.append(in_turn(book, delivery(number, 20, rate))))
        assert sum(isinstance(answer, Claimed) for answer in answers) == 1
        assert sum(isinstance(answer, Busy) and answer.too_early for answer in answers) == 7

    def test_who_waits_is_called_for_the_moment(self, book: Any) -> None:
        """A message is promoted shortly before its start. Before that none is promoted, and no
        relay finds the key open."""
        rate = rate_of("1/h", 1)
        book.ledger.complete_alone(claimed(book, 1, 1, rate).claim, None)
        for number in (2, 3):
            park(book, number, 1, rate)
        assert call(book, 1, rate, ahead_s=60.0) is None
        assert book.ledger.look(ahead_s=60.0).keys == ()
        book.pass_time(HOUR_US - 50_000_000)
        assert book.ledger.look(ahead_s=60.0).keys == (KEY,)
        bounds = Bounds(KEY, 1, rate)
        found = book.ledger.promote_next(KEY, expected_s=5.0, bounds=bounds, ahead_s=60.0)
        assert found.message.id == "m2"
        assert 0 < found.wait_s <= 50
        assert found.due_us - book.ledger.now_us() <= 55_000_000
        assert call(book, 1, rate, ahead_s=60.0) is None

    def test_several_are_called_for_their_moments(self, book: Any) -> None:
        """With slots, each promoted message starts one interval after the one before."""
        rate = rate_of("1/m", 1)
        claimed(book, 1, 5, rate)
        for number in (2, 3, 4):
            park(book, number, 5, rate)
        bounds = Bounds(KEY, 5, rate)
        options = {"expected_s": 5.0, "bounds": bounds, "ahead_s": 150.0}
        found = [book.ledger.promote_next(KEY, **options) for _ in range(3)]
        assert [each and each.message.id for each in found] == ["m2", "m3", None]
        assert found[1].wait_s - found[0].wait_s == pytest.approx(60, abs=30)
