"""`celery -A shop beat --scheduler taskguard_celery.LeaderScheduler`: of several beats, one sends.

The inner scheduler is Celery's own, or the one that the setting `taskguard_beat_scheduler` names
(`django_celery_beat.schedulers:DatabaseScheduler`). Each term of this beat as the leader creates a
new one. A thread campaigns for leadership, so beat itself waits for no server except the broker.

Guarantees: a beat sends only while it holds the leader's lease. If the leader dies, another beat
takes over within `taskguard_beat_ttl_s` and a second. If the leader is stopped, or notices that its
broker gives no answer, another beat takes over at once. A lost lease, or a server that is down,
neither ends the process nor raises in beat. SIGTERM ends it at any time.

After each message, the ledger records when each entry was last sent. So a new leader sends each
entry that became due without a leader once, and sends no message a second time. If a row of
django-celery-beat was changed after that record, the row counts.

Not guaranteed: a tick can be sent twice. A beat that was frozen while it sent a message sends it
when it wakes up. If a beat ends between a message and its record, the next leader sends that
message again. Tasks with `once_per="tick"` still run once. Without a ledger, nothing is recorded:
each new leader knows only what it sent itself.

Read next: `ticks.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from datetime import UTC, datetime
from typing import Any

from celery.beat import PersistentScheduler, Scheduler
from celery.utils.imports import load_extension_class_names, symbol_by_name

from taskguard import Leadership, errors
from taskguard_celery.runtime import runtime_of
from taskguard_celery.ticks import name_ticks

__all__ = ["LeaderScheduler"]

logger = logging.getLogger("taskguard")

_NAME = "beat"
_TTL_S = 15.0
# Interval at which a beat checks whether it leads, in seconds.
_LOOK_S = 1.0
_LONGEST_END_S = 3.0
# Timeout for a connection to the broker, in seconds.
_CONNECT_S = 4.0


class LeaderScheduler(Scheduler):  # type: ignore[misc]  # Celery has no types
    """A scheduler for Celery beat that sends only while this process leads.

    `taskguard_beat_ttl_s` is the length of the leader's lease in seconds, 15 by default.
    `taskguard_beat_scheduler` names the inner scheduler, by default Celery's own.
    """

    def __init__(self, app: Any, *args: Any, lazy: bool = False, **options: Any) -> None:
        self._options = options
        self._kind = _kind_of(app)
        self._term = _Term()
        self._rests_until_s = 0.0
        self._leading = threading.Event()
        self._leadership: Leadership | None = None
        self._thread: threading.Thread | None = None
        self._tries_since_s: float | None = None
        self._broker_is_away = False
        self._closed = False
        # The first tick creates it. If beat gets a signal before that, its handler creates a second
        # scheduler while the first is being created. Neither must hold a resource then.
        self._leader: Any = None
        self._ttl_s = float(app.conf.get("taskguard_beat_ttl_s", _TTL_S))
        super().__init__(app, *args, lazy=lazy, **options)

    def _candidate(self) -> Any:
        """Return the candidate for leadership. Raises ConfigurationError, which ends beat."""
        runtime = runtime_of(self.app)
        if runtime.ledger is None:
            logger.warning(
                "beat has locks only: no ledger records what the last leader sent, so a new leader "
                "can send messages again. Set a ledger (taskguard_ledger_url)."
            )
        return runtime.leader(_NAME, ttl_s=self._ttl_s, on_lost="fence")

    def setup_schedule(self) -> None:
        """Do nothing: the inner scheduler has the schedule."""

    @property
    def info(self) -> str:
        """The line about the inner scheduler in beat's banner."""
        return f"    . inside -> {self._kind.__module__}.{self._kind.__qualname__}"

    # -- beat's loop, in the main thread

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send due entries if this beat leads. Return the seconds until the next call."""
        self._end_if_closed()
        self._tries_since_s = time.monotonic()
        try:
            if self._thread is None:
                self._leader = self._candidate()
                self._thread = threading.Thread(target=self._campaign, name="leader", daemon=True)
                self._thread.start()
            return self._tick(*args, **kwargs)
        finally:
            self._tries_since_s = None
            self._end_if_closed()

    def _end_if_closed(self) -> None:
        """Raise SystemExit again: the code that a signal interrupted may have suppressed it."""
        if self._closed:
            raise SystemExit(0)

    def _tick(self, *args: Any, **kwargs: Any) -> float:
        leadership = self._leadership
        if leadership is None or not leadership.remaining_s:
            self._term.end(lost=True)
            self._leading.wait(_LOOK_S)
            return 0.0
        try:
            if self._term.of is not leadership:
                self._term.end(lost=True)
                self._term = _Term.begin(leadership, self._kind, self.app, self._options)
                self._rests_until_s = 0.0
            rest_s = self._rests_until_s - time.monotonic()
            if rest_s <= 0.0:
                rest_s = self._term.tick(*args, **kwargs)
                self._rests_until_s = time.monotonic() + rest_s
        except Exception as error:  # noqa: BLE001  # the transport and the schedule raise anything
            self._give_up(leadership, error)
            return 0.0
        return min(rest_s, _LOOK_S)

    def _give_up(self, leadership: Leadership, error: Exception) -> None:
        """Step down, so that a beat that can send becomes the leader."""
        logger.warning("beat: this process cannot send, so it steps down: %r", error)
        self._broker_is_away = True
        self._term.end(lost=True)
        leadership.step_down()

    def should_sync(self) -> bool:
        """Return False: the inner scheduler syncs after each message."""
        return False

    def close(self) -> None:
        """Step down and end. A signal handler calls this, so it neither raises nor waits long."""
        self._closed = True
        if self._tries_since_s is not None:
            return  # a signal interrupted the inner scheduler; beat closes once more
        self._term.end(lost=self._leadership is None)
        if self._leader is not None:
            with contextlib.suppress(Exception):
                self._leader.step_down()
        if self._thread is not None and self._thread.is_alive():  # not before its start
            self._thread.join(_LONGEST_END_S)

    # -- leadership, in its own thread

    def _campaign(self) -> None:
        """Campaign for leadership, and lead when elected, until beat ends."""
        while not self._closed:
            try:
                if not self._broker_is_away or self._broker_answers():
                    self._broker_is_away = False
                    self._leader.run(self._lead)
            except Exception:
                logger.exception("beat: the campaign for leadership failed, and goes on")
                time.sleep(_LOOK_S)

    def _broker_answers(self) -> bool:
        with self.app.connection_for_write(connect_timeout=_CONNECT_S) as connection:
            try:
                connection.connect()
            except Exception as error:  # noqa: BLE001  # the transport can raise anything
                logger.debug("beat: the broker gave no answer: %r", error)
                time.sleep(_LOOK_S)
                return False
        return True

    def _lead(self, leadership: Leadership) -> None:
        """Lead until the lease ends, and step down if the main thread hangs."""
        self._leadership = leadership
        self._leading.set()
        try:
            while not leadership.lost.wait(_LOOK_S):
                since_s = self._tries_since_s
                if since_s is not None and time.monotonic() - since_s > self._ttl_s:
                    logger.warning(
                        "beat: this process has tried to send for %.0f s, so it steps down",
                        time.monotonic() - since_s,
                    )
                    self._broker_is_away = True
                    leadership.step_down()
        finally:
            self._leading.clear()
            self._leadership = None


class _Term:
    """The inner scheduler of one term.

    Attributes:
        of: the leadership of the term, or None if there is no scheduler.
    """

    def __init__(self, of: Leadership | None = None, inner: Any = None) -> None:
        self.of = of
        self._inner = inner
        self._sent: dict[str, str] = {}
        self._unrecorded = False
        self._failed: Exception | None = None

    @classmethod
    def begin(cls, of: Leadership, kind: Any, app: Any, options: dict[str, Any]) -> _Term:
        """Create a scheduler that knows when earlier leaders sent its entries."""
        began = datetime.now(UTC)
        inner = kind(app=app, **options)
        made = cls(of, inner)
        # Sync after each task: a late write would overwrite the writes of a later leader.
        inner.sync_every_tasks = 1
        name_ticks(inner)
        recorded: dict[str, str] = of.memory or {}
        for name, entry in inner.schedule.items():
            moment = datetime.fromisoformat(recorded[name]) if name in recorded else None
            if moment is not None and not _row_is_newer(entry, moment, began):
                _set_last_run(entry, moment)
            made._sent[name] = _last_run_of(entry).isoformat()
        made._watch(inner)
        # The next leader needs a record even if this term sends nothing.
        made._unrecorded = True
        made._record()
        return made

    def _watch(self, inner: Any) -> None:
        reserve, apply_async = inner.reserve, inner.apply_async
        reserved: dict[str, str] = {}

        def noted_reserve(entry: Any) -> Any:
            following = reserve(entry)
            reserved[entry.name] = _last_run_of(following).isoformat()
            return following

        def watched_apply_async(entry: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = apply_async(entry, *args, **kwargs)
            except Exception as error:
                self._failed = error  # beat logs it, and would go on to the next entry
                raise
            if entry.name in reserved:
                self._sent[entry.name] = reserved.pop(entry.name)
                self._unrecorded = True
            return result

        def connect_once() -> Any:
            # Celery itself retries for most of an hour.
            return inner.connection.ensure_connection(max_retries=1, timeout=_CONNECT_S)

        inner.reserve, inner.apply_async = noted_reserve, watched_apply_async
        inner._ensure_connected = connect_once  # noqa: SLF001  # Celery has no setting for it

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send one entry if one is due, and record it. Raises if it could not be sent."""
        rest_s = float(self._inner.tick(*args, **kwargs) or 0.0)
        if self._failed is not None:
            raise self._failed
        self._forget_removed()
        self._record()
        return rest_s

    def _forget_removed(self) -> None:
        """Forget removed entries. An entry that is created later with that name is a new one."""
        for name in self._sent.keys() - self._inner.schedule.keys():
            del self._sent[name]
            self._unrecorded = True

    def _record(self) -> None:
        """Record when each entry was sent. If this fails, the next record contains it."""
        if self.of is None or not self._unrecorded:
            return
        try:
            self.of.remember(self._sent)
            self._unrecorded = False
        except errors.TaskguardError as error:
            logger.warning("beat: the ledger did not record which messages were sent: %s", error)

    def end(self, *, lost: bool) -> None:
        """Close the scheduler without raising. With `lost`, discard its unwritten state."""
        inner, self._inner = self._inner, None
        if inner is None:
            return
        try:
            if lost:
                getattr(inner, "_dirty", set()).clear()  # django-celery-beat's
            else:
                self._record()
            inner.close()
        except Exception:
            logger.exception("beat: its schedule was not closed well")
        self.of = None


