"""Spans around the parts of a delivery, for a tracer of an integration: `taskguard_otel`.

| span | around |
| --- | --- |
| claim | the lock server's and the ledger's answer, with any wait for the key |
| park | storing a message in the line of its key |
| body | one run of the body |
| complete | the statements that commit DONE |

Guarantees: without a tracer a span costs one function call. Plain locks and leaders have no spans.
This module catches no error: a tracer must not raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, Self

from taskguard.log_fields import use_ids
from taskguard.model.claims import Answer
from taskguard.model.states import Decision

if TYPE_CHECKING:
    from taskguard.model.claims import Busy, Claimed
    from taskguard.model.delivery import Delivery
    from taskguard.model.lease import Lease
    from taskguard.model.outcomes import Ended

__all__ = [
    "NO_SPAN",
    "Span",
    "Tracer",
    "ended",
    "note_claim",
    "note_refusal",
    "set_tracer",
    "span",
    "trace_context",
    "trace_headers",
    "traceparent",
]


class Span(Protocol):
    """One span. It begins when its block is entered, or by `begin()` if it is made `later`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None: ...

    def begin(self) -> None:
        """Begin a span that was made `later`."""
        ...

    def note(
        self, outcome: str, *, link: str | None = None, failed: bool = False, **values: Any
    ) -> None:
        """Note how it ended.

        Args:
            outcome: one word.
            link: the traceparent of a span to link to.
            failed: whether it counts as an error.
            values: more attributes.
        """
        ...


class Tracer(Protocol):
    """Makes spans. One process has at most one tracer."""

    def span(
        self, name: str, delivery: Delivery, lease: Lease | None, attempt: int, *, later: bool
    ) -> Span:
        """Return a span of a delivery. `lease` is None, and `attempt` 0, before a claim."""
        ...

    def ended(self, delivery: Delivery, outcome: str) -> None:
        """Note on the queue's span how the delivery ended."""
        ...

    def traceparent(self) -> str | None:
        """Return the W3C traceparent of the current span, or None if it is not sampled."""
        ...

    def headers(self) -> dict[str, str]:
        """Return the headers that carry the current context with a message."""
        ...

    def context(self, headers: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Make the context in these headers the current one for a block."""
        ...

    def ids(self) -> dict[str, str]:
        """Return `trace_id` and `span_id` of the current span, or nothing if there is none."""
        ...


class _NoSpan:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        pass

    def begin(self) -> None:
        pass

    def note(
        self, outcome: str, *, link: str | None = None, failed: bool = False, **values: Any
    ) -> None:
        pass


NO_SPAN = _NoSpan()
_tracer: Tracer | None = None


def set_tracer(tracer: Tracer | None) -> None:
    """Use a tracer in this process from now on. None: use none."""
    global _tracer  # noqa: PLW0603  # one for a process, as tracer providers are
    _tracer = tracer
    use_ids(None if tracer is None else tracer.ids)


def span(
    name: str,
    delivery: Delivery,
    lease: Lease | None = None,
    attempt: int = 0,
    *,
    later: bool = False,
) -> Span:
    """Return a span of a delivery, or one that does nothing."""
    if _tracer is None or delivery.is_lock:
        return NO_SPAN
    return _tracer.span(name, delivery, lease, attempt, later=later)


def note_claim(span: Span, claimed: Claimed | None, lease: Lease) -> None:
    """Note a claim that was granted. A takeover links to the claim of the holder that vanished."""
    if span is NO_SPAN:
        return
    values: dict[str, Any] = {
        "fence": lease.fence,
        "attempt": 1 if claimed is None else claimed.attempt,
    }
    if claimed is None or claimed.vanished is None:
        span.note("claimed", **values)
    else:
        span.note("takeover", link=claimed.trace, holder=claimed.vanished.described, **values)


def note_refusal(span: Span, found: Answer | Busy) -> None:
    """Note a claim that was not granted. A duplicate links to the claim of the other holder."""
    if span is NO_SPAN:
        return
    if isinstance(found, Answer):
        dead = found.decision in (Decision.DEAD, Decision.BURY)
        span.note(found.decision.value, link=found.trace, failed=dead)
    elif found.owner is None or not found.owner.process:
        span.note("busy", link=found.trace)
    else:
        span.note("busy", link=found.trace, holder=found.owner.described)


def ended(delivery: Delivery, outcome: Ended) -> None:
    """Tell the tracer how a delivery ended."""
    if _tracer is not None and not delivery.is_lock:
        _tracer.ended(delivery, outcome.value)


def traceparent() -> str | None:
    """Return the traceparent of the current span. None: it is not sampled, or no tracer is used."""
    return None if _tracer is None else _tracer.traceparent()


def trace_headers() -> dict[str, str]:
    """Return the headers by which a stored call keeps the current context. Empty without one."""
    return {} if _tracer is None else _tracer.headers()


def trace_context(headers: Mapping[str, Any] | None) -> AbstractContextManager[Any]:
    """Make the context of a stored call the current one, for the block that sends it."""
    if _tracer is None or not headers:
        return nullcontext()
    return _tracer.context(headers)
