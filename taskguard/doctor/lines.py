"""Find messages in lines for which no relay runs: those of another namespace or queue."""

from __future__ import annotations

from typing import Any

from taskguard.api import TaskGuard
from taskguard.doctor.configuration import Configuration, named
from taskguard.errors import TaskguardError
from taskguard.findings import Finding, Level
from taskguard.guarded import prefix_of
from taskguard.keys import finish_key

__all__ = ["check_lines"]

_RELAYS = ("celery", "rq", "celery+rq")
_TARGETS = {"celery": "MODULE:APP", "rq": "REDIS_URL"}


def check_lines(runtime: TaskGuard, configuration: Configuration) -> list[Finding]:
    """Find lines for which no relay runs, other than the one of a worker that starts."""
    ledger: Any = runtime.ledger
    if not hasattr(ledger, "standing"):
        return []  # a stand-in of the user's own
    mine = (runtime.namespace, *runtime.formerly_namespaces)
    try:
        return [
            _finding(named(ledger), app, queue, count, is_own=app in mine)
            for (app, queue), count in sorted(ledger.standing().items())
            if not (configuration.starts and app in mine and queue == configuration.serves)
            and not _has_relay(ledger, runtime.namespace if app in mine else app, queue)
        ]
    except TaskguardError:
        return []  # what is wrong with the ledger is said elsewhere


def _has_relay(ledger: Any, app: str, queue: str) -> bool:
    """Whether a relay of that namespace, which sends to that queue, holds its lease."""
    names = (name for name in _RELAYS if queue in name.split("+"))
    keys = (prefix_of(app) + finish_key(f"leader:taskguard-relay:{name}") for name in names)
    return any(ledger.holders(key) for key in keys)


def _finding(ledger: str, app: str, queue: str, count: int, *, is_own: bool) -> Finding:
    several = f"{count:,} messages wait" if count != 1 else "A message waits"
    if is_own:
        target = _TARGETS.get(queue, "TARGET")
        return Finding(
            "stranded_lines",
            Level.WARNING,
            where=f"the ledger {ledger}",
            what=f"{several} in lines for a queue of {queue}, and no relay for it runs.",
            why="If nothing else uses their keys they wait for ever.",
            mend=f"Start a worker of {queue}, or run `taskguard relay --{queue} {target}`.",
        )
    return Finding(
        "stranded_lines",
        Level.WARNING,
        where=f"the ledger {ledger}",
        what=f"{several} in lines of the namespace {app!r}, and no relay of it runs.",
        why="If it is a former namespace of this application they wait for ever.",
        mend=f"If so, set taskguard_formerly_namespaces = [{app!r}] (formerly_namespaces=, "
        "TASKGUARD_FORMERLY_NAMESPACES): workers, and `taskguard relay`, then send them. If it is "
        "another application's, start its workers.",
    )
