"""What beat sends says which tick it is: the schedule's entry, and when it was due.

Beat is left as it is: where it runs with this package imported, its scheduler's `reserve` and
`apply_async` are looked at, and the message gets a mark when it is published (`marks.py`). That
holds for all schedulers that send by them: Celery's, django-celery-beat's, RedBeat's.

Guarantees: for a crontab and a clocked time the due time is that of the schedule, whatever the
beats' clocks and `last_run_at` are: the last one that had come when the entry was sent. For an
interval it is the last multiple of the interval since 1970 (of a relative one in its timezone); of
one beat, two sends never get the same one. A beat whose ticks cannot be named sends all the same.

Does not guarantee a name for schedules of other classes, as Celery's `solar`: their messages have
none, so that each is work of its own.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from celery.schedules import crontab, schedule
from celery.signals import beat_init

from taskguard.integration import interval_due_at, tick_name

__all__ = ["due_at", "name_ticks", "take_tick"]

logger = logging.getLogger("taskguard")

_NAMED = "_taskguard_names_ticks"
# The 29th of February comes again after eight years at the latest; with a day of the week, 40.
_MOST_DAYS = 366 * 41
# What Celery rounds the times of a relative interval to.
_UNITS = (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1))

# The entry that is being sent, and when beat reserved each entry last.
_Sending = tuple[Any, dict[str, datetime]]
_sending: ContextVar[_Sending | None] = ContextVar("taskguard_sending", default=None)


def name_ticks(scheduler: Any) -> None:
    """From here on what this scheduler of beat sends carries the name of its tick."""
    if getattr(scheduler, _NAMED, False):
        return
    setattr(scheduler, _NAMED, True)
    reserve, apply_async = scheduler.reserve, scheduler.apply_async
    reserved: dict[str, datetime] = {}

    def noted_reserve(entry: Any) -> Any:
        # The time that beat counts the next interval from: two of these are an interval apart.
        following = reserve(entry)
        reserved[entry.name] = following.last_run_at
        return following

    def named_apply_async(entry: Any, *args: Any, **kwargs: Any) -> Any:
        token = _sending.set((entry, reserved))
        try:
            return apply_async(entry, *args, **kwargs)
        finally:
            _sending.reset(token)

    scheduler.reserve, scheduler.apply_async = noted_reserve, named_apply_async


def take_tick(task: str) -> str:
    """The name of the tick that a message of this task is sent for; "" if it is for none."""
    sending = _sending.get()
    if sending is None or task != sending[0].task:
        return ""
    entry, reserved = sending
    try:
        moment = reserved.pop(entry.name, None) or entry.schedule.now()
        due = due_at(entry.schedule, entry.schedule.maybe_make_aware(moment))
        return "" if due is None else tick_name(entry.name, due)
    except Exception:
        # Whatever is wrong with one entry: it is sent, as it would be without us.
        logger.exception("%s: its tick has no name, so it counts as a message", entry.name)
        return ""


def due_at(plan: Any, moment: datetime) -> datetime | None:
    """When an entry with this schedule was due last, at this moment; None: that cannot be told."""
    if isinstance(plan, crontab):
        return _crontab_due_at(plan, moment)
    if isinstance(plan, schedule):
        return _interval_due_at(plan, moment) if plan.run_every else None
    clocked: datetime | None = getattr(plan, "clocked_time", None)
    return clocked


def _interval_due_at(plan: schedule, moment: datetime) -> datetime:
    """The last multiple of the interval; of a relative one it begins with a local day, hour, …

    Celery rounds each time of a relative interval down to such a beginning, so two of them may be
    closer together than the interval.
    """
    every: timedelta = plan.run_every
    unit = next((each for each in _UNITS if each <= every), None) if plan.relative else None
    if unit is None:
        return interval_due_at(moment, every)
    offset = (moment.utcoffset() or timedelta()) % unit
    return interval_due_at(moment.astimezone(UTC) + offset, every // unit * unit) - offset


def _crontab_due_at(plan: crontab, moment: datetime) -> datetime | None:
    """The last time that the crontab names, at `moment`: its own day, or the next one before it."""
    # The timezone in which Celery itself reads the crontab's hours: `nowfun` may have its own.
    zone = plan.remaining_delta(plan.now())[0].tzinfo
    today = moment.astimezone(zone).date()
    for days in range(_MOST_DAYS):
        due = _last_of_day(plan, today - timedelta(days=days), moment, zone)
        if due is not None:
            return due
    return None


def _last_of_day(plan: crontab, day: date, moment: datetime, zone: Any) -> datetime | None:
    named = (
        day.month in plan.month_of_year
        and day.day in plan.day_of_month
        and day.isoweekday() % 7 in plan.day_of_week
    )
    if not named:
        return None
    # An hour that comes twice has two times of each name; in UTC they are two.
    times = (
        datetime.combine(day, time(hour, minute, fold=fold), zone).astimezone(UTC)
        for hour in plan.hour
        for minute in plan.minute
        for fold in (0, 1)
    )
    return max((each for each in times if each <= moment), default=None)


def _on_beat_init(sender: Any = None, **_: Any) -> None:
    name_ticks(sender.scheduler)


beat_init.connect(_on_beat_init, weak=False)
