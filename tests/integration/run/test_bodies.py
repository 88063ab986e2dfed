"""Bodies of every kind, and faults between the lease and its end."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.guarded_shop import GuardedShop, NotingQueue, write
from support.waiting import wait_until
from taskguard.errors import ConfigurationError, StaleTokenError
from taskguard.model.delivery import Deferred
from taskguard.run import watchdog
from taskguard.run.guard import Guard

HALF = "caf\udce9"  # what os.fsdecode makes of b"caf\xe9"


def test_a_generator_is_refused_at_once(pg: GuardedShop) -> None:
    """A generator is refused at decoration: it would be DONE without having run."""

    def ship(n: int, guard: Guard) -> Iterator[int]:
        with guard.transaction() as db:
            write(db)
        yield n

    with pytest.raises(ConfigurationError, match="generator"):
        pg.tg.guarded(key="order:<n>")(ship)


def test_a_coroutine_that_a_decorator_hid_is_not_done(pg: GuardedShop) -> None:
    """A coroutine that is never awaited raises, and the work is FAILED."""

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return inner

    @traced
    async def ship(n: int) -> None:
        del n

    guarded = pg.tg.guarded(key="order:<n>")(ship)
    with pytest.raises(ConfigurationError, match="coroutine"):
        guarded(1)
    assert pg.states == ["FAILED"]


def test_a_coroutine_that_a_decorator_runs_is_a_plain_function(pg: GuardedShop) -> None:
    """A decorator that runs a coroutine makes it a plain function."""

    def run(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return asyncio.run(function(*args, **kwargs))

        return inner

    @pg.tg.guarded(key="order:<n>")
    @run
    async def ship(n: int, guard: Guard) -> int:
        with guard.transaction() as db:
            write(db)
        return n

    assert ship(1) == 1
    assert (pg.effects, pg.states) == (["x"], ["DONE"])


def test_an_interrupt_as_the_lease_is_kept_leaves_none(
    pg: GuardedShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a signal handler raises while the lease is stored, the watchdog does not renew it for
    ever."""
    dog = pg.tg.runner.watchdog
    keep = dog.track

    class SoftTimeLimitError(Exception):
        pass

    def interrupted(kept: Any) -> None:
        keep(kept)
        monkeypatch.setattr(dog, "track", keep)
        raise SoftTimeLimitError

    monkeypatch.setattr(dog, "track", interrupted)

    @pg.tg.guarded(key="order:<n>", ttl_s=5.0)
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)

    with pytest.raises(SoftTimeLimitError):
        ship(1)
    gc.collect()
    assert len(dog) == 0
    ship(1)
    assert pg.effects == ["x"]


def test_half_a_surrogate_in_a_result_is_stored(pg: GuardedShop) -> None:
    """A result with half a surrogate pair is stored, and the body does not run again."""
    runs = []

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int) -> dict[str, str]:
        runs.append(n)
        return {"file": HALF}

    assert ship(1) == ship(1) == {"file": HALF}
    assert (len(runs), pg.states) == (1, ["DONE"])


def test_half_a_surrogate_in_an_error_is_no_other_error(pg: GuardedShop) -> None:
    """If an error has half a surrogate pair, the work is FAILED, and the error goes on."""

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int) -> None:
        raise LookupError(HALF)

    with pytest.raises(LookupError):
        ship(1)
    assert pg.states == ["FAILED"]


def test_a_read_only_database_puts_deliveries_off(pg: GuardedShop, pg_url: str) -> None:
    """If the database is read-only, as after a failover to a standby, deliveries are deferred, and
    none is lost."""
    name = sa.make_url(pg_url).database
    with pg.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.exec_driver_sql(f"alter database {name} set default_transaction_read_only = on")
    pg.ledger.close()
    queue = NotingQueue()
    assert isinstance(pg.deliver(lambda guard: None, queue), Deferred)
    assert queue.deferrals == [1]


def test_the_current_guard_in_a_plain_lock_is_the_bodys(pg: GuardedShop) -> None:
    """Within a plain lock, `current_guard()` is the guard of the body."""

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int) -> None:
        with pg.tg.lock("inventory:1"), taskguard.current_guard().transaction() as db:
            write(db)

    ship(1)
    assert (pg.effects, pg.states) == (["x"], ["DONE"])


def test_a_thread_that_could_not_start_is_started_with_the_next_lease(
    pg: GuardedShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the watchdog's thread cannot start, the body does not run. The next lease starts it, and
    is renewed."""
    start = watchdog.start_thread

    def refuse(function: Callable[[], None]) -> None:
        del function
        monkeypatch.setattr(watchdog, "start_thread", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(watchdog, "start_thread", refuse)

    @pg.tg.guarded(key="order:<n>", ttl_s=6.0)
    def ship(n: int, guard: Guard) -> None:
        wait_until(lambda: "renewed" in pg.happened)
        guard.check()

    with pytest.raises(RuntimeError):
        ship(1)
    ship(2)


def test_a_called_functions_loss_after_done_goes_on(pg: GuardedShop) -> None:
    """After DONE, the StaleTokenError of another key goes on, and the work stays DONE."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
        raise StaleTokenError("of a guarded function that the body called", key="other")

    with pytest.raises(StaleTokenError):
        pg.deliver(body)
    assert pg.states == ["DONE"]


def test_progress_that_cannot_be_read_leaves_no_claim(pg: GuardedShop) -> None:
    """If the stored progress cannot be read, the body gets an error, and the work is FAILED."""

    def first(guard: Guard) -> None:
        with guard.checkpoint({"a": 1}):
            pass
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pg.deliver(first)
    with pg.engine.begin() as db:
        db.execute(sa.text("update taskguard_work set progress = '{'"))
    with pytest.raises(ValueError, match="property name"):
        pg.deliver(lambda guard: guard.progress)
    assert pg.states == ["FAILED"]
