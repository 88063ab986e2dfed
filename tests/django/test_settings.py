"""`settings.TASKGUARD`: where it applies, what is refused, and what `manage.py check` reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import taskguard
from support.django_shop import django_on, set_up
from taskguard.errors import ConfigurationError
from taskguard.locks.memory import MemoryLocks
from taskguard_sandbox.servers import Valkey, free_port


@contextlib.contextmanager
def settings_as(given: Any) -> Iterator[None]:
    from django.test import override_settings

    with override_settings(TASKGUARD=given):
        yield


@pytest.fixture
def migrated(pg_url: str) -> Iterator[str]:
    with django_on(default=pg_url):
        yield pg_url


def test_celery_rq_and_connect_take_them(migrated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery, RQ and `connect()` use `settings.TASKGUARD`. Their own options go first, and the
    environment last."""
    from celery import Celery

    import taskguard_celery
    import taskguard_django
    import taskguard_rq

    monkeypatch.setenv("TASKGUARD_LOCKS_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("TASKGUARD_LEDGER_URL", "sqlite:///other.sqlite")
    with settings_as({"LOCKS": "memory://"}):
        app, other = Celery("shop"), Celery("other")
        other.conf.taskguard_locks = None
        rq = taskguard_rq.runtime()
        taskguard_rq.configure()  # the next one is made anew
        for runtime in (taskguard_celery.runtime_of(app), rq, taskguard.connect()):
            assert runtime.ledger is taskguard_django.ledger()
            assert isinstance(runtime.runner.locks, MemoryLocks)
        assert taskguard_celery.runtime_of(other).runner.locks is None


def test_without_locks_the_environment_has_them(
    migrated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without LOCKS, the lock server's URL comes from the environment."""
    monkeypatch.setenv("TASKGUARD_LOCKS_URL", "memory://")
    with settings_as({}):
        assert isinstance(taskguard.connect().runner.locks, MemoryLocks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"LOCK": "redis://:secret@host"}, "LOCKS, DATABASE, NAMESPACE and FORMERLY_NAMESPACES"),
        ("redis://:secret@host", "Make it a dict"),
        ({"LOCKS": None, "DATABASE": "elsewhere"}, "not in DATABASES"),
    ],
)
def test_wrong_settings_are_reported_without_a_password(
    migrated: str, given: Any, message: str
) -> None:
    """Wrong settings are reported by `connect()` and by `manage.py check`, without a password."""
    from taskguard_django.checks import check_settings

    with settings_as(given):
        with pytest.raises(ConfigurationError, match=message) as raised:
            taskguard.connect()
        (found,) = check_settings()
    assert found.id == "taskguard.misconfigured"
    assert str(raised.value) in found.msg
    assert "secret" not in found.msg


def test_a_database_in_memory_or_of_another_kind_is_refused() -> None:
    """A database that cannot have a ledger is refused."""
    set_up()
    from taskguard_django.conf import url_of

    for vendor, name, message in (
        ("sqlite", ":memory:", "in memory"),
        ("sqlite", "file:memorydb_default?mode=memory&cache=shared", "in memory"),
        ("mysql", "shop", "is mysql"),
    ):
        connection: Any = SimpleNamespace(
            vendor=vendor, alias="default", settings_dict={"NAME": name}
        )
        with pytest.raises(ConfigurationError, match=message):
            url_of(connection)


def test_the_url_is_that_of_djangos_connection() -> None:
    """The ledger's URL has Django's OPTIONS for libpq, and its role."""
    import psycopg

    set_up()
    from taskguard_django.conf import url_of

    options = {"sslmode": "require", "pool": True, "assume_role": "clerk", "options": "-c a=b"}
    given = {"NAME": "shop", "HOST": "/run/db", "PASSWORD": "p@ss/word", "OPTIONS": options}
    connection = SimpleNamespace(
        vendor="postgresql", alias="default", Database=psycopg, settings_dict=given
    )
    url = url_of(connection)
    assert (url.host, url.password, url.database) == ("/run/db", "p@ss/word", "shop")
    assert dict(url.query) == {"sslmode": "require", "options": "-c a=b -c role=clerk"}


def test_check_tells_what_is_missing(migrated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`manage.py check` reports a missing lock server. With `--database` it reports missing
    tables."""
    from django.core.checks import run_checks
    from django.core.management import call_command

    from taskguard_django.checks import check_tasks

    def found() -> list[str]:
        ids = {str(each.id) for each in run_checks(databases=["default"])}
        # A server of tests does not flush. Other tests of this process share tasks with all apps.
        others = {"taskguard.commits_unflushed", *(each.id for each in check_tasks())}
        return sorted(each for each in ids - others if each.startswith("taskguard."))

    monkeypatch.delenv("TASKGUARD_LOCKS_URL", raising=False)
    with settings_as({"LOCKS": None}):
        assert found() == []
    with settings_as({}):
        assert found() == ["taskguard.no_lock_server"]
        call_command("migrate", "taskguard", "zero", verbosity=0)
        assert found() == ["taskguard.no_lock_server", "taskguard.tables_missing"]
        (warning,) = [
            each for each in run_checks(databases=["default"]) if "tables_missing" in str(each.id)
        ]
        assert "migrate" in str(warning.hint)
        assert "taskguard ledger" not in str(warning), "one command, not two"


def test_check_asks_the_servers_where_a_database_is_named(migrated: str) -> None:
    """`check --database` reports the findings of `taskguard doctor` by name. Plain `check` and a
    test run contact no server."""
    from django.core.checks import WARNING, run_checks
    from django.test.utils import setup_test_environment, teardown_test_environment

    from taskguard_django.checks import check_tasks

    def found(**options: Any) -> dict[str, int]:
        of_tasks = {each.id for each in check_tasks()}
        messages = [each for each in run_checks(**options) if each.id not in of_tasks]
        ids = {str(each.id): each.level for each in messages}
        return {name: level for name, level in ids.items() if name.startswith("taskguard.")}

    with (
        Valkey(maxmemory="50mb", maxmemory_policy="allkeys-lru") as server,
        settings_as({"LOCKS": server.url}),
    ):
        assert found(databases=["default"]) == {
            "taskguard.eviction": WARNING,
            "taskguard.commits_unflushed": WARNING,  # an Error would stop `migrate`
        }
        assert found() == {}
        setup_test_environment()
        try:
            assert found(databases=["default"]) == {}
        finally:
            teardown_test_environment()
    with settings_as({"LOCKS": f"redis://127.0.0.1:{free_port()}"}):
        assert found(databases=["default"])["taskguard.lock_server_away"] == WARNING


def test_check_tells_of_tasks_that_can_lose_work(migrated: str) -> None:
    """`manage.py check` reports guarded tasks of Celery's current app that can lose work."""
    from celery import Celery, current_app

    from taskguard_celery import guarded_task, safe_defaults
    from taskguard_django.checks import check_tasks

    def reported(app: Celery) -> list[str]:
        @app.task(name="ship", shared=False)
        @guarded_task(key="order:<n>")
        def ship(n: int) -> None: ...

        before = current_app._get_current_object()
        app.set_current()
        try:
            # Other tests of this process may have shared theirs with all apps.
            return [each.msg for each in check_tasks() if each.msg.startswith("the task ship:")]
        finally:
            before.set_current()

    unsafe, safe = (Celery("shop", set_as_current=False) for _ in range(2))
    safe_defaults(safe)
    assert [text.partition("(")[0] for text in reported(unsafe)] == [
        "the task ship: acks_late ",
        "the task ship: reject_on_worker_lost ",
    ]
    assert reported(safe) == []
