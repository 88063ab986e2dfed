"""Applications with different namespaces that share a ledger do not affect each other."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from celery import Celery

import taskguard
import taskguard_celery
import taskguard_rq
from support.etcd import forget
from taskguard import TaskGuard
from taskguard.errors import ConfigurationError, KeyBusyError
from taskguard.events import Event
from taskguard.guarded import GuardedFunction
from taskguard.integration import UNSET, Configuration, Sweeper, enqueue_in, examine
from taskguard.ledger.sql import SqlLedger
from taskguard.lock_table import TableLocks
from taskguard.model.delivery import MessageRef
from taskguard.model.states import State
from taskguard_celery import guarded_task
from taskguard_rq import guarded_job


@pytest.fixture
def ledger_url(sqlite_url: str) -> str:
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    ledger.close()
    return sqlite_url


@contextmanager
def application(ledger: str, locks: Any, namespace: Any = UNSET) -> Iterator[TaskGuard]:
    tg = taskguard.connect(locks=locks, ledger=ledger, namespace=namespace)
    yield tg
    tg.close()


def test_equal_names_and_keys_are_different_works(ledger_url: str, redis_url: str) -> None:
    """Without a namespace, one application gets the other's stored result."""

    def shipped_by(tg: TaskGuard, name: str) -> Any:
        @tg.guarded(key="order:<order>", work="ship")
        def ship(order: int) -> str:
            return name

        return ship(1)

    with (
        application(ledger_url, redis_url, "shop") as shop,
        application(ledger_url, redis_url, "billing") as billing,
        application(ledger_url, redis_url, "") as plain,
    ):
        assert [shipped_by(tg, "the first") for tg in (shop, billing, plain)] == ["the first"] * 3
        assert [shipped_by(tg, "again") for tg in (shop, billing, plain)] == ["the first"] * 3
    ledger = SqlLedger(ledger_url)
    found = {work.id for work in ledger.list_work(State.DONE, limit=9)}
    assert found == {"ship shop:order:1", "ship billing:order:1", "ship order:1"}
    ledger.close()


def test_locks_are_an_applications_own_and_guarded_calls_meet_them(
    ledger_url: str, redis_url: str
) -> None:
    """`tg.lock()` and guarded functions with the same key exclude each other within one application
    only."""
    with (
        application(ledger_url, redis_url, "shop") as shop,
        application(ledger_url, redis_url, "billing") as billing,
    ):

        @shop.guarded(key="order:<order>")
        def ship(order: int) -> int:
            return order

        @shop.guarded(key="order:<order>", namespace="billing")
        def across(order: int) -> int:
            return order

        with shop.lock("order:1") as lease:
            assert lease.key == "shop:order:1"
            with pytest.raises(KeyBusyError), shop_of_another_thread(ledger_url, redis_url):
                pass
            with billing.lock("order:1"):
                pass
            assert across(1) == 1, "a task's own namespace replaces its application's"
        assert ship(1) == 1


@contextmanager
def shop_of_another_thread(ledger: str, locks: str) -> Iterator[None]:
    """Return a shop as another process of the same application would have it."""
    failed: list[BaseException] = []

    def run() -> None:
        with application(ledger, locks, "shop") as shop:
            try:
                with shop.lock("order:1"):
                    pass
            except KeyBusyError as error:
                failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    yield


@pytest.mark.parametrize("wrong", ["a b", "a{", "a%", "ü ", "a\n", 7])
def test_a_namespace_that_cannot_begin_a_key_is_refused(sqlite_url: str, wrong: Any) -> None:
    """An invalid namespace is refused at once, with the allowed characters."""
    with pytest.raises(ConfigurationError, match="namespace"):
        taskguard.connect(locks="memory://", ledger=sqlite_url, namespace=wrong)


