"""An application that `examine()` checks: its locks, ledger, tasks and queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from taskguard.api import TaskGuard
from taskguard.findings import Finding
from taskguard.model.policy import Policy
from taskguard.values import value

__all__ = ["Configuration", "GuardedTask", "named"]


@value
class GuardedTask:
    """A task, with what it requires of servers.

    Attributes:
        name: its name.
        policy: its options.
        row: the GuardedRow that it moves.
        limit_s: after how many seconds the queue ends its body. None: never.
    """

    name: str
    policy: Policy
    row: Any = None
    limit_s: float | None = None


@value
class Configuration:
    """One application to check. An integration makes it, or `taskguard doctor` from two URLs.

    Attributes:
        runtime: returns its locks and ledger. May raise ConfigurationError.
        name: its name, with the queue's.
        tasks: its guarded tasks, as far as they are known.
        findings: findings about the queue's own settings.
        recorded: returns findings that matter only with a ledger. Called if the ledger answers.
        queue_server: the URL, or a redis-py client, of the Redis that has the queues. None: the
            queues are not on a Redis.
        folder: where to look for migrations. None: nowhere.
        serves: the kind of its queue, as stored calls name it: "celery", "rq".
        starts: whether a worker is about to start. If so, its ledger's id is stored at the lock
            server, so that `namespace_shared` can be found.
    """

    runtime: Callable[[], TaskGuard]
    name: str = ""
    tasks: Sequence[GuardedTask] = ()
    findings: Sequence[Finding] = ()
    recorded: Callable[[], Sequence[Finding]] = list
    queue_server: Any = None
    folder: Path | None = None
    serves: str = ""
    starts: bool = False


def named(part: object) -> str:
    """Return the text that names a provider or a ledger in findings."""
    return repr(part).removeprefix("<").removesuffix(">")
