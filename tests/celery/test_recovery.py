"""Work that the broker lost, and tasks enqueued in a transaction, on real workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
import sqlalchemy as sa
from celery import chain, chord, group
from celery.signals import before_task_publish
from sqlalchemy import orm

from support.due import make_due
from support.waiting import patience_s, wait_until
from taskguard.cli import main
from taskguard.errors import ConfigurationError
from taskguard.model.states import State
from taskguard_celery import enqueue, schedule_sweep, sweep
from taskguard_celery.calls import CelerySender

HERE = Path(__file__).resolve().parent.parent


def lose_messages(shop: Any) -> None:
    """The broker forgets everything it had."""
    with shop.broker() as broker:
        broker.flushdb()


@pytest.mark.usefixtures("short_leases")
def test_a_killed_workers_work_is_sent_again_when_the_broker_lost_it(shop: Any) -> None:
    """If a worker was killed and the broker lost the message, a sweep sends the stored message,
    whose chain goes on."""
    result = chain(shop.tasks.recover.s(1, 60), shop.tasks.add.s(41)).apply_async()
    with shop.worker() as worker:
        shop.wait_for_steps("began")
        worker.kill()
    lose_messages(shop)
    with shop.worker():
        wait_until(lambda: sweep(shop.tasks.app).sent, message="an overdue work")
        assert result.get(timeout=patience_s()) == 42
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"1": 1})
    assert shop.work("shop.recover", 1).state is State.DONE


def test_enqueued_in_a_transaction_it_runs_if_that_commits(shop: Any) -> None:
    """Work that is enqueued in a transaction runs only if that commits, and its result has the
    returned id."""
    tasks = shop.tasks
    with shop.worker(), orm.Session(shop.engine) as session:
        gone = enqueue(tasks.recover, (1,), session=session)
        session.rollback()
        kept = enqueue(tasks.recover, (2,), session=session)
        session.commit()
        assert kept.result.get(timeout=patience_s()) == 2
        gone.send()
        assert (gone.outcome, kept.outcome) == ("stored", "sent")
        with shop.engine.connect() as db:
            stored = enqueue(tasks.recover, (3,), session=db)
            db.commit()
        assert stored.outcome == "stored"
        stored.send()
        assert stored.outcome == "sent"
        assert stored.result.get(timeout=patience_s()) == 3
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"2": 1, "3": 1})


def put_orders(shop: Any, *orders: int) -> None:
    """Enqueued, and their messages lost."""
    with orm.Session(shop.engine) as session, session.begin():
        for order in orders:
            enqueue(shop.tasks.recover, (order,), session=session)
    lose_messages(shop)
    make_due(shop)


def waiting(shop: Any) -> int:
    """Messages in the queue."""
    with shop.broker() as broker:
        return int(broker.llen(shop.tasks.app.conf.task_default_queue))


def test_a_sweep_sends_by_a_producer_of_its_own(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep uses one producer of its own. A refused message does not block the others."""
    app = shop.tasks.app
    put_orders(shop, *range(5))
    sent: list[Any] = []
    publish = kombu.Producer.publish

    def refused_once(producer: Any, *args: Any, **options: Any) -> Any:
        sent.append(producer)
        if len(sent) == 2:
            raise ConnectionError("the broker closed it")
        return publish(producer, *args, **options)

    monkeypatch.setattr(kombu.Producer, "publish", refused_once)
    monkeypatch.setattr(app.producer_pool, "acquire", None)
    swept = sweep(app)
    assert (swept.sent, swept.refused) == (4, 1)
    assert len(set(map(id, sent))) == 1
    assert waiting(shop) == 4


def test_calls_that_do_not_fit_their_task_are_failed_and_hold_up_no_other(shop: Any) -> None:
    """A stored message that does not fit its task, or whose serializer is not accepted, is FAILED.
    The others are sent."""
    put_orders(shop, *range(14))
    with shop.engine.begin() as db:
        change = sa.text(
            "update taskguard_work set call = replace(call, :old, :new)"
            " where id <> 'shop.recover order:13' and id <> 'shop.recover order:0'"
        )
        db.execute(change, {"old": '\\"kwargs\\": {}', "new": '\\"kwargs\\": {\\"colour\\": 1}'})
        change = sa.text(
            "update taskguard_work"
            " set call = replace(call, 'application/json', 'application/x-nil')"
            " where id = 'shop.recover order:0'"
        )
        assert db.execute(change).rowcount == 1
    lose_messages(shop)
    make_due(shop)
    swept = sweep(shop.tasks.app)
    assert (swept.sent, swept.refused, swept.failed) == (1, 0, 13)
    assert "does not fit shop.recover" in str(shop.work("shop.recover", 5).error)
    assert "cannot be read" in str(shop.work("shop.recover", 0).error)
    assert shop.work("shop.recover", 5).state is State.FAILED


