"""The options of `enqueue()` for the job itself, as types for editors and type checkers.

Nothing imports this module at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from rq import Callback, RateLimit, Repeat, Retry, Webhook

__all__ = ["JobOptions"]


class JobOptions(TypedDict, total=False):
    """Options of `Queue.create_job()`, except `depends_on`, `ttl` and `status`.

    `rate_limit` and `webhooks` need RQ 3.
    """

    description: str | None
    failure_ttl: int | None
    group_id: str | None
    job_id: str | None
    meta: dict[str, Any] | None
    on_failure: Callback | Callable[..., Any] | None
    on_stopped: Callback | Callable[..., Any] | None
    on_success: Callback | Callable[..., Any] | None
    rate_limit: RateLimit | None
    repeat: Repeat | None
    result_ttl: int | None
    retry: Retry | None
    timeout: int | None
    webhooks: Sequence[Webhook] | None
