"""Guarded functions without a queue."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from taskguard.errors import ConfigurationError, KeyTemplateError
from taskguard.integration import GuardedFunction, MessageRef

M1 = MessageRef("m1")


def ship(order_id: int, express: bool = False, *, guard: Any = None) -> None:
    """A function to guard."""


def test_an_async_function_is_refused_without_a_word_of_queues() -> None:
    """A plain async function is refused, and the error names neither Celery nor RQ."""

    async def ship(order: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"asyncio\.run") as caught:
        GuardedFunction(ship, key="order:<order>")
    assert "Celery" not in str(caught.value)
    assert "RQ" not in str(caught.value)


def test_the_signature_is_the_callers() -> None:
    """The signature of a guarded function has no `guard`."""
    assert str(inspect.signature(ship)).count("guard") == 1
    assert list(GuardedFunction(ship, key="order:<order_id>").signature.parameters) == [
        "order_id",
        "express",
    ]


@pytest.mark.parametrize(
    ("once_per", "work"),
    [
        ("key", "shop.ship order:42"),
        ("message", "shop.ship message:m1 order:42"),
        ("tick", "shop.ship message:m1 order:42"),
        ("v:<express>", "shop.ship v:False"),
    ],
)
def test_what_counts_as_the_same_work(once_per: str, work: str) -> None:
    """Work is named by its key, by its message, or by a template of its own."""
    compiled = GuardedFunction(ship, key="order:<order_id>", once_per=once_per)
    delivery = compiled.delivery((42,), {}, task="shop.ship", namespace="", message=M1)
    assert (delivery.keys, delivery.work) == (("order:42",), work)


def test_a_tick_is_one_work_in_whatever_messages_it_comes() -> None:
    """All messages of one entry and one due time are one work. With `once_per="message"` the tick
    does not count."""
    ticks = [MessageRef(name, tick="clean@2026-07-01T12:00:00Z") for name in ("m1", "m2")]

    def works(once_per: str) -> list[str | None]:
        compiled = GuardedFunction(ship, key="order:<order_id>", once_per=once_per)
        asked: dict[str, Any] = {"task": "ship", "namespace": "eu"}
        return [compiled.delivery((42,), {}, message=tick, **asked).work for tick in ticks]

    assert works("tick") == ["ship eu:tick:clean@2026-07-01T12:00:00Z eu:order:42"] * 2
    assert len(set(works("message"))) == 2


@pytest.mark.parametrize(
    ("options", "deciding"),
    [
        ({"key": "order:<order_id>"}, {"order_id": 42}),
        ({"key": "orders"}, {}),
        ({"key": ["orders", "stock"]}, {}),
        ({"key": "orders", "once_per": "key"}, None),
        ({"key": "orders", "once_per": "order:<order_id>"}, None),
        ({"key": "orders", "once_per": "message"}, None),
        ({"key": "orders", "once_per": "tick"}, None),
        ({"key": "orders", "once_per": "run"}, None),
        ({"key": lambda order_id, express: "orders"}, None),
    ],
)
def test_an_explicit_once_per_differs_from_the_default(
    options: dict[str, Any], deciding: dict[str, object] | None
) -> None:
    """The key's arguments decide which work a call is. With an explicit `once_per`, also "key", or
    a callable, nothing is said of that."""
    compiled = GuardedFunction(ship, **options)
    assert compiled.deciding((42,), {}) == deciding
    assert compiled.is_one_work == (deciding == {})


def test_a_message_id_that_is_used_for_two_keys_names_two_works() -> None:
    """With `once_per="message"`, work is named by the message and the key."""
    compiled = GuardedFunction(ship, key="order:<order_id>", once_per="message")
    work_ids = {
        compiled.delivery((order,), {}, task="t", namespace="", message=M1).work
        for order in (1, 2, 2)
    }
    assert work_ids == {"t message:m1 order:1", "t message:m1 order:2"}


def test_work_shared_by_name_and_apart_by_namespace() -> None:
    """`work=` replaces the task's name. `namespace` is the prefix of keys and work ids."""
    compiled = GuardedFunction(ship, key="order:<order_id>", work="shipping", namespace="eu")
    delivery = compiled.delivery((42,), {}, task="shop.ship", namespace="", message=M1)
    assert (delivery.keys, delivery.work) == (("eu:order:42",), "shipping eu:order:42")


def test_several_keys_make_one_work() -> None:
    """Locks are sorted, so that all holders take them in one order. The work is named in the order
    of the templates."""
    compiled = GuardedFunction(ship, key=["z:<order_id>", "a:<order_id>"], namespace="eu")
    delivery = compiled.delivery((42,), {}, task="t", namespace="", message=M1)
    assert delivery.keys == ("eu:a:42", "eu:z:42")
    assert delivery.work == "t eu:z:42%,a:42"


def move(a: int, b: int, c: int = 0) -> None:
    """A function whose keys change if its arguments swap their values."""


LISTS = [
    (["<a>,<b>", "<c>"], (1, 2, 3), (2, 3, 1)),
    (["account:<a>", "account:<b>"], (1, 2), (2, 1)),
    (["account:<a>", "account:<b>", "account:<c>"], (1, 1, 2), (1, 2, 2)),
    (lambda a, b, **_: [f"account:{a}", f"account:{b}"], (1, 2), (2, 1)),
    ([lambda a, b, **_: [f"{n}" for n in range(a)], lambda b, **_: ["0"] * b], (1, 2), (2, 1)),
]


