"""Warnings of a worker about its settings, and its behaviour if they are wrong."""

from __future__ import annotations

import logging
import signal
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import sqlalchemy as sa
from celery import Celery, shared_task
from celery.app.task import Context
from celery.worker.control import conf
from redis import Redis
from sqlalchemy import make_url

import taskguard_celery
from support.waiting import patience_s, wait_until
from taskguard.errors import ConfigurationError
from taskguard_celery import guarded_task
from taskguard_celery.doctor import configuration_of
from taskguard_celery.health import judge_app, settings_of_app
from taskguard_celery.message import rank_of
from taskguard_celery.startup import LookAfter
from taskguard_sandbox.servers import free_port

SECRET = "s3cret-horse"


@pytest.fixture(autouse=True)
def no_shared_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apps made here have their own tasks only, whatever was imported before."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())


def make_app(broker: str = "redis://localhost", **settings: Any) -> Celery:
    """An app with one guarded task and one that is not; connects to nothing."""
    app = Celery("settings", broker=broker, set_as_current=False)
    app.conf.update(settings)

    @app.task(name="ship", shared=False)
    @guarded_task(key="order:<order>")
    def ship(order: int) -> None: ...

    @app.task(name="plain", shared=False)
    def plain() -> None: ...

    return app


def found(app: Celery) -> list[str]:
    """Return the findings that lose or repeat the guarded task's work."""
    app.finalize()
    losing = {"early_ack", "worker_lost_ack", "visibility_timeout"}
    return [str(each) for each in configuration_of(app).findings if each.name in losing]


def test_safe_defaults_leave_no_warning() -> None:
    """`safe_defaults()` allows for the app's time limit, and leaves no warning."""
    app = make_app(task_time_limit=7_200)
    taskguard_celery.safe_defaults(app)
    assert found(app) == []
    assert app.conf.broker_transport_options["visibility_timeout"] > 7_200


def test_safe_defaults_allow_for_the_time_limit_of_a_task() -> None:
    """`safe_defaults()` allows for the time limit of a task that is defined later."""
    app = make_app()
    taskguard_celery.safe_defaults(app)

    @app.task(name="late", shared=False, time_limit=9_000)
    @guarded_task(key="order:<order>")
    def late(order: int) -> None: ...

    assert found(app) == []


def test_safe_defaults_confirm_publishing_on_rabbitmq() -> None:
    """`safe_defaults()` confirms publishing on RabbitMQ, and keeps other options."""
    app = make_app("amqp://localhost", broker_transport_options={"max_retries": 3})
    taskguard_celery.safe_defaults(app)
    assert found(app) == []
    assert app.conf.broker_transport_options == {"max_retries": 3, "confirm_publish": True}


REDIS = "redis"
RABBITMQ = "amqp"


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"broker_url": "redis://a"}, REDIS),
        ({"broker_url": ["redis://a", "redis://b"]}, REDIS),
        ({"broker_url": ("rediss://a",)}, REDIS),
        ({"broker_url": "redis://a;redis://b"}, REDIS),
        ({"broker_url": "sentinel://a:26379;sentinel://b:26379"}, REDIS),
        ({"broker_url": "redis+socket:///tmp/redis.sock"}, REDIS),
        ({"broker_transport": "redis"}, REDIS),
        ({"broker_read_url": "redis://a", "broker_write_url": ["redis://a"]}, REDIS),
        ({}, RABBITMQ),
        ({"broker_url": "localhost"}, RABBITMQ),
        ({"broker_url": ["amqp://a", "amqp://b"]}, RABBITMQ),
        ({"broker_url": "pyamqp://a;amqps://b"}, RABBITMQ),
        ({"broker_url": "librabbitmq://a"}, RABBITMQ),
        ({"broker_transport": "pyamqp"}, RABBITMQ),
        ({"broker_url": "redis://a", "broker_write_url": "amqp://b"}, "both"),
        ({"broker_url": ["memory://"]}, "memory"),
    ],
)
def test_the_broker_is_known_however_it_is_given(settings: dict[str, Any], kind: str) -> None:
    """The broker is recognized from each setting that Celery knows."""
    with Celery("given", set_as_current=False) as app:
        app.conf.update(settings)
        before = settings_of_app(app)
        taskguard_celery.safe_defaults(app)
        reads_redis = kind in (REDIS, "both")
        request = Context({"delivery_info": {"priority": 3}})
        assert rank_of(app, request) == (3 if reads_redis else -3)
        assert before.visible_s == (3_600 if reads_redis else None)
        assert before.is_amqp == settings_of_app(app).confirms == (kind in (RABBITMQ, "both"))
        in_memory = "broker_in_memory" in {each.name for each in judge_app(before)}
        assert in_memory == (kind == "memory")


