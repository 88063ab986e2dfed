"""What in Celery's settings loses or repeats work: rules over an app's and a task's settings.

Guarantees: nothing here connects, or asks Celery for more than its configuration; `settings_of`
and `settings_of_app` read that, the rest is a matter of what they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import Task

from taskguard import Finding, Level
from taskguard_celery.broker import broker_kind, visibility_timeout_s
from taskguard_celery.message import detect_quorum_queues

__all__ = [
    "LOSING",
    "AppSettings",
    "TaskSettings",
    "findings_of_app",
    "findings_of_task",
    "settings_of",
    "settings_of_app",
    "time_limit_s",
]

_SAFE = "taskguard_celery.safe_defaults(app) sets what is safe"
# What a worker says in one line for each task.
LOSING = frozenset({"early_ack", "worker_lost_ack", "visibility_timeout"})
_IN_MEMORY = ("memory", "filesystem")
_TRANSIENT = (1, "1", "transient")
_CONSUMER_TIMEOUT_S = 1_800.0  # RabbitMQ's own default; what it is set to, it does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """What counts of a task's settings; the app's where it has none of its own.

    Attributes:
        name: the task's name.
        acks_late: it is acknowledged after it has run.
        requeues_lost: a killed child's message comes back.
        acks_failures: it is acknowledged, too, where it failed or was killed by its time limit.
        limit_s: when its child is killed.
        soft_limit_s: when it is told to end.
        visible_s: when the broker delivers an unacknowledged message again; None: never.
        retry_delay_s: the delay of an automatic retry at the longest.
        unacked_s: how long RabbitMQ may wait for an acknowledgement; 0 for another broker.
        recoverable: a sweep can send its message again.
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
    """What counts of an app's settings.

    Attributes:
        transport: the kind of the broker, kombu's driver type.
        prefetches: how many messages a child fetches ahead (worker_prefetch_multiplier).
        acks_late: messages are acknowledged after they have run.
        confirms: a publish returns when the broker has the message.
        delivery_mode: of messages, as the setting has it.
        eager: tasks are run where they are called.
        visible_s: when the broker delivers an unacknowledged message again; None: never.
        countdowns_s: those of beat's entries, by name.
    """

    transport: str
    prefetches: int = 1
    acks_late: bool = True
    confirms: bool = True
    delivery_mode: Any = 2
    eager: bool = False
    visible_s: float | None = None
    countdowns_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_amqp(self) -> bool:
        """Whether that is RabbitMQ, or another of its protocol."""
        return self.transport == "amqp"


def settings_of(task: Task, *, recoverable: bool = False) -> TaskSettings:
    """What a task's settings are."""
    conf = task.app.conf
    soft_s = task.soft_time_limit or conf.task_soft_time_limit
    limit_s, retry_delay_s = time_limit_s(task), _retry_delay_s(task)
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
    """After how many seconds Celery kills the task's body; None: never."""
    limit = task.time_limit or task.app.conf.task_time_limit
    return None if limit is None else float(limit)


def _retry_delay_s(task: Task) -> float:
    """At the longest, of retries by autoretry_for; what a body says to retry() nobody knows."""
    if task.max_retries == 0 or not getattr(task, "autoretry_for", ()):
        return 0.0
    backoff = getattr(task, "retry_backoff", False)
    longest = getattr(task, "retry_backoff_max", 600) if backoff else task.default_retry_delay
    return float(longest or 0)


