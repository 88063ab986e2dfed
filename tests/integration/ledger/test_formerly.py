"""Guards that a deploy changes: work that is done under the former guard is not done again."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from support.guarded_shop import GuardedShop, NotingQueue, write
from taskguard import Former, Guard, GuardedRow
from taskguard.errors import ConfigurationError, KeyTemplateError, WorkDeadError
from taskguard.events import DoneElsewhere
from taskguard.integration import (
    Answered,
    Completed,
    Deferred,
    Delivery,
    Dropped,
    GuardedFunction,
    MessageRef,
)
from taskguard.locks.memory import MemoryLocks
from taskguard_celery import guarded_task
from taskguard_celery.message import is_redelivered
from taskguard_celery.recognition import guarded_function_of as function_of_task
from taskguard_rq import guarded_job
from taskguard_rq.recognition import guarded_function_of as function_of_job
from taskguard_rq.redelivery import is_redelivered as is_begun_again
from taskguard_rq.redelivery import note_start


def ship(order_id: int, shop: str = "a", guard: Guard | None = None) -> None:
    """A task."""


WAS: dict[str, Any] = {"key": "order:<order_id>"}


class Guarded:
    """The task in one deploy: how it is guarded, and under which names."""

    def __init__(self, shop: GuardedShop, *, task: str = "ship", app: str = "", **options: Any):
        self._shop = shop
        self._task, self._app = task, app
        named = {
            name: options.pop(name) for name in ("namespace", "max_crashes") if name in options
        }
        self._function = GuardedFunction(ship, **options, **named)
        self.queue = NotingQueue()
        self.ran: list[Guard] = []

    def delivery(self, order: int = 1, message: str = "m", **numbers: Any) -> Delivery:
        redelivered = numbers.pop("redelivered", False)
        return self._function.delivery(
            (order,),
            {},
            task=self._task,
            message=MessageRef(message, **numbers),
            queue=self.queue,
            namespace=self._app,
            redelivered=redelivered,
        )

    def deliver(self, *args: Any, body: Callable[[Guard], Any] | None = None, **values: Any) -> Any:
        def default(guard: Guard) -> str:
            self.ran.append(guard)
            with guard.transaction() as db:
                write(db)
                guard.result = "shipped"
            return "shipped"

        delivery = self.delivery(*args, **values)
        return self._shop.tg.runner.deliver(delivery, body or default)


CHANGES = {
    "key": ({"key": "shop:<shop>:order:<order_id>"}, Former(key="order:<order_id>")),
    "once_per": ({**WAS, "once_per": "<shop>:<order_id>"}, Former(once_per="key")),
    "message": ({**WAS, "once_per": "message"}, Former(once_per="key")),
    "namespace": ({**WAS, "namespace": "eu"}, Former(namespace="")),
    "task": ({**WAS, "task": "shop.ship"}, Former(task="ship")),
    "several": (
        {"key": "o:<order_id>", "namespace": "eu"},
        [Former(key="x:<order_id>"), Former(key="order:<order_id>", namespace="")],
    ),
    "an application's namespace": ({**WAS, "app": "eu"}, Former(namespace="")),
}


@pytest.fixture(params=["sqlite_url"])
def shop(request: pytest.FixtureRequest, make_shop: Any) -> GuardedShop:
    made: GuardedShop = make_shop(request.getfixturevalue(request.param), locks=MemoryLocks())
    return made


@pytest.mark.parametrize("change", CHANGES)
def test_a_message_that_is_done_has_its_effect_once_over_a_deploy(
    shop: GuardedShop, change: str
) -> None:
    """If its worker was killed before the acknowledgement, the next worker with a new guard does
    not repeat the effect."""
    options, formerly = CHANGES[change]
    before = Guarded(shop, **WAS)
    after = Guarded(shop, **options, formerly=formerly)
    assert before.deliver() == Completed("shipped")
    assert after.deliver(redelivered=True) == Answered("shipped")
    assert shop.effects == ["x"]
    assert "done_elsewhere" not in shop.happened


@pytest.mark.parametrize("change", CHANGES)
def test_workers_of_the_deploy_before_find_what_is_done(shop: GuardedShop, change: str) -> None:
    """Workers with the former guard, which still run for a while, find work that the new guard has
    done."""
    options, formerly = CHANGES[change]
    before = Guarded(shop, **WAS)
    after = Guarded(shop, **options, formerly=formerly)
    outcomes: list[Any] = []

    def body(guard: Guard) -> None:
        outcomes.append(before.deliver(message="n"))
        with guard.transaction() as db:
            write(db)
            guard.result = "shipped"

    def apart(guard: Guard) -> None:
        contextvars.Context().run(body, guard)

    assert after.deliver(body=apart) == Completed("shipped")
    assert isinstance(outcomes[0], Deferred)
    assert before.deliver(message="n", deferrals=1) == Answered("shipped")
    assert before.ran == []
    assert shop.effects == ["x"]


def test_a_change_that_is_not_declared_is_reported(shop: GuardedShop) -> None:
    """An undeclared change is logged with both work ids, but only for a message that the queue has
    delivered before."""
    Guarded(shop, **WAS).deliver()
    changed = Guarded(shop, key="shop:<shop>:order:<order_id>")
    changed.deliver(redelivered=True)
    assert shop.effects == ["x", "x"]
    [warning] = [event for event in shop.events if isinstance(event, DoneElsewhere)]
    assert (warning.other, warning.work) == ("ship order:1", "ship shop:a:order:1")
    assert (warning.message, warning.task) == ("m", "ship")


def test_what_is_no_such_change_is_not_reported(shop: GuardedShop) -> None:
    """Another message, another task, a first delivery, or a body that runs again causes no
    warning."""
    Guarded(shop, **WAS).deliver()
    changed: dict[str, Any] = {"key": "shop:<shop>:order:<order_id>"}
    Guarded(shop, **changed).deliver(2)
    Guarded(shop, **changed).deliver(3, "n", redelivered=True)
    Guarded(shop, **changed, task="bill").deliver(redelivered=True)
    assert "done_elsewhere" not in shop.happened


def test_every_attempt_of_a_work_has_one_idempotency_key(shop: GuardedShop) -> None:
    """The idempotency key stays the same under the new guard, so a payment provider does not see
    another payment."""
    keys: list[str] = []

    def fails(guard: Guard) -> None:
        keys.extend([guard.idempotency_key, guard.idempotency_key_for("pay")])
        raise ZeroDivisionError

    before = Guarded(shop, **WAS)
    after = Guarded(shop, key="o:<order_id>", formerly=Former(**WAS))
    for number, guarded in enumerate([before, after, after]):
        with pytest.raises(ZeroDivisionError):
            guarded.deliver(body=fails, retries=number)
    assert keys[:2] == keys[2:4] == keys[4:]


def test_steps_of_the_former_guard_are_not_taken_again(shop: GuardedShop) -> None:
    """A worker with the new guard finds the steps that the former guard has stored."""
    paid: list[int] = []

    def pays(guard: Guard) -> Any:
        guard.step("pay", lambda: paid.append(1))
        if len(paid) == guard.attempt:
            raise ZeroDivisionError
        return guard.attempt

    with pytest.raises(ZeroDivisionError):
        Guarded(shop, **WAS).deliver(body=pays)
    after = Guarded(shop, key="o:<order_id>", formerly=Former(**WAS))
    assert after.deliver(body=pays, retries=1) == Completed(2)
    assert paid == [1]


def test_an_error_names_the_record_to_requeue(shop: GuardedShop) -> None:
    """If the former record is DEAD, the error names its id."""
    options = {**WAS, "max_crashes": 1}
    before = Guarded(shop, **options)
    with pytest.raises(SystemExit):
        before.deliver(body=lambda guard: sys.exit(1))
    with pytest.raises(WorkDeadError):
        before.deliver()
    after = Guarded(shop, key="o:<order_id>", formerly=Former(**WAS))
    with pytest.raises(WorkDeadError, match="requeue 'ship order:1'"):
        after.deliver()


def test_arguments_of_which_the_former_key_was_none_have_no_former_work(
    shop: GuardedShop,
) -> None:
    """If the former key cannot be made of the arguments, there is no former work: its guard would
    have refused them."""
    formerly = Former(key="shop:<shop>:order:<order_id>")
    after = Guarded(shop, **WAS, formerly=formerly)
    assert after.delivery().formerly == ("ship shop:a:order:1",)
    assert after.delivery().keys == ("order:1", "shop:a:order:1")
    function = GuardedFunction(ship, **WAS, formerly=formerly)
    delivery = function.delivery((1, None), {}, namespace="", message=MessageRef("m"))
    assert (delivery.formerly, delivery.keys) == ((), ("order:1",))


def test_a_former_shape_that_is_the_present_one_costs_nothing(shop: GuardedShop) -> None:
    """A former guard that equals the present one costs no further query."""
    function = Guarded(shop, **WAS, formerly=Former(task="ship"))
    delivery = function.delivery()
    assert delivery == replace(delivery, formerly=(), keys=("order:1",))


PARKS: dict[str, Any] = {"once_per": "message", "busy": "park"}


@pytest.mark.parametrize(
    ("now", "formerly", "line", "work"),
    [
        ("o:<order_id>", Former(**WAS), "order:1", "ship message:m order:1"),
        ("o:<order_id>", [Former(**WAS), Former(key="x")], "order:1", "ship message:m order:1"),
        ("order:<order_id>", Former(task="x"), "order:1", "x message:m order:1"),
        ("order:<order_id>", Former(namespace="n"), "n:order:1", "ship n:message:m n:order:1"),
        ("o:<order_id>", Former(key="order:<order_id>", once_per="key"), "o:1", None),
        ("o:<order_id>", Former(key=["order:<order_id>", "b"]), "o:1", None),
    ],
)
def test_a_line_is_known_by_its_former_names(
    now: str, formerly: Any, line: str, work: str | None
) -> None:
    """A line is known by its former names as long as they are declared, because workers with the
    former guard know no others."""
    function = GuardedFunction(ship, key=now, formerly=formerly, **PARKS)
    parking: Any = object()
    delivery = function.delivery(
        (1,), {}, namespace="", task="ship", message=MessageRef("m"), parking=parking
    )
    own = function.delivery((1,), {}, namespace="", task="ship", message=MessageRef("m"))
    assert (delivery.line, delivery.parking) == (line, parking)
    assert delivery.work == (work or f"ship message:m {own.line}")
    assert delivery.work not in delivery.formerly
    assert delivery.lines == (line, *(key for key in delivery.keys if key != line))


@pytest.mark.parametrize("former", [Former(key="o"), Former(namespace="n")])
def test_a_former_key_is_not_bounded(former: Former) -> None:
    """A former key with a limit or rate is refused at decoration, not at each message."""
    with pytest.raises(ConfigurationError, match="its former key"):
        GuardedFunction(ship, **WAS, once_per="message", formerly=former, limit=2)


@pytest.mark.parametrize(
    ("formerly", "error"),
    [
        ("order:<order_id>", ConfigurationError),
        ([Former(task="x"), {"key": "y"}], ConfigurationError),
        ([Former(task=str(number)) for number in range(9)], ConfigurationError),
        (Former(key="order:<order>"), KeyTemplateError),
        (Former(once_per="<order>"), KeyTemplateError),
    ],
)
def test_what_cannot_have_been_is_refused(formerly: Any, error: type[Exception]) -> None:
    """An impossible former guard is refused at decoration, with the task's name."""
    with pytest.raises(error, match="ship"):
        GuardedFunction(ship, **WAS, formerly=formerly)


