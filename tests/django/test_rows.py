"""`taskguard_django.row()`, a model's row as the state machine; enqueueing in its transaction."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import taskguard
from support.django_shop import django_on
from taskguard import Guard
from taskguard.errors import ConfigurationError, RowIneligibleError
from taskguard.integration import Delivery, MessageRef, Policy, Sweeper, enqueue_in


@pytest.fixture(params=["pg_url", "sqlite_url"])
def models(request: pytest.FixtureRequest) -> Iterator[Any]:
    with django_on(default=request.getfixturevalue(request.param)):
        from support.django_orders import models

        yield models


def test_a_models_row_is_moved_with_the_effects(models: Any) -> None:
    """The row moves from PAID over SHIPPING to SHIPPED. A cancelled row is reported, and a body
    that fails leaves PAID."""
    from taskguard_django import atomic, row

    status = models.Order.Status
    tg = taskguard.connect()
    fails = [True]

    @tg.guarded(
        key="order:<order_id>",
        row=row(
            models.Order,
            id="<order_id>",
            state="status",
            fence="fence_token",
            new=status.PAID,
            processing=status.SHIPPING,
            done=status.SHIPPED,
        ),
    )
    def ship(order_id: int, guard: Guard) -> None:
        with atomic():
            order = models.Order.objects.get(id=order_id)
            assert (order.status, order.fence_token) == ("SHIPPING", guard.fence)
            models.Effect.objects.create(item=f"{order_id}")
            if fails.pop():
                raise ZeroDivisionError

    order = models.Order.objects.create()
    with pytest.raises(ZeroDivisionError):
        ship(order.id)
    order.refresh_from_db()
    assert (order.status, models.Effect.objects.count()) == ("PAID", 0)
    fails += [False, False]
    ship(order.id)
    ship(order.id)
    order.refresh_from_db()
    assert (order.status, models.Effect.objects.count()) == ("SHIPPED", 1)
    cancelled = models.Order.objects.create(status="CANCELLED")
    with pytest.raises(RowIneligibleError):
        ship(cancelled.id)
    tg.close()


def test_ids_of_all_kinds_find_their_row(models: Any) -> None:
    """A row is found by a UUID, and by several fields that are unique together."""
    from taskguard_django import atomic, row

    tg = taskguard.connect()
    move = {"state": "state", "fence": "fence", "new": 0, "processing": 1, "done": 2}
    pair = {"tenant": "<tenant>", "number": "<number>"}
    first, second = (
        models.Parcel.objects.create(id=uuid.uuid4(), tenant="é", number=n) for n in (1, 2)
    )

    @tg.guarded(key="parcel:<parcel_id>", row=row(models.Parcel, id="<parcel_id>", **move))
    def send(parcel_id: uuid.UUID) -> None:
        with atomic():
            assert models.Parcel.objects.get(pk=parcel_id).state == 1

    @tg.guarded(key="parcel:<tenant>:<number>", row=row(models.Parcel, id=pair, **move))
    def send_by_number(tenant: str, number: int) -> None: ...

    send(first.id)
    send_by_number("é", 2)
    for parcel in (first, second):
        parcel.refresh_from_db()
    assert (first.state, second.state) == (2, 2)
    tg.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"state": "colour"}, "not a field"),
        ({"fence": "number"}, "64 bits"),
        ({"id": {"tenant": "<a>"}}, "unique"),
        ({"id": {"made": "<a>"}}, "DateTimeField"),
    ],
)
def test_what_does_not_fit_is_reported(models: Any, wrong: dict[str, Any], message: str) -> None:
    """A declaration that does not fit its model is refused."""
    from taskguard_django import row

    states = {"new": 0, "processing": 1, "done": 2}
    given: dict[str, Any] = {"id": "<a>", "state": "state", "fence": "fence", **states, **wrong}
    with pytest.raises(ConfigurationError, match=message):
        row(models.Parcel, **given)


# -- enqueueing -------------------------------------------------------------------------------


def delivery(order: int) -> Delivery:
    return Delivery(
        keys=(f"order:{order}",),
        work=f"ship order:{order}",
        task="ship",
        message=MessageRef(f"m{order}"),
        policy=Policy(),
        call="{}",
    )


def test_enqueued_work_commits_or_rolls_back_with_djangos_transaction(models: Any) -> None:
    """Enqueued work is sent once after the COMMIT. After a rollback there is no record."""
    from django.db import transaction

    from taskguard_django import connection
    from taskguard_django.models import Work

    tg = taskguard.connect()
    sent: list[str] = []

    def send(call: Any, message: MessageRef) -> None:
        assert not transaction.get_connection().in_atomic_block
        sent.append(message.id)

    with transaction.atomic():
        models.Order.objects.create()
        enqueue_in(connection(), tg, delivery(1), send)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            enqueue_in(connection(), tg, delivery(2), send)
            raise ZeroDivisionError
        assert sent == []
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        enqueue_in(connection(), tg, delivery(3), send)
        raise ZeroDivisionError
    assert sent == ["m1"]
    assert [(work.id, work.state) for work in Work.objects.all()] == [("ship order:1", "NEW")]
    assert Sweeper(tg, {"test": send}).sweep().sent == 0
    tg.close()


def test_a_duplicate_in_djangos_transaction_finds_the_first(models: Any) -> None:
    """A duplicate attaches to the first message, or replaces it. After a rollback it replaces
    nothing."""
    from django.db import transaction

    from taskguard_django import connection

    tg = taskguard.connect()
    sent: list[str] = []

    def put(message: str, duplicate: Any) -> Any:
        call = json.dumps({"queue": "test", "message": message})
        made = replace(delivery(1), message=MessageRef(message), call=call)
        send = lambda call, message: sent.append(message.id)  # noqa: E731
        return enqueue_in(connection(), tg, made, send, duplicate=duplicate)

    with transaction.atomic():
        put("a", "attach")
        assert put("b", "attach").first.message == "a"
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert put("c", "replace").outcome == "replaced"
        raise ZeroDivisionError
    with transaction.atomic():
        assert put("d", "replace").first.message == "a"
    assert sent == ["a", "d"]
    tg.close()


def test_enqueueing_outside_a_transaction_is_refused(models: Any) -> None:
    """Enqueueing outside a transaction is refused, because it would commit apart from the user's
    writes."""
    from taskguard_django import connection

    tg = taskguard.connect()
    with pytest.raises(ConfigurationError, match="outside a transaction"):
        enqueue_in(connection(), tg, delivery(1), lambda call, message: None)
    tg.close()


def test_what_a_body_enqueues_is_committed_with_done(models: Any) -> None:
    """Work that is enqueued in `atomic()` commits with DONE."""
    from taskguard_django import atomic, connection

    tg = taskguard.connect()
    sent: list[str] = []

    @tg.guarded(key="bill:<n>")
    def bill(n: int) -> None:
        with atomic():
            enqueue_in(connection(), tg, delivery(n), lambda call, m: sent.append(m.id))
            if n == 2:
                raise ZeroDivisionError

    bill(1)
    with pytest.raises(ZeroDivisionError):
        bill(2)
    assert sent == ["m1"]
    tg.close()
