"""`guard.step()` calls an external service once per work, as far as possible."""

from __future__ import annotations

from typing import Any

import pytest

import taskguard
from support.claims import overtake
from support.guarded_shop import GuardedShop, write
from taskguard import Guard
from taskguard.errors import (
    ConfigurationError,
    LeaseLostError,
    ResultError,
    TransactionRetryError,
    TransactionUsageError,
)
from taskguard.ledger.transactions.own import OwnConnection
from taskguard.model.delivery import Answered, Completed


class Provider:
    """An external service that counts its calls, and knows earlier idempotency keys."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.charges: dict[str, int] = {}

    def charge(self, amount: int, key: str = "") -> dict[str, Any]:
        self.calls.append(amount)
        self.charges.setdefault(key, amount)
        return {"charge": len(self.calls), "amounts": (amount,)}


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture(params=["sqlite_url"])
def shop(request: pytest.FixtureRequest, make_shop: Any) -> Any:
    """Return a shop in one database: the contract suite has the SQL of progress for each."""
    return make_shop(request.getfixturevalue(request.param))


def test_a_later_attempt_gets_the_stored_result(shop: GuardedShop, provider: Provider) -> None:
    """A step returns its result as JSON makes it, in the first attempt and in later ones."""
    results: list[Any] = []

    def body(guard: Guard) -> Any:
        results.append(guard.step("charge", provider.charge, 7, key="k"))
        if guard.attempt == 1:
            raise ZeroDivisionError
        with guard.transaction() as db:
            write(db)
        return results[-1]["charge"]

    with pytest.raises(ZeroDivisionError):
        shop.deliver(body)
    assert shop.deliver(body) == Completed(1)
    assert results == [{"charge": 1, "amounts": [7]}] * 2
    assert provider.calls == [7]
    assert (shop.effects, shop.states) == (["x"], ["DONE"])


def test_steps_are_told_apart_by_name_and_stay_beside_progress(
    shop: GuardedShop, provider: Provider
) -> None:
    """A checkpoint keeps the results of steps, and a step keeps the progress."""

    def body(guard: Guard) -> None:
        for number in range(guard.progress or 0, 3):
            guard.step(f"charge {number}", provider.charge, number)
            with guard.checkpoint(number + 1) as db:
                write(db, f"{number}")
            if number == 1 and guard.attempt == 1:
                raise ZeroDivisionError
        assert guard.step("charge 0", provider.charge, 99)["amounts"] == [0]

    with pytest.raises(ZeroDivisionError):
        shop.deliver(body)
    assert isinstance(shop.deliver(body), Completed)
    assert provider.calls == [0, 1, 2]
    assert shop.effects == ["0", "1", "2"]


def test_a_step_within_a_step_is_a_step(shop: GuardedShop, provider: Provider) -> None:
    """A step within a step is stored, too."""

    def outer(guard: Guard) -> str:
        return f"after {guard.step('inner', provider.charge, 1)['charge']}"

    def body(guard: Guard) -> Any:
        first = guard.step("outer", outer, guard)
        assert guard.step("inner", provider.charge, 2) == {"charge": 1, "amounts": [1]}
        return first

    assert shop.deliver(body) == Completed("after 1")
    assert provider.calls == [1]


def test_a_holder_that_was_overtaken_stores_nothing(shop: GuardedShop, provider: Provider) -> None:
    """A step of an overtaken holder is refused, and its delivery is deferred. The new holder's
    claim is unchanged."""

    def body(guard: Guard) -> None:
        def late() -> str:
            overtake(shop)
            return "too late"

        guard.step("charge", late)
        provider.charge(1)

    shop.deliver(body)
    assert provider.calls == []
    assert shop.states == ["PROCESSING"]
    view = shop.ledger.view("ship order:1")
    assert view is not None
    assert view.progress_json is None


def test_a_holder_without_a_lease_promotes_no_message(
    shop: GuardedShop, provider: Provider
) -> None:
    """A holder without a lease does not call the service, because it could not store the result."""

    def body(guard: Guard) -> None:
        guard._attempt.lease.mark_lost("for the test")
        with pytest.raises(LeaseLostError):
            guard.step("charge", provider.charge, 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shop.deliver(body)
    assert provider.calls == []


def test_what_a_body_does_to_a_result_is_not_stored(shop: GuardedShop) -> None:
    """If a body changes a step's result, the change is not stored."""

    def body(guard: Guard) -> None:
        orders = guard.step("find", lambda: ["a", "b"])
        first = orders.pop(0)
        guard.step("mail", lambda: None)
        if guard.attempt == 1:
            raise ZeroDivisionError
        with guard.transaction() as db:
            for order in (first, *orders):
                write(db, order)

    with pytest.raises(ZeroDivisionError):
        shop.deliver(body)
    shop.deliver(body)
    assert shop.effects == ["a", "b"]


