"""Time limits that come while a ledger's answer is on its way: what the record says is what counts.

Celery's soft limit and RQ's timeout are exceptions that a signal's handler raises wherever the
main thread is.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from support.guarded_shop import GuardedShop, write
from support.proxy import Mode, Proxy
from support.waiting import wait_until
from taskguard import Guard
from taskguard.errors import LedgerUnavailableError, TransactionAbandonedError
from taskguard.integration import Answered, Completed, Deferred, Dropped
from taskguard.locks.memory import MemoryLocks


class TimeLimitError(Exception):
    """An error like SoftTimeLimitExceeded and JobTimeoutException."""


@pytest.fixture
def behind_proxy(postgres: Any, pg_url: str, make_shop: Any) -> Iterator[tuple[GuardedShop, Proxy]]:
    """A shop whose ledger reaches the database by way of the proxy."""
    with Proxy(postgres.port) as proxy:
        yield make_shop(pg_url, pg_url.replace(f":{postgres.port}/", f":{proxy.port}/")), proxy


@contextmanager
def limited_once_lost(proxy: Proxy) -> Iterator[None]:
    """The limit is reached as soon as a reply was thrown away, which never comes then."""

    def expire(*_: Any) -> None:
        raise TimeLimitError

    def watch() -> None:
        wait_until(lambda: proxy.lost > 0, message="the reply")
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, expire)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)


# -- between COMMIT and its answer ------------------------------------------------------------


@pytest.mark.parametrize("caught", [False, True], ids=["goes on", "caught by the body"])
def test_a_limit_after_commit_is_no_failure(
    behind_proxy: tuple[GuardedShop, Proxy], caught: bool
) -> None:
    """If a time limit hits after COMMIT, the work is DONE, and the queue gets the result."""
    shop, proxy = behind_proxy
    then: list[int] = []

    def body(guard: Guard) -> None:
        try:
            with guard.transaction() as db:
                write(db)
                guard.result = 7
                guard.after_commit(lambda: then.append(1))
                proxy.lose_reply_to(b"COMMIT", then=Mode.SWALLOW)
        except TimeLimitError:
            if not caught:
                raise

    with limited_once_lost(proxy):
        assert shop.deliver(body) == Completed(7)
    assert (shop.effects, shop.states, then) == (["x"], ["DONE"], [1])
    assert "completed" in shop.happened
    assert "failed" not in shop.happened
    assert shop.deliver(body) == Answered(7)


def test_a_limit_after_the_body_is_no_failure(behind_proxy: tuple[GuardedShop, Proxy]) -> None:
    """If a time limit hits during the completion after the body, the work is DONE."""
    shop, proxy = behind_proxy

    def body(guard: Guard) -> int:
        proxy.lose_reply_to(b"taskguard.transaction", then=Mode.SWALLOW)
        return 7

    with limited_once_lost(proxy):
        assert shop.deliver(body) == Completed(7)
    assert shop.states == ["DONE"]
    assert shop.deliver(body) == Answered(7)


@pytest.mark.parametrize("caught", [False, True], ids=["goes on", "caught by the body"])
@pytest.mark.parametrize("url", ["pg_url", "sqlite_url"])
def test_a_limit_before_commit_is_one(
    request: pytest.FixtureRequest, make_shop: Any, url: str, caught: bool
) -> None:
    """If a time limit hits before COMMIT, nothing is written, and the work is FAILED."""
    shop = make_shop(request.getfixturevalue(url))

    def body(guard: Guard) -> None:
        try:
            with guard.transaction() as db:
                write(db)
                raise TimeLimitError
        except TimeLimitError:
            if not caught:
                raise

    with pytest.raises(TransactionAbandonedError if caught else TimeLimitError):
        shop.deliver(body)
    assert (shop.effects, shop.states) == ([], ["FAILED"])


@pytest.mark.parametrize(
    "url",
    [
        "pg_url",
        "sqlite_url",
        *(pytest.param(url, marks=pytest.mark.debian) for url in ("mariadb_url", "mysql_url")),
    ],
)
def test_a_limit_right_after_commit_is_no_failure_anywhere(
    request: pytest.FixtureRequest, make_shop: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each database, a time limit right after COMMIT leaves the work DONE."""
    shop = make_shop(request.getfixturevalue(url))
    commit = sa.Connection.commit

    def interrupted(db: sa.Connection) -> None:
        commit(db)
        raise TimeLimitError

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
            monkeypatch.setattr(sa.Connection, "commit", interrupted)

    outcome = shop.deliver(body)
    monkeypatch.undo()
    assert outcome == Completed(None)
    assert (shop.effects, shop.states) == (["x"], ["DONE"])


