"""Findings about a Celery app's settings, by the command and when a worker starts."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc

import taskguard_celery
from taskguard.cli import main
from taskguard.integration import Finding, Level, examine
from taskguard.ledger.sql import SqlLedger
from taskguard_celery import guarded_task
from taskguard_celery.doctor import configuration_of
from taskguard_celery.health import (
    AppSettings,
    TaskSettings,
    judge_app,
    judge_task,
    settings_of_app,
)
from taskguard_sandbox.servers import Valkey, free_port


@pytest.fixture(autouse=True)
def no_shared_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apps made here have their own tasks only, whatever was imported before."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())


@pytest.fixture
def ledger_url(sqlite_url: str) -> str:
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    ledger.close()
    return sqlite_url


def make_app(
    broker: str = "redis://localhost",
    *,
    task: dict[str, Any] | None = None,
    late: dict[str, Any] | None = None,
    **settings: Any,
) -> Celery:
    """An app with one guarded task, and safe settings but for these; connects to nothing.

    `late`: settings that are made when safe_defaults has seen the others.
    """
    app = Celery("shop", broker=broker, set_as_current=False)
    taskguard_celery.safe_defaults(app)
    app.conf.update(settings)

    @app.task(name="ship", shared=False, **(task or {}))
    @guarded_task(key="order:<order>")
    def ship(order: int) -> None: ...

    app.finalize()
    app.conf.update(late or {})
    return app


def found(app: Celery) -> dict[str, Finding]:
    return {each.name: each for each in configuration_of(app).findings}


@pytest.mark.parametrize("broker", ["redis://localhost", "amqp://localhost"])
def test_safe_defaults_leave_nothing_to_find(broker: str) -> None:
    """After `safe_defaults()` there is no finding, with Redis and with RabbitMQ."""
    assert found(make_app(broker)) == {}


@pytest.mark.parametrize(
    ("name", "level", "given"),
    [
        ("early_ack", Level.WARNING, {"task_acks_late": False}),
        ("worker_lost_ack", Level.WARNING, {"task_reject_on_worker_lost": False}),
        (
            "visibility_timeout",
            Level.WARNING,
            {"late": {"task_time_limit": 7_200, "task_soft_time_limit": 7_000}},
        ),
        ("hard_time_limit", Level.NOTE, {"task_time_limit": 60}),
        (
            "retry_beyond_visibility",
            Level.WARNING,
            {
                "task": {"autoretry_for": (OSError,)},
                "broker_transport_options": {"visibility_timeout": 100},
            },
        ),
        (
            "consumer_timeout",
            Level.NOTE,
            {"broker": "amqp://localhost", "task": {"time_limit": 3_600, "soft_time_limit": 3_500}},
        ),
        (
            "consumer_timeout",
            Level.NOTE,
            {
                "broker": ["amqp://localhost"],
                "task": {"autoretry_for": (OSError,), "default_retry_delay": 3_600},
            },
        ),
        (
            "countdown_beyond_visibility",
            Level.WARNING,
            {
                "beat_schedule": {
                    "nightly": {"task": "ship", "schedule": 60, "options": {"countdown": 4_000}}
                }
            },
        ),
        ("eager", Level.WARNING, {"task_always_eager": True}),
        ("broker_in_memory", Level.WARNING, {"broker": "memory://"}),
        (
            "unconfirmed_publish",
            Level.WARNING,
            {"broker": "amqp://localhost", "broker_transport_options": {}},
        ),
        (
            "transient_messages",
            Level.WARNING,
            {"broker": "amqp://localhost", "task_default_delivery_mode": "transient"},
        ),
    ],
)
def test_each_setting_has_its_finding(name: str, level: Level, given: dict[str, Any]) -> None:
    """One wrong setting in a safe app causes its finding, and no other."""
    (finding,) = found(make_app(**given)).values()
    assert (finding.name, finding.level) == (name, level)


NIGHTLY = {"task": "ship", "schedule": 60.0, "args": (1,)}


@pytest.mark.parametrize(
    ("guard", "entry", "found"),
    [
        ({"key": "orders"}, {}, True),
        ({"key": "order:<order>"}, {}, True),
        ({"key": "order:<order>"}, {"args": (), "kwargs": {"order": 1}}, True),
        ({"key": "order:<order>", "once_per": "orders"}, {}, False),
        ({"key": "orders", "once_per": "key"}, {}, False),
        ({"key": "order:<order>"}, {"args": (BeatLazyFunc(time.time),)}, False),
        ({"key": "orders"}, {"args": (BeatLazyFunc(time.time),)}, True),
        ({"key": "orders", "once_per": "tick"}, {}, False),
        ({"key": "orders", "once_per": "message"}, {}, False),
        ({"key": "orders", "busy": "latest", "once_per": "message"}, {}, False),
        ({"key": lambda **_: f"orders:{time.time():.0f}"}, {}, False),
        ({"key": "order:<order>"}, {"args": ()}, False),
        ({"key": "order:<order>"}, {"task": "other"}, False),
        ({"key": "order:<order>"}, {"args": 5}, False),
    ],
)
@pytest.mark.parametrize("bind", [False, True])
def test_an_entry_of_beat_that_runs_once_is_found(
    ledger_url: str,
    caplog: pytest.LogCaptureFixture,
    guard: dict[str, Any],
    entry: dict[str, Any],
    found: bool,
    bind: bool,
) -> None:
    """An entry of beat whose messages are all the same work is a finding, unless its task has an
    explicit `once_per`. Without a ledger it is none."""
    app = Celery("shop", broker=f"redis://127.0.0.1:{free_port()}", set_as_current=False)
    taskguard_celery.safe_defaults(app)
    app.conf.update(
        beat_schedule={"nightly": {**NIGHTLY, **entry}},
        taskguard_locks_url="memory://",
        taskguard_ledger_url=ledger_url,
    )
    if bind:

        @app.task(name="ship", shared=False, bind=True)
        @guarded_task(**guard)
        def ship(self: Any, order: int) -> None: ...

    else:

        @app.task(name="ship", shared=False)
        @guarded_task(**guard)
        def ship(order: int) -> None: ...

    def reported() -> list[tuple[str, str]]:
        reports = examine(configuration_of(app))
        return [
            (each.name, each.where)
            for report in reports
            for each in report.findings
            if report.part == "settings"
        ]

    assert reported() == [("periodic_once", "beat's entry nightly")] * found
    taskguard_celery.check_worker(app)
    assert caplog.text.count("(finding periodic_once)") == int(found)
    app.conf.update(taskguard_ledger_url=None)
    assert reported() == []


@pytest.mark.parametrize(
    ("guard", "found"),
    [
        ({"key": "orders"}, True),
        ({"key": ["orders", "stock"]}, True),
        ({"key": "orders", "once_per": "key"}, False),
        ({"key": "orders", "once_per": "tick"}, False),
        ({"key": "orders", "once_per": "run"}, False),
        ({"key": "orders", "once_per": "message", "limit": 2}, False),
        ({"key": "orders", "once_per": "order:<order>"}, False),
        ({"key": "order:<order>"}, False),
        ({"key": ["orders", "order:<order>"]}, False),
        ({"key": lambda order: "orders"}, False),
    ],
)
def test_a_task_whose_key_has_no_arguments_is_found(
    ledger_url: str, caplog: pytest.LogCaptureFixture, guard: dict[str, Any], found: bool
) -> None:
    """A task whose key has no arguments is a finding of the command and of a worker's start,
    unless it has an explicit `once_per`. Without a ledger it is none."""
    app = Celery("shop", broker=f"redis://127.0.0.1:{free_port()}", set_as_current=False)
    taskguard_celery.safe_defaults(app)
    app.conf.update(taskguard_locks_url="memory://", taskguard_ledger_url=ledger_url)

    @app.task(name="ship", shared=False)
    @guarded_task(**guard)
    def ship(order: int) -> None: ...

    taskguard_celery.check_worker(app)
    said = [each.getMessage() for each in caplog.records if "constant_key" in each.getMessage()]
    assert len(said) == int(found)
    for value in ("tick", "run", "message", "key"):
        assert all(f'"{value}"' in line and "the task ship:" in line for line in said)
    app.conf.update(taskguard_ledger_url=None)
    reports = examine(configuration_of(app))
    assert "constant_key" not in {each.name for report in reports for each in report.findings}


def test_a_finding_shows_no_password_and_no_hashed_value(ledger_url: str) -> None:
    """A finding shows neither the password of a URL nor a hashed argument of a schedule."""
    away = f"redis://:s3cret-horse@127.0.0.1:{free_port()}/0"
    app = Celery("shop", broker=away, set_as_current=False)
    app.conf.update(
        beat_schedule={"nightly": {**NIGHTLY, "args": ("s3cret-card",)}},
        taskguard_locks_url=away,
        taskguard_ledger_url=ledger_url,
    )

    @app.task(name="ship", shared=False)
    @guarded_task(key="card:<card|hash>")
    def ship(card: str) -> None: ...

    found = [each for report in examine(configuration_of(app)) for each in report.findings]
    names = {"periodic_once", "early_ack", "lock_server_away", "queue_server_away"}
    assert names <= {each.name for each in found}
    assert "s3cret" not in " ".join(map(repr, found))


def test_an_app_without_guarded_tasks_is_left_alone() -> None:
    """An app without guarded tasks has no findings."""
    app = Celery("plain", broker="memory://", set_as_current=False)
    app.finalize()
    assert found(app) == {}


def test_rules_are_about_settings_alone() -> None:
    """Safe settings have no finding. A recoverable task may have a hard time limit."""
    assert list(judge_task(TaskSettings(name="ship"))) == []
    assert list(judge_app(AppSettings(transport="redis"))) == []
    swept = TaskSettings(name="ship", limit_s=60.0, recoverable=True)
    assert list(judge_task(swept)) == []
    assert settings_of_app(Celery("x", broker="pyamqp://h", set_as_current=False)).is_amqp


def test_the_command_examines_an_app(
    tmp_path: Path,
    ledger_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`taskguard doctor --celery` reports findings about settings, locks, ledger, clocks and
    broker."""
    with Valkey(appendonly="no", maxmemory="1gb", maxmemory_policy="allkeys-lru") as server:
        (tmp_path / "doctors_shop.py").write_text(
            "from celery import Celery\n"
            "from taskguard_celery import guarded_task\n"
            f"app = Celery('shop', broker={server.url!r}, set_as_current=False)\n"
            f"app.conf.taskguard_locks_url = {server.url!r}\n"
            f"app.conf.taskguard_ledger_url = {ledger_url!r}\n"
            "@app.task(shared=False)\n"
            "@guarded_task(key='order:<n>')\n"
            "def ship(n): ...\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        status = main(["doctor", "--celery", "doctors_shop:app", "--json"])
        sys.modules.pop("doctors_shop")
    findings = json.loads(capsys.readouterr().out)
    assert status == 0
    assert [(each["part"], each["name"]) for each in findings] == [
        ("settings", "early_ack"),
        ("settings", "worker_lost_ack"),
        ("locks", "eviction"),
        ("queue", "queue_eviction"),
        ("queue", "queue_no_persistence"),
    ]
    assert findings[0]["where"] == "the task doctors_shop.ship"


def test_settings_that_cannot_be_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt setting is an error, which names the nearest one."""
    (tmp_path / "doctors_typo.py").write_text(
        "from celery import Celery\n"
        "app = Celery('shop', broker='memory://', set_as_current=False)\n"
        "app.conf.taskguard_lock_url = 'memory://'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["doctor", "--celery", "doctors_typo:app"]) == 1
    sys.modules.pop("doctors_typo")
    said = " ".join(capsys.readouterr().out.split())
    assert "error: misconfigured" in said
    assert "Did you mean taskguard_locks_url?" in said


class TestWorkerStart:
    """`check_worker`, which a worker calls when it starts."""

    def test_findings_are_warnings_with_their_names(
        self, ledger_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Findings are logged as warnings with their names. Notes are not logged."""
        with Valkey(maxmemory="50mb", maxmemory_policy="allkeys-lru") as server:
            app = make_app(
                server.url,
                taskguard_locks_url=server.url_of(1),
                taskguard_ledger_url=ledger_url,
                task_acks_late=False,
            )
            with caplog.at_level(logging.WARNING, logger="taskguard"):
                taskguard_celery.check_worker(app)
        lines = [record.getMessage() for record in caplog.records]
        assert [line.rpartition("(finding ")[2].rstrip(")") for line in lines] == [
            "early_ack",
            "eviction",
            "queue_eviction",
            "queue_no_persistence",
        ]
        assert "the task ship: acks_late" in lines[0]
        assert "maxmemory-policy is allkeys-lru" in lines[1]

    def test_another_ledgers_application_is_found_by_whose_worker_starts_later(
        self, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """If two applications with different ledgers share a lock server and a namespace, the later
        worker warns."""
        for name in ("shop", "billing"):
            url = f"sqlite:///{tmp_path}/{name}"
            ledger = SqlLedger(url)
            ledger.create_schema()
            ledger.close()
            assert "namespace_shared" not in caplog.text
            options = {"taskguard_locks_url": redis_url, "taskguard_ledger_url": url}
            taskguard_celery.check_worker(make_app("amqp://", **options))
        assert caplog.text.count("(finding namespace_shared)") == 1

    def test_servers_that_are_down_are_reported_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """If the servers are down, a worker starts, and warns once of each."""
        app = make_app(
            f"redis://127.0.0.1:{free_port()}",
            taskguard_locks_url=f"redis://127.0.0.1:{free_port()}",
            taskguard_ledger_url=f"postgresql+psycopg://x@127.0.0.1:{free_port()}/x",
        )
        taskguard_celery.check_worker(app)
        names = [each.getMessage().rpartition("(finding ")[2] for each in caplog.records]
        assert names == ["lock_server_away)", "ledger_away)"]

    def test_every_connection_is_closed(self, ledger_url: str, redis_url: str) -> None:
        """All connections of the check are closed before the pool forks."""
        app = make_app(redis_url, taskguard_locks_url=redis_url, taskguard_ledger_url=ledger_url)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gc.collect()
            caught.clear()
            taskguard_celery.check_worker(app)
            gc.collect()
        assert [str(each.message) for each in caught if each.category is ResourceWarning] == []
