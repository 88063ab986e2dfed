"""Bodies that catch the exception that ended their transaction, and return as if all was well."""

from __future__ import annotations

from typing import Any

import pytest

from support.guarded_shop import GuardedShop, NotingQueue, write
from taskguard.errors import TransactionAbandonedError
from taskguard.run.guard import Guard


class SoftTimeLimitError(Exception):
    """An error like Celery's SoftTimeLimitExceeded, which is raised in the middle of the body."""


def test_a_body_that_catches_what_ended_its_transaction_is_not_done(shop: GuardedShop) -> None:
    """If a body catches the time limit that ended its transaction, the work is not DONE, because
    its writes are gone."""
    runs = []

    def body(guard: Guard) -> str:
        runs.append(1)
        try:
            with guard.transaction() as db:
                write(db)
                if len(runs) == 1:
                    raise SoftTimeLimitError
        except SoftTimeLimitError:
            pass
        return "shipped"

    with pytest.raises(TransactionAbandonedError, match="SoftTimeLimitError") as caught:
        shop.deliver(body)
    assert isinstance(caught.value.__cause__, SoftTimeLimitError)
    assert caught.value.key == "order:1"
    assert (shop.effects, shop.states) == ([], ["FAILED"])
    shop.deliver(body)
    assert (shop.effects, shop.states) == (["x"], ["DONE"])


def test_a_transaction_that_is_begun_again_makes_up_for_it(pg: GuardedShop) -> None:
    """A body may begin another transaction. The last one counts."""

    def body(guard: Guard) -> str:
        try:
            with guard.transaction() as db:
                write(db, "first")
                raise LookupError
        except LookupError:
            with guard.transaction() as db:
                write(db, "second")
        return "shipped"

    pg.deliver(body)
    assert (pg.effects, pg.states) == (["second"], ["DONE"])


def test_parts_that_are_committed_later_make_up_for_it(pg: GuardedShop) -> None:
    """If the body commits a checkpoint after that, its end counts."""

    def body(guard: Guard) -> str:
        try:
            with guard.transaction() as db:
                write(db, "all at once")
                raise LookupError
        except LookupError:
            with guard.checkpoint(1) as db:
                write(db, "a part")
        return "shipped"

    pg.deliver(body)
    assert (pg.effects, pg.states) == (["a part"], ["DONE"])


@pytest.mark.parametrize("part", ["transaction", "checkpoint"])
def test_a_step_does_not_make_up_for_it(pg: GuardedShop, part: str) -> None:
    """A step does not replace the lost writes: a call to an external service in a clean-up is none
    of them."""

    def body(guard: Guard) -> None:
        on = guard.transaction() if part == "transaction" else guard.checkpoint(1)
        try:
            with on as db:
                write(db)
                raise LookupError
        except LookupError:
            guard.step("tell", lambda: "told")

    with pytest.raises(TransactionAbandonedError):
        pg.deliver(body)
    assert (pg.effects, pg.states) == ([], ["FAILED"])


def test_a_swallowed_deadlock_is_run_again_although_a_step_was_stored(pg: GuardedShop) -> None:
    """After a swallowed deadlock the body runs again, even if it has stored a step."""
    runs = []

    def body(guard: Guard) -> None:
        runs.append(1)
        try:
            with guard.transaction() as db:
                write(db)
                if len(runs) == 1:
                    db.exec_driver_sql("do $$ begin raise exception sqlstate '40P01'; end $$")
        except Exception:
            guard.step("tell", lambda: "told")

    pg.deliver(body)
    assert (len(runs), pg.effects, pg.states) == (2, ["x"], ["DONE"])


def test_a_swallowed_shutdown_goes_on(pg: GuardedShop) -> None:
    """If a body swallows a shutdown, its work is given back at once."""

    def body(guard: Guard) -> None:
        try:
            with guard.transaction() as db:
                write(db)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass

    with pytest.raises(KeyboardInterrupt):
        pg.deliver(body)
    assert (pg.effects, pg.states) == ([], ["NEW"])


def test_the_message_of_a_lost_lease_is_put_off(pg: GuardedShop) -> None:
    """If a body swallows the error of `guard.check()`, its delivery is deferred."""
    queue = NotingQueue()

    def body(guard: Guard) -> None:
        try:
            with guard.transaction() as db:
                write(db)
                guard._attempt.lease.mark_lost("for the test")
                guard.check()
        except Exception:
            pass

    pg.deliver(body, queue)
    assert (pg.effects, pg.states, queue.deferrals) == ([], ["NEW"], [1])


def test_a_result_in_an_abandoned_block_is_none(pg: GuardedShop) -> None:
    """A result that was set in an abandoned block is dropped, and the work is not DONE."""
    results: list[Any] = []

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> str:
        try:
            with guard.transaction() as db:
                write(db)
                guard.result = "shipped"
                raise LookupError
        except LookupError:
            return "caught"

    with pytest.raises(TransactionAbandonedError):
        results.append(ship(1))
    assert (results, pg.states) == ([], ["FAILED"])
