"""Check which of Celery's settings lose or repeat work: read them once, then judge them.

Guarantees: opens no connection, and reads only the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import Task

from taskguard.integration import Finding
from taskguard_celery import findings
from taskguard_celery.broker import broker_kind, visibility_timeout_s
from taskguard_celery.message import detect_quorum_queues
from taskguard_celery.retries import longest_delay_s

__all__ = [
    "AppSettings",
    "TaskSettings",
    "judge_app",
    "judge_task",
    "settings_of",
    "settings_of_app",
    "time_limit_s",
]

_IN_MEMORY = ("memory", "filesystem")
_TRANSIENT = (1, "1", "transient")
_CONSUMER_TIMEOUT_S = 1_800.0  # RabbitMQ's default; it does not tell the setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Settings of a task, or the app's if the task has none of its own.

    Attributes:
        name: the task's name.
        acks_late: whether Celery acknowledges a message after its body has run.
        requeues_lost: whether the message of a killed child is delivered again.
        acks_failures: whether a message is acknowledged if its body failed or exceeded its time
            limit.
        limit_s: after how long the child is killed.
        soft_limit_s: after how long the body gets SoftTimeLimitExceeded.
        visible_s: after how long the broker delivers an unacknowledged message again. None: never.
        retry_delay_s: the longest delay of an automatic retry.
        unacked_s: how long RabbitMQ may wait for an acknowledgement. 0 for other brokers.
        recoverable: whether a sweep can send the message again.
    """

    name: str
    acks_late: bool = True
    requeues_lost: bool = True
    acks_failures: bool = True
    limit_s: float | None = None
    soft_limit_s: float | None = None
    visible_s: float | None = None
    retry_delay_s: float = 0.0
    unacked_s: float = 0.0
    recoverable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Settings of an app.

    Attributes:
        transport: the kind of the broker, kombu's driver type.
        confirms: whether a publish returns only when the broker has the message.
        delivery_mode: task_default_delivery_mode.
        eager: whether tasks run in the process that calls them.
        visible_s: after how long the broker delivers an unacknowledged message again. None: never.
        countdowns_s: the countdowns of beat's entries, by name.
    """

    transport: str
    confirms: bool = True
    delivery_mode: Any = 2
    eager: bool = False
    visible_s: float | None = None
    countdowns_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_amqp(self) -> bool:
        """Return whether the broker is RabbitMQ, or another that speaks AMQP."""
        return self.transport == "amqp"


def settings_of(task: Task, *, recoverable: bool = False) -> TaskSettings:
    """Read a task's settings."""
    conf = task.app.conf
    soft_s = task.soft_time_limit or conf.task_soft_time_limit
    limit_s, retry_delay_s = time_limit_s(task), longest_delay_s(task)
    unacked_s = 0.0
    if broker_kind(task.app) == "amqp":
        # With quorum queues RabbitMQ holds a retry, else a worker does.
        held = not detect_quorum_queues(task.app, "amqp")[0]
        unacked_s = max(limit_s or 0.0, retry_delay_s if held else 0.0)
    # From Celery 5.6 on a task has two settings for it, which default to the one that it had.
    acks = [
        getattr(task, name, None)
        for name in ("acks_on_failure_or_timeout", "acks_on_failure", "acks_on_timeout")
    ]
    return TaskSettings(
        name=task.name,
        acks_late=bool(task.acks_late),
        requeues_lost=bool(task.reject_on_worker_lost),
        acks_failures=False not in acks,
        limit_s=limit_s,
        soft_limit_s=None if soft_s is None else float(soft_s),
        visible_s=visibility_timeout_s(task.app),
        retry_delay_s=retry_delay_s,
        unacked_s=unacked_s,
        recoverable=recoverable,
    )


def time_limit_s(task: Task) -> float | None:
    """Return after how many seconds Celery kills the task's body, or None."""
    limit = task.time_limit or task.app.conf.task_time_limit
    return None if limit is None else float(limit)


def settings_of_app(app: Any) -> AppSettings:
    """Read an app's settings."""
    conf = app.conf
    options = conf.broker_transport_options or {}
    return AppSettings(
        transport=broker_kind(app, write=True),
        confirms=bool(options.get("confirm_publish")),
        delivery_mode=conf.task_default_delivery_mode,
        eager=bool(conf.task_always_eager),
        visible_s=visibility_timeout_s(app),
        countdowns_s=dict(_countdowns_s(conf.beat_schedule or {})),
    )


def _countdowns_s(schedule: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, entry in schedule.items():
        countdown = (entry.get("options") or {}).get("countdown") if hasattr(entry, "get") else None
        if countdown is not None:
            yield str(name), float(countdown)


def judge_task(task: TaskSettings) -> Iterator[Finding]:
    """Judge which of a task's settings can lose or repeat its work."""
    where = f"the task {task.name}"
    visible_s, limit_s = task.visible_s, task.limit_s
    if not task.acks_late:
        yield findings.EARLY_ACK.at(where)
    if not task.requeues_lost:
        yield findings.WORKER_LOST_ACK.at(where)
    if visible_s is not None and limit_s is not None and visible_s < limit_s:
        yield findings.VISIBILITY_TIMEOUT.at(where, visible_s=visible_s, limit_s=limit_s)
    if visible_s is not None and visible_s < task.retry_delay_s:
        yield findings.RETRY_BEYOND_VISIBILITY.at(
            where, visible_s=visible_s, delay_s=task.retry_delay_s
        )
    if task.unacked_s > _CONSUMER_TIMEOUT_S:
        yield findings.CONSUMER_TIMEOUT.at(
            where, unacked_s=task.unacked_s, timeout_s=_CONSUMER_TIMEOUT_S
        )
    kills = limit_s is not None and (task.soft_limit_s is None or task.soft_limit_s >= limit_s)
    if kills and task.acks_failures and not task.recoverable:
        yield findings.HARD_TIME_LIMIT.at(where, limit_s=limit_s)


def judge_app(app: AppSettings) -> Iterator[Finding]:
    """Judge which of an app's settings can lose or repeat messages."""
    where = "the app"
    if app.eager:
        yield findings.EAGER.at(where)
    if app.transport in _IN_MEMORY:
        yield findings.BROKER_IN_MEMORY.at(where, transport=app.transport)
    if app.is_amqp and not app.confirms:
        yield findings.UNCONFIRMED_PUBLISH.at(where)
    if app.is_amqp and app.delivery_mode in _TRANSIENT:
        yield findings.TRANSIENT_MESSAGES.at(where)
    for name, countdown_s in app.countdowns_s.items():
        if app.visible_s is not None and countdown_s > app.visible_s:
            yield findings.COUNTDOWN_BEYOND_VISIBILITY.at(
                f"beat's entry {name}", countdown_s=countdown_s, visible_s=app.visible_s
            )
