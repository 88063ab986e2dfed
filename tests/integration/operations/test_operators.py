"""`tg.operations` changes work and keys: on SQLite, with locks in memory, without a queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support import claims
from support.guarded_shop import GuardedShop, NotingQueue
from support.own_rows import Shop as RowShop
from support.waiting import patience_s
from taskguard import Guard
from taskguard.errors import (
    ConfigurationError,
    KeyBusyError,
    LeaseLostError,
    LedgerUnavailableError,
)
from taskguard.integration import Delivery
from taskguard.ledger.tables import ACTIONS
from taskguard.locks import MemoryLocks
from taskguard.model.bounds import Bounds, slots_of
from taskguard.model.changes import Expected
from taskguard.model.claims import Busy, Claimed
from taskguard.model.delivery import Answered, Completed, Deferred, Dropped, MessageRef, stored_call
from taskguard.model.policy import make_policy
from taskguard.model.states import State

KEY, WORK = "order:1", "ship order:1"


@pytest.fixture
def shop(sqlite_url: str, make_shop: Callable[..., GuardedShop]) -> GuardedShop:
    """Return a shop whose lock server answers before the ledger."""
    return make_shop(sqlite_url, locks=MemoryLocks())


def deliver(
    shop: GuardedShop,
    body: Any,
    number: int = 1,
    *,
    message: str | None = None,
    deferrals: int = 0,
    **options: Any,
) -> Any:
    """Deliver a message of its own work on order:1, with these options of its guard."""
    policy = make_policy(options, task="ship")
    delivery = Delivery(
        keys=(KEY,),
        work=f"ship order:{number}",
        task="ship",
        message=MessageRef(message or f"m{number}", 0, deferrals),
        policy=policy,
        queue=NotingQueue(),
    )
    return shop.tg.runner.deliver(delivery, body)


def nothing(guard: Guard) -> None:
    """Do nothing."""


def actions(shop: GuardedShop) -> list[tuple[str, str]]:
    with shop.engine.connect() as db:
        rows = db.execute(sa.select(ACTIONS.c.action, ACTIONS.c.actor).order_by(ACTIONS.c.id))
        return [(row.action, row.actor) for row in rows]


def fail(shop: GuardedShop, number: int) -> None:
    claimed = shop.ledger.claim(claims.request(number))
    assert isinstance(claimed, Claimed)
    shop.ledger.fail(claimed.claim, "boom")


class TestPause:
    @pytest.mark.parametrize(
        "options", [{"busy": "skip"}, {"busy": "raise"}, {"busy": "wait", "wait_s": 0.01}]
    )
    def test_every_delivery_is_deferred(self, shop: GuardedShop, options: Any) -> None:
        """None is skipped, and none fails, whatever `busy=` says. After the pause they run."""
        operations = shop.tg.operations
        operations.pause(KEY, reason="audit", actor="ann")
        assert isinstance(deliver(shop, nothing, **options), Deferred)
        assert operations.resume(KEY, reason="done", actor="bob") is not None
        assert deliver(shop, nothing, deferrals=1, **options) == Completed(None)
        assert actions(shop) == [("pause", "ann"), ("resume", "bob")]

    @pytest.mark.parametrize("busy", ["skip", "raise"])
    def test_the_second_of_two_simultaneous_deliveries(self, shop: GuardedShop, busy: str) -> None:
        """The lock server refuses it because of the first one, which the ledger is refusing."""
        shop.tg.operations.pause(KEY, reason="audit")
        found: list[Any] = []
        claim = shop.ledger.claim

        def claim_while_another_comes(request: Any) -> Any:
            if not found:
                found.append(None)
                found[0] = deliver(shop, nothing, 2, busy=busy)
            return claim(request)

        shop.ledger.claim = claim_while_another_comes  # type: ignore[method-assign]
        assert isinstance(deliver(shop, nothing, busy=busy), Deferred)
        assert isinstance(found[0], Deferred)

    def test_a_key_that_is_not_paused_is_skipped_as_before(self, shop: GuardedShop) -> None:
        def body(guard: Guard) -> None:
            assert isinstance(elsewhere(deliver, shop, nothing, 2, busy="skip"), Dropped)

        assert deliver(shop, body) == Completed(None)

    def test_what_a_plain_call_reads(self, shop: GuardedShop) -> None:
        """The error says by which operator the key is paused, since when, and why."""
        shop.tg.operations.pause(KEY, reason="manual correction", actor="ann")
        text = r"order:1 is paused by ann since 20[0-9-]+ .*: manual correction\. The lock was not"
        with pytest.raises(KeyBusyError, match=text), shop.tg.lock(KEY):
            pass

        @shop.tg.guarded(key=KEY, once_per="bill:<number>", limit=2)
        def bill(number: int) -> None:
            raise AssertionError("unreachable")

        with pytest.raises(KeyBusyError, match="is paused by ann"):
            bill(1)

    def test_it_waits_for_the_holder(self, shop: GuardedShop) -> None:
        """The holder's effect is committed. No other delivery gets the key before the pause."""
        begun, may_end = threading.Event(), threading.Event()

        def body(guard: Guard) -> str:
            begun.set()
            assert may_end.wait(patience_s())
            return "shipped"

        shipped: list[Any] = []
        holder = threading.Thread(target=lambda: shipped.append(deliver(shop, body)))
        holder.start()
        assert begun.wait(patience_s())
        threading.Timer(0.2, may_end.set).start()
        made = shop.tg.operations.pause(KEY, reason="audit", timeout_s=patience_s())
        holder.join()
        assert shipped == [Completed("shipped")]
        assert shop.tg.operations.paused() == [(KEY, made)]

    @pytest.mark.parametrize("interrupted", [False, True])
    def test_a_wait_that_ends_leaves_no_pause(
        self, shop: GuardedShop, interrupted: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After its timeout, or if its process is interrupted, other slots of the key are open."""
        operations = shop.tg.operations

        @shop.tg.guarded(key=KEY, once_per="bill:<number>", limit=2)
        def bill(number: int) -> int:
            if number > 1:
                return number

            def interrupt(_: float) -> None:
                raise KeyboardInterrupt

            if interrupted:
                monkeypatch.setattr(shop.tg.runner.clock, "sleep", interrupt)
            expected = KeyboardInterrupt if interrupted else KeyBusyError
            with pytest.raises(expected):
                operations.pause(KEY, reason="audit", timeout_s=60.0 if interrupted else 0.0)
            monkeypatch.undo()
            return elsewhere(bill, 2)

        assert bill(1) == 2
        assert (operations.paused(), actions(shop)) == ([], [])

    def test_a_holder_that_writes(
        self, sqlite_url: str, make_shop: Callable[..., GuardedShop]
    ) -> None:
        """Its transaction stops all writers on SQLite. The pause waits, and says so at the end."""
        shop = make_shop(f"{sqlite_url}?timeout=0.1", locks=MemoryLocks())

        def body(guard: Guard) -> None:
            with guard.transaction() as db:
                db.execute(sa.text("insert into effects values ('x')"))
                with pytest.raises(KeyBusyError, match=r"still held by an unknown holder"):
                    elsewhere(shop.tg.operations.pause, KEY, reason="audit", timeout_s=0.0)

        assert deliver(shop, body) == Completed(None)
        assert shop.tg.operations.paused() == []

    @pytest.mark.parametrize("now", [False, True])
    def test_an_interrupt_before_the_answer_to_its_commit(
        self, shop: GuardedShop, now: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The operator is not told that the key is paused, so it is not."""
        try_pause = shop.ledger.try_pause

        def interrupted(*args: Any, **options: Any) -> None:
            try_pause(*args, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(shop.ledger, "try_pause", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shop.tg.operations.pause(KEY, reason="audit", actor="ann", now=now)
        assert shop.tg.operations.paused() == []
        assert actions(shop) == [("pause", "ann"), ("resume", "ann")]

    def test_the_lock_server_tells_it_when_its_turn_comes(
        self, shop: GuardedShop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Until then it looks only twice a second."""
        try_pause, tries = shop.ledger.try_pause, []

        def counted(*args: Any, **options: Any) -> Any:
            tries.append(args)
            return try_pause(*args, **options)

        monkeypatch.setattr(shop.ledger, "try_pause", counted)
        with shop.tg.lock(KEY), pytest.raises(KeyBusyError):
            elsewhere(shop.tg.operations.pause, KEY, reason="audit", timeout_s=1.0)
        assert len(tries) < 10

    def test_a_key_that_is_free_only_for_moments(
        self, sqlite_url: str, make_shop: Callable[..., GuardedShop], monkeypatch: Any
    ) -> None:
        """Without a lock server nobody waits in turn. Each second the key is free for 25 ms."""
        shop, now_s, number = make_shop(sqlite_url), 0.5, 1
        held: list[Claimed] = []

        def go_on() -> None:
            nonlocal number
            if now_s % 1.0 < 0.025 and held:
                shop.ledger.complete_alone(held.pop().claim, None)
            elif now_s % 1.0 >= 0.025 and not held:
                number += 1
                found = shop.ledger.claim(claims.request(number, keys=(KEY,)))
                assert isinstance(found, Claimed)
                held.append(found)

        def sleep(for_s: float) -> None:
            nonlocal now_s
            now_s += for_s
            go_on()

        go_on()
        monkeypatch.setattr(shop.tg.runner.clock, "monotonic_s", lambda: now_s)
        monkeypatch.setattr(shop.tg.runner.clock, "sleep", sleep)
        shop.tg.operations.pause(KEY, reason="audit", timeout_s=10.0)
        assert held == []

    def test_it_is_not_paused_twice(self, shop: GuardedShop) -> None:
        shop.tg.operations.pause(KEY, reason="audit", actor="ann")
        with pytest.raises(KeyBusyError, match=r"is paused by ann .*audit\. Resume it first"):
            shop.tg.operations.pause(KEY, reason="again")
        assert shop.tg.operations.resume(KEY, reason="done") is not None
        assert shop.tg.operations.resume(KEY, reason="done") is None

    def test_a_resume_while_it_waits(self, shop: GuardedShop) -> None:
        """The pause began before the resume, so it does not complete after it."""
        operations = shop.tg.operations

        def body(guard: Guard) -> None:
            def resume(_: float) -> None:
                patch.undo()
                assert operations.resume(KEY, reason="a mistake", actor="bob") is None

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shop.tg.runner.clock, "sleep", resume)
                with pytest.raises(KeyBusyError, match=r"bob resumed it .*: a mistake"):
                    elsewhere(operations.pause, KEY, reason="audit")

        assert deliver(shop, body) == Completed(None)
        assert (operations.paused(), actions(shop)) == ([], [("resume", "bob")])

    @pytest.mark.parametrize("share", [{"limit": 3}, {"mode": "read"}])
    def test_shares_of_a_paused_key(self, shop: GuardedShop, share: Any) -> None:
        """Nobody gets one, as long as the key is paused."""
        operations, lock = shop.tg.operations, shop.tg.lock(KEY, **share)
        operations.pause(KEY, reason="audit", actor="ann")
        with pytest.raises(KeyBusyError, match=r"order:1 is paused by ann .*: audit"), lock:
            pass
        assert shop.tg.runner.locks.holders(KEY) == []  # type: ignore[union-attr]
        operations.resume(KEY, reason="done")
        with lock:
            pass

    def test_a_share_of_a_key_whose_ledger_gives_no_answer(
        self, shop: GuardedShop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The key may be paused, so the share is given back."""

        def no_answer(_: Any) -> Any:
            raise LedgerUnavailableError("no route to host")

        monkeypatch.setattr(shop.ledger, "pause_of", no_answer)
        with pytest.raises(LedgerUnavailableError), shop.tg.lock(KEY, limit=2):
            pass
        assert shop.tg.runner.locks.holders(KEY) == []  # type: ignore[union-attr]

    def test_it_waits_for_holders_of_shares(
        self, shop: GuardedShop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Meanwhile no other gets a share. After a timeout all get them again."""
        operations, share = shop.tg.operations, shop.tg.lock(KEY, limit=3)
        first = shop.tg.lock(KEY, limit=3, token="first")
        assert first.acquire()
        with pytest.raises(KeyBusyError, match="is still held by"):
            operations.pause(KEY, reason="audit", timeout_s=0.0)
        with share:
            pass

        def end_first(_: float) -> None:
            monkeypatch.undo()
            assert share.acquire() is None
            first.release()

        monkeypatch.setattr(shop.tg.runner.clock, "sleep", end_first)
        operations.pause(KEY, reason="audit", timeout_s=patience_s())
        assert share.acquire() is None
        assert shop.tg.runner.locks.holders(KEY) == []  # type: ignore[union-attr]

    def test_shares_lose_a_key_that_is_paused_at_once(self, shop: GuardedShop) -> None:
        """Their holders learn of it when they renew or release."""
        with pytest.raises(LeaseLostError), shop.tg.lock(KEY, mode="read"):
            elsewhere(shop.tg.operations.pause, KEY, reason="stuck", now=True)

    def test_at_once(self, shop: GuardedShop) -> None:
        """The late holder's transaction is refused, and its message is deferred."""

        def body(guard: Guard) -> None:
            shop.tg.operations.pause(KEY, reason="stuck", now=True)
            with guard.transaction() as db:
                db.execute(sa.text("insert into effects values ('x')"))

        assert isinstance(deliver(shop, body), Deferred)
        assert shop.effects == []

    def test_only_with_a_ledger(self) -> None:
        with closing(taskguard.connect(locks=MemoryLocks(), ledger=None)) as tg:
            for ask in (tg.operations.pause, tg.operations.resume, tg.operations.drop):
                with pytest.raises(ConfigurationError, match="ledger"):
                    ask(KEY, reason="audit")

    def test_a_key_as_errors_show_it(self, shop: GuardedShop) -> None:
        """A key with special characters may be given as `tg.lock()` takes it, or escaped."""
        for key, shown in (
            ("a b", "a%20b"),
            ("a b", "a b"),
            ("50%", "50%"),
            ("50%", "50%25"),
            ("50% off", "50% off"),
            ("tenant=5", "tenant=5"),
        ):
            shop.tg.operations.pause(shown, reason="audit")
            with pytest.raises(KeyBusyError, match="is paused"), shop.tg.lock(key):
                pass
            assert shop.tg.operations.resume(key, reason="done") is not None

    def test_a_key_whose_template_has_a_special_character(self, shop: GuardedShop) -> None:
        """The text of a template is not escaped. `tg.lock()` would take another key."""
        tenant = claims.request(1, keys=("tenant=5",))
        claimed = shop.ledger.claim(tenant)
        assert isinstance(claimed, Claimed)
        shop.ledger.fail(claimed.claim, "boom")
        shop.tg.operations.pause("tenant=5", reason="audit")
        assert isinstance(shop.ledger.claim(claims.request(2, keys=tenant.keys)), Busy)
        assert shop.tg.operations.resume("tenant=5", reason="done") is not None
        assert isinstance(shop.ledger.claim(claims.request(2, keys=tenant.keys)), Claimed)


def elsewhere(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call it as if from outside of the current body."""
    import contextvars

    return contextvars.Context().run(call, *args, **options)


class TestBulk:
    def test_each_work_has_its_own_answer(self, shop: GuardedShop) -> None:
        """Work that may not change is left, and the answer says why."""
        for number in (1, 2):
            fail(shop, number)
        shop.ledger.claim(claims.request(3))
        works = [f"ship order:{number}" for number in (1, 2, 3, 4)]
        found = shop.tg.operations.requeue(works, reason="the bank is back", actor="ann")
        assert [each.changed for each in found] == [True, True, False, False]
        assert [each.work for each in found] == works
        assert "send its message again" in found[0].then
        assert ["PROCESSING by" in found[2].why, found[3].why] == [True, "there is no such work"]
        assert actions(shop) == [("requeue", "ann")] * 2

    def test_what_was_seen_of_each(self, shop: GuardedShop) -> None:
        for number in (1, 2):
            fail(shop, number)
        seen = {WORK: Expected(state=State.DEAD)}
        found = shop.tg.operations.drop([WORK, "ship order:2"], reason="x", expected=seen)
        assert [each.changed for each in found] == [False, True]

    @pytest.mark.parametrize("reason", ["", " \n"])
    def test_a_reason_is_needed(self, shop: GuardedShop, reason: str) -> None:
        fail(shop, 1)
        with pytest.raises(ConfigurationError, match="reason="):
            shop.tg.operations.drop(WORK, reason=reason)
        assert shop.states == ["FAILED"]

    def test_a_release_that_fails_in_the_middle_names_what_it_released(
        self, shop: GuardedShop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The key has two holders, and the database goes down after the first."""
        slots = slots_of(KEY, 2)
        for number in (1, 2):
            bounds = Bounds(KEY, 2, None, slots)
            shop.ledger.claim(claims.request(number, keys=slots[:1], bounds=bounds))
        release = shop.ledger.release

        def first_only(key: str, **options: Any) -> Any:
            if key == slots[1]:
                raise LedgerUnavailableError("the database is down")
            return release(key, **options)

        monkeypatch.setattr(shop.ledger, "release", first_only)
        with pytest.raises(LedgerUnavailableError, match=r"(?s)is down.*order:1#0 was released"):
            shop.tg.operations.release(KEY, reason="host is gone")

    def test_a_change_is_one_line_of_the_log(
        self, shop: GuardedShop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whatever the id of its message is, of which the id of work may be made."""
        message = MessageRef("m1\nforged")
        work, keys = f"ship message:{message.id} {KEY}", (KEY,)
        asked = claims.request(1, message=message, work=work, keys=keys)
        claimed = shop.ledger.claim(asked)
        assert isinstance(claimed, Claimed)
        assert shop.tg.operations.release(KEY, reason="host\nis gone")
        shop.ledger.fail(claimed.claim, "boom")
        assert shop.tg.operations.drop(work, reason="not wanted")[0].changed
        assert len(caplog.messages) >= 2
        assert "\n" not in "".join(caplog.messages)

    def test_texts_are_one_line(self, shop: GuardedShop) -> None:
        """Control characters of an actor and a reason do not reach the record."""
        fail(shop, 1)
        shop.tg.operations.drop(WORK, reason="a\nb\x1b[2J", actor="ann\x07")
        view = shop.ledger.view(WORK)
        assert view is not None
        assert view.error == "dropped by ann\\x07: a b\\x1b[2J"

    def test_a_caller_of_work_that_is_marked_as_done(self, shop: GuardedShop) -> None:
        fail(shop, 1)
        assert shop.tg.operations.done(WORK, reason="by hand")[0].changed
        assert deliver(shop, nothing) == Answered(None, same_message=False)


class TestLineGoesOn:
    """The next message is sent from here, if the runtime knows how."""

    @pytest.fixture
    def sent(self, shop: GuardedShop) -> list[str]:
        """Return the messages that were sent. One holds the key, and three wait."""
        sent: list[str] = []
        shop.tg.senders["test"] = lambda call, message: sent.append(message.id)
        for number in (2, 3, 4):
            message = MessageRef(f"m{number}")
            call = stored_call({"queue": "test"}, message, app="")
            asked = claims.request(number, message=message, keys=(KEY,), call=call, in_line=True)
            assert shop.ledger.park(asked)
        return sent

    def test_after_a_resume(self, shop: GuardedShop, sent: list[str]) -> None:
        shop.tg.operations.pause(KEY, reason="audit")
        assert sent == []
        shop.tg.operations.resume(KEY, reason="done")
        assert sent == ["m2"]

    def test_after_a_pause_that_was_given_up(
        self, shop: GuardedShop, sent: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It kept the free slot of the key closed, while the holder of another one went on."""
        slots = slots_of(KEY, 2)
        bounds = Bounds(KEY, 2, None, slots)
        claimed = [
            shop.ledger.claim(claims.request(number, keys=slots[:1], bounds=bounds))
            for number in (8, 9)
        ]
        assert all(isinstance(each, Claimed) for each in claimed)

        def end_one(_: float) -> None:
            shop.ledger.complete_alone(claimed.pop().claim, None)
            raise KeyboardInterrupt

        monkeypatch.setattr(shop.tg.runner.clock, "sleep", end_one)
        with pytest.raises(KeyboardInterrupt):
            shop.tg.operations.pause(KEY, reason="audit")
        assert sent == ["m2"]

    def test_after_a_release(self, shop: GuardedShop, sent: list[str]) -> None:
        assert isinstance(shop.ledger.claim(claims.request(1)), Claimed)
        assert shop.tg.operations.release(KEY, reason="host is gone")
        assert sent == ["m2"]

    @pytest.mark.parametrize("action", ["drop", "done"])
    def test_after_the_end_of_a_promoted_message(
        self, shop: GuardedShop, sent: list[str], action: str
    ) -> None:
        assert shop.ledger.promote_next(KEY, expected_s=600.0) is not None
        getattr(shop.tg.operations, action)("ship order:2", reason="not wanted")
        assert sent == ["m3"]

    @pytest.mark.parametrize("action", ["drop", "done"])
    def test_the_answer_to_a_duplicate_does_not_notify_the_caller(
        self, shop: GuardedShop, sent: list[str], action: str
    ) -> None:
        """Another message of the same work is answered before the parked one was sent."""
        getattr(shop.tg.operations, action)("ship order:2", reason="not wanted")
        assert isinstance(deliver(shop, nothing, 2, message="n"), (Dropped, Answered))
        assert [each.message.id for each in shop.ledger.overdue(parked=True)] == ["m2"]
        assert isinstance(deliver(shop, nothing, 2), (Dropped, Answered))
        assert shop.ledger.overdue(parked=True) == []

    def test_call_now(self, shop: GuardedShop, sent: list[str]) -> None:
        """A waiting message goes first."""
        assert shop.tg.operations.call_now("ship order:4", reason="urgent")[0].changed
        assert sent == ["m4"]

    def test_call_now_of_an_enqueued_message(self, shop: GuardedShop, sent: list[str]) -> None:
        """It is sent, and not again by the next sweep."""
        call = stored_call({"queue": "test"}, MessageRef("m9"), app="")
        asked = claims.request(9, message=MessageRef("m9"), call=call)
        shop.ledger.enqueue(None, asked, due_in_s=3600.0)
        shop.tg.operations.call_now("ship order:9", reason="urgent")
        assert sent == ["m9"]
        assert [each.work for each in shop.ledger.overdue()] == []


class TestOwnRow:
    """`done(row=)` moves the user's own row in the same transaction."""

    @pytest.fixture
    def rows(self, sqlite_url: str) -> Iterator[RowShop]:
        with closing(RowShop(sqlite_url)) as shop:
            yield shop

    @staticmethod
    def operations(rows: RowShop) -> Any:
        return taskguard.connect(locks=None, ledger=rows.ledger).operations

    def test_both_are_done(self, rows: RowShop) -> None:
        ship = rows.step()

        def body(guard: Guard) -> None:
            raise ValueError("boom")

        with pytest.raises(ValueError, match="boom"):
            ship(body)
        ref = ship.request("n", call=None).row
        [found] = self.operations(rows).done("ship order:7", reason="by hand", row=ref)
        assert found.changed
        assert (rows.status, rows.state()) == ("SHIPPED", "DONE")
        assert ship(message="another") == Answered(None, same_message=False)

    def test_the_row_may_be_named_later(self, rows: RowShop) -> None:
        """A repeated call that names the row moves it, although the work is marked already."""
        ship = rows.step()

        def body(guard: Guard) -> None:
            raise ValueError("boom")

        with pytest.raises(ValueError, match="boom"):
            ship(body)
        ref, operations = ship.request("n", call=None).row, self.operations(rows)
        assert operations.done("ship order:7", reason="by hand")[0].changed
        assert rows.status != "SHIPPED"
        for _ in range(2):
            assert operations.done("ship order:7", reason="by hand", row=ref)[0].changed
            assert rows.status == "SHIPPED"

    def test_a_row_in_another_state_stays(self, rows: RowShop) -> None:
        ship = rows.step()

        def body(guard: Guard) -> None:
            raise ValueError("boom")

        with pytest.raises(ValueError, match="boom"):
            ship(body)
        rows.put(7, "CANCELLED")
        ref = ship.request("n", call=None).row
        [found] = self.operations(rows).done("ship order:7", reason="by hand", row=ref)
        assert (found.changed, "is 'CANCELLED'" in found.why) == (False, True)
        assert (rows.status, rows.state()) == ("CANCELLED", "FAILED")
