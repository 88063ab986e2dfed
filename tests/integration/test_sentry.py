"""Sentry gets one event for work that dies, and none for what taskguard handles by itself.

The SDK is the real one, with its integrations and a transport that collects. It patches Celery and
RQ for good, so each test is a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.scripts import run_script

pytest.importorskip("sentry_sdk")

TESTS = Path(__file__).parents[1]
COMMON = """
import json, sys
sys.path.insert(0, sys.argv[1])
import sentry_sdk
from sentry_sdk.transport import Transport

sent = []


class Collecting(Transport):
    def capture_envelope(self, envelope):
        sent.extend(item.payload.json for item in envelope.items if item.type == "event")


sentry_sdk.init(dsn="http://key@localhost/1", transport=Collecting)

import sqlalchemy as sa
from support import claims
from taskguard.ledger.sql import SqlLedger
from taskguard.model.claims import MessageRef

engine = sa.create_engine(f"sqlite:///{sys.argv[2]}/ledger.db", poolclass=sa.NullPool)
ledger = SqlLedger(engine)
ledger.create_schema()
found = {}


def hold(task, number):
    request = claims.request(
        number, work=f"{task} order:{number}", task=task, message=MessageRef("other")
    )
    return ledger.claim(request)


def overtake(task, number):
    claims.end_leases(engine)
    assert hold(task, number).takeover


def titles():
    for event in sent:
        values = event.get("exception", {}).get("values", [])
        yield values[-1]["type"] if values else event["logentry"]["message"]


def note(name):
    found[name] = list(titles())
    sent.clear()
"""
CELERY = """
from celery import Celery
from celery.app import trace
from taskguard_celery import guarded_task
from taskguard_celery.tracing import trace_briefly, _BriefInfo

app = Celery("sentry", broker="memory://", backend="cache+memory://")
app.conf.update(taskguard_locks=None, taskguard_ledger=ledger)


def make(name, **options):
    @app.task(name=name)
    @guarded_task(key="order:<order>", ttl_s=10, **options)
    def body(order, how="", *, guard):
        if how == "fails":
            raise ValueError("fails")
        if how == "stale":
            overtake(name, order)
        with guard.transaction():
            pass
        return how

    return body


make("ship")
make("wait", busy="park", once_per="message")
make("refuse", busy="raise")
make("skip", busy="skip")
make("die", max_crashes=1)
app.finalize()
trace_briefly(app, "host")
numbers = iter(range(100))


def deliver(name, *args):
    task, message = app.tasks[name], f"m{next(numbers)}"
    request = {"id": message, "args": args, "kwargs": {}, "delivery_info": {"is_eager": False}}
    answer = task.__trace__(message, args, {}, request)
    return getattr(answer, "retval", None)
"""
RQ = """
from redis import Redis
from rq import Queue
from rq.scheduler import RQScheduler
import sentry_jobs
from taskguard_rq import GuardedSimpleWorker, configure

connection = Redis.from_url(sys.argv[3])
# As if another worker ran the scheduler: a deferred job stays in its registry.
connection.set(RQScheduler.get_locking_key("sentry"), "1")
sentry_jobs.overtake = overtake
configure(locks=None, ledger=ledger)
queue = Queue("sentry", connection=connection)


def deliver(name, *args):
    queue.enqueue(getattr(sentry_jobs, name), *args)
    GuardedSimpleWorker([queue], connection=connection).work(burst=True)
"""
JOBS = """
from taskguard_rq import guarded_job


def body(name, order, how, guard):
    if how == "fails":
        raise ValueError("fails")
    if how == "stale":
        overtake(f"sentry_jobs.{name}", order)
    with guard.transaction():
        pass
    return how


@guarded_job(key="order:<order>", ttl_s=10)
def ship(order, how="", *, guard):
    return body("ship", order, how, guard)


@guarded_job(key="order:<order>", ttl_s=10, busy="park", once_per="message")
def wait(order, how="", *, guard):
    return body("wait", order, how, guard)


@guarded_job(key="order:<order>", ttl_s=10, busy="raise")
def refuse(order, how="", *, guard):
    return body("refuse", order, how, guard)


@guarded_job(key="order:<order>", ttl_s=10, busy="skip")
def skip(order, how="", *, guard):
    return body("skip", order, how, guard)


@guarded_job(key="order:<order>", ttl_s=10, max_crashes=1)
def die(order, how="", *, guard):
    return body("die", order, how, guard)
"""
SCENARIO = """
deliver("ship", 1)
deliver("ship", 1)
note("duplicate")
hold(NAMES["ship"], 2)
deliver("ship", 2)
note("deferred")
hold(NAMES["wait"], 3)
deliver("wait", 3)
note("parked")
hold("another", 7)
deliver("refuse", 7)
note("refused")
deliver("skip", 7)
note("skipped")
deliver("ship", 4, "stale")
note("stale")
hold(NAMES["die"], 5)
claims.end_leases(engine)
deliver("die", 5)
note("dead")
deliver("die", 5)
note("still dead")
deliver("ship", 6, "fails")
note("failed")
print(json.dumps(found))
"""
EXPECTED = {
    "duplicate": [],
    "deferred": [],
    "parked": [],
    "refused": ["KeyBusyError"],
    "skipped": [],
    "stale": [],
    "dead": ["WorkDeadError"],
    "still dead": [],
    "failed": ["ValueError"],
}


def test_one_event_for_dead_work_of_celery(tmp_path: Path) -> None:
    """A DEAD work item is one event, although a log line at ERROR and the task's error report it.
    Messages that are parked, deferred, answered or stale are none."""
    names = "NAMES = {name: name for name in ('ship', 'wait', 'die')}\n"
    said = run_script(COMMON + CELERY + names + SCENARIO, str(TESTS), str(tmp_path))
    assert json.loads(said) == EXPECTED


def test_traces_are_brief_under_sentry(tmp_path: Path) -> None:
    """Sentry's own tracer around Celery's does not hide that an Ignore needs no traceback."""
    script = """
hold("ship", 2)
error = deliver("ship", 2)
assert error.tb.tb_next is None, error.traceback
print("brief")
"""
    assert run_script(COMMON + CELERY + script, str(TESTS), str(tmp_path)) == "brief"


def test_one_event_for_dead_work_of_rq(tmp_path: Path, redis_url: str) -> None:
    """RQ's jobs report as Celery's tasks do."""
    (tmp_path / "sentry_jobs.py").write_text(JOBS)
    names = "NAMES = {name: f'sentry_jobs.{name}' for name in ('ship', 'wait', 'die')}\n"
    script = COMMON + "sys.path.insert(0, sys.argv[2])\n" + RQ + names + SCENARIO
    said = run_script(script, str(TESTS), str(tmp_path), redis_url)
    assert json.loads(said.splitlines()[-1]) == EXPECTED