def test_what_a_body_raises_after_its_interrupted_commit_is_its_own(
    sqlite_url: str, make_shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a body raises after its COMMIT was interrupted, its error goes on, and the work stays
    DONE."""
    shop = make_shop(sqlite_url)
    commit = sa.Connection.commit

    def interrupted(db: sa.Connection) -> None:
        commit(db)
        raise TimeLimitError

    def body(guard: Guard) -> None:
        try:
            with guard.transaction() as db:
                write(db)
                monkeypatch.setattr(sa.Connection, "commit", interrupted)
        except TimeLimitError as error:
            monkeypatch.undo()
            raise ZeroDivisionError from error

    with pytest.raises(ZeroDivisionError):
        shop.deliver(body)
    assert (shop.effects, shop.states) == (["x"], ["DONE"])


# -- between a claim and its answer -----------------------------------------------------------


def test_a_limit_while_a_claim_is_answered_holds_nothing(
    behind_proxy: tuple[GuardedShop, Proxy],
) -> None:
    """If a time limit hits while a claim's answer is awaited, the claim is given back, and counts
    no crash."""
    shop, proxy = behind_proxy
    proxy.lose_reply_to(b"insert into taskguard_keys", then=Mode.SWALLOW)
    with limited_once_lost(proxy), pytest.raises(TimeLimitError):
        shop.deliver(lambda guard: None)
    assert shop.states == ["NEW"]
    assert shop.deliver(lambda guard: guard.attempt) == Completed(2)
    view = shop.ledger.view("ship order:1")
    assert view is not None
    assert view.crashes == 0


def test_a_limit_while_a_plain_lock_is_answered_holds_nothing(
    behind_proxy: tuple[GuardedShop, Proxy],
) -> None:
    """If a time limit hits while a lock's answer is awaited, the key is free at once."""
    shop, proxy = behind_proxy
    proxy.lose_reply_to(b"insert into taskguard_keys", then=Mode.SWALLOW)
    with limited_once_lost(proxy), pytest.raises(TimeLimitError), shop.tg.lock("stock:1"):
        pass
    with shop.tg.lock("stock:1") as lease:
        lease.check()


def test_a_claim_whose_answers_were_lost_is_settled_by_the_next_delivery(
    sqlite_url: str, make_shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an outage took the answer of a claim, the process settles it with its next delivery,
    without a crash."""
    shop = make_shop(sqlite_url)
    claim = shop.ledger.claim

    def unheard(asked: Any) -> Any:
        claim(asked)
        raise LedgerUnavailableError("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(shop.ledger, "claim", unheard)
        assert isinstance(shop.deliver(lambda guard: None), Deferred)
    assert shop.states == ["PROCESSING"]
    assert shop.deliver(lambda guard: guard.attempt, deferrals=1) == Completed(2)
    view = shop.ledger.view("ship order:1")
    assert view is not None
    assert view.crashes == 0


def test_claims_whose_answers_were_lost_are_settled_by_several_deliveries_at_once(
    sqlite_url: str, make_shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage several threads settle such claims at once, and none of them fails."""
    shop = make_shop(sqlite_url)
    claim, view = shop.ledger.claim, shop.ledger.view

    def unheard(asked: Any) -> Any:
        claim(asked)
        raise LedgerUnavailableError("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(shop.ledger, "claim", unheard)
        with ThreadPoolExecutor(2) as threads:
            both = threads.map(
                lambda deferrals: shop.deliver(lambda guard: None, deferrals=deferrals), (0, 0)
            )
            assert all(isinstance(outcome, Deferred | Dropped) for outcome in both)
    others: list[Any] = []

    def view_among_others(work: str) -> Any:
        if not others:
            others.append(None)  # it does as this one does, in the middle of it
            with ThreadPoolExecutor(1) as thread:
                others[0] = thread.submit(shop.deliver, lambda guard: None, deferrals=1).result()
        return view(work)

    monkeypatch.setattr(shop.ledger, "view", view_among_others)
    assert isinstance(shop.deliver(lambda guard: None, deferrals=9), Completed | Answered)
    assert len(others) == 1
    assert shop.states == ["DONE"]


@pytest.mark.parametrize("part", ["lock server", "ledger", "events"])
def test_a_limit_on_the_way_in_holds_nothing(
    sqlite_url: str, make_shop: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A time limit between the grant and the body leaves nothing held."""
    locks = MemoryLocks()
    shop = make_shop(sqlite_url, locks=locks)

    def interrupted(home: Any, name: str) -> None:
        asked = getattr(home, name)

        def ask(*args: Any, **kwargs: Any) -> None:
            asked(*args, **kwargs)
            raise TimeLimitError

        patch.setattr(home, name, ask)

    with monkeypatch.context() as patch, pytest.raises(TimeLimitError):
        if part == "lock server":
            interrupted(locks, "acquire")
        elif part == "ledger":
            interrupted(shop.ledger, "claim")
        else:
            interrupted(shop.tg.runner._claiming, "_note_claim")
        shop.deliver(lambda guard: None)
    assert locks.held() == {}
    assert shop.deliver(lambda guard: 7) == Completed(7)
