"""Tasks with `pydantic=True`: a key is made of the models that the body gets, everywhere."""

# No lazy annotations: Celery before 5.7 does not evaluate them.

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import celery
import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer

import taskguard_celery
from support.waiting import patience_s, wait_until
from taskguard.errors import KeyArgumentError
from taskguard_celery import enqueue, guarded_task, runtime_of
from taskguard_celery.marks import HEADER, Marks

pydantic = pytest.importorskip("pydantic")
if celery.VERSION < (5, 5):
    pytest.skip("Celery has models since 5.5", allow_module_level=True)


class Customer(pydantic.BaseModel):  # type: ignore[misc,unused-ignore]
    name: str = "nobody"


class Order(pydantic.BaseModel):  # type: ignore[misc,unused-ignore]
    number: int
    customer: Customer = Customer()

    @pydantic.field_validator("number")
    @classmethod
    def shift(cls, number: int, info: Any) -> int:
        """Add what the task's `pydantic_context` says."""
        return number + (info.context or {}).get("shift", 0)


def test_models_go_in_and_come_out(shop: Any) -> None:
    """The body gets a model; the key comes from its attribute."""
    order = {"number": 7, "lines": ["a book"]}
    with shop.worker():
        results = [shop.tasks.model.delay(order) for _ in range(2)]
        assert [result.get(timeout=patience_s()) for result in results] == [order, order]
        assert (
            enqueue(shop.tasks.model, ({"number": 8},)).result.get(timeout=patience_s())["number"]
            == 8
        )
    assert shop.effects() == Counter({"7": 1, "8": 1})


def test_a_revoked_message_that_waits_is_recorded(shop: Any) -> None:
    """A revoked message leaves its line, and the next one is promoted."""
    task = shop.tasks.queue_up_models
    with shop.worker(concurrency=2):
        first = task.delay({"number": 1}, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        parked, last = task.delay({"number": 1}), task.delay({"number": 1})
        wait_until(lambda: len(shop.ledger.waiting()) == 2, message="both wait")
        shop.revoke(parked)
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in (first, last)] == [1, 1]
        wait_until(lambda: parked.state == "REVOKED", message="REVOKED")
        views = [shop.ledger.view(f"shop.queue_up_models message:{parked.id} queue:1")]
        assert [(each.error, each.final) for each in views] == [("revoked", True)]
    assert "was not recorded" not in shop.logs()


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    app = Celery("app", broker="memory://", backend="cache+memory://", set_as_current=False)
    taskguard_celery.configure(app, locks="memory://", ledger=f"sqlite:///{tmp_path / 'ledger'}")
    runtime_of(app).ledger.create_schema()  # type: ignore[union-attr]
    yield app
    runtime_of(app).close()
    app.close()


FIVE = Order(number=5)


def nested(order: Order, amount: int = 1) -> None: ...
def optional(order: Optional[Order] = None, amount: int = 1) -> None: ...  # noqa: UP045
def bound(self: Task, order: Order, amount: int = 1) -> None: ...
def default(amount: int, order: Order = FIVE) -> None: ...


NUMBER, NESTED = "order:<order.number>:<amount>", "order:<order.customer.name>"


@pytest.mark.parametrize(
    ("function", "key", "options", "args", "kwargs", "made"),
    [
        (nested, NESTED, {}, ({"number": 5, "customer": {"name": "ann"}},), {}, "order:ann"),
        (nested, NUMBER, {}, ({"number": "5"},), {}, "order:5:1"),
        (nested, NUMBER, {}, (), {"order": {"number": 5}, "amount": 3}, "order:5:3"),
        (nested, NUMBER, {"pydantic_strict": True}, ({"number": 5},), {}, "order:5:1"),
        (nested, NUMBER, {"pydantic_context": {"shift": 2}}, ({"number": 5},), {}, "order:7:1"),
        (nested, NUMBER, {"autoretry_for": (ValueError,)}, ({"number": 5},), {}, "order:5:1"),
        (optional, NUMBER, {}, ({"number": 5},), {}, "order:5:1"),
        (optional, "<amount>", {}, (), {}, "1"),
        (bound, NUMBER, {"bind": True}, ({"number": 5},), {}, "order:5:1"),
        (default, NUMBER, {}, (4,), {}, "order:5:4"),
        (nested, "<order[number]>", {"pydantic": False}, ({"number": 5},), {}, "5"),
    ],
)
def test_enqueue_names_the_work_that_its_delivery_names(  # noqa: PLR0917
    app: Celery,
    function: Callable[..., None],
    key: str,
    options: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: str,
) -> None:
    """With nested and optional models, strict ones, a context, `bind`, keywords and defaults."""
    options = {"pydantic": True, **options}
    task = app.task(name="t", shared=False, **options)(guarded_task(key=key)(function))
    task_id = str(uuid.uuid4())
    enqueue(task, args, kwargs, task_id=task_id)
    ledger = runtime_of(app).ledger
    enqueued = ledger.view(f"t {made}")  # type: ignore[union-attr]
    assert enqueued.state == "NEW"
    sent_s = float(enqueued.message.rpartition("@")[2])
    headers = {HEADER: Marks(task_id, sent_s=sent_s).header()}
    request = {"id": task_id, "delivery_info": {}, "headers": headers}
    build_tracer(task.name, task, app=app)(task_id, args, kwargs, request)
    assert app.AsyncResult(task_id).state == "SUCCESS"
    assert ledger.view(f"t {made}").state == "DONE"  # type: ignore[union-attr]


def test_enqueue_takes_models_as_delay_does(app: Celery) -> None:
    """`enqueue()` takes models, and sends them as dicts, as Celery does since 5.7."""
    if celery.VERSION < (5, 7):
        pytest.skip("Celery sends models since 5.7")
    task = app.task(name="t", shared=False, pydantic=True)(guarded_task(key=NUMBER)(nested))
    enqueue(task, (Order(number=5),))
    assert runtime_of(app).ledger.view("t order:5:1") is not None  # type: ignore[union-attr]


def test_arguments_that_the_models_refuse_are_not_enqueued(app: Celery) -> None:
    """Arguments that a model refuses raise an error that does not quote them."""
    task = app.task(name="t", shared=False, pydantic=True)(guarded_task(key=NUMBER)(nested))
    with pytest.raises(KeyArgumentError, match="pydantic models refuse") as refused:
        enqueue(task, ({"number": "secret"},))
    assert "secret" not in str(refused.value)
    with pytest.raises(TypeError):
        enqueue(task, ())
