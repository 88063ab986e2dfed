"""Events of deliveries, one class for each, and the listeners that receive them.

Guarantees: a listener that raises breaks no task. Its error is logged once for each listener and
kind of event. Listeners are called in the thread of the event, so they must not block. Keys are
those at the lock server: they contain no value marked `|hash`.

| event | when | level of the default log |
| --- | --- | --- |
| acquired | the lock server granted the lease | debug |
| contended | the key was found taken | debug |
| renewed | the watchdog renewed leases (one event per batch) | debug |
| renewal_failed | a renewal got no answer; the old deadline remains | warning |
| lost | a lease can no longer be trusted | warning |
| released | the lease ended with the body | debug |
| claimed | the ledger granted the work | debug |
| takeover | the ledger granted work whose holder's lease had expired | warning |
| duplicate | a delivery was answered from the record, or superseded | info; if DEAD: warning |
| deferred | the message was published again with a delay, then acknowledged | info |
| parked | a message was stored in the line of its key, then acknowledged | debug |
| promoted | the first message of a line was promoted | debug |
| completed | PROCESSING -> DONE is committed | debug |
| stale_refused | the database refused a late commit | warning |
| failed | the body raised | debug (the queue logs it) |
| dead | the work has become DEAD: it does not run again | error |
| lock_unavailable | the lock server gave no answer; without a ledger nothing runs | warning |
| lock_overruled | the lock server's value outlives every lease; the ledger decided | warning |
| done_elsewhere | a redelivered message has done another work of its task before | warning |
| delivered | a delivery has ended, with its outcome; exactly one event per delivery | debug |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from taskguard.log_fields import fields_of, shown, with_shown_ids
from taskguard.model.lease import UNKNOWN_HOLDER
from taskguard.model.outcomes import Ended
from taskguard.values import value

if TYPE_CHECKING:
    from taskguard.model.delivery import Delivery

__all__ = [
    "Acquired",
    "Claimed",
    "Completed",
    "Contended",
    "Dead",
    "Deferred",
    "Delivered",
    "DoneElsewhere",
    "Duplicate",
    "Event",
    "Events",
    "Failed",
    "Listener",
    "LockOverruled",
    "LockUnavailable",
    "LockUndecided",
    "Lost",
    "Parked",
    "Promoted",
    "Released",
    "RenewalFailed",
    "Renewed",
    "StaleRefused",
    "StillDead",
    "Takeover",
    "log_event",
]

logger = logging.getLogger("taskguard")


@value(kw_only=True)
class Event:
    """The base class of events.

    Attributes:
        key: the keys, joined with ", ".
        task: the task's name; "" for a plain lock.
        message: the message's id; "" if there is none.
        work: the id of the work; "" for a plain lock.
    """

    name: ClassVar[str] = "event"
    level: ClassVar[int] = logging.DEBUG
    text: ClassVar[str] = "%(name)s %(key)s"

    key: str
    task: str = ""
    message: str = ""
    work: str = ""


@value(kw_only=True)
class Acquired(Event):
    """The lock server granted the lease, `waited_s` after the delivery's first request."""

    name: ClassVar[str] = "acquired"
    waited_s: float = 0.0


@value(kw_only=True)
class Contended(Event):
    """The key was found taken, at the lock server or in the ledger.

    `holder` is the id of the holder's message, "" if it is unknown. `held_by` also names its
    process: "celery@web-3, pid 4711, message 8d3f". With locks only, or if the ledger does not know
    the worker, it has the number of the worker: "worker 1f2e3d4c, pid 4711, message 8d3f".
    """

    name: ClassVar[str] = "contended"
    text: ClassVar[str] = "%(key)s is held by %(held_by)s"
    holder: str = ""
    held_by: str = UNKNOWN_HOLDER
    retry_after_s: float | None = None


@value(kw_only=True)
class Renewed(Event):
    """A batch of `count` leases was renewed, in `took_s`. `key` is the key of the first."""

    name: ClassVar[str] = "renewed"
    count: int = 1
    took_s: float = 0.0


@value(kw_only=True)
class RenewalFailed(Event):
    """A renewal of `count` leases got no answer. Their old deadlines remain."""

    name: ClassVar[str] = "renewal_failed"
    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = "renewing %(count)s leases failed (%(error)s); their deadlines stay"
    count: int = 1
    error: str = ""
    took_s: float = 0.0


