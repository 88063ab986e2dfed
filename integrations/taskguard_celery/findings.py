"""Findings about Celery's settings and schedules that lose or repeat work."""

from __future__ import annotations

from taskguard.integration import FindingTemplate, Level

_CELERY = "docs/reference/settings.md#what-celery-needs"
_VISIBILITY = "docs/how-to/long-tasks.md"

_ONCE_PER = (
    'Set once_per= in the guard: "tick" runs each tick of a schedule. "run" runs again if the '
    'former run has ended. "message" runs each message. An explicit "key" runs once, and removes '
    "this finding."
)

EARLY_ACK = FindingTemplate(
    "early_ack",
    Level.WARNING,
    what="acks_late (task_acks_late) is off.",
    why="A killed worker loses the message.",
    fix="Set task_acks_late = True, or call taskguard_celery.safe_defaults(app).",
    link=_CELERY,
)
WORKER_LOST_ACK = FindingTemplate(
    "worker_lost_ack",
    Level.WARNING,
    what="reject_on_worker_lost (task_reject_on_worker_lost) is off.",
    why="A killed child process loses the message.",
    fix="Set task_reject_on_worker_lost = True, or call taskguard_celery.safe_defaults(app).",
    link=_CELERY,
)
VISIBILITY_TIMEOUT = FindingTemplate(
    "visibility_timeout",
    Level.WARNING,
    what="visibility_timeout (broker_transport_options) is {visible_s:g} s, below the time_limit "
    "of {limit_s:g} s.",
    why="The broker delivers the message again while its body runs.",
    fix="Set visibility_timeout above all time limits, or call "
    "taskguard_celery.safe_defaults(app).",
    link=_VISIBILITY,
)
RETRY_BEYOND_VISIBILITY = FindingTemplate(
    "retry_beyond_visibility",
    Level.WARNING,
    what="An automatic retry can wait for {delay_s:g} s, longer than visibility_timeout "
    "({visible_s:g} s).",
    why="The broker delivers the waiting message again and again, in growing numbers.",
    fix="Set a shorter default_retry_delay or retry_backoff_max, or a longer visibility_timeout.",
    link=_VISIBILITY,
)
COUNTDOWN_BEYOND_VISIBILITY = FindingTemplate(
    "countdown_beyond_visibility",
    Level.WARNING,
    what="The countdown is {countdown_s:g} s, longer than visibility_timeout ({visible_s:g} s).",
    why="The broker delivers the waiting message again and again, in growing numbers.",
    fix="Schedule the entry at the time at which its task shall run, without a countdown, or set a "
    "longer visibility_timeout.",
    link=_VISIBILITY,
)
CONSUMER_TIMEOUT = FindingTemplate(
    "consumer_timeout",
    Level.NOTE,
    what="A worker can take {unacked_s:g} s to acknowledge a message. RabbitMQ's consumer_timeout "
    "is {timeout_s:g} s by default.",
    why="After consumer_timeout RabbitMQ closes the worker's channel. The worker ends, and the "
    "message is delivered again.",
    fix="Raise consumer_timeout (rabbitmq.conf, a policy, or x-consumer-timeout of the queue), and "
    "let a supervisor restart workers.",
    link="docs/how-to/rabbitmq.md",
)
HARD_TIME_LIMIT = FindingTemplate(
    "hard_time_limit",
    Level.NOTE,
    what="time_limit is {limit_s:g} s, without a shorter soft_time_limit.",
    why="Work whose body it kills stays PROCESSING. Its message is acknowledged, so nothing runs "
    "the work again.",
    fix="Set a soft_time_limit below it, or recoverable=True and a sweep.",
    link="docs/how-to/long-tasks.md",
)
EAGER = FindingTemplate(
    "eager",
    Level.WARNING,
    what="task_always_eager is on.",
    why="Tasks run in the process that calls them. No message is delivered again after a crash.",
    fix="Set task_always_eager = False, except in tests.",
    link="docs/how-to/testing.md#eager-mode",
)
BROKER_IN_MEMORY = FindingTemplate(
    "broker_in_memory",
    Level.WARNING,
    what="The broker is {transport}://, which is for tests.",
    why="Messages are lost with the process, or delivered twice.",
    fix="Set broker_url to redis://… or amqp://….",
    link=_CELERY,
)
UNCONFIRMED_PUBLISH = FindingTemplate(
    "unconfirmed_publish",
    Level.WARNING,
    what="confirm_publish (broker_transport_options) is off.",
    why="A message that is sent or deferred can be lost with the connection, without an error.",
    fix='Set broker_transport_options = {{"confirm_publish": True}}, or call '
    "taskguard_celery.safe_defaults(app).",
    link="docs/how-to/rabbitmq.md",
)
TRANSIENT_MESSAGES = FindingTemplate(
    "transient_messages",
    Level.WARNING,
    what="task_default_delivery_mode is transient.",
    why="A restart of RabbitMQ loses messages.",
    fix='Set task_default_delivery_mode = "persistent".',
    link="docs/how-to/rabbitmq.md",
)
PERIODIC_ONCE = FindingTemplate(
    "periodic_once",
    Level.WARNING,
    what="All messages of this entry are the same work of the task {task}.",
    why="The work runs once. Later messages are answered from its record, which is kept for "
    "{days:g} days or longer.",
    fix=_ONCE_PER,
    link="docs/how-to/periodic.md",
)
CONSTANT_KEY = FindingTemplate(
    "constant_key",
    Level.WARNING,
    what="Its key has no arguments, so all its messages are the same work.",
    why="The work runs once. Later messages are answered from its record, which is kept for "
    "{days:g} days or longer.",
    fix=_ONCE_PER,
    link="docs/reference/options-once.md#once_per",
)
