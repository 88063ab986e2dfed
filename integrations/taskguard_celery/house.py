"""One lock provider, one ledger and one watchdog for each Celery app and process.

Settings, all optional where the environment has TASKGUARD_LOCKS_URL and TASKGUARD_LEDGER_URL:

| setting | value |
| --- | --- |
| taskguard_locks_url | redis://…, valkey://…, memory:// |
| taskguard_locks | a redis-py client or a lock provider; None: the ledger alone |
| taskguard_ledger_url | a SQLAlchemy URL |
| taskguard_ledger | an Engine or a ledger; None: locks only |
| taskguard_listeners | callables that hear every event, instead of the one that logs |

What Celery shows of its settings (`celery report`, `inspect conf`, and so Flower) shows none of the
first four: they may have passwords.

Results are stored as kombu's JSON, so that dates, decimals and UUIDs come back as they went; a
pydantic model as what Celery makes of it for `pydantic=True`, its `model_dump()`.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import Any
from weakref import WeakKeyDictionary

from celery.app import utils as app_utils
from kombu.utils import json as kombu_json

from taskguard import UNSET, Codec, TaskGuard, connect, events

__all__ = ["configure", "house_of"]


class _Encoder(kombu_json.JSONEncoder):
    def default(self, o: Any) -> Any:
        dump = getattr(o, "model_dump", None)
        return dump() if callable(dump) else super().default(o)  # type: ignore[no-untyped-call]  # kombu has no types


CODEC = Codec(dumps=functools.partial(kombu_json.dumps, cls=_Encoder), loads=kombu_json.loads)

_HIDDEN = r"taskguard_(locks|ledger)"


def _hide_secrets() -> None:
    """Celery masks settings by their names; which those are, no setting says, but its pattern."""
    hidden = app_utils.HIDDEN_SETTINGS
    if _HIDDEN not in hidden.pattern:
        app_utils.HIDDEN_SETTINGS = re.compile(f"{hidden.pattern}|{_HIDDEN}", hidden.flags)


_hide_secrets()

_houses: WeakKeyDictionary[Any, TaskGuard] = WeakKeyDictionary()
_building = threading.Lock()


def configure(app: Any, *, locks: Any = UNSET, ledger: Any = UNSET, listeners: Any = UNSET) -> None:
    """Set an app's lock server, ledger and listeners in one call; what is left out stays.

    Args:
        app: the Celery app.
        locks: a URL, a client, a provider or None, as for `taskguard.connect()`.
        ledger: a URL, an Engine, a ledger or None, as for `taskguard.connect()`.
        listeners: callables that hear every event.
    """
    given = {"taskguard_locks": locks, "taskguard_ledger": ledger, "taskguard_listeners": listeners}
    app.conf.update({name: value for name, value in given.items() if value is not UNSET})
    _houses.pop(app, None)


def house_of(app: Any) -> TaskGuard:
    """The app's locks and ledger in this process, made at the first call.

    Raises ConfigurationError if something is missing or wrong.
    """
    if hasattr(app, "_get_current_object"):
        app = app._get_current_object()  # noqa: SLF001  # celery.current_app; Celery has no other way
    house = _houses.get(app)
    if house is None:
        with _building:
            house = _houses.get(app)
            if house is None:
                house = _houses[app] = build(app)
    return house


def build(app: Any) -> TaskGuard:
    """A new house by the app's settings; connects to nothing yet."""
    listeners = app.conf.get("taskguard_listeners")
    return connect(
        locks=_setting(app, "taskguard_locks"),
        ledger=_setting(app, "taskguard_ledger"),
        listeners=(events.log_event,) if listeners is None else tuple(listeners),
        codec=CODEC,
    )


def _setting(app: Any, name: str) -> Any:
    if name in app.conf:
        return app.conf[name]
    return app.conf.get(f"{name}_url", UNSET)
