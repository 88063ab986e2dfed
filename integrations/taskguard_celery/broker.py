"""Which broker an app uses, as kombu reads the app's settings.

The settings may have one URL, a list of URLs, URLs joined by ";", or one URL for reading and one
for writing. They may also have a `broker_transport` without a URL. Without any of these settings
the broker is RabbitMQ. This module makes no connection.
"""

from __future__ import annotations

from typing import Any

__all__ = ["broker_kind", "broker_urls", "visibility_timeout_s"]

_VISIBILITY_TIMEOUTS_S = {"redis": 3_600.0, "sqs": 1_800.0}
# Schemes whose driver may be missing in this process: doctor also runs where no worker does.
_KINDS = {"librabbitmq": "amqp"}


def broker_kind(app: Any, *, write: bool = False) -> str:
    """Return kombu's driver type: "amqp", "redis" (also for Sentinel), "sqs", "memory", …

    Args:
        app: the Celery app.
        write: the broker that messages are published to, not the one that workers consume from.
    """
    try:
        connection = app.connection_for_write() if write else app.connection_for_read()
        return str(connection.get_transport_cls().driver_type)
    except Exception:  # noqa: BLE001  # the module of a driver can raise anything
        urls = broker_urls(app, write=write)
        scheme = urls[0].partition("://")[0].partition("+")[0].lower() if urls else ""
        return _KINDS.get(scheme, scheme)


def broker_urls(app: Any, *, write: bool = False) -> list[str]:
    """Return the URLs of the broker; none if it is RabbitMQ by default."""
    given = app.conf.broker_write_url if write else app.conf.broker_read_url
    if isinstance(given, str):
        given = given.split(";")
    return [str(url) for url in given or ()]


def visibility_timeout_s(app: Any) -> float | None:
    """Return after how many seconds the broker redelivers an unacknowledged message, or None."""
    default_s = _VISIBILITY_TIMEOUTS_S.get(broker_kind(app))
    if default_s is None:
        return None
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout", default_s))
