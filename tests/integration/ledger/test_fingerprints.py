"""`fingerprint=`: a message with other arguments does not get the answer of known work."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

import taskguard
from taskguard import Guard, TaskGuard
from taskguard.errors import ConfigurationError, FingerprintMismatchError, KeyTemplateError
from taskguard.ledger.sql import SqlLedger
from taskguard_celery import guarded_task


@pytest.fixture
def ledger(sqlite_url: str) -> Iterator[SqlLedger]:
    made = SqlLedger(sqlite_url)
    made.create_schema()
    yield made
    made.close()


@pytest.fixture
def tg(ledger: SqlLedger) -> Iterator[TaskGuard]:
    made = taskguard.connect(locks="memory://", ledger=ledger)
    yield made
    made.close()


class Cash:
    """Charges orders, and fails as often as the test says."""

    def __init__(self, tg: TaskGuard) -> None:
        self.charged: list[Any] = []
        self.failures = 0

        @tg.guarded(key="order:<order>", fingerprint="<amount>", work="charge")
        def charge(order: int, amount: Any, guard: Guard) -> str:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("the card was refused")
            self.charged.append(amount)
            return f"charged {amount}"

        self.charge: Callable[..., str] = charge


@pytest.fixture
def cash(tg: TaskGuard) -> Cash:
    return Cash(tg)


def test_other_arguments_get_no_answer_of_work_that_is_done(cash: Cash) -> None:
    """The stored result belongs to one amount. Another amount is refused, and the same amount gets
    it."""
    assert cash.charge(1, 100) == "charged 100"
    with pytest.raises(FingerprintMismatchError, match="Nothing was run"):
        cash.charge(1, 200)
    assert cash.charge(1, "100") == "charged 100"
    assert cash.charge(2, 200) == "charged 200"
    assert cash.charged == [100, 200]


def test_work_that_failed_is_not_run_with_other_arguments(cash: Cash, ledger: SqlLedger) -> None:
    """Failed work is not run with other arguments, because parts may be committed. After a requeue,
    the next message decides."""
    cash.failures = 1
    with pytest.raises(RuntimeError):
        cash.charge(1, 100)
    with pytest.raises(FingerprintMismatchError, match="work requeue 'charge order:1'") as caught:
        cash.charge(1, 200)
    assert caught.value.key == "order:1"
    assert ledger.requeue("charge order:1", reason="the amount was wrong")
    assert cash.charge(1, 200) == "charged 200"
    assert cash.charged == [200]


def test_neither_the_error_nor_the_ledger_shows_the_arguments(
    cash: Cash, ledger: SqlLedger
) -> None:
    """Only a digest of the arguments is stored. The error survives a result backend's pickle."""
    cash.charge(1, "4111-1111")
    with pytest.raises(FingerprintMismatchError) as caught:
        cash.charge(1, "5500-0000")
    row = ledger.view("charge order:1")
    assert row is not None
    for number in ("4111-1111", "5500-0000"):
        assert number not in str(caught.value)
        assert number not in repr(dataclasses.replace(row, result_json=None))
    assert pickle.loads(pickle.dumps(caught.value)).key == "order:1"  # our own


def test_works_from_before_the_option_are_answered(tg: TaskGuard) -> None:
    """Work from before the option is answered, because it has no fingerprint to compare."""

    @tg.guarded(key="order:<order>", work="charge")
    def before(order: int, amount: int) -> int:
        return amount

    @tg.guarded(key="order:<order>", work="charge", fingerprint="<amount>")
    def after(order: int, amount: int) -> int:
        return amount

    before(1, 100)
    assert after(1, 200) == 100


def test_a_task_of_celery_fails_with_it(ledger: SqlLedger) -> None:
    """Celery's caller gets the error, not the result of the other amount."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(task_always_eager=True, taskguard_locks_url="memory://")
    app.conf.taskguard_ledger = ledger

    @app.task(name="charge", shared=False)
    @guarded_task(key="order:<order>", fingerprint=lambda amount, **_: f"{amount:.2f}")
    def charge(order: int, amount: float) -> float:
        return amount

    assert charge.delay(1, 100).get() == 100
    assert charge.delay(1, 100.001).get() == 100
    with pytest.raises(FingerprintMismatchError):
        charge.delay(1, 200).get()


def test_a_wrong_fingerprint_is_refused_at_decoration(tg: TaskGuard) -> None:
    """A placeholder that is no parameter is refused at decoration, and so is a list, whose order
    would be lost."""
    with pytest.raises(KeyTemplateError, match="amuont"):
        tg.guarded(key="<order>", fingerprint="<amuont>")(lambda order, amount: None)
    with pytest.raises(ConfigurationError, match="one template"):
        tg.guarded(key="<order>", fingerprint=["<a>", "<b>"])(lambda order, a, b: None)