def test_celery_rq_and_the_environment_say_it(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The namespace is a setting of Celery's app, of `configure()`, and of the environment."""
    monkeypatch.setenv("TASKGUARD_LEDGER_URL", ledger_url)
    monkeypatch.setenv("TASKGUARD_LOCKS_URL", "memory://")
    apps: list[Celery] = []

    def celery_app(**conf: Any) -> Any:
        app = Celery("namespaced", set_as_current=False)
        app.conf.update(conf)
        apps.append(app)

        @app.task(name="namespaced.ship", shared=False)
        @guarded_task(key="order:<order>")
        def ship(order: int, guard: Any) -> str:
            return str(guard.key)

        return ship

    @guarded_job(key="order:<order>")
    def charge(order: int, guard: Any) -> str:
        return str(guard.key)

    assert celery_app(taskguard_namespace="shop")(1) == "shop:order:1"
    taskguard_rq.configure(namespace="office")
    assert charge(1) == "office:order:1"
    monkeypatch.setenv("TASKGUARD_NAMESPACE", "everywhere")
    assert celery_app()(1) == "everywhere:order:1"
    assert charge(1) == "office:order:1"
    ship = celery_app()
    taskguard_celery.configure(ship.app, namespace="")
    assert ship(1) == "order:1"
    for app in apps:
        taskguard_celery.runtime_of(app).close()


@pytest.mark.parametrize("namespace", [None, "CELERY"])
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("taskguard_lock_url", "taskguard_locks_url"),
        ("taskguard_name_space", "taskguard_namespace"),
    ],
)
def test_an_unknown_setting_of_a_celery_app_is_an_error(
    ledger_url: str, namespace: str | None, name: str, near: str
) -> None:
    """An unknown setting raises an error that names the nearest one, because a typing error would
    be ignored."""
    app = Celery("typo", set_as_current=False)
    known = {"taskguard_ledger_url": ledger_url, "taskguard_locks_url": "memory://", name: "x"}
    if namespace:
        source = {f"{namespace}_{each.upper()}": value for each, value in known.items()}
        app.config_from_object(source, namespace=namespace)
    else:
        app.conf.update(known)
    with pytest.raises(ConfigurationError, match=rf"{name}.*{near}"):
        taskguard_celery.runtime_of(app)


def test_settings_of_others_and_all_of_ours_are_taken(ledger_url: str) -> None:
    """An app may have settings of other packages, and all of taskguard's, also by a Django
    project's names."""
    app = Celery("known", set_as_current=False)
    source = {
        "CELERY_TASKGUARD_LEDGER_URL": ledger_url,
        "CELERY_TASKGUARD_LOCKS": None,
        "CELERY_TASKGUARD_NAMESPACE": "shop",
        "CELERY_TASKGUARD_LISTENERS": (),
        "TASKGUARD": {"DATABASE": "default"},
        "TASKGUARD_COLOUR": "another's: Celery does not read it",
        "CELERY_BROKER_URL": "memory://",
    }
    app.config_from_object(source, namespace="CELERY")
    assert taskguard_celery.runtime_of(app).namespace == "shop"


