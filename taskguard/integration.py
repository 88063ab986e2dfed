"""Public names for authors of an integration: of a queue, a framework or a test tool.

The integrations for Celery, RQ and Django import nothing of taskguard but these names, those of
`taskguard` and `taskguard.locks`, and the modules `errors`, `events` and `fenced`.

Read next: `docs/how-to/queue.md`, an integration from top to bottom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskguard.clock import Clock as Clock
    from taskguard.clock import SystemClock as SystemClock
    from taskguard.decorated import Decorator as Decorator
    from taskguard.doctor import Configuration as Configuration
    from taskguard.doctor import GuardedTask as GuardedTask
    from taskguard.doctor import Report as Report
    from taskguard.doctor import examine as examine
    from taskguard.doctor import log_findings as log_findings
    from taskguard.findings import Finding as Finding
    from taskguard.findings import FindingTemplate as FindingTemplate
    from taskguard.findings import Level as Level
    from taskguard.guarded import GuardedFunction as GuardedFunction
    from taskguard.keys import KeySpec as KeySpec
    from taskguard.ledger.transactions.external import ExternalConnection as ExternalConnection
    from taskguard.measuring import HEARD as HEARD
    from taskguard.measuring import labels_of as labels_of
    from taskguard.measuring import measured as measured
    from taskguard.metrics import Metric as Metric
    from taskguard.model.changes import Changed as Changed
    from taskguard.model.changes import Expected as Expected
    from taskguard.model.claims import Claim as Claim
    from taskguard.model.delivery import NOT_BEFORE as NOT_BEFORE
    from taskguard.model.delivery import Answered as Answered
    from taskguard.model.delivery import Codec as Codec
    from taskguard.model.delivery import Completed as Completed
    from taskguard.model.delivery import Deferred as Deferred
    from taskguard.model.delivery import Delivery as Delivery
    from taskguard.model.delivery import Dropped as Dropped
    from taskguard.model.delivery import MessageRef as MessageRef
    from taskguard.model.delivery import Outcome as Outcome
    from taskguard.model.delivery import Parked as Parked
    from taskguard.model.delivery import Parking as Parking
    from taskguard.model.delivery import Queue as Queue
    from taskguard.model.outcomes import Ended as Ended
    from taskguard.model.policy import Policy as Policy
    from taskguard.model.records import Existing as Existing
    from taskguard.model.states import EXPIRED as EXPIRED
    from taskguard.model.states import State as State
    from taskguard.model.texts import printable as printable
    from taskguard.model.views import WorkFilter as WorkFilter
    from taskguard.model.workers import adopt_worker as adopt_worker
    from taskguard.model.workers import describe_worker as describe_worker
    from taskguard.operations.collector import exposition as exposition
    from taskguard.outbox.enqueue import Duplicate as Duplicate
    from taskguard.outbox.enqueue import OutcomeOfEnqueue as OutcomeOfEnqueue
    from taskguard.outbox.enqueue import Placed as Placed
    from taskguard.outbox.enqueue import Send as Send
    from taskguard.outbox.enqueue import check_delay as check_delay
    from taskguard.outbox.enqueue import enqueue_in as enqueue_in
    from taskguard.outbox.enqueue import not_before_s as not_before_s
    from taskguard.outbox.relay import Relay as Relay
    from taskguard.outbox.relay_process import RelayProcess as RelayProcess
    from taskguard.outbox.sweep import Sweeper as Sweeper
    from taskguard.outbox.sweep import Swept as Swept
    from taskguard.overrides import Overrides as Overrides
    from taskguard.overrides import overridden as overridden
    from taskguard.periodic.ticks import interval_due_at as interval_due_at
    from taskguard.periodic.ticks import tick_name as tick_name
    from taskguard.run.counting import Counting as Counting
    from taskguard.run.flush import flush_all as flush_all
    from taskguard.run.flush import flush_when_idle as flush_when_idle
    from taskguard.run.guard import attempt_of as attempt_of
    from taskguard.run.names import Names as Names
    from taskguard.run.runner import Runner as Runner
    from taskguard.run.tracing import Span as Span
    from taskguard.run.tracing import Tracer as Tracer
    from taskguard.run.tracing import set_tracer as set_tracer
    from taskguard.run.tracing import trace_context as trace_context
    from taskguard.run.tracing import trace_headers as trace_headers
    from taskguard.settings import UNSET as UNSET
    from taskguard.settings import set_defaults as set_defaults
else:
    from taskguard.lazy import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "taskguard.clock": "Clock SystemClock",
            "taskguard.decorated": "Decorator",
            "taskguard.doctor": "Configuration GuardedTask Report examine log_findings",
            "taskguard.findings": "Finding FindingTemplate Level",
            "taskguard.guarded": "GuardedFunction",
            "taskguard.keys": "KeySpec",
            "taskguard.ledger.transactions.external": "ExternalConnection",
            "taskguard.measuring": "HEARD labels_of measured",
            "taskguard.metrics": "Metric",
            "taskguard.model.changes": "Changed Expected",
            "taskguard.model.claims": "Claim",
            "taskguard.model.delivery": (
                "NOT_BEFORE Answered Codec Completed Deferred Delivery Dropped MessageRef Outcome "
                "Parked Parking Queue"
            ),
            "taskguard.model.outcomes": "Ended",
            "taskguard.model.policy": "Policy",
            "taskguard.model.records": "Existing",
            "taskguard.model.states": "EXPIRED State",
            "taskguard.model.texts": "printable",
            "taskguard.model.views": "WorkFilter",
            "taskguard.model.workers": "adopt_worker describe_worker",
            "taskguard.operations.collector": "exposition",
            "taskguard.outbox.enqueue": (
                "Duplicate OutcomeOfEnqueue Placed check_delay enqueue_in not_before_s Send"
            ),
            "taskguard.outbox.relay": "Relay",
            "taskguard.outbox.relay_process": "RelayProcess",
            "taskguard.outbox.sweep": "Sweeper Swept",
            "taskguard.overrides": "Overrides overridden",
            "taskguard.periodic.ticks": "interval_due_at tick_name",
            "taskguard.run.counting": "Counting",
            "taskguard.run.flush": "flush_all flush_when_idle",
            "taskguard.run.guard": "attempt_of",
            "taskguard.run.names": "Names",
            "taskguard.run.runner": "Runner",
            "taskguard.run.tracing": "Span Tracer set_tracer trace_context trace_headers",
            "taskguard.settings": "UNSET set_defaults",
        },
    )
