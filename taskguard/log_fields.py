"""The facts in `extra` of a log record: docs/how-to/logs.md lists them.

Guarantees: they are under one name, `taskguard`, so that they never hide an attribute of a record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from taskguard.model.texts import printable, shown_id

if TYPE_CHECKING:
    from taskguard.model.delivery import Delivery

__all__ = ["fields_of", "said_of", "shown", "trace_ids", "use_ids", "with_shown_ids"]

_ids_of_span: list[Callable[[], dict[str, str]]] = []


def with_shown_ids(event: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an event with the ids of messages that their queues show."""
    ids = ((name, event[name]) for name in ("message", "holder") if name in event)
    return {**event, **{name: shown_id(each) for name, each in ids}}


def fields_of(event: dict[str, Any]) -> dict[str, Any]:
    """Return the `extra` of the log line of an event with these fields."""
    said = {**event, **trace_ids()}
    if "held_by" in said:
        said["holder_message"], process = said.pop("holder"), said.pop("held_by")
        said["previous" if event["name"] == "takeover" else "holder"] = process
    return {"taskguard": said}


def shown(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values for the text of a log line: a line end in a text would forge a line."""
    return {name: printable(each) if type(each) is str else each for name, each in values.items()}


def said_of(delivery: Delivery, **values: Any) -> dict[str, Any]:
    """Return the `extra` of a log line about a delivery that is no event."""
    said = {"key": delivery.key, "task": delivery.task}
    said["message"] = shown_id(delivery.message.id)
    return {"taskguard": {**said, "work": delivery.work or "", **values, **trace_ids()}}


def trace_ids() -> dict[str, str]:
    """Return the ids of the current span, if a tracer is in use that knows them."""
    return _ids_of_span[0]() if _ids_of_span else {}


def use_ids(ids_of_span: Callable[[], dict[str, str]] | None) -> None:
    """Set the function that returns `trace_id` and `span_id`. None: there is no tracer."""
    _ids_of_span[:] = [] if ids_of_span is None else [ids_of_span]
