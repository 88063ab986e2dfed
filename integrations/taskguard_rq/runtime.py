"""One lock provider, one ledger and one watchdog for each process that runs jobs.

`configure()`, or TASKGUARD_LOCKS_URL, TASKGUARD_LEDGER_URL and TASKGUARD_NAMESPACE, set them. They
are created at the first job, or by a worker that calls `runtime()` before it forks. A work horse
can use what its worker created.
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
    """Set the lock server, ledger and listeners for jobs of this process.

    A setting that you leave out keeps its value.

    Args:
        locks: a URL, a client, a provider or None, as for `taskguard.connect()`.
        ledger: a URL, an Engine, a ledger or None, as for `taskguard.connect()`.
        namespace: the prefix of this application's keys and work, as for `taskguard.connect()`.
        formerly_namespaces: former namespaces, as for `taskguard.connect()`.
        listeners: callables that get every event, in addition to the logging listener.
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
    """Return the TaskGuard of this process, with its locks and ledger.

    Raises:
        ConfigurationError: a setting is wrong or missing.
    """
    with _making:
        if not _made:
            _made.append(connect(**_settings))
        return _made[0]
