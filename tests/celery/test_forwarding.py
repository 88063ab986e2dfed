"""A Celery message that is sent again is the same message, whatever its options are."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, Task
from celery._state import pop_current_task, push_current_task
from celery.app.task import Context
from celery.events import EventDispatcher
from celery.signals import before_task_publish
from kombu import Exchange, Queue
from sqlalchemy import orm

from support.celery_process import come, local_app, messages_of
from support.claims import request
from support.request_ids import request_id, requests
from support.waiting import patience_s, wait_until
from taskguard.integration import MessageRef
from taskguard.model.states import State
from taskguard_celery import enqueue, guarded_task
from taskguard_celery.calls import CelerySender
from taskguard_celery.marks import HEADER, MESSAGE_HEADERS

OTHER = {"task": "link", "args": [1], "kwargs": {}, "options": {}, "immutable": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "args and kwargs for people": {"argsrepr": "(<hidden>)", "kwargsrepr": "{<hidden>}"},
    "chain": {"chain": [OTHER]},
    "chord": {"chord": OTHER, "group_id": "g", "group_index": 3},
    "compression": {"compression": "gzip"},
    "correlation": {"correlation_id": "c", "message_id": "m", "app_id": "a", "type": "t"},
    "delivery mode": {"delivery_mode": 1},
    "exchange": {"exchange": "orders", "routing_key": "order.new"},
    "expires": {"expires": 600},
    "headers": {"headers": {"mine": {"a": [1, None]}, "x-request-id": "r"}},
    "headers in headers": {"headers": {"mine": 1, "headers": {"sentry-trace": "t"}}},
    "ignored result": {"ignore_result": True},
    "links": {"link": [OTHER], "link_error": [OTHER]},
    "nesting": {"replaced_task_nesting": 1},
    "origin": {"origin": "gen1@host"},
    "parent": {"root_id": "r", "parent_id": "p"},
    "priority": {"priority": 7},
    "queue": {"queue": "celery"},
    "reply": {"reply_to": "q"},
    "serializer": {"serializer": "pickle"},
    "shadow": {"shadow": "another name"},
    "stamps": {"stamped_headers": ["mark"], "mark": "it"},
    "time limits": {"time_limit": 9, "soft_time_limit": 5},
}
tenant: ContextVar[str] = ContextVar("tenant", default="")


@pytest.fixture
def app(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An app of this process with the tasks `later`, which is deferred, and `line`."""
    with local_app(sqlite_url, monkeypatch) as made:
        made.conf.accept_content = ["json", "pickle"]
        made.conf.task_send_sent_event = made.conf.task_inherit_parent_priority = True
        orders = Exchange("orders", type="topic")
        queues = ("celery", "celery.taskguard", "other", "other.taskguard")
        made.conf.task_queues = [Queue(name, Exchange(name), routing_key=name) for name in queues]
        made.conf.task_queues.append(Queue("new", orders, routing_key="order.new"))
        made.conf.task_routes = {"*": {"queue": "other", "priority": 3}}

        def ship(self: Task, order: int) -> None: ...

        @made.task(name="holder", shared=False)
        def hold() -> None: ...

        for name, busy in (("later", "retry"), ("line", "park")):
            guard = guarded_task(key="order:<order>", once_per="message", busy=busy)
            made.task(name=name, bind=True, base=Careless, shared=False)(guard(ship))
        made.finalize()
        yield made


class Careless(Task):  # type: ignore[misc]  # Celery has no types
    """Says of each message in which tenant it was sent, and drops all other headers."""

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if tenant.get():
            options["headers"] = {"tenant": tenant.get()}
        return super().apply_async(args, kwargs, **options)


def overwrite(headers: dict[str, Any], properties: dict[str, Any], body: Any, **_: Any) -> None:
    """Act as a handler of `before_task_publish` that records the sender of a message."""
    body[1]["tenant"] = tenant.get()
    for name in [name for name in headers if name not in MESSAGE_HEADERS]:
        del headers[name]
    headers.update({"tenant": tenant.get(), "origin": "overwritten", "parent_id": "overwritten"})
    properties["correlation_id"] = "overwritten"


@contextmanager
def at_work(app: Celery, name: str) -> Iterator[Context]:
    """Within a task, which a message named so brought."""
    task = app.tasks["holder"]
    push_current_task(task)
    task.push_request(id=name, called_directly=False, delivery_info={"priority": 9})
    try:
        yield task.request
    finally:
        task.pop_request()
        pop_current_task()


@contextmanager
def holding(app: Celery) -> Iterator[Context]:
    """Within a task of another tenant, in a process whose handlers say so."""
    token = tenant.set("the holder's")
    before_task_publish.connect(overwrite)
    try:
        with at_work(app, "holder") as request:
            yield request
    finally:
        before_task_publish.disconnect(overwrite)
        tenant.reset(token)


