"""Tasks that move a row of the user's: which deliveries run, and what the row contains afterwards.

On PostgreSQL and SQLite, on the ledger's own connections and on the user's Engine.
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
from taskguard.model.records import Once
from taskguard.run.guard import Guard
from taskguard.run.runner import Runner


# `test_own_row_tables.py` compares the SQL of each database with the table of states.
@pytest.fixture(
    params=["pg_url", "sqlite_url", pytest.param("mariadb_url", marks=pytest.mark.debian)]
)
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    made = Shop(request.getfixturevalue(request.param))
    yield made
    made.close()


def fail(guard: Guard) -> None:
    raise ZeroDivisionError


def nothing(guard: Guard) -> None:
    """A body without a transaction of its own."""


# -- the way of an order ----------------------------------------------------------------------


def test_the_row_moves_with_the_claim_and_with_the_effects(shop: Shop) -> None:
    """The row is PROCESSING with the body's fence while it runs, then `done` with its effects.
    Later messages are answered."""
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
    """An id may come as a number or as text. A text that would be another key for the same row is
    refused."""
    shop.step()(order=order)
    assert shop.status == "SHIPPED"
    with pytest.raises(KeyArgumentError, match="no id of orders"):
        shop.step()(order="07")


@pytest.mark.parametrize("atomic", [True, False])
def test_a_body_without_a_transaction_moves_it_too(shop: Shop, atomic: bool) -> None:
    """For a body without a transaction, the ledger moves the row in one of its own."""
    assert shop.step(atomic=atomic)(lambda guard: 5) == Completed(5)
    assert shop.status == "SHIPPED"
    assert shop.step()() == Answered(5)


def test_what_fails_is_new_again_for_the_queues_retry(shop: Shop) -> None:
    """Failed work is FAILED in its record, its row is NEW, and its transaction leaves nothing."""
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
    """After a shutdown the row is NEW, so another worker need not wait."""

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
    """A row may have several steps: billing starts at SHIPPED, and a late duplicate of shipping is
    answered."""
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
    """If two steps name their work alike, a duplicate of one does not take the other's PROCESSING
    row."""
    ship = shop.step(processing="BUSY")
    bill = shop.step("bill", new="SHIPPED", processing="BUSY", done="BILLED")
    equal: list[Any] = []
    ship()

    def body(guard: Guard) -> None:
        shop.change("delete from taskguard_work where id = 'ship order:7'")  # purged
        shop.change("update taskguard_keys set lease_until = 1")
        with pytest.raises(RowIneligibleError):
            ship(by=shop.process(), message="another")
        equal.append(shop.order().fence_token == guard.fence)

    bill(body)
    assert equal == [True]
    assert shop.status == "BILLED"


# -- no row of this task's --------------------------------------------------------------------


def test_a_missing_row_is_an_error_by_default(shop: Shop) -> None:
    """The error of a missing row names the row, and the option to use if the message may come
    first."""
    with pytest.raises(RowMissingError, match=r'no row orders 8.*on_missing="defer"') as caught:
        shop.step()(order=8)
    assert caught.value.key == "order:8"
    assert shop.effects == []
    assert "missing" in shop.reasons


def test_a_row_in_another_state_is_an_error_by_default(shop: Shop) -> None:
    """The error has the row's state, and the row does not change."""
    shop.put(7, "CANCELLED")
    with pytest.raises(RowIneligibleError, match="CANCELLED") as caught:
        shop.step()()
    assert (caught.value.key, caught.value.state) == ("order:7", "CANCELLED")
    assert (shop.status, shop.effects, shop.order().fence_token) == ("CANCELLED", [], None)


@pytest.mark.parametrize("which", ["missing", "ineligible"])
def test_either_may_be_skipped_or_put_off(shop: Shop, which: str) -> None:
    """One option acknowledges either case with an event, another defers until the row fits."""
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
    """After `retention_s` a deferred message fails with an error, so that a person sees it."""
    defer = shop.step(on_missing="defer", retention_s=50)
    with pytest.raises(RowMissingError):
        defer(order=8, published_at_s=time.time() - 100)


@pytest.mark.parametrize("how", ["skip", "defer"])
def test_a_plain_call_gets_an_error(shop: Shop, how: str) -> None:
    """A plain call gets an error, because it has no queue that could acknowledge it."""
    with pytest.raises(RowMissingError):
        shop.step(on_missing=how)(order=8, queue=False)


def test_a_row_that_is_processing_without_a_known_holder_is_not_touched(shop: Shop) -> None:
    """If a PROCESSING row has no known holder, it is not changed, and a person has to look."""
    shop.put(7, "SHIPPING")
    with pytest.raises(RowIneligibleError, match="SHIPPING"):
        shop.step()()
    assert shop.status == "SHIPPING"


