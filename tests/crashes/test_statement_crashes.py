"""A task without a row of its own, killed around any message to its database; it comes again.

On connections of the ledger's own, as most have them: claims of what is new and of what is not,
completions within a transaction and alone, a duplicate. At the end there is one effect, and DONE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pytest_taskguard.crashes import kill_process
from support.databases import DATABASES
from support.exploration import Exploration
from support.killing import KillAt, was_killed
from support.own_rows import Shop, Step
from taskguard import Guard

Body = Callable[[Step, Guard], Any]


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def with_transaction(ship: Step, guard: Guard) -> Any:
    return ship.effect(guard)


def without_transaction(ship: Step, guard: Guard) -> Any:
    return "ship"


def dies(ship: Step, guard: Guard) -> Any:
    kill_process()


def nothing_before(shop: Shop) -> None:
    """The key and the work are new."""


def a_holder_died(shop: Shop) -> None:
    """The work has been begun, by the same message; its lease has run out."""
    assert was_killed(lambda: _deliver(shop.url, dies))
    shop.expire()


def the_key_was_used(shop: Shop) -> None:
    """The key is known and free, the work is new."""
    _once(shop, without_transaction, name="other")


def it_is_done(shop: Shop) -> None:
    """The delivery is a duplicate."""
    _once(shop, with_transaction)


@pytest.mark.parametrize("before", [nothing_before, a_holder_died, the_key_was_used, it_is_done])
@pytest.mark.parametrize("body", [with_transaction, without_transaction])
def test_killed_around_any_message_to_the_database(
    url: str, exploration: Exploration, before: Callable[[Shop], None], body: Body
) -> None:
    """SIGKILL before it, once it was sent, and after its answer; then the message comes again."""
    whole = exploration.whole or url.startswith("postgresql")
    shop = Shop(url)
    kills = 0
    for at in replace(exploration, whole=whole).numbers(step=4):
        shop.begin_again()
        before(shop)
        if shop.engine.name == "sqlite":
            shop.close()
        if not was_killed(lambda at=at: _deliver(url, body, at)):  # type: ignore[misc]
            break
        kills += 1
        shop.expire()
        _once(shop, body)
        assert shop.state() == "DONE", at
        assert len(shop.effects) == int(body is with_transaction or before is it_is_done), at
    shop.close()
    assert at > 2
    print(f"{kills} kills, one effect each")


def _once(shop: Shop, body: Body, *, name: str = "ship", **numbers: int) -> None:
    """One delivery of the message, by a process that knows of no lease but by the ledger."""
    ship = Step(shop, name, None, max_crashes=10)
    ship(lambda guard: body(ship, guard), message=name, by=shop.process(), **numbers)


def _deliver(url: str, body: Body, at: int | None = None) -> None:
    """In a process that is killed at its boundary number `at`."""
    shop = Shop(url, new=False)
    if at is not None:
        KillAt(shop.ledger._database.engine, at)
    _once(shop, body)