def test_listeners_are_added_to_the_one_that_logs(
    ledger_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A listener of Celery's settings, RQ's or connect()'s does not replace the one that logs."""
    heard: list[Event] = []
    app = Celery("heard", set_as_current=False)
    taskguard_celery.configure(app, locks="memory://", ledger=ledger_url, listeners=[heard.append])
    taskguard_rq.configure(locks="memory://", ledger=ledger_url, listeners=[heard.append])
    plain = taskguard.connect(locks="memory://", ledger=ledger_url, listeners=[heard.append])
    for tg in (taskguard_celery.runtime_of(app), taskguard_rq.runtime(), plain):
        caplog.clear()
        heard.clear()

        @tg.guarded(key="order:<order>", work="heard")
        def ship(order: int) -> None: ...

        with caplog.at_level("DEBUG", logger="taskguard"):
            ship(1)
        assert heard
        lines = [each for each in caplog.records if hasattr(each, "taskguard")]
        assert len(lines) == len(heard), "each event once"
        tg.close()


def test_a_sweep_sends_what_its_own_application_has_stored(ledger_url: str) -> None:
    """A sweep leaves messages of another application, which has another broker, to that
    application's sweep."""
    sent: list[str] = []

    def send(call: dict[str, Any], message: MessageRef) -> None:
        sent.append(message.id)

    def broken(call: dict[str, Any], message: MessageRef) -> None:
        raise ConnectionError("this process dies first")

    def ship(order: int) -> None: ...

    with (
        application(ledger_url, "memory://", "shop") as shop,
        application(ledger_url, "memory://", "billing") as billing,
        application(ledger_url, "memory://") as plain,
    ):
        for name, tg in (("shop", shop), ("billing", billing), ("plain", plain)):
            delivery = GuardedFunction(ship, key="order:<order>").delivery(
                (1,),
                {},
                namespace=tg.namespace,
                task="ship",
                message=MessageRef(f"of {name}"),
                call={"queue": "test"},
            )
            assert json.loads(delivery.call or "")["message"] == f"of {name}"
            enqueue_in(None, tg, delivery, broken)
        engine = sa.create_engine(ledger_url)
        with engine.begin() as db:
            db.execute(sa.text("update taskguard_work set due = 1"))
        engine.dispose()
        swept = Sweeper(shop, {"test": send}).sweep()
        assert (swept.sent, swept.strange) == (2, 1)
        assert sorted(sent) == ["of plain", "of shop"], (
            "messages without an application are swept by all"
        )
        Sweeper(billing, {"test": send}).sweep()
        assert sorted(sent) == ["of billing", "of plain", "of shop"]


class TestDoctor:
    """Two applications that do not know of each other, each with a ledger of its own."""

    @staticmethod
    def names(locks: str, ledger: str, *, namespace: str = "", starts: bool = False) -> list[str]:
        made = taskguard.connect(locks=locks, ledger=ledger, namespace=namespace)
        reports = examine(Configuration(lambda: made, starts=starts))
        found = [each for report in reports for each in report.findings]
        shared = [each for each in found if each.name == "namespace_shared"]
        assert all("SqlLedger sqlite" in each.what and "/shop" in each.what for each in shared)
        return [each.name for each in shared]

    @pytest.fixture
    def ledgers(self, tmp_path: Path) -> list[str]:
        """Return the URLs of two databases with tables."""
        urls = [f"sqlite:///{tmp_path}/{name}" for name in ("shop", "billing")]
        for url in urls:
            ledger = SqlLedger(url)
            ledger.create_schema()
            ledger.close()
        return urls

    @pytest.mark.parametrize("server", ["redis_url", "pg_url", "etcd"])
    def test_one_namespace_of_two_ledgers(
        self, server: str, request: pytest.FixtureRequest, ledgers: list[str]
    ) -> None:
        """The worker that starts later is warned, and so is `taskguard doctor`. The first worker is
        not."""
        found = request.getfixturevalue(server)
        locks = found if isinstance(found, str) else found.url
        if server == "etcd":
            forget(locks)
        if server == "pg_url":
            with closing(TableLocks(locks)) as table:
                table.create_table()
        shop, billing = ledgers
        for ledger in ledgers:
            assert self.names(locks, ledger) == []  # no worker has started
        assert self.names(locks, shop, starts=True) == []
        assert self.names(locks, billing) == []  # nor a mark of its own
        assert self.names(locks, billing, starts=True) == ["namespace_shared"]
        assert self.names(locks, billing) == ["namespace_shared"]
        for starts in (True, False):
            assert self.names(locks, shop, starts=starts) == []
            assert self.names(locks, billing, namespace="billing", starts=starts) == []

    def test_who_looks_leaves_nothing(self, redis_url: str, ledgers: list[str]) -> None:
        """The doctor leaves nothing at the lock server or in the ledger."""
        self.names(redis_url, ledgers[0])
        with redis.Redis.from_url(redis_url) as client:
            assert client.keys() == []
            ledger = SqlLedger(ledgers[0])
            assert ledger.mark(make=False) is None
            ledger.mark(make=True)
            ledger.close()
            self.names(redis_url, ledgers[0])
            assert client.keys() == []