def test_the_row_tells_longer_than_the_record(shop: Shop) -> None:
    """After a purge the row still says that it is done, without a result. An old message of a NEW
    row runs."""
    ship = shop.step(retention_s=50)
    old = time.time() - 100
    assert ship(published_at_s=old) == Completed("ship")
    shop.change("delete from taskguard_work")
    assert ship(published_at_s=old, message="another") == Answered(None)
    assert shop.effects == ["ship order:7"]


def test_a_deleted_row_that_was_done_is_still_answered(shop: Shop) -> None:
    """A late duplicate of a done, deleted row is answered."""
    ship = shop.step()
    ship()
    shop.change("delete from orders")
    assert ship(message="another") == Answered("ship")


def test_a_purge_of_keys_does_not_lower_the_fence(shop: Shop) -> None:
    """The row's own fence counts, too, so the fence does not fall after a purge, or if the clock
    went back."""
    ship = shop.step()
    shop.change(f"update orders set fence_token = {2**61}")
    ship()
    assert shop.order().fence_token == 2**61 + 1
    assert shop.status == "SHIPPED"


# -- its owner ---------------------------------------------------------------------------------


def test_a_row_that_its_owner_sets_back_is_done_again(shop: Shop) -> None:
    """After its owner sets it back, the next message does the work from the beginning, without old
    progress or result."""
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
    """If its owner cancels the row, the completion is refused, nothing is written, and the owner's
    state stays."""
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
def test_a_body_that_moves_its_row_itself_gets_an_error(shop: Shop, statement: str) -> None:
    """A body that moves its row itself gets one error that names `done`. Catching it does
    not help."""
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
    """The row moves with the effects. A body that moved it itself gets an error."""
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
    """A duplicate of running work is deferred, even if the lock server knows no holder."""
    ship = shop.step()
    outcomes: list[Any] = []
    ship(lambda guard: outcomes.append(ship(by=shop.process(), message="another")))
    assert isinstance(outcomes[0], Deferred)
    assert shop.status == "SHIPPED"


@pytest.mark.parametrize("ends", ["transaction", "plain"])
def test_a_paused_holder_is_refused_after_a_takeover(shop: Shop, ends: str) -> None:
    """After a takeover the row has a higher fence. Only the new holder has an effect."""
    ship = shop.step()
    outcomes: list[Any] = []

    def paused(guard: Guard) -> Any:
        shop.expire()
        outcomes.append(ship(by=shop.process(), message="another"))
        return ship.effect(guard) if ends == "transaction" else None

    assert ship(paused) == Answered("ship")
    assert outcomes == [Completed("ship")]
    assert (shop.status, shop.effects) == ("SHIPPED", ["ship order:7"])


def test_a_paused_holder_takes_nothing_from_the_one_that_took_over(shop: Shop) -> None:
    """If the paused holder fails while the new one runs, the row stays PROCESSING with the new
    fence."""
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

    outcomes: list[Any] = []
    other = threading.Thread(
        target=lambda: outcomes.append(ship(taking_over, by=shop.process(), message="another"))
    )
    with pytest.raises(ZeroDivisionError):
        ship(paused)
    assert shop.status == "SHIPPING"
    holder.gone.set()
    other.join(patience_s())
    assert outcomes == [Completed("ship")]
    assert fences[0] == fences[1]
    assert shop.effects == ["ship order:7"]


def test_of_many_at_once_one_does_it(shop: Shop) -> None:
    """Of several processes that share only the database, one does the work."""
    ship = shop.step()
    runners = [shop.process() for _ in range(4)]
    outcomes: list[Any] = []
    at_once(4, lambda number: outcomes.append(ship(by=runners[number], message=f"m{number}")))
    assert len(outcomes) == len(runners)
    assert outcomes.count(Completed("ship")) == 1
    assert all(isinstance(each, Completed | Answered | Deferred) for each in outcomes)
    assert (shop.status, shop.effects) == ("SHIPPED", ["ship order:7"])


@pytest.mark.parametrize("dead", [None, "STUCK"])
def test_a_row_that_kills_its_workers_is_left_where_it_is_seen(shop: Shop, dead: Any) -> None:
    """A row that kills its workers stays PROCESSING, or gets its configured state. After a requeue
    it is done."""
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
    """If its owner sets a dead row back, it is done without a requeue, and with no crash
    counted."""
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
    """The row of a revoked message stays NEW, so that an operator can requeue it."""
    ship = shop.step()
    with pytest.raises(ZeroDivisionError):
        ship(fail)
    assert shop.ledger.revoke("ship order:7", message="m")
    assert ship(retries=1) == Dropped("revoked")
    with pytest.raises(WorkRevokedError):
        ship(queue=False)
    assert shop.status == "PAID"