@pytest.mark.skipif(not hasattr(kombu.Producer, "batch"), reason="kombu 5.7 sends in batches")
def test_a_sweep_sends_in_batches(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep sends its messages to Redis in one batch, in Celery's own form."""
    app = shop.tasks.app
    put_orders(shop, *range(5))
    asked: list[Any] = []
    execute = redis.Redis.execute_command

    def noted(client: Any, *command: Any, **options: Any) -> Any:
        asked.append(command[0])
        return execute(client, *command, **options)

    monkeypatch.setattr(redis.Redis, "execute_command", noted)  # a pipeline has its own
    assert sweep(app).sent == 5
    assert "LPUSH" not in asked
    assert waiting(shop) == 5
    with shop.worker():
        shop.wait_for_effects(5)
    assert shop.effects() == Counter(map(str, range(5)))


def test_what_the_broker_refuses_at_the_end_of_a_batch_is_not_lost(shop: Any) -> None:
    """If the broker refuses a batch, none of it counts as sent. A later sweep sends it."""
    app = shop.tasks.app
    queue = app.conf.task_default_queue
    put_orders(shop, *range(5))
    with shop.broker() as broker:
        broker.set(queue, "no list, so that no message can be put into it")
        swept = sweep(app)
        assert (swept.sent, swept.refused) == (0, 5)
        broker.delete(queue)
    make_due(shop)
    assert sweep(app).sent == 5
    assert waiting(shop) == 5


def test_enqueued_in_a_body_it_commits_with_done(shop: Any) -> None:
    """Work that a body enqueues is sent once, however often the body's message comes."""
    tasks = shop.tasks
    task_id = str(uuid.uuid4())
    with shop.worker():
        shop.publish_raw(tasks.ship_and_bill, [1], times=3, task_id=task_id)
        shop.wait_for_effects(2)
        billed = tasks.app.AsyncResult(task_id).get(timeout=patience_s())
        assert tasks.app.AsyncResult(billed).get(timeout=patience_s()) == 1001
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"shipped 1": 1, "1001": 1})


@pytest.mark.once
def test_a_producer_killed_after_its_commit_loses_nothing(shop: Any) -> None:
    """If a producer is killed after its commit, `taskguard relay` sends its message."""
    script = (
        "import os, signal\n"
        "from sqlalchemy import orm\n"
        "from support import shop\n"
        "from taskguard_celery import enqueue\n"
        "from taskguard_celery.calls import CelerySender\n"
        "CelerySender.send_first = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with orm.Session(shop.engine()) as session:\n"
        "    enqueue(shop.recover, (1,), session=session)\n"
        "    session.commit()\n"
    )
    environment = {**os.environ, **shop.environment, "PYTHONPATH": str(HERE)}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert shop.work("shop.recover", 1).state is State.NEW
    command = [sys.executable, "-m", "taskguard", "relay", "--celery", "support.shop:app"]
    relay = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        with shop.worker():
            shop.wait_for_effects(1)
            wait_until(
                lambda: shop.work("shop.recover", 1).state is State.DONE,
                message="DONE",
            )
    finally:
        relay.terminate()
        output, _ = relay.communicate(timeout=patience_s())
    assert relay.returncode == 0, output
    assert "sent: 1, refused: 0" in output
    assert shop.effects() == Counter({"1": 1})


def test_revoked_work_is_not_sent_again(shop: Any) -> None:
    """A sweep does not send revoked work, even if its message is lost."""
    tasks = shop.tasks
    with orm.Session(shop.engine) as session, session.begin():
        revoked = enqueue(tasks.recover, (1,), session=session)
    with shop.broker() as broker:
        message = broker.lpop(tasks.app.conf.task_default_queue)
    with shop.worker():
        shop.revoke(revoked.result)
        with shop.broker() as broker:
            broker.lpush(tasks.app.conf.task_default_queue, message)
        wait_until(
            lambda: shop.work("shop.recover", 1).state is State.FAILED,
            message="revoked in the ledger",
        )
    make_due(shop)
    assert sweep(tasks.app).sent == 0
    assert shop.effects() == Counter()


def test_the_sweep_is_a_task_of_beat(shop: Any) -> None:
    """`schedule_sweep()` adds the sweep to beat's schedule, and a worker can run it."""
    app = shop.tasks.app
    schedule_sweep(app, every_s=30)
    assert app.conf.beat_schedule["taskguard.sweep"] == {"task": "taskguard.sweep", "schedule": 30}
    with shop.engine.connect() as db:
        enqueue(shop.tasks.recover, (1,), session=db)
        db.commit()
    make_due(shop)
    assert app.tasks["taskguard.sweep"]() == "sent 1, refused 0"
    with shop.worker():
        shop.wait_for_effects(1)


