"""The options of `enqueue()` that go with the message, as types for editors and type checkers.

Nothing imports this module at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from kombu.entity import Exchange, Queue

__all__ = ["MessageOptions"]


class MessageOptions(TypedDict, total=False):
    """Options of `apply_async()` that `enqueue()` stores and sends with the message.

    `expires` is not among them: `enqueue()` refuses it. Celery takes any other name as well, for
    example a stamp of your own: type checkers accept those from a `dict[str, Any]`.
    """

    add_to_parent: bool
    compression: str | None
    countdown: float | None
    delivery_mode: int | str | None
    eta: datetime | None
    exchange: str | Exchange | None
    headers: Mapping[str, Any] | None
    ignore_result: bool
    link: Any
    link_error: Any
    priority: int | None
    queue: str | Queue | None
    reply_to: str | None
    retry: bool
    retry_policy: Mapping[str, Any] | None
    routing_key: str | None
    serializer: str | None
    shadow: str | None
    soft_time_limit: float | None
    task_id: str | None
    time_limit: float | None