def test_a_former_guard_says_what_was_different() -> None:
    """A former guard has to state a difference. Its namespace is checked like the option."""
    with pytest.raises(ConfigurationError, match="name what has changed"):
        Former()
    with pytest.raises(ConfigurationError, match="namespace"):
        Former(namespace="a b")


def test_every_decorator_takes_it(shop: GuardedShop) -> None:
    """The decorators of Celery, of RQ and of plain functions take `formerly=`."""
    app = Celery("shop", set_as_current=False)
    formerly = Former(task="shop.ship")

    def charge(order_id: int) -> None:
        """A body."""

    task = app.task(name="ship", shared=False)(guarded_task(**WAS, formerly=formerly)(charge))
    of_celery = function_of_task(task)
    assert of_celery is not None
    of_rq = function_of_job(guarded_job(**WAS, formerly=[formerly])(charge))
    assert of_rq is not None
    for function in (of_celery, of_rq):
        delivery = function.delivery((1,), {}, namespace="", message=MessageRef("m"))
        assert delivery.formerly == ("shop.ship order:1",)

    @shop.tg.guarded(**WAS, work="shop.ship")
    def before(order_id: int) -> int:
        return 1

    @shop.tg.guarded(**WAS, work="ship", formerly=formerly)
    def after(order_id: int) -> int:
        return 2

    assert (before(1), after(1)) == (1, 1)


