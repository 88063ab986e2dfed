"""What a decorator makes of a function, before any queue."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from taskguard import GuardedFunction, MessageRef
from taskguard.errors import ConfigurationError, KeyTemplateError

M1 = MessageRef("m1")


def ship(order_id: int, express: bool = False, *, guard: Any = None) -> None:
    """A function to guard."""


def test_an_async_function_is_refused_without_a_word_of_queues() -> None:
    """A plain function has none: neither Celery nor RQ is to blame."""

    async def ship(order: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"asyncio\.run") as caught:
        GuardedFunction(ship, key="order:<order>")
    assert "Celery" not in str(caught.value)
    assert "RQ" not in str(caught.value)


def test_the_signature_is_the_callers() -> None:
    """`guard` is not part of it."""
    assert str(inspect.signature(ship)).count("guard") == 1
    assert list(GuardedFunction(ship, key="order:<order_id>").signature.parameters) == [
        "order_id",
        "express",
    ]


@pytest.mark.parametrize(
    ("once_per", "work"),
    [
        ("key", "shop.ship order:42"),
        ("message", "shop.ship message:m1"),
        ("v:<express>", "shop.ship v:False"),
    ],
)
def test_what_counts_as_the_same_work(once_per: str, work: str) -> None:
    """By key, by message, or by a template of its own."""
    compiled = GuardedFunction(ship, key="order:<order_id>", once_per=once_per)
    delivery = compiled.delivery((42,), {}, task="shop.ship", message=M1)
    assert (delivery.keys, delivery.work) == (("order:42",), work)


def test_work_shared_by_name_and_apart_by_namespace() -> None:
    """`work=` replaces the task's name; `namespace` stands before keys and works."""
    compiled = GuardedFunction(
        ship, key="order:<order_id>", work="shipping", options={"namespace": "eu"}
    )
    delivery = compiled.delivery((42,), {}, task="shop.ship", message=M1)
    assert (delivery.keys, delivery.work) == (("eu:order:42",), "shipping eu:order:42")


def test_several_keys_make_one_work() -> None:
    """Sorted, so that everybody locks in one order."""
    compiled = GuardedFunction(ship, key=["z:<order_id>", "a:<order_id>"])
    delivery = compiled.delivery((42,), {}, task="t", message=M1)
    assert delivery.keys == ("a:42", "z:42")
    assert delivery.work == "t a:42,z:42"


def test_a_template_that_does_not_fit_is_found_at_decoration() -> None:
    """The message names the parameters there are."""
    with pytest.raises(KeyTemplateError, match="order_id"):
        GuardedFunction(ship, key="order:<orderid>")


def test_guard_must_not_stand_before_what_callers_pass() -> None:
    """A caller's second argument would land in it."""

    def wrong(order_id: int, guard: Any, express: bool = False) -> None: ...

    with pytest.raises(ConfigurationError, match="put `guard` after 'express'"):
        GuardedFunction(wrong, key="order:<order_id>")


def test_async_bodies_are_refused() -> None:
    """Neither queue awaits them."""

    async def wrong(order_id: int) -> None: ...

    with pytest.raises(ConfigurationError, match="async"):
        GuardedFunction(wrong, key="order:<order_id>")


@pytest.mark.parametrize("takes_guard", [True, False])
def test_a_body_may_leave_guard_out(takes_guard: bool) -> None:
    """It is passed to those that take it only."""

    def without(order_id: int) -> str:
        return "without"

    def with_guard(order_id: int, guard: Any) -> Any:
        return guard

    compiled = GuardedFunction(with_guard if takes_guard else without, key="k:<order_id>")
    sentinel: Any = object()
    assert compiled.call((1,), {}, sentinel) == (sentinel if takes_guard else "without")
