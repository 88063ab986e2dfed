"""Put the key, work, fencing token and attempt on each log record inside a guarded body.

    handler.addFilter(taskguard.logs.GuardFilter())                   # the standard library
    structlog.configure(processors=[taskguard.logs.add_guard, …])     # structlog

| name | value |
| --- | --- |
| taskguard_key | the key; several are joined with ", " |
| taskguard_work | the id of the work |
| taskguard_fence | the fencing token |
| taskguard_attempt | 1 for the first holder of this work, higher for later ones |

Guarantees: the record of any logger has them, also in functions and threads that the body calls and
waits for. A key has no value that is marked `|hash`, and no control character. The filter keeps
every record and never raises.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from taskguard.model.texts import printable
from taskguard.run.current import guard_here
from taskguard.run.guard import attempt_of

__all__ = ["GuardFilter", "add_guard"]

_NAMES = ("taskguard_key", "taskguard_work", "taskguard_fence", "taskguard_attempt")


class GuardFilter(logging.Filter):
    """Add the four attributes to each record. Add it to a handler, so that it sees all loggers.

    Outside a guarded body the attributes are None, so that a format string may name them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True, after the attributes were added."""
        vars(record).update({**dict.fromkeys(_NAMES), **_of_body()})
        return True


def add_guard(
    logger: Any,  # noqa: ARG001  # structlog's
    name: str,  # noqa: ARG001
    event_dict: MutableMapping[str, Any],
) -> MutableMapping[str, Any]:
    """Add the four names to an event of structlog, if it is logged inside a guarded body.

    Args:
        logger: not used.
        name: not used.
        event_dict: the event.

    Returns:
        The event.
    """
    event_dict.update(_of_body())
    return event_dict


def _of_body() -> dict[str, Any]:
    guard = guard_here()
    if guard is None:
        return {}
    work = printable(attempt_of(guard).work)
    return dict(zip(_NAMES, (printable(guard.key), work, guard.fence, guard.attempt), strict=True))