def test_what_a_task_says_for_itself_stays_and_is_warned_about() -> None:
    """`safe_defaults()` does not change a task's own option, which causes a warning."""
    app = Celery("own", broker="redis://localhost", set_as_current=False)
    taskguard_celery.safe_defaults(app)

    @app.task(name="ship", shared=False, acks_late=False)
    @guarded_task(key="order:<order>")
    def ship(order: int) -> None: ...

    (warning,) = found(app)
    assert "acks_late" in warning


def test_guarded_task_over_app_task_says_how_to_turn_it_round() -> None:
    """`@guarded_task` above `@app.task` raises at import, with the correct order."""
    app = Celery("order", set_as_current=False)
    with pytest.raises(ConfigurationError, match=r"above @app\.task on .*ship"):

        @guarded_task(key="order:<order>")
        @app.task(name="ship", shared=False)
        def ship(order: int) -> None: ...


def test_guarded_task_over_shared_task_says_so_too() -> None:
    """`@guarded_task` above `@shared_task` raises at import, with the correct order."""
    with pytest.raises(ConfigurationError, match=r"above @app\.task on .*post"):

        @guarded_task(key="letter:<letter>")
        @shared_task(name="post")
        def post(letter: int) -> None: ...


def test_lost_children_are_looked_for_well_within_a_lease() -> None:
    """A timer for each connection of a worker looks for lost children. A worker without guarded
    tasks has none."""
    started: list[tuple[float, Mock]] = []

    def call_repeatedly(delay_s: float, _: Any) -> Mock:
        started.append((delay_s, Mock()))
        return started[-1][1]

    pool = SimpleNamespace(maintain_pool=lambda: None)
    worker = {
        "hub": SimpleNamespace(call_repeatedly=call_repeatedly),
        "pool": pool,
        "task_consumer": None,
        "controller": None,
    }
    bare, guarded = (
        SimpleNamespace(app=app, **worker)
        for app in (Celery("bare", set_as_current=False), make_app())
    )
    LookAfter(bare).start(bare)
    assert started == []
    step = LookAfter(guarded)
    for _ in range(2):
        step.start(guarded)
    children = [timer for delay_s, timer in started if delay_s <= 1]
    assert [timer.cancel.called for timer in children] == [True, False]
    # A second timer of each connection looks at counts.
    assert [timer.cancel.called for _, timer in started] == [True, True, False, False]


def test_a_worker_warns_once_of_each_setting_and_safe_defaults_silence_it(
    make_shop: Any,
) -> None:
    """A worker logs one line for each wrong setting, with the guarded tasks. With `safe_defaults()`
    it logs none."""
    shop = make_shop(
        SHOP_SETTINGS='{"task_acks_late": false, "task_reject_on_worker_lost": false,'
        ' "task_time_limit": 100}'
    )
    with shop.worker() as worker:
        text = worker.text()
    names = ("early_ack", "worker_lost_ack", "visibility_timeout")
    for name in names:
        (line,) = [line for line in text.splitlines() if f"(finding {name})" in line]
        assert " the tasks shop." in line
        assert " more: " in line
    with shop.worker({"SHOP_SAFE": "1"}) as worker:
        assert not any(f"(finding {name})" in worker.text() for name in names)


def test_a_worker_that_could_claim_nothing_does_not_start(pg_url: str, make_shop: Any) -> None:
    """A worker without a usable ledger does not start, and shows no password. The message waits,
    and runs later."""
    shop = make_shop(tables=False)
    result = shop.tasks.ship.delay(1)

    def says(ledger: str) -> str:
        said = str(shop.worker({"SHOP_LEDGER": ledger}).fails_to_start())
        assert "taskguard: " in said
        assert "Traceback" not in said
        assert SECRET not in said
        return said

    said = says("")
    assert "No ledger is configured" in said
    assert "taskguard_ledger_url" in said
    says(f"postgresql+nosuchdriver://shop:{SECRET}@127.0.0.1/shop")
    assert "taskguard ledger create" in says(pg_url)
    shop.ledger.create_schema()
    role = "taskguard_clerk"
    with shop.engine.begin() as db:
        db.exec_driver_sql(f"create role {role} login")
        db.exec_driver_sql(f"grant select, insert, update on all tables in schema public to {role}")
        db.exec_driver_sql(f"revoke update on taskguard_messages from {role}")
    try:
        url = make_url(pg_url).set(username=role, password=None).render_as_string(False)
        assert "UPDATE on taskguard_messages" in says(url)
        with shop.engine.begin() as db:
            db.exec_driver_sql(f"grant update on taskguard_messages to {role}")
        with shop.worker({"SHOP_LEDGER": url}):
            assert result.get(timeout=patience_s()) == {"order": 1}
    finally:
        with shop.engine.begin() as db:
            db.exec_driver_sql(f"drop owned by {role}")
            db.exec_driver_sql(f"drop role {role}")
    assert shop.effects() == Counter({"1": 1})


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://shop:{SECRET}@127.0.0.1:port/shop",
        f"mysql://shop:{SECRET}@127.0.0.1/shop",
        f"postgresql+nosuchdriver://shop:{SECRET}@127.0.0.1/shop",
    ],
    ids=["unreadable", "unknown database", "missing driver"],
)
def test_a_wrong_ledger_url_is_refused_without_its_password(url: str) -> None:
    """The error of the check that a worker makes when it starts does not show the password."""
    app = make_app(taskguard_ledger_url=url, taskguard_locks_url="redis://127.0.0.1:1")
    with pytest.raises(ConfigurationError) as refused:
        taskguard_celery.check_worker(app)
    assert SECRET not in str(refused.value)


