"""Tasks that move a row of the user's own: what is run, what stands in the row afterwards.

On PostgreSQL and SQLite, on the ledger's own connections and on an Engine of the user's.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

from support.databases import DATABASES
from support.leaving import exiting_at_sigterm
from support.own_rows import EFFECTS, ORDERS, Shop
from support.threads import at_once
from support.waiting import patience_s
from taskguard.errors import (
    ConfigurationError,
    FingerprintMismatchError,
    KeyArgumentError,
    RowChangedError,
    RowIneligibleError,
    RowMissingError,
    WorkDeadError,
    WorkRevokedError,
)
from taskguard.integration import Answered, Completed, Deferred, Dropped
from taskguard.run.guard import Guard
from taskguard.run.runner import Runner


@pytest.fixture(params=[*DATABASES, "an Engine of PostgreSQL"])
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    own = "Engine" in request.param
    url = request.getfixturevalue("pg_url" if own else request.param)
    made = Shop(url, sa.create_engine(url) if own else None)
    yield made
    made.close()


def fail(guard: Guard) -> None:
    raise ZeroDivisionError


def nothing(guard: Guard) -> None:
    """A body without a transaction of its own."""


# -- the way of an order ----------------------------------------------------------------------


def test_the_row_moves_with_the_claim_and_with_the_effects(shop: Shop) -> None:
    """PROCESSING with the body's fence while it runs; `done` with its effects; then answered."""
    ship = shop.step()
    seen: list[Any] = []

    def body(guard: Guard) -> str:
        seen.append((shop.order().status, shop.order().fence_token == guard.fence))
        return ship.effect(guard)

    assert ship(body) == Completed("ship")
    assert seen == [("SHIPPING", True)]
    assert (shop.status, shop.effects) == ("SHIPPED", ["ship order:7"])
    assert ship(message="another") == Answered("ship")
    assert shop.effects == ["ship order:7"]


@pytest.mark.parametrize("order", [7, "7"])
def test_an_id_comes_as_a_number_or_as_text(shop: Shop, order: Any) -> None:
    """As queues send it. What would be another key for the same row is refused."""
    shop.step()(order=order)
    assert shop.status == "SHIPPED"
    with pytest.raises(KeyArgumentError, match="no id of orders"):
        shop.step()(order="07")


@pytest.mark.parametrize("atomic", [True, False])
def test_a_body_without_a_transaction_moves_it_too(shop: Shop, atomic: bool) -> None:
    """At its end, by a transaction that the ledger opens."""
    assert shop.step(atomic=atomic)(lambda guard: 5) == Completed(5)
    assert shop.status == "SHIPPED"
    assert shop.step()() == Answered(5)