def content(message: Any) -> dict[str, Any]:
    """A message, without the number of its delivery and the route on which it came."""
    headers, marks = dict(message.headers), dict(message.headers[HEADER])
    for name in ("deferrals", "promoted"):
        marks.pop(name, None)
    passing = {"delivery_info", "delivery_tag", "expiration"}
    properties = {name: value for name, value in message.properties.items() if name not in passing}
    return {
        **{f"header {name}": value for name, value in headers.items() if name != "eta"},
        **{f"property {name}": value for name, value in properties.items()},
        "header taskguard": marks,
        "body": message.payload,
        "content type": message.content_type,
    }


def route(message: Any) -> tuple[str, str]:
    info = message.delivery_info
    return info["exchange"], info["routing_key"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("way", ["deferred", "promoted", "sent again"])
def test_a_message_in_hand_keeps_its_options(
    app: Celery, monkeypatch: pytest.MonkeyPatch, way: str, options: dict[str, Any]
) -> None:
    """A message that is sent again keeps its contents and its route, and gets nothing of the task
    that sends it."""
    events: list[Any] = []
    monkeypatch.setattr(
        EventDispatcher, "publish", lambda _, kind, event, *__, **___: events.append(event)
    )
    ledger = app.conf.taskguard_ledger
    app.tasks["later" if way == "deferred" else "line"].apply_async(
        (1,), task_id=str(uuid.uuid4()), **options
    )
    [first] = messages_of(app)
    ledger.claim(request(1, work="refund order:1", ttl_s=7200.0))
    if way == "deferred":
        with holding(app) as holder:
            come(first)
    else:
        come(first)
        [waits] = ledger.waiting()
        sender = CelerySender(app)
        send = sender if way == "sent again" else sender.hand_off
        with holding(app) as holder:
            send(json.loads(ledger.view(waits.work).call), MessageRef(waits.message, deferrals=1))
    [again] = messages_of(app)
    assert content(again) == content(first)
    if way != "promoted":
        assert route(again) == route(first)
    assert (again.headers[HEADER].get("promoted") is not None) == (way == "promoted")
    assert holder.children == []
    sent = [(each["args"], each["root_id"], each["parent_id"]) for each in events]
    assert sent[0] == sent[1]


# Work that is enqueued does not expire; a signature has a `type` of its own.
SENT = {
    name: {option: value for option, value in options.items() if option != "type"}
    for name, options in OPTIONS.items()
    if name != "expires"
}


@pytest.mark.parametrize("options", SENT.values(), ids=SENT)
def test_what_is_enqueued_is_the_message_that_a_call_sends(
    app: Celery, options: dict[str, Any]
) -> None:
    """`enqueue()` sends the message that a call would send, also if a sweep sends it later. It
    stays a child of the task that enqueued it."""
    task, options = app.tasks["line"], {"task_id": str(uuid.uuid4()), **options}
    with at_work(app, "enqueues") as request:
        task.apply_async((1,), **options)
        [promoted] = messages_of(app)
        enqueue(task, (1,), **options)
        assert len(request.children) == 2
    [first] = messages_of(app)
    ledger = app.conf.taskguard_ledger
    [work] = ledger.list_work(State.NEW)
    call, message = json.loads(work.call), MessageRef(work.message)
    token = tenant.set("the sweeper's")
    with at_work(app, "sweeps") as request, CelerySender(app).batch() as send:
        send(call, message)
        assert request.children == []
    tenant.reset(token)
    [swept] = messages_of(app)
    assert content(swept) == content(first)
    for each in (promoted, first):
        del each.headers[HEADER]["sent"]
    assert content(first) == content(promoted)
    assert {route(each) for each in (promoted, first, swept)} == {route(promoted)}


def test_what_is_enqueued_is_sent_in_the_context_of_its_enqueue(
    app: Celery, sqlite_url: str
) -> None:
    """Work that is sent after a commit is sent in the context of its `enqueue()`."""
    task, engine = app.tasks["line"], sa.create_engine(sqlite_url)
    with orm.Session(engine) as session:
        token = tenant.set("the caller's")
        enqueue(task, (1,), session=session)
        tenant.reset(token)
        session.commit()
    engine.dispose()
    [message] = messages_of(app)
    assert message.headers["tenant"] == "the caller's"


@pytest.mark.once
def test_messages_of_a_line_run_each_for_its_own_request(shop: Any) -> None:
    """Each message of a strict line runs with its own headers, although another one's holder sends
    it. That also holds for retries, and with a base class that replaces headers."""
    task, results = shop.tasks.careless, []
    with requests(), shop.worker(concurrency=2) as worker:
        for number in range(4):
            token = request_id.set(f"request-{number}")
            results.append(task.delay("a", number, shop.tasks.UNTIL_GO if not number else 0.0))
            request_id.reset(token)
            if not number:
                shop.wait_for_steps("began")
        wait_until(lambda: len(shop.ledger.waiting()) == 3, message="three wait")
        shop.let_go()
        ran = [each.get(timeout=patience_s()) for each in results]
        assert ran == [f"request-{number}" for number in range(4)]
        assert [list(each.collect()) for each in results] == [
            [(each, value)] for each, value in zip(results, ran, strict=True)
        ]
        deliveries = worker.text().count(" received")
    # Each comes once, is called, and retried; one more where a call came early.
    assert deliveries <= 16
