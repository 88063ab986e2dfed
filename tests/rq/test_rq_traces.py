"""Traces of RQ's jobs, by the worker that docs/how-to/traces.md shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.scripts import run_script

pytest.importorskip("opentelemetry.sdk")

TESTS = Path(__file__).parents[1]
JOBS = """
from taskguard_rq import guarded_job


@guarded_job(key="order:<order>", ttl_s=10)
def ship(order, *, guard):
    with guard.transaction():
        guard.result = "shipped"
"""
SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:3]
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from redis import Redis
from rq import Queue
from rq.scheduler import RQScheduler

import traced_jobs
from taskguard.ledger.sql import SqlLedger
from taskguard_otel import trace_deliveries
from taskguard_rq import GuardedSimpleWorker, configure

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = provider.get_tracer("test")
trace_deliveries()
ledger = SqlLedger(f"sqlite:///{sys.argv[2]}/ledger.db")
ledger.create_schema()
configure(locks=None, ledger=ledger)
connection = Redis.from_url(sys.argv[3])
connection.set(RQScheduler.get_locking_key("traced"), "1")
queue = Queue("traced", connection=connection)


class TracedWorker(GuardedSimpleWorker):
    def perform_job(self, job, *args, **kwargs):
        context = propagate.extract(job.meta)
        with tracer.start_as_current_span(f"run {job.func_name}", context=context):
            return super().perform_job(job, *args, **kwargs)


with tracer.start_as_current_span("sender"):
    carrier = {}
    propagate.inject(carrier)
    jobs = [queue.enqueue(traced_jobs.ship, 1, meta=dict(carrier)) for _ in range(2)]
TracedWorker([queue], connection=connection).work(burst=True)
assert [job.return_value(refresh=True) for job in jobs] == ["shipped", "shipped"]

spans = exporter.get_finished_spans()


def named(name):
    return [each for each in spans if each.name.startswith(name)]


by_id = {each.context.span_id: each for each in spans}
[sender], claims = named("sender"), named("taskguard.claim")
[body], [complete] = named("taskguard.body"), named("taskguard.complete")
assert [each.attributes["taskguard.outcome"] for each in claims] == ["claimed", "done"]
assert {each.context.trace_id for each in (*claims, body)} == {sender.context.trace_id}
run = by_id[body.parent.span_id]
assert run is by_id[claims[0].parent.span_id]
assert run.name == "run traced_jobs.ship"
assert run.attributes["taskguard.outcome"] == "done"
assert complete.parent.span_id == body.context.span_id
[link] = claims[1].links
assert link.context.span_id == claims[0].context.span_id
print("traced")
"""


def test_a_job_s_spans_are_in_the_trace_of_its_sender(tmp_path: Path, redis_url: str) -> None:
    """Claim, body and commit are children of the job's own span. A duplicate links to the claim of
    the job that did the work."""
    (tmp_path / "traced_jobs.py").write_text(JOBS)
    said = run_script(SCRIPT, str(TESTS), str(tmp_path), redis_url)
    assert said.splitlines()[-1] == "traced"
