"""Checks of `taskguard doctor` for a Celery app: locks, ledger, guarded tasks, settings."""

from __future__ import annotations

from typing import Any

from taskguard import TaskGuard
from taskguard.integration import Configuration, Finding, GuardedTask
from taskguard_celery.broker import broker_urls
from taskguard_celery.health import (
    judge_app,
    judge_task,
    settings_of,
    settings_of_app,
    time_limit_s,
)
from taskguard_celery.outbox import app_at
from taskguard_celery.periodic import runs_once
from taskguard_celery.recognition import guarded_tasks
from taskguard_celery.runtime import build

__all__ = ["configuration_at", "configuration_of"]

_REDIS = ("redis://", "rediss://", "valkey://")


def configuration_at(target: str) -> Configuration:
    """Return what `--celery shop:app` checks. Raises CommandTargetError if there is no app."""
    return configuration_of(app_at(target))


def configuration_of(app: Any, *, runtime: TaskGuard | None = None) -> Configuration:
    """Return what to check. Without `runtime`, it is made from the app's settings."""
    guarded = list(guarded_tasks(app))
    found: list[Finding] = list(judge_app(settings_of_app(app))) if guarded else []
    for task, compiled in guarded:
        settings = settings_of(task, recoverable=compiled.policy.recoverable)
        found += judge_task(settings)
    brokers = broker_urls(app)
    return Configuration(
        lambda: runtime or build(app),
        name=f"Celery app {app.main or '(no name)'}",
        tasks=[
            GuardedTask(task.name, compiled.policy, compiled.row, time_limit_s(task))
            for task, compiled in guarded
        ],
        findings=found,
        serves="celery",
        recorded=lambda: list(runs_once(app, guarded)),
        # An app with several servers uses any of them, so the first may be down.
        queue_server=brokers[0] if len(brokers) == 1 and brokers[0].startswith(_REDIS) else None,
    )
