"""A message keeps its marks, whatever user code makes of its headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, Task, beat
from celery.schedules import crontab
from celery.signals import before_task_publish

from support.celery_process import come, local_app, messages_of
from taskguard_celery import enqueue, guarded_task
from taskguard_celery.marks import HEADER, MESSAGE_HEADERS
from taskguard_celery.ticks import name_ticks


class Careless(Task):  # type: ignore[misc]  # Celery has no types
    """Replaces the headers of all its messages."""

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        options["headers"] = {"mine": 1}
        return super().apply_async(args, kwargs, **options)


@pytest.fixture
def app(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    with local_app(sqlite_url, monkeypatch) as made:
        yield made


def clear(headers: dict[str, Any], **_: Any) -> None:
    """Act as a handler of `before_task_publish` that removes all other headers."""
    for name in [name for name in headers if name not in MESSAGE_HEADERS]:
        del headers[name]


@contextmanager
def clearing() -> Iterator[None]:
    before_task_publish.connect(clear)
    try:
        yield
    finally:
        before_task_publish.disconnect(clear)


def retry_with_headers(task: Task) -> None:
    raise task.retry(headers={"mine": 1}, countdown=0)


def retry_as_with_sentry(task: Task) -> None:
    raise task.retry(headers={"sentry-trace": "t", "headers": {"sentry-trace": "t"}}, countdown=0)


def retry_without_request_headers(task: Task) -> None:
    task.request.headers = None
    raise task.retry(countdown=0)


def retry_with_cleared_headers(task: Task) -> None:
    task.request.headers.clear()
    raise task.retry(countdown=0)


def retry_by_another_id(task: Task) -> None:
    raise task.retry(task_id=f"again-{task.request.id}", countdown=0)


def retry_under_a_handler(task: Task) -> None:
    with clearing():
        raise task.retry(countdown=0)


RETRIES = pytest.mark.parametrize(
    "retry",
    [
        retry_with_headers,
        retry_as_with_sentry,
        retry_without_request_headers,
        retry_with_cleared_headers,
        retry_by_another_id,
        retry_under_a_handler,
    ],
)


@RETRIES
def test_a_tick_that_two_beats_sent_runs_once_over_a_retry(
    app: Celery, retry: Callable[[Task], None]
) -> None:
    """However the retry loses the headers; the deferrals and the time of publication stay, too."""
    effects: list[str] = []

    @app.task(name="tick", bind=True, base=Careless, shared=False)
    @guarded_task(key="tick", once_per="tick")
    def tick(self: Task) -> None:
        if not self.request.retries and not effects:
            retry(self)
        effects.append(self.request.id)

    app.finalize()
    for _ in range(2):
        scheduler = beat.Scheduler(app, lazy=True)
        name_ticks(scheduler)
        entry = scheduler.Entry(
            "yearly", "tick", schedule=crontab("0", "0", "*", "1", "1"), app=app
        )
        scheduler.apply_async(entry, producer=None, advance=False)
    first, other = messages_of(app)
    come(first)
    [again] = messages_of(app)
    marks = {name: value for name, value in first.headers[HEADER].items() if name != "id"}
    assert marks["tick"]
    assert again.headers[HEADER] == {"id": again.headers["id"], **marks}
    for message in (again, other):
        come(message)
    assert len(effects) == 1


@RETRIES
def test_a_strict_line_goes_on_after_a_retry(app: Celery, retry: Callable[[Task], None]) -> None:
    """The message that is retried keeps its place, and is known when it comes."""
    ran: list[int] = []

    @app.task(name="strict", bind=True, base=Careless, shared=False)
    @guarded_task(key="line", once_per="message", busy="park", order="strict")
    def strict(self: Task, number: int) -> None:
        if not self.request.retries:
            retry(self)
        ran.append(number)

    app.finalize()
    for number in range(2):
        strict.delay(number)
    deliveries = 0
    while (messages := messages_of(app)) and deliveries < 20:
        for message in messages:
            come(message)
            deliveries += 1
    assert ran == [0, 1]
    # Each comes, is called if it was parked, and retried.
    assert deliveries <= 6


@pytest.mark.parametrize("delay_s", [None, 0.001])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "overtaken"])
def test_the_newest_call_replaces_the_first_whatever_becomes_of_headers(
    app: Celery, delay_s: float | None, order: tuple[int, int]
) -> None:
    """Also of a debounce, and where a handler clears them as well."""
    ran: list[str] = []

    @app.task(name="paint", base=Careless, shared=False)
    @guarded_task(key="wall:<wall>")
    def paint(wall: int, colour: str) -> None:
        ran.append(colour)

    app.finalize()
    with clearing():
        for colour in ("red", "blue"):
            enqueue(paint, (1, colour), duplicate="replace", delay_s=delay_s)
        messages = messages_of(app)
        for number in order:
            come(messages[number])
    assert ran == ["blue"]


def test_headers_that_are_copied_to_another_message_are_not_its_marks(app: Celery) -> None:
    """Each message is work of its own, with its own time of publication."""

    @app.task(name="copy", bind=True, shared=False)
    @guarded_task(key="copies", once_per="message")
    def copy(self: Task, number: int) -> None:
        if number:
            self.apply_async((number - 1,), headers=self.request.headers)

    app.finalize()
    copy.apply_async((1,), headers={"mine": 1})
    [first] = messages_of(app)
    come(first)
    [second] = messages_of(app)
    assert second.headers["mine"] == 1
    assert second.headers[HEADER]["id"] == second.headers["id"] != first.headers["id"]
    assert second.headers[HEADER]["sent"] > first.headers[HEADER]["sent"]


def test_a_message_of_another_producer_stays_one_over_its_retries(app: Celery) -> None:
    """A message of another producer has no time of publication, and neither have its retries."""

    @app.task(name="again", bind=True, shared=False)
    @guarded_task(key="again")
    def again(self: Task) -> None:
        raise self.retry(countdown=0)

    app.finalize()
    again.apply_async(task_id="foreign")
    [message] = messages_of(app)
    del message.headers[HEADER]
    come(message)
    [message] = messages_of(app)
    assert message.headers[HEADER].keys() <= {"id", "serializer"}
