"""Traces of Celery: its real instrumentation and worker, a real SDK, and an exporter in memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import celery._state
import pytest
import sqlalchemy as sa
from celery import Celery
from celery.contrib.testing.worker import start_worker

from support import claims
from support.due import make_due
from support.waiting import patience_s, wait_until
from taskguard import Guard
from taskguard.errors import WorkDeadError
from taskguard.ledger.sql import SqlLedger
from taskguard_celery import enqueue, guarded_task
from taskguard_celery.outbox import sweep

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.instrumentation.celery")

from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from taskguard_otel import trace_deliveries

OURS = "taskguard."


@dataclass
class Traced:
    """An app whose deliveries are traced."""

    app: Any
    ledger: SqlLedger
    engine: sa.Engine
    exporter: InMemorySpanExporter
    tracer: Any
    began: threading.Event
    go: threading.Event

    def spans(self, name: str) -> list[Any]:
        """Return the spans with this name that have ended."""
        return [each for each in self.exporter.get_finished_spans() if each.name == name]

    def one(self, name: str) -> Any:
        [span] = self.spans(name)
        return span

    @contextlib.contextmanager
    def worker(self) -> Iterator[None]:
        with start_worker(
            self.app, pool="threads", concurrency=2, perform_ping_check=False, loglevel="ERROR"
        ):
            yield
            self.go.set()


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    """A Celery app, its tasks, and the exporter."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = sa.create_engine(f"sqlite:///{tmp_path}/ledger.db")
    ledger = SqlLedger(engine)
    ledger.create_schema()
    current = celery._state._tls.current_app
    # The instrumentation looks for tasks in the current app.
    app = Celery("traces", broker="memory://", backend="cache+memory://", set_as_current=True)
    app.conf.update(
        taskguard_locks=None,
        taskguard_ledger=ledger,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
    )
    began, go = threading.Event(), threading.Event()

    @app.task(name="shop.ship", shared=False)
    @guarded_task(key="order:<order>", ttl_s=10)
    def ship(order: int, how: str = "", *, guard: Guard) -> str:
        if how == "waits":
            began.set()
            assert go.wait(patience_s())
        if how == "fails":
            raise ValueError(how)
        with guard.transaction():
            guard.result = "shipped"
        return "shipped"

    @app.task(name="shop.queue_up", shared=False)
    @guarded_task(key="line", once_per="message", busy="park", ttl_s=10)
    def queue_up(how: str = "") -> str:
        if how == "waits":
            began.set()
            assert go.wait(patience_s())
        return how

    @app.task(name="shop.write_to", shared=False)
    @guarded_task(key="customer:<email|hash>", ttl_s=10, max_crashes=1)
    def write_to(email: str, how: str = "") -> None:
        if how == "waits":
            began.set()
            assert go.wait(patience_s())

    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    stop = trace_deliveries(provider)
    yield Traced(app, ledger, engine, exporter, provider.get_tracer("test"), began, go)
    stop()
    instrumentor.uninstrument()
    provider.shutdown()
    app.close()
    engine.dispose()
    celery._state._set_current_app(current)


def attributes_of(span: Any) -> dict[str, Any]:
    """Return our attributes of a span, without their prefix."""
    found = span.attributes.items()
    return {name.removeprefix(OURS): value for name, value in found if name.startswith(OURS)}