def test_a_message_that_is_revoked_while_it_runs_leaves_its_row_new(shop: Shop) -> None:
    """If a running message is revoked, its completion is refused, and the row is NEW again."""
    ship = shop.step()

    def body(guard: Guard) -> str:
        assert shop.ledger.revoke("ship order:7", message="m")
        return ship.effect(guard)

    assert ship(body) == Dropped("revoked")
    assert (shop.status, shop.effects) == ("PAID", [])


def test_a_fingerprint_binds_until_the_row_is_set_back(shop: Shop) -> None:
    """Another amount is an error until the row is set back."""
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


def test_a_row_that_another_session_locks_is_busy(pg_url: str) -> None:
    """A row that another transaction locks is busy after the lock timeout, and the delivery is
    deferred."""
    shop = Shop(pg_url)
    with shop.engine.begin() as db:
        db.execute(sa.select(ORDERS).where(ORDERS.c.id == 7).with_for_update())
        assert isinstance(shop.step()(), Deferred)
    assert shop.status == "PAID"
    assert shop.step()(deferrals=1) == Completed("ship")
    shop.close()


def test_an_open_insert_that_refers_to_the_row_is_not_in_the_way(pg_url: str) -> None:
    """An open insert that refers to the row, such as a line of the order, locks only the row's key,
    and does not block."""
    shop = Shop(pg_url)
    shop.change("create table lines (order_id integer references orders (id))")
    with shop.engine.begin() as db:
        db.execute(sa.text("insert into lines values (7)"))
        assert shop.step()() == Completed("ship")
    shop.close()


def test_a_holder_in_its_transaction_does_not_wait_for_a_takeover(pg_url: str) -> None:
    """The late holder and the next one lock the row first, so there is no deadlock, and the late
    holder completes."""
    shop = Shop(pg_url)
    ship = shop.step()
    outcomes: list[Any] = []

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            db.execute(sa.update(ORDERS).where(ORDERS.c.id == 7).values(note="mine"))
            shop.expire()
            outcomes.append(ship(by=shop.process(), message="another"))

    assert ship(body) == Completed(None)
    assert isinstance(outcomes[0], Deferred)
    assert (shop.status, shop.order().note) == ("SHIPPED", "mine")
    shop.close()


def test_a_run_is_one_passage_of_the_row(shop: Shop) -> None:
    """With once_per="run", the next run begins once the row was set back. A late copy of an older
    message is answered by its own run, and another message while the row is done by the row."""
    ship = shop.step(once_per="run")
    results = iter(["one", "two"])

    def body(guard: Guard) -> str:
        ship.effect(guard)
        return next(results)

    assert ship(body, message="first") == Completed("one")
    assert ship(body, message="second") == Answered(None)
    shop.put(7, "PAID")
    assert ship(body, message="first") == Answered("one")
    assert shop.status == "PAID"
    assert ship(body, message="third") == Completed("two")
    assert ship(body, message="first") == Answered("one")
    assert shop.effects == ["ship order:7"] * 2


def test_enqueueing_a_row_that_was_set_back_stores_its_call(shop: Shop) -> None:
    """Enqueueing commits with the change that sets the row back. If its process dies, the message
    is overdue and runs."""
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


def test_a_call_whose_row_was_set_back_is_replaced_by_a_newer_one(shop: Shop) -> None:
    """A debounce: each change sets the row back and replaces the call. The newest message runs."""
    ship = shop.step()
    ship()
    for message in ("older", "newer"):
        request = ship.request(message, call={"queue": "test"})
        with orm.Session(shop.engine) as session:
            session.execute(sa.update(ORDERS).values(status="PAID"))
            once = Once(lambda _, request=request: request, replaces=True)
            shop.ledger.enqueue(session.connection(), request, due_in_s=0, once=once)
            session.commit()
    assert [each.message.name for each in shop.ledger.overdue()] == ["newer"]
    assert ship(message="older") == Dropped("replaced", by="newer")
    assert shop.status == "PAID"
    assert ship(message="newer") == Completed("ship")
    assert shop.status == "SHIPPED"
    assert shop.effects == ["ship order:7"] * 2


@pytest.mark.parametrize("status", ["SHIPPED", "CANCELLED", None])
def test_what_its_row_says_cannot_be_run_is_not_sent_for_ever(
    shop: Shop, status: str | None
) -> None:
    """A message that its row refuses is not sent for ever. Its caller is notified, and another
    enqueue sends it again."""
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
    """A message that is deferred until its row fits stays overdue, because its copy may be lost."""
    ship = shop.step(on_ineligible="defer")
    shop.ledger.enqueue(None, ship.request("m", call={"queue": "test"}), due_in_s=0)
    shop.put(7, "ORDERED")
    assert isinstance(ship(), Deferred)
    assert [each.work for each in shop.ledger.overdue()] == ["ship order:7"]
