"""Traces of deliveries: spans of OpenTelemetry in the trace of the message.

The spans are `taskguard.claim`, `taskguard.park`, `taskguard.body` and `taskguard.complete`. They
are children of the current span, which is that of the queue's instrumentation. That span gets
`taskguard.key`, `taskguard.work` and `taskguard.outcome`. A duplicate and a takeover link to the
claim of the other holder, if its span was sampled. docs/how-to/traces.md has a table.

Guarantees: needs only the API of OpenTelemetry. Without an SDK nothing is recorded. Keys have no
value that is marked `|hash`, and no argument or result is an attribute. A span is an error only if
its body failed, its commit was refused, or its work is DEAD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import taskguard
from taskguard import errors
from taskguard.integration import set_tracer

if TYPE_CHECKING:
    from taskguard.integration import Delivery

__all__ = ["trace_deliveries"]

_W3C = TraceContextTextMapPropagator()
_PREFIX = "taskguard."


def trace_deliveries(tracer_provider: trace.TracerProvider | None = None) -> Callable[[], None]:
    """Make spans of all deliveries of this process, and of the processes that it forks later.

    Args:
        tracer_provider: the provider of spans. Default: the global one, also if it is set later.

    Returns:
        A function that ends this.
    """
    set_tracer(_Tracer(trace.get_tracer("taskguard", taskguard.__version__, tracer_provider)))
    return lambda: set_tracer(None)


class _Tracer:
    """The tracer of the core: `taskguard.integration.Tracer`."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def span(
        self, name: str, delivery: Delivery, lease: Any, attempt: int, *, later: bool
    ) -> _Span:
        attributes: dict[str, Any] = {
            "key": delivery.key,
            "task": delivery.task,
            "work": delivery.work,
        }
        if lease is not None:
            attributes |= {"fence": lease.fence, "attempt": attempt}
        return _Span(self._tracer, name, delivery, lease, attributes, later=later)

    def ended(self, delivery: Delivery, outcome: str) -> None:
        span = trace.get_current_span()
        span.set_attributes(
            _named({"key": delivery.key, "work": delivery.work, "outcome": outcome})
        )

    def traceparent(self) -> str | None:
        if not trace.get_current_span().get_span_context().trace_flags.sampled:
            return None
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        return carrier.get("traceparent")

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return carrier

    @contextmanager
    def context(self, headers: Mapping[str, Any]) -> Iterator[None]:
        texts = {name: text for name, text in headers.items() if isinstance(text, str)}
        token = context.attach(propagate.extract(texts))
        try:
            yield
        finally:
            context.detach(token)

    def ids(self) -> dict[str, str]:
        current = trace.get_current_span().get_span_context()
        if not current.is_valid:
            return {}
        return {
            "trace_id": trace.format_trace_id(current.trace_id),
            "span_id": trace.format_span_id(current.span_id),
        }


class _Span:
    """One span, current in its block."""

    def __init__(
        self,
        tracer: trace.Tracer,
        name: str,
        delivery: Delivery,
        lease: Any,
        attributes: dict[str, Any],
        *,
        later: bool,
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._delivery = delivery
        self._lease = lease
        self._attributes = attributes
        self._later = later
        self._span: trace.Span = trace.INVALID_SPAN
        self._token: Any = None
        self._noted = False

    def __enter__(self) -> Self:
        if not self._later:
            self.begin()
        return self

    def begin(self) -> None:
        self._span = self._tracer.start_span(
            f"{_PREFIX}{self._name}", attributes=_named(self._attributes)
        )
        self._token = context.attach(trace.set_span_in_context(self._span))

    def note(
        self, outcome: str, *, link: str | None = None, failed: bool = False, **values: Any
    ) -> None:
        self._noted = True
        span = self._span
        span.set_attributes(_named({"outcome": outcome, **values}))
        if link is not None:
            other = trace.get_current_span(_W3C.extract({"traceparent": link}))
            span.add_link(other.get_span_context())
        if failed:
            span.set_status(Status(StatusCode.ERROR, outcome))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._token is None:
            return
        try:
            if error is not None:
                self._note_error(error)
            elif not self._noted:
                self.note("ok")
            if self._lease is not None and self._lease.lost.is_set():
                self._span.add_event("lease_lost")
        finally:  # the text of an error may raise
            context.detach(self._token)
            self._span.end()

    def _note_error(self, error: BaseException) -> None:
        """Note how a span ended by an exception. Not each is an error of the work."""
        if isinstance(error, errors.StaleTokenError):
            self._span.add_event("stale_refused")
            self.note("stale", failed=True)
        elif isinstance(error, errors.TaskguardError):
            self.note(type(error).__name__)
        elif isinstance(error, self._delivery.orders):
            self.note(type(error).__name__)  # Celery's Retry, for example
        elif isinstance(error, Exception):
            self._span.record_exception(error)
            self.note("failed", failed=self._name == "body")
        else:
            self.note("interrupted")


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_PREFIX}{name}": value for name, value in values.items() if value is not None}