def test_the_spans_of_a_delivery_are_children_of_the_queue_s(traced: Traced) -> None:
    """Claim, body and commit are in the trace of the message, with the key, the work, the fencing
    token and the outcome."""
    with traced.worker():
        traced.app.tasks["shop.ship"].delay(1).get(timeout=patience_s())
        wait_until(lambda: traced.spans("run/shop.ship"), message="the task's span")
    run = traced.one("run/shop.ship")
    claim, body = traced.one("taskguard.claim"), traced.one("taskguard.body")
    complete = traced.one("taskguard.complete")
    assert claim.parent.span_id == body.parent.span_id == run.context.span_id
    assert complete.parent.span_id == body.context.span_id
    assert {each.context.trace_id for each in (claim, body, complete)} == {run.context.trace_id}
    work = traced.ledger.view("shop.ship order:1")
    assert work is not None
    common = {"key": "order:1", "work": work.id, "task": "shop.ship"}
    held = {"fence": work.fence, "attempt": 1}
    assert attributes_of(claim) == {**common, **held, "outcome": "claimed"}
    assert attributes_of(body) == {**common, **held, "outcome": "ok"}
    assert attributes_of(complete) == {**common, **held, "outcome": "ok"}
    assert attributes_of(run) == {"key": "order:1", "work": work.id, "outcome": "done"}
    assert not claim.links


def test_a_duplicate_links_to_the_claim_of_the_holder(traced: Traced) -> None:
    """Another message of done work links to the claim of the delivery that did it."""
    task = traced.app.tasks["shop.ship"]
    with traced.worker():
        for _ in range(2):
            task.delay(1).get(timeout=patience_s())
        wait_until(lambda: len(traced.spans("run/shop.ship")) == 2, message="both spans")
    first, second = traced.spans("taskguard.claim")
    assert attributes_of(second)["outcome"] == "done"
    [link] = second.links
    assert link.context.span_id == first.context.span_id
    assert link.context.trace_id == first.context.trace_id != second.context.trace_id
    assert attributes_of(traced.spans("run/shop.ship")[1])["outcome"] == "duplicate"
    assert second.status.status_code is StatusCode.UNSET
    assert len(traced.spans("taskguard.body")) == 1


def test_a_takeover_links_to_the_claim_of_the_holder_that_vanished(traced: Traced) -> None:
    """The claim of the second attempt links to the first one, and names its holder."""
    task = traced.app.tasks["shop.ship"]
    with traced.worker():
        held = task.delay(1, "waits")
        assert traced.began.wait(patience_s())
        taken = task.delay(1)

        def taken_over() -> bool:
            claims.end_leases(traced.engine)  # the watchdog renews the lease
            return bool(taken.ready())

        wait_until(taken_over, message="a takeover")
        assert taken.get(timeout=patience_s()) == "shipped"
        traced.go.set()
        assert held.get(timeout=patience_s()) == "shipped"
        wait_until(lambda: len(traced.spans("run/shop.ship")) == 2, message="both spans")
    outcomes = {attributes_of(each)["outcome"]: each for each in traced.spans("taskguard.claim")}
    takeover = outcomes["takeover"]
    assert attributes_of(takeover)["attempt"] == 2
    assert held.id in attributes_of(takeover)["holder"]
    [link] = takeover.links
    assert link.context.span_id == outcomes["claimed"].context.span_id
    [stale] = [each for each in traced.spans("taskguard.body") if each.status.description]
    assert attributes_of(stale)["outcome"] == "stale"
    assert stale.status.status_code is StatusCode.ERROR


def test_dead_work_is_an_error_and_a_hashed_value_is_in_no_span(traced: Traced) -> None:
    """The claim that finds the work dead says so. The key shows the hash alone."""
    task, email = traced.app.tasks["shop.write_to"], "ann@shop.example"
    with traced.worker():
        held = task.delay(email, "waits")
        assert traced.began.wait(patience_s())
        dead = task.delay(email)

        def has_ended() -> bool:
            claims.end_leases(traced.engine)  # the watchdog renews the lease
            return bool(dead.ready())

        wait_until(has_ended, message="it is DEAD")
        assert isinstance(dead.result, WorkDeadError)
        traced.go.set()
        wait_until(held.ready, message="the first one ends")
        wait_until(lambda: len(traced.spans("run/shop.write_to")) >= 2, message="both spans")
    ours = [each for each in traced.exporter.get_finished_spans() if each.name.startswith(OURS)]
    [bury] = [each for each in ours if attributes_of(each)["outcome"] == "bury"]
    assert bury.status.status_code is StatusCode.ERROR
    assert not [each for each in ours if email in str(attributes_of(each))]


