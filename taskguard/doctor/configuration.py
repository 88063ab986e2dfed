"""What there is to examine: an application's locks and ledger, its tasks, and its queue."""

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
    """A task, as far as it says what servers have to bear.

    Attributes:
        name: its name.
        policy: its options.
        row: the GuardedRow that it moves.
        limit_s: after how many seconds the queue ends its body; None: it does not.
    """

    name: str
    policy: Policy
    row: Any = None
    limit_s: float | None = None


@value
class Configuration:
    """One application. An integration makes it, or `taskguard doctor` of two URLs.

    Attributes:
        runtime: gives its locks and ledger; may raise ConfigurationError.
        name: what it is called, with the queue.
        tasks: its guarded tasks, as far as they are known.
        findings: what is wrong with the queue's own settings.
        recorded: finds what is wrong because work is on record; called where the ledger answers.
        queue_server: the URL, or a redis-py client, of the Redis that has the queues; None where
            that is none.
        folder: where to look for migrations; None: nowhere.
        serves: the kind of its queue, as stored calls name it: "celery", "rq".
        starts: a worker is about to run by it, and leaves its ledger's mark at the lock server.
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
    """A provider or a ledger, for people."""
    return repr(part).removeprefix("<").removesuffix(">")