def settings_of_app(app: Any) -> AppSettings:
    """What an app's settings are."""
    conf = app.conf
    options = conf.broker_transport_options or {}
    return AppSettings(
        transport=broker_kind(app, write=True),
        prefetches=conf.worker_prefetch_multiplier,
        acks_late=bool(conf.task_acks_late),
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


def findings_of_task(task: TaskSettings) -> Iterator[Finding]:
    """What in a task's settings can lose or repeat its work."""
    where = f"the task {task.name}"
    if not task.acks_late:
        yield Finding(
            "early_ack",
            Level.WARNING,
            where=where,
            what="acks_late (task_acks_late) is off.",
            why="A killed worker loses the message.",
            mend=f"task_acks_late = True; {_SAFE}.",
        )
    if not task.requeues_lost:
        yield Finding(
            "worker_lost_ack",
            Level.WARNING,
            where=where,
            what="reject_on_worker_lost (task_reject_on_worker_lost) is off.",
            why="A killed pool child loses the message.",
            mend=f"task_reject_on_worker_lost = True; {_SAFE}.",
        )
    if task.visible_s is not None and task.limit_s is not None and task.visible_s < task.limit_s:
        yield Finding(
            "visibility_timeout",
            Level.WARNING,
            where=where,
            what=f"visibility_timeout (broker_transport_options, {task.visible_s:g} s) is below "
            f"time_limit ({task.limit_s:g} s).",
            why="The message is delivered again while the body runs.",
            mend=f"A visibility_timeout above all time limits; {_SAFE}.",
        )
    if task.visible_s is not None and task.visible_s < task.retry_delay_s:
        yield Finding(
            "retry_beyond_visibility",
            Level.WARNING,
            where=where,
            what=f"An automatic retry may be {task.retry_delay_s:g} s away, beyond "
            f"visibility_timeout ({task.visible_s:g} s).",
            why="The waiting message is delivered again and again, more of them each time.",
            mend="A shorter default_retry_delay or retry_backoff_max, or a longer "
            "visibility_timeout.",
        )
    if task.unacked_s > _CONSUMER_TIMEOUT_S:
        yield Finding(
            "consumer_timeout",
            Level.NOTE,
            where=where,
            what=f"A worker may need {task.unacked_s:g} s until it acknowledges a message, and "
            f"RabbitMQ's consumer_timeout is {_CONSUMER_TIMEOUT_S:g} s by default.",
            why="After consumer_timeout RabbitMQ closes the worker's channel. The worker ends, and "
            "the message is delivered again.",
            mend="A longer consumer_timeout (rabbitmq.conf, a policy, or x-consumer-timeout of the "
            "queue), and a supervisor that starts workers again.",
        )
    if task.acks_late and not task.acks_failures:
        yield Finding(
            "failures_rejected",
            Level.NOTE,
            where=where,
            what="task_acks_on_failure_or_timeout is off.",
            why="What fails goes to the dead-letter exchange of a RabbitMQ's queue, and elsewhere "
            "nowhere.",
            mend="Nothing, if that is meant.",
        )
    if task.limit_s is not None and task.acks_failures and not task.recoverable:
        yield from _judge_hard_limit(task, where=where)


def _judge_hard_limit(task: TaskSettings, *, where: str) -> Iterator[Finding]:
    limit_s = task.limit_s or 0.0
    if task.soft_limit_s is not None and task.soft_limit_s < limit_s:
        return
    yield Finding(
        "hard_time_limit",
        Level.NOTE,
        where=where,
        what=f"time_limit ({limit_s:g} s) has no soft_time_limit before it.",
        why="A body that is killed by it stays PROCESSING, its message is acknowledged, and "
        "nobody runs it again.",
        mend="A soft_time_limit below it, or recoverable=True and a sweep.",
    )


def findings_of_app(app: AppSettings) -> Iterator[Finding]:
    """What in an app's settings can lose or repeat messages."""
    where = "the app"
    if app.eager:
        yield Finding(
            "eager",
            Level.WARNING,
            where=where,
            what="task_always_eager is on.",
            why="Tasks run where they are called, and no message comes again after a crash.",
            mend="task_always_eager = False, but in tests.",
        )
    if app.transport in _IN_MEMORY:
        yield Finding(
            "broker_in_memory",
            Level.WARNING,
            where=where,
            what=f"Its broker is {app.transport}://.",
            why="It is for tests: messages end with the process, or come twice.",
            mend="broker_url = redis://… or amqp://….",
        )
    if app.is_amqp and not app.confirms:
        yield Finding(
            "unconfirmed_publish",
            Level.WARNING,
            where=where,
            what="confirm_publish (broker_transport_options) is off.",
            why="A message that is published, or put off, may be lost with the connection, and "
            "nobody is told.",
            mend=f'broker_transport_options = {{"confirm_publish": True}}; {_SAFE}.',
        )
    if app.is_amqp and app.delivery_mode in _TRANSIENT:
        yield Finding(
            "transient_messages",
            Level.WARNING,
            where=where,
            what="task_default_delivery_mode is transient.",
            why="A restart of RabbitMQ loses messages.",
            mend='task_default_delivery_mode = "persistent".',
        )
    if app.acks_late and app.prefetches != 1:
        count = app.prefetches or "any number of"
        yield Finding(
            "prefetch",
            Level.NOTE,
            where=where,
            what=f"Each child fetches {count} messages ahead (worker_prefetch_multiplier).",
            why="They wait behind a long body, while other workers are idle, and come again when "
            "the broker's time for them is over.",
            mend=f"worker_prefetch_multiplier = 1; {_SAFE}.",
        )
    late = {
        name: countdown_s
        for name, countdown_s in app.countdowns_s.items()
        if app.visible_s is not None and countdown_s > app.visible_s
    }
    if late:
        yield Finding(
            "countdown_beyond_visibility",
            Level.WARNING,
            where=f"beat's entry {min(late)}",
            what=f"Its countdown ({late[min(late)]:g} s) is beyond visibility_timeout "
            f"({app.visible_s:g} s).",
            why="The waiting message is delivered again and again, more of them each time.",
            mend="A schedule for the time itself, or a longer visibility_timeout.",
        )
