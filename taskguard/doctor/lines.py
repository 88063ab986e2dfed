"""Lines for which no relay runs: those of another namespace or another queue."""

from __future__ import annotations

from typing import Any

from taskguard.api import TaskGuard
from taskguard.doctor import findings
from taskguard.doctor.configuration import Configuration, named
from taskguard.errors import TaskguardError
from taskguard.findings import Finding
from taskguard.guarded import prefix_of
from taskguard.keys import finish_key

__all__ = ["check_lines"]

_RELAYS = ("celery", "rq", "celery+rq")
_TARGETS = {"celery": "MODULE:APP", "rq": "REDIS_URL"}


def check_lines(runtime: TaskGuard, configuration: Configuration) -> list[Finding]:
    """Find lines for which no relay runs, other than the one of a worker that starts."""
    ledger: Any = runtime.ledger
    if not hasattr(ledger, "count_waiting"):
        return []  # a ledger of the user's own
    mine = (runtime.namespace, *runtime.formerly_namespaces)
    try:
        return [
            _finding(named(ledger), app, queue, count, is_own=app in mine)
            for (app, queue), count in sorted(ledger.count_waiting().items())
            if not (configuration.starts and app in mine and queue == configuration.serves)
            and not _has_relay(ledger, runtime.namespace if app in mine else app, queue)
        ]
    except TaskguardError:
        return []  # `check_ledger()` reports it


def _has_relay(ledger: Any, app: str, queue: str) -> bool:
    """Return whether a relay of that namespace for that queue holds its lease."""
    names = (name for name in _RELAYS if queue in name.split("+"))
    keys = (prefix_of(app) + finish_key(f"leader:taskguard-relay:{name}") for name in names)
    return any(ledger.holders(key) for key in keys)


def _finding(ledger: str, app: str, queue: str, count: int, *, is_own: bool) -> Finding:
    where = f"the ledger {ledger}"
    if not is_own:
        return findings.STRANDED_NAMESPACE.at(where, namespace=app, count=count)
    target = _TARGETS.get(queue, "TARGET")
    return findings.STRANDED_LINES.at(where, queue=queue, target=target, count=count)