@pytest.mark.parametrize(
    ("info", "known"),
    [({"redelivered": True}, True), ({"redelivered": False}, False), ({}, False), (None, False)],
)
def test_a_celery_delivery_says_whether_its_broker_knows_it(info: Any, known: bool) -> None:
    """A Celery delivery says whether its broker has delivered it before. Eager calls have no
    broker."""
    assert is_redelivered(SimpleNamespace(delivery_info=info)) is known


JOB: dict[str, Any] = {"number_of_retries": None, "repeats_left": None, "meta": {}}
BEFORE = datetime.now(UTC)


@pytest.mark.parametrize(
    ("values", "deferrals", "known"),
    [
        ({"started_at": BEFORE}, 0, True),
        ({"started_at": None}, 0, False),
        ({"started_at": None, "number_of_retries": 1}, 0, True),
        ({"started_at": BEFORE, "repeats_left": 0}, 0, False),
        ({"started_at": BEFORE}, 1, False),
        ({"started_at": BEFORE, "meta": {"interval": 60}}, 0, False),
    ],
    ids=["begun", "new", "has asked again", "a repeat", "put off", "of rq-scheduler"],
)
def test_a_guarded_worker_tells_whether_rq_has_begun_a_job_before(
    values: dict[str, Any], deferrals: int, known: bool
) -> None:
    """A guarded worker reports whether RQ has begun a job before. For a deferred or reused job it
    does not know."""
    job: Any = SimpleNamespace(**{**JOB, **values})
    note_start(job)
    job.started_at = datetime.now(UTC)
    assert is_begun_again(job, deferrals=deferrals) is known