@value(kw_only=True)
class Lost(Event):
    """The lease can no longer be trusted. taskguard tells the body.

    `cause` is "expired", "max_hold" or "taken", and `reason` says it in words.
    """

    name: ClassVar[str] = "lost"
    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = "lease on %(key)s lost after %(held_s).1f s: %(reason)s (%(task)s)"
    fence: int = 0
    reason: str = ""
    cause: str = "expired"
    held_s: float = 0.0


@value(kw_only=True)
class Released(Event):
    """The lease ended with the body, `held_s` after it was taken."""

    name: ClassVar[str] = "released"
    fence: int = 0
    held_s: float = 0.0


@value(kw_only=True)
class Claimed(Event):
    """The ledger granted the work, in `took_s`."""

    name: ClassVar[str] = "claimed"
    fence: int = 0
    attempt: int = 1
    took_s: float = 0.0


@value(kw_only=True)
class Takeover(Event):
    """The lease of the work's last holder had expired. This is attempt `attempt`.

    `holder` and `held_by` name the last holder, as in `Contended`.
    """

    name: ClassVar[str] = "takeover"
    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "%(task)s takes over %(key)s: the lease of %(held_by)s ran out "
        "(attempt %(attempt)s, crash %(crashes)s)"
    )
    fence: int = 0
    attempt: int = 1
    crashes: int = 0
    holder: str = ""
    held_by: str = UNKNOWN_HOLDER


@value(kw_only=True)
class Duplicate(Event):
    """The delivery needed no body.

    Its `reason` is done, superseded, replaced, outdated, revoked, skipped, mismatch or dead. A copy
    of the same message supersedes it. A newer `enqueue()` replaces it. A newer message of its task
    and key makes it outdated. For the user's own row the reason is missing or ineligible.
    """

    name: ClassVar[str] = "duplicate"
    level: ClassVar[int] = logging.INFO
    text: ClassVar[str] = (
        "%(task)s %(key)s answered as a duplicate: %(reason)s (message %(message)s)"
    )
    reason: str = "done"
    age_s: float = 0.0


@value(kw_only=True)
class StillDead(Duplicate):
    """The delivery's work was DEAD before, because `crashes` holders vanished."""

    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "%(task)s %(key)s is DEAD since %(age_s).0f s: %(crashes)s holders vanished "
        "(message %(message)s)"
    )
    reason: str = "dead"
    crashes: int = 0


@value(kw_only=True)
class Deferred(Event):
    """The message was published again with a delay of `delay_s`. Then it was acknowledged.

    `deferrals` is how often the message has been deferred by now.
    """

    name: ClassVar[str] = "deferred"
    level: ClassVar[int] = logging.INFO
    text: ClassVar[str] = (
        "%(task)s %(key)s deferred by %(delay_s).1f s: %(reason)s (message %(message)s)"
    )
    reason: str = ""
    delay_s: float = 0.0
    deferrals: int = 0


@value(kw_only=True)
class Parked(Event):
    """The message was stored in the line of its key in the ledger. Then it was acknowledged."""

    name: ClassVar[str] = "parked"
    text: ClassVar[str] = "%(task)s %(key)s parked (message %(message)s)"


@value(kw_only=True)
class Promoted(Event):
    """The first message of a line was promoted because its key is free."""

    name: ClassVar[str] = "promoted"
    text: ClassVar[str] = "%(task)s %(key)s promoted (message %(message)s)"


@value(kw_only=True)
class Completed(Event):
    """DONE is committed, `held_s` after the claim."""

    name: ClassVar[str] = "completed"
    fence: int = 0
    attempt: int = 1
    held_s: float = 0.0


@value(kw_only=True)
class StaleRefused(Event):
    """The database refused a commit of this holder. Nothing of it was written."""

    name: ClassVar[str] = "stale_refused"
    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "%(task)s %(key)s: stale commit refused (fence %(fence)s, held %(held_s).1f s)"
    )
    fence: int = 0
    attempt: int = 1
    held_s: float = 0.0


@value(kw_only=True)
class Failed(Event):
    """The body raised `error` (its type's name), `held_s` after the claim."""

    name: ClassVar[str] = "failed"
    fence: int = 0
    attempt: int = 1
    error: str = ""
    held_s: float = 0.0


@value(kw_only=True)
class Dead(Event):
    """The work is DEAD: its holders vanished `crashes` times.

    `error` is what the delivery raises. The log record has it as its exception, so that an error
    tracker such as Sentry knows the two for one.
    """

    name: ClassVar[str] = "dead"
    level: ClassVar[int] = logging.ERROR
    text: ClassVar[str] = (
        "%(task)s %(key)s is DEAD: %(crashes)s holders vanished; it is not run any more"
    )
    crashes: int = 0
    error: Exception | None = None


