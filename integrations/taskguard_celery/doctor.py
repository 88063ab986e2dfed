"""A Celery app for `taskguard doctor`: its locks and ledger, its guarded tasks, its settings."""

from __future__ import annotations

from typing import Any

from taskguard import Configuration, Finding, GuardedTask, TaskGuard
from taskguard_celery.broker import broker_urls
from taskguard_celery.findings import (
    findings_of_app,
    findings_of_task,
    settings_of,
    settings_of_app,
    time_limit_s,
)
from taskguard_celery.outbox import app_at
from taskguard_celery.periodic import findings_of_rows, findings_of_schedule
from taskguard_celery.recognition import guarded_tasks
from taskguard_celery.runtime import build

__all__ = ["configuration_at", "configuration_of"]

_REDIS = ("redis://", "rediss://", "valkey://")


def configuration_at(target: str) -> Configuration:
    """For `--celery shop:app`. Raises CommandTargetError where there is no app."""
    return configuration_of(app_at(target))


def configuration_of(app: Any, *, runtime: TaskGuard | None = None) -> Configuration:
    """What there is to examine. Without `runtime` it is made by the app's settings."""
    guarded = list(guarded_tasks(app))
    found: list[Finding] = list(findings_of_app(settings_of_app(app))) if guarded else []
    for task, compiled in guarded:
        settings = settings_of(task, recoverable=compiled.policy.recoverable)
        found += findings_of_task(settings)
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
        recorded=lambda: [*findings_of_schedule(app), *findings_of_rows(app)],
        # Of several servers the app uses any one, so the first may be down.
        queue_server=brokers[0] if len(brokers) == 1 and brokers[0].startswith(_REDIS) else None,
    )