def test_the_command_says_what_it_did(
    shop: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`taskguard sweep` prints what it sent. Without a queue, or with refused messages, it exits
    with 1."""
    with shop.engine.connect() as db:
        enqueue(shop.tasks.recover, (1,), session=db)
        db.commit()
    make_due(shop)
    assert main(["sweep", "--celery", "support.shop:app"]) == 0
    assert capsys.readouterr().out == "sent: 1, refused: 0\n"
    assert main(["sweep"]) == 1
    assert "--celery MODULE:APP" in capsys.readouterr().err
    make_due(shop)
    monkeypatch.setattr(CelerySender, "_send", _refuse)
    assert main(["sweep", "--celery", "support.shop:app"]) == 1
    assert "A later sweep tries them again" in capsys.readouterr().err


def _refuse(*_: Any, **__: Any) -> None:
    raise ConnectionError("the broker is away")


def test_a_signature_is_enqueued_with_its_options(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature keeps its arguments, links, priority and route. Options of the call are added."""
    sent: list[dict[str, Any]] = []

    def note(headers: Any = None, properties: Any = None, body: Any = None, **_: Any) -> None:
        sent.append({"headers": headers, "properties": properties, "body": body})

    before_task_publish.connect(note)
    tasks = shop.tasks
    try:
        with orm.Session(shop.engine) as session, session.begin():
            enqueue(tasks.recover.s(1).set(priority=7), session=session, link=tasks.add.s(41))
            enqueue(tasks.recover.s(), (2,), {"seconds": 0.0}, session=session)
    finally:
        before_task_publish.disconnect(note)
    (one, two) = sorted(sent, key=lambda each: str(each["body"][0]))
    assert (one["properties"]["priority"], list(one["body"][0])) == (7, [1])
    assert one["body"][2]["callbacks"][0]["task"] == "shop.add"
    assert (list(two["body"][0]), two["body"][1]) == ([2], {"seconds": 0.0})
    with shop.worker():
        shop.wait_for_effects(2)
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"1": 1, "2": 1})


@pytest.mark.parametrize("by", ["countdown", "eta", "naive eta", "of the signature"])
def test_a_countdown_is_waited_once_whoever_sends_the_message(shop: Any, by: str) -> None:
    """A countdown counts from the enqueue. Until its end no sweep takes the message for lost."""
    tasks, wait = shop.tasks, timedelta(hours=2)
    before = datetime.now(UTC)
    task: Any = tasks.recover.s(1)
    options: dict[str, Any] = {
        "countdown": {"countdown": 7200},
        "eta": {"eta": before + wait},
        "naive eta": {"eta": (before + wait).replace(tzinfo=None)},
    }.get(by, {})
    if not options:
        task = task.set(countdown=7200)
    etas: list[datetime] = []

    def note(headers: Any = None, **_: Any) -> None:
        etas.append(datetime.fromisoformat(headers["eta"]))

    before_task_publish.connect(note)
    try:
        with orm.Session(shop.engine) as session, session.begin():
            enqueue(task, session=session, **options)
        with shop.engine.begin() as db:
            now_us, due = db.execute(
                sa.text(
                    "select extract(epoch from clock_timestamp()) * 1e6, due from taskguard_work"
                )
            ).one()
            assert int(due) - int(now_us) > 2.9 * 3600e6, "an hour after its time"
        make_due(shop)
        assert sweep(tasks.app).sent == 1  # as if its process had died before it could send it
        with shop.engine.begin() as db:
            again = db.execute(sa.text("select due from taskguard_work")).scalar_one()
        assert int(again) - int(now_us) > 2.9 * 3600e6
    finally:
        before_task_publish.disconnect(note)
    assert len(etas) == 2
    assert etas[0] == etas[1]
    assert wait <= etas[0] - before < wait + timedelta(minutes=5)


def test_only_guarded_tasks_are_enqueued(shop: Any) -> None:
    """A task without a guard is refused, because duplicates would run it. So is an expiry."""

    @shop.tasks.app.task(name="plain", shared=False)
    def plain() -> None:
        pass

    with shop.engine.connect() as db:
        with pytest.raises(ConfigurationError, match="not guarded"):
            enqueue(plain, session=db)
        with pytest.raises(ConfigurationError, match="plain: it is not guarded"):
            enqueue(plain.s(), session=db)
        recover = shop.tasks.recover
        for canvas, instead in (
            (chain(recover.s(1), recover.s(2)), "chain .* link=rest"),
            (group(recover.s(1), recover.s(2)), "group .* one by one"),
            (chord([recover.s(1)], recover.s(2)), "chord .* whose body calls it"),
        ):
            with pytest.raises(ConfigurationError, match=instead):
                enqueue(canvas, session=db)
        with pytest.raises(ConfigurationError, match=r"shop\.elsewhere.* Import"):
            enqueue(shop.tasks.app.signature("shop.elsewhere"), session=db)
        with pytest.raises(ConfigurationError, match="a Celery task or its signature"):
            enqueue(print, session=db)
        with pytest.raises(ConfigurationError, match="expires"):
            enqueue(shop.tasks.recover.s(1).set(expires=60), session=db)
        with pytest.raises(ConfigurationError, match="expires"):
            enqueue(shop.tasks.recover, (1,), session=db, expires=60)


@pytest.mark.parametrize("target", ["support.needs:nope", "nowhere:app", "os:path", "os", "", ":"])
def test_an_app_that_is_not_there_is_said_in_a_sentence(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong `--celery` option causes one sentence, and no traceback."""
    assert main(["sweep", "--celery", target]) == 1
    assert f"no Celery app at {target!r}" in capsys.readouterr().err
