"""Spans around the parts of a delivery, for a tracer of an integration: `taskguard_otel`.

| span | around |
| --- | --- |
| claim | the lock server's and the ledger's answer, with any wait for the key |
| park | storing a message in the line of its key |
| body | one run of the body |
| complete | the statements that commit DONE |

Guarantees: without a tracer a span costs one function call. Plain locks and leaders have no spans.
A tracer that raises breaks no delivery: its first error is logged. A time limit or a lost lease
that arrives in a tracer goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from taskguard.errors import TaskguardError
from taskguard.log_fields import use_ids
from taskguard.model.claims import Answer
from taskguard.model.states import Decision
from taskguard.run.shutdown import raised_by_handler

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

logger = logging.getLogger("taskguard")

_T = TypeVar("_T")


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


class _Unfailing:
    """A span of a tracer that may raise."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Self:
        _try(self._span.__enter__)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _try(self._span.__exit__, kind, error, traceback)

    def begin(self) -> None:
        _try(self._span.begin)

    def note(
        self, outcome: str, *, link: str | None = None, failed: bool = False, **values: Any
    ) -> None:
        _try(self._span.note, outcome, link=link, failed=failed, **values)


NO_SPAN = _NoSpan()
_tracer: Tracer | None = None
_complained = False


def _try(ask: Callable[..., _T], *args: Any, **kwargs: Any) -> _T | None:
    """Return what a tracer returns, or None if it raises."""
    global _complained  # noqa: PLW0603  # one tracer for a process
    try:
        return ask(*args, **kwargs)
    except Exception as error:
        if isinstance(error, TaskguardError) or raised_by_handler(error):
            raise
        if not _complained:
            _complained = True
            logger.exception("the tracer failed; its spans may be missing")
        return None


def set_tracer(tracer: Tracer | None) -> None:
    """Use a tracer in this process from now on. None: use none."""
    global _tracer, _complained  # one for a process, as tracer providers are
    _tracer, _complained = tracer, False
    use_ids(None if tracer is None else lambda: _try(tracer.ids) or {})


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
    made = _try(_tracer.span, name, delivery, lease, attempt, later=later)
    return NO_SPAN if made is None else _Unfailing(made)


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
        _try(_tracer.ended, delivery, outcome.value)


def traceparent() -> str | None:
    """Return the traceparent of the current span. None: it is not sampled, or no tracer is used."""
    return None if _tracer is None else _try(_tracer.traceparent)


def trace_headers() -> dict[str, str]:
    """Return the headers by which a stored call keeps the current context. Empty without one."""
    return {} if _tracer is None else _try(_tracer.headers) or {}


def trace_context(headers: Mapping[str, Any] | None) -> AbstractContextManager[Any]:
    """Make the context of a stored call the current one, for the block that sends it."""
    if _tracer is None or not headers:
        return nullcontext()
    return _try(_tracer.context, headers) or nullcontext()