def test_what_fails_is_new_again_for_the_queues_retry(shop: Shop) -> None:
    """FAILED in taskguard's record; nothing of the transaction stays."""
    ship = shop.step()

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            db.execute(sa.insert(EFFECTS).values(item="x"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ship(body)
    assert (shop.status, shop.state(), shop.effects) == ("PAID", "FAILED", [])
    assert ship(retries=1) == Completed("ship")
    assert shop.status == "SHIPPED"


def test_what_is_given_back_is_new_again(shop: Shop) -> None:
    """At a shutdown: another worker need not wait."""

    def leave(guard: Guard) -> None:
        signal.raise_signal(signal.SIGTERM)

    with exiting_at_sigterm(), pytest.raises(SystemExit):
        shop.step()(leave)
    assert (shop.status, shop.state()) == ("PAID", "NEW")


def test_a_row_whose_body_ends_its_process_is_taken_over(shop: Shop) -> None:
    """`sys.exit()` counts as a crash: the row stays, and the next delivery need not wait for it."""
    ship = shop.step(max_crashes=2)
    with pytest.raises(SystemExit):
        ship(lambda guard: sys.exit(2))
    assert (shop.status, shop.state()) == ("SHIPPING", "PROCESSING")
    with pytest.raises(SystemExit):
        ship(lambda guard: sys.exit(2))
    with pytest.raises(WorkDeadError, match="SystemExit: 2"):
        ship()
    assert (shop.status, shop.state()) == ("SHIPPING", "DEAD")


def test_several_steps_on_one_row(shop: Shop) -> None:
    """SHIPPED is where billing starts; a late duplicate of shipping is still answered."""
    ship = shop.step()
    bill = shop.step("bill", new="SHIPPED", processing="BILLING", done="BILLED")
    with pytest.raises(RowIneligibleError, match=r"'PAID'.*'SHIPPED' to 'BILLED'"):
        bill()
    ship()
    fence = shop.order().fence_token
    assert bill() == Completed("bill")
    assert shop.status == "BILLED"
    assert shop.order().fence_token > fence
    assert ship(message="another") == Answered("ship")
    assert bill(message="another") == Answered("bill")
    assert shop.effects == ["bill order:7", "ship order:7"]


def test_steps_that_call_their_work_alike(shop: Shop) -> None:
    """Both PROCESSING: one's duplicate does not take the other's row for its own."""
    ship = shop.step(processing="BUSY")
    bill = shop.step("bill", new="SHIPPED", processing="BUSY", done="BILLED")
    told: list[Any] = []
    ship()

    def body(guard: Guard) -> None:
        shop.change("delete from taskguard_work where id = 'ship order:7'")  # purged
        shop.change("update taskguard_keys set lease_until = 1")
        with pytest.raises(RowIneligibleError):
            ship(by=shop.process(), message="another")
        told.append(shop.order().fence_token == guard.fence)

    bill(body)
    assert told == [True]
    assert shop.status == "BILLED"


# -- no row of this task's --------------------------------------------------------------------


def test_a_missing_row_is_an_error_by_default(shop: Shop) -> None:
    """It names the row, and what to say if the message may come first."""
    with pytest.raises(RowMissingError, match=r'no row orders 8.*on_missing="defer"') as caught:
        shop.step()(order=8)
    assert caught.value.key == "order:8"
    assert shop.effects == []
    assert "missing" in shop.reasons


def test_a_row_in_another_state_is_an_error_by_default(shop: Shop) -> None:
    """It carries the state; the row stays as it is."""
    shop.put(7, "CANCELLED")
    with pytest.raises(RowIneligibleError, match="CANCELLED") as caught:
        shop.step()()
    assert (caught.value.key, caught.value.state) == ("order:7", "CANCELLED")
    assert (shop.status, shop.effects, shop.order().fence_token) == ("CANCELLED", [], None)


@pytest.mark.parametrize("which", ["missing", "ineligible"])
def test_either_may_be_skipped_or_put_off(shop: Shop, which: str) -> None:
    """Acknowledged with an event, or put off until it finds the row. Never a silent run."""
    order, status = (8, "PAID") if which == "missing" else (7, "WAITING")
    if which == "ineligible":
        shop.put(7, "WAITING")
    skip = shop.step(**{f"on_{which}": "skip"})
    assert skip(order=order) == Dropped(which)
    assert shop.reasons == [which]
    defer = shop.step(**{f"on_{which}": "defer"})
    assert isinstance(defer(order=order), Deferred)
    assert shop.queue.deferrals == [1]
    assert defer(order=order) == Dropped("superseded")
    assert shop.effects == []
    shop.put(order, "PAID")
    assert defer(order=order, deferrals=1) == Completed("ship")
    assert (shop.order(order).status, status) != ("WAITING", "WAITING")


def test_a_message_is_not_put_off_for_ever(shop: Shop) -> None:
    """Past `retention_s` it is an error, so that a person sees it."""
    defer = shop.step(on_missing="defer", retention_s=50)
    with pytest.raises(RowMissingError):
        defer(order=8, published_at_s=time.time() - 100)


@pytest.mark.parametrize("how", ["skip", "defer"])
def test_a_plain_call_is_told_by_an_error(shop: Shop, how: str) -> None:
    """It has no queue to be acknowledged to."""
    with pytest.raises(RowMissingError):
        shop.step(on_missing=how)(order=8, queue=False)


def test_a_row_that_is_processing_by_nobody_we_know_is_not_touched(shop: Shop) -> None:
    """Somebody else's program, or a record that was deleted: a person has to look."""
    shop.put(7, "SHIPPING")
    with pytest.raises(RowIneligibleError, match="SHIPPING"):
        shop.step()()
    assert shop.status == "SHIPPING"


def test_the_row_tells_longer_than_the_record(shop: Shop) -> None:
    """After a purge: done is done, without a result; and an old message of a NEW row is run."""
    ship = shop.step(retention_s=50)
    old = time.time() - 100
    assert ship(published_at_s=old) == Completed("ship")
    shop.change("delete from taskguard_work")
    assert ship(published_at_s=old, message="another") == Answered(None)
    assert shop.effects == ["ship order:7"]


def test_a_deleted_row_that_was_done_is_still_answered(shop: Shop) -> None:
    """The order was archived; its late duplicate is no error."""
    ship = shop.step()
    ship()
    shop.change("delete from orders")
    assert ship(message="another") == Answered("ship")


def test_a_purge_of_keys_does_not_lower_the_fence(shop: Shop) -> None:
    """The row's own is in the reckoning, also if the clock went back."""
    ship = shop.step()
    shop.change(f"update orders set fence_token = {2**61}")
    ship()
    assert shop.order().fence_token == 2**61 + 1
    assert shop.status == "SHIPPED"


# -- its owner ---------------------------------------------------------------------------------


def test_a_row_that_its_owner_sets_back_is_done_again(shop: Shop) -> None:
    """By the next message, from the beginning: no progress, no result of the first time."""
    ship = shop.step()

    def in_parts(guard: Guard) -> Any:
        with guard.checkpoint("half"):
            pass
        return ship.effect(guard)

    ship(in_parts)
    shop.put(7, "PAID")
    assert ship(lambda guard: guard.progress, message="another") == Completed(None)
    assert shop.status == "SHIPPED"
    assert ship(message="third") == Answered(None)


def test_its_owner_cancels_it_while_it_is_shipped(shop: Shop) -> None:
    """The completion is refused, nothing of it stays, and the state is its owner's."""
    ship = shop.step(on_ineligible="skip")

    def body(guard: Guard) -> str:
        shop.put(7, "CANCELLED")
        return ship.effect(guard)

    assert ship(body) == Dropped("ineligible")
    assert (shop.status, shop.effects) == ("CANCELLED", [])
    assert "stale_refused" in [event.name for event in shop.events]


def test_a_checkpoint_of_a_cancelled_order_is_refused(shop: Shop) -> None:
    """Its effects are not written either."""
    ship = shop.step(on_ineligible="skip")

    def body(guard: Guard) -> None:
        shop.put(7, "CANCELLED")
        with guard.checkpoint(1) as db:
            db.execute(sa.insert(EFFECTS).values(item="half"))

    assert ship(body) == Dropped("ineligible")
    assert (shop.status, shop.effects) == ("CANCELLED", [])


@pytest.mark.parametrize("statement", ["update orders set status = 'LOST'", "delete from orders"])
def test_a_body_that_moves_its_row_itself_is_told_so(shop: Shop, statement: str) -> None:
    """Once, by an error of its own that names `done`; swallowing it does not help."""
    ship = shop.step()

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            db.execute(sa.insert(EFFECTS).values(item="x"))
            db.execute(sa.text(statement))

    def swallowing(guard: Guard) -> None:
        with pytest.raises(RowChangedError):
            body(guard)

    for each in (body, swallowing):
        with pytest.raises(RowChangedError, match=r"done='SHIPPED'"):
            ship(each)
        assert (shop.status, shop.state(), shop.effects) == ("PAID", "FAILED", [])
    assert ship(retries=1) == Completed("ship")


@pytest.mark.parametrize("moved", [False, True])
def test_the_row_moves_in_a_session_of_the_users_own(shop: Shop, moved: bool) -> None:
    """With its effects; and a body that moved it there is told so, too."""
    ship = shop.step()

    def body(guard: Guard) -> None:
        with orm.Session(shop.engine) as session, guard.transaction(session):
            session.execute(sa.insert(EFFECTS).values(item="x"))
            if moved:
                session.execute(sa.text("update orders set status = 'LOST'"))

    if moved:
        with pytest.raises(RowChangedError, match=r"done='SHIPPED'"):
            ship(body)
        assert (shop.status, shop.effects) == ("PAID", [])
    else:
        ship(body)
        assert (shop.status, shop.effects) == ("SHIPPED", ["x"])


def test_a_body_may_write_the_other_columns_of_its_row(shop: Shop) -> None:
    """In the transaction of the move."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            db.execute(sa.update(ORDERS).where(ORDERS.c.id == 7).values(note="fragile"))

    shop.step()(body)
    assert (shop.status, shop.order().note) == ("SHIPPED", "fragile")


# -- several holders ---------------------------------------------------------------------------


def test_a_duplicate_of_what_runs_is_put_off(shop: Shop) -> None:
    """Also where the lock server knows of nothing."""
    ship = shop.step()
    told: list[Any] = []
    ship(lambda guard: told.append(ship(by=shop.process(), message="another")))
    assert isinstance(told[0], Deferred)
    assert shop.status == "SHIPPED"


@pytest.mark.parametrize("ends", ["transaction", "plain"])
def test_a_paused_holder_is_refused_after_a_takeover(shop: Shop, ends: str) -> None:
    """Its row has a higher fence by then; the one that took over has the only effect."""
    ship = shop.step()
    told: list[Any] = []

    def paused(guard: Guard) -> Any:
        shop.expire()
        told.append(ship(by=shop.process(), message="another"))
        return ship.effect(guard) if ends == "transaction" else None

    assert ship(paused) == Answered("ship")
    assert told == [Completed("ship")]
    assert (shop.status, shop.effects) == ("SHIPPED", ["ship order:7"])


def test_a_paused_holder_takes_nothing_from_the_one_that_took_over(shop: Shop) -> None:
    """It fails while the other is at work: the other's row stays PROCESSING with its fence."""
    ship = shop.step()
    fences: list[int] = []

    def taking_over(guard: Guard) -> str:
        fences.append(guard.fence)
        holder.ended.set()
        wait(holder.gone)
        fences.append(shop.order().fence_token)
        return ship.effect(guard)

    class holder:  # noqa: N801
        ended, gone = threading.Event(), threading.Event()

    def paused(guard: Guard) -> None:
        shop.expire()
        other.start()
        wait(holder.ended)
        raise ZeroDivisionError

    def wait(event: threading.Event) -> None:
        assert event.wait(patience_s())

    told: list[Any] = []
    other = threading.Thread(
        target=lambda: told.append(ship(taking_over, by=shop.process(), message="another"))
    )
    with pytest.raises(ZeroDivisionError):
        ship(paused)
    assert shop.status == "SHIPPING"
    holder.gone.set()
    other.join(patience_s())
    assert told == [Completed("ship")]
    assert fences[0] == fences[1]
    assert shop.effects == ["ship order:7"]


def test_of_many_at_once_one_does_it(shop: Shop) -> None:
    """Processes that know nothing of each other but by the database."""
    ship = shop.step()
    runners = [shop.process() for _ in range(4)]
    told: list[Any] = []
    at_once(4, lambda number: told.append(ship(by=runners[number], message=f"m{number}")))
    assert len(told) == len(runners)
    assert told.count(Completed("ship")) == 1
    assert all(isinstance(each, Completed | Answered | Deferred) for each in told)
    assert (shop.status, shop.effects) == ("SHIPPED", ["ship order:7"])


@pytest.mark.parametrize("dead", [None, "STUCK"])
def test_a_row_that_kills_its_workers_is_left_where_it_is_seen(shop: Shop, dead: Any) -> None:
    """PROCESSING, or the state that was named for it; requeued by an operator it is done."""
    ship = shop.step(dead=dead, max_crashes=1)

    def vanish(guard: Guard) -> None:
        shop.expire()
        with pytest.raises(WorkDeadError):
            ship(by=shop.process())
        assert shop.status == (dead or "SHIPPING")
        with pytest.raises(WorkDeadError):
            ship(by=shop.process())

    with pytest.raises(WorkDeadError):
        ship(vanish)
    assert shop.status == (dead or "SHIPPING")
    assert shop.ledger.requeue("ship order:7", reason="mended")
    assert ship(retries=1) == Completed("ship")
    assert shop.status == "SHIPPED"


def test_a_dead_row_that_its_owner_sets_back_is_done(shop: Shop) -> None:
    """Without an operator of taskguard's, and with no crash counted."""
    ship = shop.step(max_crashes=1)

    def vanish(guard: Guard) -> None:
        shop.expire()
        with pytest.raises(WorkDeadError):
            ship(by=shop.process())

    with pytest.raises(WorkDeadError):
        ship(vanish)
    shop.put(7, "PAID")
    assert ship(message="another") == Completed("ship")
    view = shop.ledger.view("ship order:7")
    assert view is not None
    assert (view.crashes, view.state.value, shop.status) == (0, "DONE", "SHIPPED")


def test_a_revoked_message_is_not_run(shop: Shop) -> None:
    """Its row stays NEW for whoever asks an operator to requeue it."""
    ship = shop.step()
    with pytest.raises(ZeroDivisionError):
        ship(fail)
    assert shop.ledger.revoke("ship order:7", message="m")
    assert ship(retries=1) == Dropped("revoked")
    with pytest.raises(WorkRevokedError):
        ship(queue=False)
    assert shop.status == "PAID"


def test_a_message_that_is_revoked_while_it_runs_leaves_its_row_new(shop: Shop) -> None:
    """Its completion is refused; nobody else would put the row back."""
    ship = shop.step()

    def body(guard: Guard) -> str:
        assert shop.ledger.revoke("ship order:7", message="m")
        return ship.effect(guard)

    assert ship(body) == Dropped("revoked")
    assert (shop.status, shop.effects) == ("PAID", [])


def test_a_fingerprint_binds_until_the_row_is_set_back(shop: Shop) -> None:
    """Another amount is an error; of a new round it is not."""
    ship = shop.step(fingerprint="<amount>")
    ship(amount=1)
    with pytest.raises(FingerprintMismatchError):
        ship(amount=2, message="another")
    shop.put(7, "PAID")
    assert ship(amount=2, message="another") == Completed("ship")
    with pytest.raises(FingerprintMismatchError):
        ship(amount=1, message="third")


def test_a_row_needs_a_ledger(shop: Shop) -> None:
    """With locks only there is nothing that could move it."""
    runner = Runner(locks=shop.runner.locks, ledger=None)
    with pytest.raises(ConfigurationError, match="ledger"):
        shop.step()(by=runner)


def test_somebody_who_locks_the_row_makes_it_busy(pg_url: str) -> None:
    """No longer than the lock time-out; then it is put off."""
    shop = Shop(pg_url)
    with shop.engine.begin() as db:
        db.execute(sa.select(ORDERS).where(ORDERS.c.id == 7).with_for_update())
        assert isinstance(shop.step()(), Deferred)
    assert shop.status == "PAID"
    assert shop.step()(deferrals=1) == Completed("ship")
    shop.close()


def test_an_open_insert_that_refers_to_the_row_is_not_in_the_way(pg_url: str) -> None:
    """As of a line of the order, by somebody's web handler: only the row's key is locked."""
    shop = Shop(pg_url)
    shop.change("create table lines (order_id integer references orders (id))")
    with shop.engine.begin() as db:
        db.execute(sa.text("insert into lines values (7)"))
        assert shop.step()() == Completed("ship")
    shop.close()


def test_a_holder_in_its_transaction_is_not_kept_by_one_who_would_take_over(pg_url: str) -> None:
    """Both lock the row first: the late holder, still unrivalled, completes; no deadlock."""
    shop = Shop(pg_url)
    ship = shop.step()
    told: list[Any] = []

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            db.execute(sa.update(ORDERS).where(ORDERS.c.id == 7).values(note="mine"))
            shop.expire()
            told.append(ship(by=shop.process(), message="another"))

    assert ship(body) == Completed(None)
    assert isinstance(told[0], Deferred)
    assert (shop.status, shop.order().note) == ("SHIPPED", "mine")
    shop.close()


def test_enqueueing_a_row_that_was_set_back_stores_its_call(shop: Shop) -> None:
    """In the transaction that sets it back: killed right after that, it is overdue and runs."""
    ship = shop.step()
    ship()
    request = ship.request("second", call={"queue": "test"})
    shop.ledger.enqueue(None, request, due_in_s=0)
    assert shop.ledger.overdue(work="ship order:7") == []
    with orm.Session(shop.engine) as session:
        session.execute(sa.update(ORDERS).values(status="PAID"))
        shop.ledger.enqueue(session.connection(), request, due_in_s=0)
        session.commit()
    assert [each.work for each in shop.ledger.overdue()] == ["ship order:7"]
    assert ship(message="second") == Completed("ship")
    assert ship(message="first") == Answered("ship")
    assert shop.effects == ["ship order:7"] * 2
    assert shop.ledger.overdue(work="ship order:7") == []


@pytest.mark.parametrize("status", ["SHIPPED", "CANCELLED", None])
def test_what_its_row_says_cannot_be_run_is_not_sent_for_ever(
    shop: Shop, status: str | None
) -> None:
    """It was told so, and is done by hand, cancelled or gone; enqueued anew it is sent anew."""
    ship = shop.step()
    request = ship.request("m", call={"queue": "test"})
    shop.ledger.enqueue(None, request, due_in_s=0)
    if status is None:
        shop.change("delete from orders")
    else:
        shop.put(7, status)
    if status == "SHIPPED":
        assert ship() == Answered(None)
    else:
        with pytest.raises((RowMissingError, RowIneligibleError)):
            ship()
    assert shop.ledger.overdue(work="ship order:7") == []
    shop.put(7, "PAID")
    shop.ledger.enqueue(None, request, due_in_s=0)
    assert [each.work for each in shop.ledger.overdue()] == ["ship order:7"]
    assert ship() == Completed("ship")


def test_what_waits_for_its_row_is_sent_until_it_comes(shop: Shop) -> None:
    """What is published again may be lost, as any message."""
    ship = shop.step(on_ineligible="defer")
    shop.ledger.enqueue(None, ship.request("m", call={"queue": "test"}), due_in_s=0)
    shop.put(7, "ORDERED")
    assert isinstance(ship(), Deferred)
    assert [each.work for each in shop.ledger.overdue()] == ["ship order:7"]