def _kind_of(app: Any) -> Any:
    """Return the class of the inner scheduler, from `taskguard_beat_scheduler`."""
    named = app.conf.get("taskguard_beat_scheduler") or PersistentScheduler
    aliases = dict(load_extension_class_names("celery.beat_schedulers"))
    kind = symbol_by_name(named, aliases=aliases)
    if issubclass(kind, LeaderScheduler):
        raise errors.ConfigurationError(
            "taskguard_beat_scheduler names the scheduler inside of LeaderScheduler, for example "
            '"django_celery_beat.schedulers:DatabaseScheduler"; LeaderScheduler itself is what '
            "`celery beat --scheduler` gets."
        )
    return kind


def _last_run_of(entry: Any) -> datetime:
    """When the entry was sent last, in UTC."""
    moment: datetime = entry.schedule.maybe_make_aware(entry.last_run_at)
    return moment.astimezone(UTC)


def _row_is_newer(entry: Any, moment: datetime, began: datetime) -> bool:
    """Whether a row of django-celery-beat's says more than a record of `moment`.

    Beats share the row, and people change it: an entry that was disabled, or made anew under its
    name, must not be sent for a time before that. The scheduler itself fills in a missing
    `last_run_at` and saves the entries of `beat_schedule`. So times since `began` say nothing.
    """
    model = getattr(entry, "model", None)
    if model is None:
        return False  # the record is right, whatever this beat's own file says
    times = [_last_run_of(entry)]
    changed: datetime | None = getattr(model, "date_changed", None)
    if changed is not None:
        times.append(changed.astimezone(UTC))  # without USE_TZ it is in the process's timezone
    known = [each for each in times if each < began]
    if not known:  # never sent, or `last_run_at` was reset since
        return bool(getattr(model, "total_run_count", 0))
    return max(known) >= moment


def _set_last_run(entry: Any, moment: datetime) -> None:
    """Set `moment`, which is in UTC, in the entry's own timezone.

    Celery compares the hours of a crontab with the hour that it finds there, and rounds relative
    intervals in that timezone.
    """
    zone = entry.last_run_at.tzinfo
    if zone is not None and getattr(entry.schedule, "nowfun", None) is None:
        # Celery's own local timezone makes a datetime with the offset of its moment alone.
        zone = getattr(entry.schedule, "tz", zone)
    local = moment.replace(tzinfo=None) if zone is None else moment.astimezone(zone)
    entry.last_run_at = local
    model = getattr(entry, "model", None)  # django-celery-beat's
    if model is not None:
        model.last_run_at = local