def test_a_failed_body_is_an_error(traced: Traced) -> None:
    """Its span has the exception. The claim is none."""
    with traced.worker():
        failed = traced.app.tasks["shop.ship"].delay(1, "fails")
        with pytest.raises(ValueError, match="fails"):
            failed.get(timeout=patience_s())
        wait_until(lambda: traced.spans("run/shop.ship"), message="the task's span")
    body = traced.one("taskguard.body")
    assert body.status.status_code is StatusCode.ERROR
    assert attributes_of(body)["outcome"] == "failed"
    assert body.events[0].attributes["exception.type"] == "ValueError"
    assert traced.one("taskguard.claim").status.status_code is StatusCode.UNSET


def test_a_parked_message_stays_in_its_own_trace(traced: Traced) -> None:
    """It is promoted by another delivery, and runs in the trace of its own sender."""
    task = traced.app.tasks["shop.queue_up"]
    with traced.worker():
        first = task.delay("waits")
        assert traced.began.wait(patience_s())
        with traced.tracer.start_as_current_span("sender") as sender:
            second = task.delay("second")
        wait_until(lambda: traced.spans("taskguard.park"), message="parked")
        traced.go.set()
        assert [each.get(timeout=patience_s()) for each in (first, second)] == ["waits", "second"]
        wait_until(lambda: len(traced.spans("run/shop.queue_up")) == 3, message="all spans")
    mine = sender.get_span_context().trace_id
    park = traced.one("taskguard.park")
    assert park.context.trace_id == mine
    bodies = [each.context.trace_id for each in traced.spans("taskguard.body")]
    assert bodies.count(mine) == 1
    runs = traced.spans("run/shop.queue_up")
    assert [each.context.trace_id for each in runs].count(mine) == 2
    ended = [attributes_of(each)["outcome"] for each in runs if each.context.trace_id == mine]
    assert ended == ["parked", "done"]


def test_a_message_that_a_sweep_sends_is_in_the_trace_of_its_enqueue(
    traced: Traced,
) -> None:
    """`enqueue()` stores the context with the call, so a process without it can send it."""
    task = traced.app.tasks["shop.ship"]
    with traced.engine.connect() as db:  # the message is left to a sweep
        with db.begin(), traced.tracer.start_as_current_span("sender") as sender:
            enqueue(task, (1,), session=db)
    make_due(traced)
    assert sweep(traced.app).sent == 1
    with traced.worker():
        wait_until(lambda: traced.spans("run/shop.ship"), message="it runs")
    assert traced.one("taskguard.body").context.trace_id == sender.get_span_context().trace_id


def test_nothing_is_recorded_of_a_span_that_is_not_sampled(traced: Traced) -> None:
    """The record of the work has no trace then, and a duplicate has no link."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    parent = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(0))
    task = traced.app.tasks["shop.ship"]
    with traced.worker():
        with trace.use_span(NonRecordingSpan(parent)):
            unsampled = task.delay(1)
        assert unsampled.get(timeout=patience_s()) == "shipped"
        assert task.delay(1).get(timeout=patience_s()) == "shipped"
        wait_until(lambda: traced.spans("run/shop.ship"), message="the sampled one")
    assert not traced.one("taskguard.claim").links


def test_log_records_have_the_ids_of_the_span(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    """`trace_id` and `span_id` are those of the span in which the event happened."""
    caplog.set_level("DEBUG", "taskguard")
    with traced.worker():
        traced.app.tasks["shop.ship"].delay(1).get(timeout=patience_s())
        wait_until(lambda: traced.spans("run/shop.ship"), message="the task's span")
    records = [vars(each).get("taskguard", {}) for each in caplog.records]
    [claimed] = [each for each in records if each.get("name") == "claimed"]
    claim = traced.one("taskguard.claim")
    assert claimed["trace_id"] == trace.format_trace_id(claim.context.trace_id)
    assert claimed["span_id"] == trace.format_span_id(claim.context.span_id)