def test_what_a_body_does_to_its_progress_is_not_committed(shop: GuardedShop) -> None:
    """If a checkpoint is rolled back, the body's next run has the earlier progress."""
    turns: list[int] = []

    def body(guard: Guard) -> None:
        progress = guard.progress or {"done": []}
        for item in "ab":
            if item in progress["done"]:
                continue
            progress["done"].append(item)
            with guard.checkpoint(progress) as db:
                write(db, item)
                if item == "b" and guard.attempt == 2 and not turns:
                    turns.append(1)
                    raise TransactionRetryError("a deadlock", key="order:1")
            if guard.attempt == 1:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shop.deliver(body)
    shop.deliver(body)
    assert shop.effects == ["a", "b"]


def test_a_result_whose_commit_failed_is_stored_by_the_next_run(
    shop: GuardedShop, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a step's COMMIT failed, the next run of the body stores the known result without another
    call."""
    commit, failed = OwnConnection.commit, []

    def fail_once(self: OwnConnection) -> None:
        if not failed:
            failed.append(1)
            raise TransactionRetryError("COMMIT did not happen", key="order:1")
        commit(self)

    monkeypatch.setattr(OwnConnection, "commit", fail_once)

    def body(guard: Guard) -> Any:
        charge = guard.step("charge", provider.charge, 1)["charge"]
        with guard.transaction() as db:
            write(db)
        return charge

    assert shop.deliver(body) == Completed(1)
    assert provider.calls == [1]
    assert shop.effects == ["x"]


def test_a_name_that_is_no_text_is_refused(shop: GuardedShop, provider: Provider) -> None:
    """A step's name has to be text, because JSON would change another type."""
    with pytest.raises(TypeError, match="a step's name is a text"):
        shop.deliver(lambda guard: guard.step(1, provider.charge, 1))
    assert provider.calls == []


def test_a_result_that_is_not_json_fails_the_body(shop: GuardedShop) -> None:
    """A result that is not JSON raises an error with the step's name. The call is repeated by the
    next attempt."""

    def body(guard: Guard) -> None:
        guard.step("charge", object)

    with pytest.raises(ResultError, match="result of step 'charge'"):
        shop.deliver(body)
    assert shop.states == ["FAILED"]


def test_in_a_transaction_or_after_it_a_step_is_refused(
    shop: GuardedShop, provider: Provider
) -> None:
    """A step in or after a transaction is refused before the call, because its result could not be
    committed by itself."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
            with pytest.raises(TransactionUsageError, match="Call it before"):
                guard.step("charge", provider.charge, 1)
        with pytest.raises(TransactionUsageError, match="after DONE"):
            guard.step("charge", provider.charge, 1)

    shop.deliver(body)
    assert provider.calls == []
    assert shop.states == ["DONE"]


def test_with_locks_only_a_step_is_refused(provider: Provider) -> None:
    """With locks only a step is refused, because there is no ledger to store it."""
    tg = taskguard.connect(locks="memory://", ledger=None)

    @tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        guard.step("charge", provider.charge, n)

    with pytest.raises(ConfigurationError, match="there is no ledger"):
        ship(1)
    assert provider.calls == []


def test_each_step_has_an_idempotency_key_that_stays(shop: GuardedShop) -> None:
    """A step's idempotency key stays the same over attempts, and differs from those of other steps
    and of the work."""
    keys: list[tuple[str, str, str]] = []

    def body(guard: Guard) -> None:
        keys.append(
            (
                guard.idempotency_key,
                guard.idempotency_key_for("charge"),
                guard.idempotency_key_for("mail"),
            )
        )
        if guard.attempt == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shop.deliver(body)
    shop.deliver(body)
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3
    assert all(len(key) == 32 for key in keys[0])


def test_a_duplicate_promotes_no_message(shop: GuardedShop, provider: Provider) -> None:
    """A duplicate of done work calls no service."""

    def body(guard: Guard) -> int:
        return int(guard.step("charge", provider.charge, 1)["charge"])

    assert shop.deliver(body) == Completed(1)
    assert shop.deliver(body) == Answered(1)
    assert provider.calls == [1]


@pytest.mark.once
def test_killed_anywhere_a_provider_that_knows_the_key_charges_once(
    taskguard_memory: Any, explore_crashes: Any, provider: Provider
) -> None:
    """If its caller dies before the answer is stored, the provider is called again. After that it
    never is."""
    tg = taskguard.connect(locks="memory://", ledger="sqlite://")

    @tg.guarded(key="invoice:<n>")
    def bill(n: int, guard: Guard) -> None:
        key = guard.idempotency_key_for("charge")
        guard.step("charge", provider.charge, n, key=key)
        with guard.transaction():
            pass

    explore_crashes(
        bill, (1,), effects=lambda: len(provider.charges), before_each=provider.charges.clear
    )
    calls = len(provider.calls)
    report = explore_crashes(
        bill, (1,), effects=lambda: len(provider.charges), before_each=provider.charges.clear
    )
    begin = [line.point for line in report.lines].index("transaction.begin asked")
    stored = [line.point for line in report.lines].index("transaction.commit done")
    # Each line is one call, and one more where the first died between the two.
    assert len(provider.calls) - calls == len(report.lines) + stored - begin
