"""Each delivery is counted once, under one outcome. The listener's event and the ledger agree."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from integration.run.test_deliveries import OTHER, RunnerRig, inside

import taskguard
from support.leaving import exiting_at_sigterm
from taskguard import Guard
from taskguard.errors import (
    LeaseLostError,
    LedgerUnavailableError,
    StaleTokenError,
    TransactionRetryError,
)
from taskguard.events import Delivered
from taskguard.integration import set_tracer
from taskguard.metrics import OUTCOMES
from taskguard.model.outcomes import Ended
from taskguard.run.counting import ended_by_error


@pytest.fixture
def rig(sqlite_url: str) -> Iterator[RunnerRig]:
    made = RunnerRig(sqlite_url)
    yield made
    made.ledger.close()


def heard(rig: RunnerRig) -> Counter[str]:
    """Return the outcomes that listeners got."""
    return Counter(each.outcome.value for each in rig.events if isinstance(each, Delivered))


def counted(rig: RunnerRig) -> Counter[str]:
    """Return the outcomes that the ledger has."""
    rig.runner.counting.flush.flush()
    rows = rig.ledger.counts()
    return Counter(
        {
            row.what.partition("/")[2]: int(row.n)
            for row in rows
            if row.what.startswith("deliveries/") and row.n
        }
    )


def failing(guard: Guard) -> None:
    raise ZeroDivisionError


def losing(guard: Guard) -> None:
    raise LeaseLostError("lost", key=guard.key)


def done(rig: RunnerRig) -> None:
    rig.deliver()


def failed(rig: RunnerRig) -> None:
    rig.deliver(failing)


def duplicate(rig: RunnerRig) -> None:
    rig.deliver()
    rig.deliver(message="other")


def deferred(rig: RunnerRig) -> None:
    inside(rig, **OTHER)


def skipped(rig: RunnerRig) -> None:
    inside(rig, **OTHER, busy="skip")


def refused(rig: RunnerRig) -> None:
    inside(rig, **OTHER, busy="raise")


def superseded(rig: RunnerRig) -> None:
    inside(rig, **OTHER)
    rig.deliver(**OTHER)


def too_old(rig: RunnerRig) -> None:
    rig.deliver(published_at_s=time.time() - 100, retention_s=50)


def stale(rig: RunnerRig) -> None:
    rig.deliver(losing)


def unavailable(rig: RunnerRig) -> None:
    def retried(guard: Guard) -> None:
        raise TransactionRetryError("deadlock")

    rig.deliver(retried, queue=None)


def interrupted(rig: RunnerRig) -> None:
    with exiting_at_sigterm():
        rig.deliver(lambda guard: signal.raise_signal(signal.SIGTERM))


def crashed(rig: RunnerRig) -> None:
    rig.deliver(lambda guard: exit_by_itself())


def exit_by_itself() -> None:
    raise SystemExit(1)


def cancelled(rig: RunnerRig) -> None:
    def body(guard: Guard) -> None:
        raise asyncio.CancelledError

    rig.deliver(body)


def raised_after_done(rig: RunnerRig) -> None:
    def body(guard: Guard) -> None:
        with guard.transaction():
            pass
        raise ZeroDivisionError

    rig.deliver(body)


def dead(rig: RunnerRig) -> None:
    for _ in range(2):
        with contextlib.suppress(SystemExit):
            rig.deliver(lambda guard: exit_by_itself(), max_crashes=2)
    rig.deliver(max_crashes=2)


def revoked(rig: RunnerRig) -> None:
    with contextlib.suppress(ZeroDivisionError):
        rig.deliver(failing)
    rig.ledger.revoke("ship order:1", message="m")
    rig.deliver(retries=1)


def nested(rig: RunnerRig) -> None:
    """A guarded call in a body is a delivery of its own."""
    other = dataclasses.replace(rig.delivery(**OTHER), keys=("order:2",))
    rig.deliver(lambda guard: rig.runner.deliver(other, lambda guard: None) and None)


CASES: dict[Callable[[RunnerRig], None], dict[str, int]] = {
    done: {"done": 1},
    failed: {"failed": 1},
    duplicate: {"done": 1, "duplicate": 1},
    deferred: {"done": 1, "deferred": 1},
    skipped: {"done": 1, "skipped": 1},
    refused: {"failed": 1, "refused": 1},
    superseded: {"done": 1, "deferred": 1, "superseded": 1},
    too_old: {"too_old": 1},
    stale: {"stale": 1},
    unavailable: {"unavailable": 1},
    interrupted: {"interrupted": 1},
    crashed: {"failed": 1},
    cancelled: {"failed": 1},
    raised_after_done: {"done": 1},
    dead: {"failed": 2, "dead": 1},
    revoked: {"failed": 1, "revoked": 1},
    nested: {"done": 2},
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_each_delivery_has_one_outcome(rig: RunnerRig, case: Callable[[RunnerRig], None]) -> None:
    """Whether it returns to its queue, or raises."""
    with contextlib.suppress(Exception, SystemExit, asyncio.CancelledError):
        case(rig)
    assert heard(rig) == counted(rig) == CASES[case]
    assert "done" not in CASES[case] or rig.runner.counting.tally.is_empty


def test_a_delivery_that_its_queue_goes_on_with_is_counted_at_its_end(rig: RunnerRig) -> None:
    """The queue could not publish the message again, and tries the delivery once more."""

    class NotYetError(Exception):
        delivery_goes_on = True

    def refuse(*_: Any) -> None:
        raise NotYetError

    def body(guard: Guard) -> None:
        publish, rig.queue.publish_again = rig.queue.publish_again, refuse  # type: ignore[method-assign]
        with pytest.raises(NotYetError):
            contextvars.Context().run(rig.deliver, **OTHER)
        rig.queue.publish_again = publish  # type: ignore[method-assign]
        contextvars.Context().run(rig.deliver, **OTHER)

    rig.deliver(body)
    assert heard(rig) == counted(rig) == {"done": 1, "deferred": 1}


def test_the_event_has_the_times_of_the_delivery(rig: RunnerRig) -> None:
    """From the publication of its message to the claim, and from there to the end."""
    rig.deliver(lambda guard: time.sleep(0.05), published_at_s=time.time() - 100)
    [event] = [each for each in rig.events if isinstance(each, Delivered)]
    assert 99.0 < event.waited_s < 200.0
    assert event.held_s >= 0.05
    view = rig.ledger.view("ship order:1")
    assert view is not None
    assert (event.fence, event.attempt, event.message) == (view.fence, 1, "m")
    counted(rig)
    by_what = {row.what: row.n for row in rig.ledger.counts()}
    assert by_what["wait/le/300"] == 1
    assert by_what["hold/sum"] == pytest.approx(event.held_s)


def test_duplicates_of_a_key_are_listed_with_their_number(rig: RunnerRig) -> None:
    """With the message of the last one, and no change of the record."""
    rig.deliver()
    before = rig.ledger.view("ship order:1")
    for number in range(3):
        rig.deliver(message=f"other-{number}")
    counted(rig)
    assert rig.ledger.view("ship order:1") == before
    with rig.ledger.database.engine.connect() as db:
        rows = db.execute(sa.text("select key, what, n, detail, work from taskguard_happenings"))
        assert [tuple(row) for row in rows] == [
            ("order:1", "duplicate", 3, "duplicate: message other-2", "ship order:1")
        ]


def test_outcomes_are_those_of_the_metrics() -> None:
    """So that each one has a series, with a zero from the start."""
    assert tuple(Ended) == OUTCOMES


def test_errors_of_a_stale_holder_and_a_silent_ledger_before_the_body() -> None:
    """The first class that fits decides, and a shutdown is an interruption."""
    assert ended_by_error(LedgerUnavailableError("x")) is Ended.UNAVAILABLE
    assert ended_by_error(StaleTokenError("x", key="k")) is Ended.FAILED
    assert ended_by_error(KeyboardInterrupt()) is Ended.INTERRUPTED


def test_a_plain_call_is_a_delivery(sqlite_url: str) -> None:
    """Also a call that is refused for its own key."""
    events: list[Any] = []
    tg = taskguard.connect(locks=None, ledger=sqlite_url, listeners=[events.append])
    assert tg.ledger is not None
    tg.ledger.create_schema()

    @tg.guarded(key="order:<number>")
    def ship(number: int) -> None:
        with contextlib.suppress(taskguard.errors.KeyAlreadyHeldError):
            ship(number)

    ship(1)
    outcomes = [each.outcome for each in events if isinstance(each, Delivered)]
    assert outcomes == [Ended.REFUSED, Ended.DONE]
    tg.close()


class FailingTracer:
    """Raises in each of its methods, as a user's span processor may."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise ValueError(name)

        return fail