@pytest.mark.parametrize(("several", "one", "other"), LISTS)
@pytest.mark.parametrize("option", ["key", "once_per", "message"])
def test_calls_with_other_arguments_are_other_work(
    option: str, several: Any, one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """Texts that name the work differ if their order, their repeats or their commas differ."""
    options = {
        "key": {"key": several},
        "once_per": {"key": "all", "once_per": several},
        "message": {"key": several, "once_per": "message"},
    }[option]
    compiled = GuardedFunction(move, **options)
    seen = [compiled.delivery(args, {}, namespace="", message=M1) for args in (one, other, one)]
    names = [each.work for each in seen]
    assert names[0] != names[1]
    assert names[0] == names[2]
    assert all(list(each.keys) == sorted(set(each.keys)) for each in seen)


def test_a_fingerprint_of_several_texts_is_theirs_in_their_order() -> None:
    """A fingerprint of several texts depends on their order."""
    compiled = GuardedFunction(move, key="all", fingerprint=LISTS[3][0])
    seen = [
        compiled.delivery(args, {}, namespace="", message=M1) for args in ((1, 2), (2, 1), (1, 2))
    ]
    assert seen[0].fingerprint == seen[2].fingerprint != seen[1].fingerprint


def test_a_set_has_no_order() -> None:
    """A callable's set names the work sorted, because its order differs between processes."""
    compiled = GuardedFunction(move, key=lambda **_: {"c", "a", "b", "d"})
    delivery = compiled.delivery((1, 2), {}, task="t", namespace="", message=M1)
    assert delivery.work == "t a%;b%;c%;d"


LONG = "x" * 1_000


@pytest.mark.parametrize("once_per", ["key", "message", "<ids[0]>:<ids[1]>"])
@pytest.mark.parametrize("name", ["shop.pick", f"shop.{LONG}"])
def test_ids_of_works_are_short_enough_for_every_index(once_per: str, name: str) -> None:
    """Work ids have a maximum length, however long the keys, the task's name or the message's id
    are. They keep a readable beginning, and work that differs only at the end has different ids."""

    def pick(ids: list[str]) -> None: ...

    compiled = GuardedFunction(
        pick,
        key=lambda ids: [f"item:{each}" for each in ids],
        once_per=once_per,
        namespace="eu",
    )
    ids = [f"{number}-{LONG[:500]}" for number in range(100)]
    work_ids = []
    for last in ("a", "b", "a"):
        message = MessageRef(f"{LONG}-{last}")
        args = ([*ids[:1], f"{ids[1]}{last}", *ids[2:]],)
        work_ids.append(compiled.delivery(args, {}, task=name, namespace="", message=message).work)
    assert work_ids[0] == work_ids[2] != work_ids[1]
    for work in work_ids:
        assert work is not None
        assert len(work.encode()) <= 500
        assert work.startswith("shop.pick eu:" if name == "shop.pick" else "shop.xxx")


def test_ids_that_are_short_stay_as_they_are() -> None:
    """A work id of up to 470 bytes and a message id of up to 200 stay as they are. Longer ones keep
    their beginning."""
    assert MessageRef("m" * 200).id == "m" * 200
    long = MessageRef("ü" * 101).id
    assert long.startswith("ü" * 80)
    assert len(long.encode()) <= 200
    assert MessageRef(long).id == long != MessageRef("ü" * 102).id
    compiled = GuardedFunction(ship, key="order:<order_id>")
    delivery = compiled.delivery((42,), {}, task="t" * 461, namespace="", message=M1)
    assert delivery.work == "t" * 461 + " order:42"


def test_a_template_that_does_not_fit_is_found_at_decoration() -> None:
    """A template that does not fit is refused at decoration, with the existing parameters."""
    with pytest.raises(KeyTemplateError, match="order_id"):
        GuardedFunction(ship, key="order:<orderid>")


def test_guard_must_not_stand_before_what_callers_pass() -> None:
    """`guard` before a parameter of callers is refused, because a caller's argument would be taken
    for it."""

    def wrong(order_id: int, guard: Any, express: bool = False) -> None: ...

    with pytest.raises(ConfigurationError, match="put `guard` after 'express'"):
        GuardedFunction(wrong, key="order:<order_id>")


def test_async_bodies_are_refused() -> None:
    """Async bodies are refused, because neither queue awaits them."""

    async def wrong(order_id: int) -> None: ...

    with pytest.raises(ConfigurationError, match="async"):
        GuardedFunction(wrong, key="order:<order_id>")


@pytest.mark.parametrize("takes_guard", [True, False])
def test_a_body_may_leave_guard_out(takes_guard: bool) -> None:
    """The guard is passed only to a body that takes it."""

    def without(order_id: int) -> str:
        return "without"

    def with_guard(order_id: int, guard: Any) -> Any:
        return guard

    compiled = GuardedFunction(with_guard if takes_guard else without, key="k:<order_id>")
    sentinel: Any = object()
    assert compiled.call((1,), {}, sentinel) == (sentinel if takes_guard else "without")