# -- a row of the user's own ------------------------------------------------------------------


ROWS = sa.Table(
    "orders",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("status", sa.String(20), nullable=False),
    sa.Column("fence_token", sa.BigInteger),
)


def paid_order(shop: GuardedShop) -> GuardedRow:
    """Order 1, which is paid, and the transition of a task."""
    ROWS.create(shop.engine)
    with shop.engine.begin() as db:
        db.execute(ROWS.insert().values(id=1, status="PAID"))
    return GuardedRow(
        ROWS,
        id="<order_id>",
        state=ROWS.c.status,
        fence=ROWS.c.fence_token,
        new="PAID",
        processing="SHIPPING",
        done="SHIPPED",
    )


def status_of_order(shop: GuardedShop) -> Any:
    with shop.engine.connect() as db:
        return db.execute(sa.select(ROWS.c.status)).scalar()


@pytest.mark.parametrize("shop", ["pg_url", "sqlite_url"], indirect=True)
@pytest.mark.parametrize("ends", ["done", "failed", "killed"])
def test_a_row_of_its_own_goes_on_under_the_new_guard(shop: GuardedShop, ends: str) -> None:
    """The row decides. If a holder was killed under the former guard, the new one takes over."""
    row = paid_order(shop)
    before = Guarded(shop, **WAS, row=row)
    after = Guarded(shop, key="o:<order_id>", formerly=Former(**WAS), row=row)

    def leaves(guard: Guard) -> None:
        if ends == "failed":
            raise ZeroDivisionError
        if ends == "killed":
            sys.exit(1)

    if ends == "done":
        before.deliver(body=leaves)
    else:
        with pytest.raises((ZeroDivisionError, SystemExit)):
            before.deliver(body=leaves)
    outcome = after.deliver(retries=1)
    assert outcome == (Answered(None) if ends == "done" else Completed("shipped"))
    assert status_of_order(shop) == "SHIPPED"
    assert len(after.ran) == len(shop.effects) == int(ends != "done")
    assert [guard.attempt for guard in after.ran] == ([] if ends == "done" else [2])


@pytest.mark.parametrize("shop", ["pg_url", "sqlite_url"], indirect=True)
def test_a_row_of_what_is_revoked_under_the_former_id_is_put_back(shop: GuardedShop) -> None:
    """If a worker with the former guard revokes the work, its holder finds out, and the row is put
    back."""
    after = Guarded(shop, key="o:<order_id>", formerly=Former(**WAS), row=paid_order(shop))

    def body(guard: Guard) -> None:
        assert shop.ledger.revoke("ship order:1", message="m")
        with guard.transaction() as db:
            write(db)

    assert after.deliver(body=body) == Dropped("revoked")
    assert (status_of_order(shop), shop.effects) == ("PAID", [])