class FailingSpans(FailingTracer):
    """Raises in each method of its spans."""

    def span(self, *_: Any, **__: Any) -> FailingTracer:
        return FailingTracer()


@pytest.fixture
def traced() -> Iterator[None]:
    yield
    set_tracer(None)


@pytest.mark.parametrize("tracer", [FailingTracer, FailingSpans])
def test_a_tracer_that_raises_breaks_no_delivery(
    rig: RunnerRig, traced: None, caplog: pytest.LogCaptureFixture, tracer: Any
) -> None:
    """Its first error is logged."""
    set_tracer(tracer())
    done(rig)
    duplicate(rig)
    assert counted(rig) == heard(rig) == {"done": 1, "duplicate": 2}
    assert caplog.text.count("the tracer failed") == 1


def test_a_time_limit_that_arrives_in_a_tracer_goes_on(rig: RunnerRig, traced: None) -> None:
    """The body must not run without its limit."""

    class Slow(FailingTracer):
        def span(self, *_: Any, **__: Any) -> Any:
            signal.raise_signal(signal.SIGALRM)

    def limit(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, limit)
    set_tracer(Slow())
    try:
        with pytest.raises(TimeoutError):
            done(rig)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_span_ends_even_if_the_text_of_its_error_raises(rig: RunnerRig, traced: None) -> None:
    """Otherwise the spans of later deliveries would be its children."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import export
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from taskguard_otel import trace_deliveries

    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    def body(guard: Guard) -> None:
        raise UnspeakableError

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    trace_deliveries(provider)
    with pytest.raises(UnspeakableError):
        rig.deliver(body)
    ended = [each.name for each in exporter.get_finished_spans()]
    assert ended == ["taskguard.claim", "taskguard.body"]
    assert trace.get_current_span() is trace.INVALID_SPAN
