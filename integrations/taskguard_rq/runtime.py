"""One lock provider, one ledger and one watchdog for the process that runs jobs.

Set by `configure()` or by TASKGUARD_LOCKS_URL, TASKGUARD_LEDGER_URL and TASKGUARD_NAMESPACE; made
at the first job, or before the fork by a worker that calls `runtime()` itself: it is usable again
in a work horse.
"""

from __future__ import annotations

import threading
from typing import Any

from taskguard import TaskGuard, connect
from taskguard.integration import UNSET

__all__ = ["configure", "runtime"]

_settings: dict[str, Any] = {}
_made: list[TaskGuard] = []
_making = threading.Lock()


def configure(
    *,
    locks: Any = UNSET,
    ledger: Any = UNSET,
    namespace: Any = UNSET,
    formerly_namespaces: Any = UNSET,
    listeners: Any = UNSET,
) -> None:
    """Set what jobs of this process are guarded by; what is left out stays as it was.

    Args:
        locks: a URL, a client, a provider or None, as for `taskguard.connect()`.
        ledger: a URL, an Engine, a ledger or None, as for `taskguard.connect()`.
        namespace: what keys and work of this application begin with, as for
            `taskguard.connect()`.
        formerly_namespaces: the namespaces that it had before, as for `taskguard.connect()`.
        listeners: callables that hear every event, beside the one that logs.
    """
    given = {
        "locks": locks,
        "ledger": ledger,
        "namespace": namespace,
        "formerly_namespaces": formerly_namespaces,
        "listeners": listeners,
    }
    _settings.update({name: value for name, value in given.items() if value is not UNSET})
    _made.clear()


def runtime() -> TaskGuard:
    """This process's locks and ledger. Raises ConfigurationError if something is missing."""
    with _making:
        if not _made:
            _made.append(connect(**_settings))
        return _made[0]
