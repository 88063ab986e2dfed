"""One lock provider, one ledger and one watchdog for each Celery app and process.

All settings are optional if the environment has TASKGUARD_LOCKS_URL and TASKGUARD_LEDGER_URL. Any
other setting that begins with `taskguard_` is an error.

| setting | value |
| --- | --- |
| taskguard_locks_url | redis://…, valkey://…, memory:// |
| taskguard_locks | a redis-py client or a lock provider; None: only the ledger |
| taskguard_ledger_url | a SQLAlchemy URL |
| taskguard_ledger | an Engine or a ledger; None: only locks |
| taskguard_namespace | prefix of this app's keys and work; default: TASKGUARD_NAMESPACE |
| taskguard_formerly_namespaces | a list of former namespaces of this app |
| taskguard_beat_scheduler | the inner scheduler of LeaderScheduler; default: Celery's own |
| taskguard_beat_ttl_s | lease of the leading beat, in seconds; default: 15 |
| taskguard_listeners | callables that get every event, in addition to the logging listener |

Celery masks the first four wherever it shows settings (`celery report`, `inspect conf`, Flower),
because they may contain passwords.

Results are stored as kombu's JSON, so dates, decimals and UUIDs keep their types. A pydantic model
is stored as its `model_dump()`, as Celery does for `pydantic=True`.
"""

from __future__ import annotations

import difflib
import functools
import re
import threading
from typing import Any

from celery.app import utils as app_utils
from kombu.utils import json as kombu_json

from taskguard import TaskGuard, connect, errors
from taskguard.integration import UNSET, Codec, MessageRef

__all__ = ["KEPT", "configure", "runtime_of"]


class _Encoder(kombu_json.JSONEncoder):
    def default(self, o: Any) -> Any:
        dump = getattr(o, "model_dump", None)
        return dump() if callable(dump) else super().default(o)  # type: ignore[no-untyped-call]  # kombu has no types


CODEC = Codec(dumps=functools.partial(kombu_json.dumps, cls=_Encoder), loads=kombu_json.loads)

_SETTINGS = (
    "taskguard_locks_url",
    "taskguard_locks",
    "taskguard_ledger_url",
    "taskguard_ledger",
    "taskguard_namespace",
    "taskguard_formerly_namespaces",
    "taskguard_listeners",
    "taskguard_beat_scheduler",
    "taskguard_beat_ttl_s",
)

_HIDDEN = r"taskguard_(locks|ledger)"


def _hide_secrets() -> None:
    """Extend the pattern of settings that Celery masks. Celery has no setting for it."""
    hidden = app_utils.HIDDEN_SETTINGS
    if _HIDDEN not in hidden.pattern:
        app_utils.HIDDEN_SETTINGS = re.compile(f"{hidden.pattern}|{_HIDDEN}", hidden.flags)


_hide_secrets()

# The queue of its stored calls, as in `calls.py`.
_NAME = "celery"
# Attribute of an app: its TaskGuard, which deliveries read without a call.
KEPT = "_taskguard"
_building = threading.Lock()


def configure(
    app: Any,
    *,
    locks: Any = UNSET,
    ledger: Any = UNSET,
    namespace: Any = UNSET,
    formerly_namespaces: Any = UNSET,
    listeners: Any = UNSET,
) -> None:
    """Set the lock server, ledger and listeners of an app in one call.

    A setting that you leave out keeps its value.

    Args:
        app: the Celery app.
        locks: a URL, a client, a provider or None, as for `taskguard.connect()`.
        ledger: a URL, an Engine, a ledger or None, as for `taskguard.connect()`.
        namespace: the prefix of this app's keys and work, as for `taskguard.connect()`.
        formerly_namespaces: former namespaces of this app, as for `taskguard.connect()`.
        listeners: callables that get every event, in addition to the logging listener.
    """
    given = {
        "taskguard_locks": locks,
        "taskguard_ledger": ledger,
        "taskguard_namespace": namespace,
        "taskguard_formerly_namespaces": formerly_namespaces,
        "taskguard_listeners": listeners,
    }
    app.conf.update({name: value for name, value in given.items() if value is not UNSET})
    vars(app).pop(KEPT, None)


def runtime_of(app: Any) -> TaskGuard:
    """Return the app's TaskGuard of this process, with its locks and ledger.

    The first call creates it.

    Raises:
        ConfigurationError: a setting is wrong or missing.
    """
    if hasattr(app, "_get_current_object"):
        app = app._get_current_object()  # noqa: SLF001  # celery.current_app; Celery has no other way
    runtime: TaskGuard | None = vars(app).get(KEPT)
    if runtime is None:
        with _building:
            runtime = vars(app).get(KEPT)
            if runtime is None:
                runtime = vars(app)[KEPT] = build(app)
    return runtime


def build(app: Any) -> TaskGuard:
    """Create a TaskGuard from the app's settings, without a connection yet."""
    _refuse_unknown(app.conf)
    runtime = connect(
        locks=_setting(app, "taskguard_locks"),
        ledger=_setting(app, "taskguard_ledger"),
        namespace=app.conf.get("taskguard_namespace", UNSET),
        formerly_namespaces=app.conf.get("taskguard_formerly_namespaces", UNSET),
        listeners=app.conf.get("taskguard_listeners") or (),
        codec=CODEC,
    )
    runtime.senders[_NAME] = functools.partial(_send, app)
    return runtime


def _send(app: Any, call: dict[str, Any], message: MessageRef) -> None:
    """Send a stored call for an operator, as a worker that promotes it does."""
    from taskguard_celery.calls import CelerySender  # it imports this module

    CelerySender(app).hand_off(call, message)


def _refuse_unknown(conf: Any) -> None:
    """Raise for an unknown setting: a misspelled one would be ignored."""
    names = [str(name) for name in conf]
    before = str(conf.prefix or "").lower()
    for name in names:
        plain = name.lower().removeprefix(before)
        # If there is a prefix, Celery reads a name in capitals only with that prefix.
        read = not before or plain != name.lower() or plain == name
        if read and plain.startswith("taskguard_") and plain not in _SETTINGS:
            near = difflib.get_close_matches(plain, _SETTINGS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise errors.ConfigurationError(
                f"Unknown setting {plain}.{hint} Known: {', '.join(_SETTINGS)}."
            )


def _setting(app: Any, name: str) -> Any:
    if name in app.conf:
        return app.conf[name]
    return app.conf.get(f"{name}_url", UNSET)