@value(kw_only=True)
class LockUnavailable(Event):
    """The lock server gave no answer within `took_s` seconds."""

    name: ClassVar[str] = "lock_unavailable"
    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "lock server gave no answer (%(error)s); the ledger alone decides on %(key)s"
    )
    error: str = ""
    took_s: float = 0.0


@value(kw_only=True)
class LockUndecided(LockUnavailable):
    """The lock server gave no answer, and there is no ledger: the lock was not taken."""

    text: ClassVar[str] = "lock server gave no answer (%(error)s); %(key)s was not taken"


@value(kw_only=True)
class LockOverruled(Event):
    """The lock server has a value that is no lease, or outlives every lease; the value stays.

    The ledger knew no live holder, and granted the key. If the value is a lease, `holder` is a
    message's id. The value ends after `remaining_s`, which is a day if it never ends.
    """

    name: ClassVar[str] = "lock_overruled"
    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "%(key)s has a value at the lock server that is no lease, or outlives every lease "
        "(%(remaining_s).0f s left). Another application wrote it, or a clock was set back. The "
        "ledger alone decides"
    )
    holder: str = ""
    remaining_s: float = 0.0


@value(kw_only=True)
class DoneElsewhere(Event):
    """A message that was delivered before has done `other`, another work of the same task.

    Now it does `work`, so its effect happens twice unless the body prevents that. The usual cause
    is a guard whose key, once_per or namespace was changed without `formerly=`.
    """

    name: ClassVar[str] = "done_elsewhere"
    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "%(task)s %(key)s: message %(message)s has done %(other)s before, and now does %(work)s. "
        "If the guard of this task was changed, say what it was by formerly="
    )
    other: str = ""


@value(kw_only=True)
class Delivered(Event):
    """A delivery has ended. Each delivery has exactly one such event, and one `outcome`.

    `waited_s` is the time from the publication of its message to its claim. Without a time of
    publication, it begins with the delivery. `held_s` is the time from the claim to the end. If the
    delivery did not get its key, these are 0.0, and so are `attempt` and `fence`.
    """

    name: ClassVar[str] = "delivered"
    text: ClassVar[str] = "%(task)s %(key)s ended: %(outcome)s"
    outcome: Ended = Ended.DONE
    waited_s: float = 0.0
    held_s: float = 0.0
    attempt: int = 0
    fence: int = 0


Listener = Callable[[Event], None]


def log_event(event: Event) -> None:
    """Write an event as one line to the logger `taskguard`. This is the default listener."""
    if logger.isEnabledFor(event.level):
        values = with_shown_ids({each.name: getattr(event, each.name) for each in fields(event)})
        values["name"] = event.name
        error = values.pop("error", None) if isinstance(event, Dead) else None
        logger.log(event.level, event.text, shown(values), exc_info=error, extra=fields_of(values))


def _hears_all(_level: int) -> bool:
    return True


class Events:
    """The listeners of one process or one `TaskGuard`.

    Attributes:
        hears: whether an event of this level reaches a listener. If not, it need not be made.
    """

    hears: Callable[[int], bool]

    def __init__(self, *listeners: Listener) -> None:
        self._complained: set[tuple[int, str]] = set()
        self._tell(listeners or (log_event,))

    def _tell(self, listeners: tuple[Listener, ...]) -> None:
        """Use these listeners from now on."""
        self._listeners = listeners
        by_log_alone = all(listener is log_event for listener in listeners)
        self.hears = logger.isEnabledFor if by_log_alone else _hears_all

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Add a listener. Return a function that removes it."""
        self._tell((*self._listeners, listener))

        def stop() -> None:
            self._tell(tuple(each for each in self._listeners if each is not listener))

        return stop

    def about(self, delivery: Delivery, kind: type[Event], **values: Any) -> None:
        """Emit an event of a delivery, unless no listener hears its level."""
        if self.hears(kind.level):
            values.setdefault("work", delivery.work or "")
            message = delivery.message.id
            self.emit(kind(key=delivery.key, task=delivery.task, message=message, **values))

    def emit(self, event: Event) -> None:
        """Call every listener. Log a listener that raises once for each kind of event."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                complaint = (id(listener), event.name)
                if complaint not in self._complained:
                    self._complained.add(complaint)
                    logger.exception("listener %r failed on %s", listener, event.name)
