"""What a Celery message is: its identity, its numbers, its age.

`Task.replace` keeps the task id, so the nesting is part of the identity. Retries keep the id and
count up; deferrals keep both and count up in a header. An id that is used again is told from the
first by when it was published, which retries and deferrals keep, too.
"""

from __future__ import annotations

import time
from typing import Any

from celery.signals import before_task_publish

from taskguard import MessageRef

__all__ = [
    "DEFERRALS_HEADER",
    "PUBLISHED_HEADER",
    "deferrals_of",
    "is_redelivered",
    "message_of",
    "published_at_s",
    "sending_of",
]

DEFERRALS_HEADER = "taskguard_deferrals"
PUBLISHED_HEADER = "taskguard_published_at"


def message_of(request: Any, published_s: float | None) -> MessageRef:
    """The identity and numbers of the message that `request` came with; see `published_at_s()`."""
    nesting = request.replaced_task_nesting or 0
    return MessageRef(
        id=f"{request.id}~{nesting}" if nesting else str(request.id),
        retries=request.retries or 0,
        deferrals=deferrals_of(request),
        sending=sending_of(published_s),
    )


def deferrals_of(request: Any) -> int:
    """How often the message of `request` has been put off."""
    return int(_header(request, DEFERRALS_HEADER) or 0)


def sending_of(published_s: float | None) -> str:
    """What tells a message from another one with its id; "" where it does not say."""
    return "" if published_s is None else f"{published_s:.6f}"


def published_at_s(request: Any) -> float | None:
    """When the message was published first, in seconds since 1970; None if it does not say."""
    stamp = _header(request, PUBLISHED_HEADER)
    return float(stamp) if stamp is not None else None


def is_redelivered(request: Any) -> bool:
    """Whether the broker says that it has delivered the message before.

    Not whether it is a duplicate: a message that was put off or retried is a new one to the broker.
    """
    return bool((request.delivery_info or {}).get("redelivered"))


def _header(request: Any, name: str) -> Any:
    return (request.headers or {}).get(name)


def _stamp(headers: Any = None, **_: Any) -> None:
    """Messages carry the moment of their first publication; deferrals and retries keep it.

    All messages: the signal names no app, so that a process with several, or one that sends tasks
    by name, could not tell which of them are guarded.
    """
    if headers is not None:
        headers.setdefault(PUBLISHED_HEADER, time.time())


before_task_publish.connect(_stamp, weak=False)