def test_a_database_that_is_not_there_loses_nothing_and_tells_no_password(shop: Any) -> None:
    """If the database is down, a worker starts, and defers deliveries. Another worker does them
    later."""
    result = shop.tasks.ship.delay(1)
    url = f"postgresql+psycopg://shop:{SECRET}@127.0.0.1:{free_port()}/shop"
    with shop.worker({"SHOP_LEDGER": url}) as worker:
        wait_until(lambda: " deferred: " in worker.text(), message="put off")
        worker.signal(signal.SIGTERM)
        worker.wait()
        assert "(finding ledger_away)" in worker.text()
        assert SECRET not in worker.text()
    assert not shop.effects()
    with shop.worker():
        assert result.get(timeout=patience_s()) == {"order": 1}
    assert shop.effects() == Counter({"1": 1})


def test_a_worker_without_its_lock_server_works_and_tells_no_password(shop: Any) -> None:
    """Neither its log nor its answers to `celery inspect` and Flower show the password. Work goes
    on, by the ledger alone."""
    url = f"redis://:{SECRET}@127.0.0.1:{free_port()}/0"
    with shop.worker({"SHOP_LOCKS": url}) as worker:
        assert shop.tasks.ship.delay(1).get(timeout=patience_s()) == {"order": 1}
        assert "lock server gave no answer" in worker.text()
        inspected = shop.tasks.app.control.inspect(timeout=10, limit=1)
        shown = f"{inspected.conf()} {inspected.report()}"
        assert "taskguard_locks_url" in shown
        assert SECRET not in shown + worker.text()


@pytest.mark.parametrize("namespace", [None, "CELERY"])
def test_what_celery_shows_of_its_settings_has_no_password(namespace: str | None) -> None:
    """`celery report`, `celery inspect conf` and Flower show no password of a URL, a client or an
    Engine."""
    ledger_url, locks_url = f"postgresql+psycopg://u:{SECRET}@h/d", f"redis://:{SECRET}@h/1"
    settings = [
        {"taskguard_ledger_url": ledger_url, "taskguard_locks_url": locks_url},
        {"taskguard_ledger": ledger_url, "taskguard_locks": locks_url},
        {"taskguard_ledger": sa.make_url(ledger_url), "taskguard_locks": Redis(password=SECRET)},
        {"taskguard_ledger": sa.create_engine(ledger_url)},
    ]
    for each in settings:
        app = make_app()
        if namespace:
            source = {f"{namespace}_{name.upper()}": value for name, value in each.items()}
            app.config_from_object(source, namespace=namespace)
        else:
            app.conf.update(each)
        state = SimpleNamespace(app=app)
        shown = f"{app.bugreport()} {conf(state)} {conf(state, with_defaults=True)}"
        assert "taskguard_l" in shown.lower()
        assert SECRET not in shown
        value = app.conf[next(iter(each))]
        assert str(value) == str(next(iter(each.values()))), "the setting itself keeps its value"


def test_a_result_that_is_not_json_leaves_the_work_done(shop: Any) -> None:
    """The work is DONE, a warning says so, and a later message gets None."""
    with shop.worker() as worker:
        shop.tasks.odd.delay(1)
        shop.wait_for_effects(1)
        assert shop.tasks.odd.delay(1).get(timeout=patience_s()) is None
        assert "is not JSON" in worker.text()
    assert shop.work("shop.odd", 1).state == "DONE"
    assert shop.effects() == Counter({"1": 1})


def test_an_argument_that_cannot_be_a_key_fails_by_name(shop: Any) -> None:
    """The caller gets an error with the argument's name, and nothing runs."""
    with shop.worker():
        result = shop.tasks.ship.delay(None)
        with pytest.raises(Exception, match="order") as caught:
            result.get(timeout=patience_s())
    assert type(caught.value).__name__ == "KeyArgumentError"
    assert not shop.steps("began")


def test_a_worker_without_guarded_tasks_needs_no_ledger(caplog: pytest.LogCaptureFixture) -> None:
    """An app without guarded tasks needs no settings of taskguard."""
    app = Celery("plain", set_as_current=False)
    with caplog.at_level(logging.WARNING, logger="taskguard"):
        taskguard_celery.check_worker(app)
    assert not caplog.records
