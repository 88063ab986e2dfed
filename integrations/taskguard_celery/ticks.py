"""Name the tick of each message that beat sends: the schedule's entry and its due time.

Beat needs no change. If its process imports this package, taskguard wraps the scheduler's `reserve`
and `apply_async`, and the message gets a mark when it is published (`marks.py`). This works for all
schedulers that use these methods: Celery's, django-celery-beat's, RedBeat's.

Guarantees: for a crontab and a clocked time, the due time is the last one of the schedule before
the entry was sent. It does not depend on the beats' `last_run_at`. For an interval, it is the last
multiple of the interval since 1970, in the schedule's timezone if the interval is relative. Two
messages of one beat never get the same due time. If a tick cannot be named, beat sends its message
without a name.

Messages of other kinds of schedules, such as Celery's `solar`, get no name. So each of them is work
of its own.
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
# 29 February repeats after at most eight years, and on one day of the week after at most 40.
_MOST_DAYS = 366 * 41
# Celery rounds the times of a relative interval down to one of these units.
_UNITS = (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1))

# The entry that is being sent, and when beat last reserved each entry.
_Sending = tuple[Any, dict[str, datetime]]
_sending: ContextVar[_Sending | None] = ContextVar("taskguard_sending", default=None)


def name_ticks(scheduler: Any) -> None:
    """Make the messages of this scheduler carry the names of their ticks."""
    if getattr(scheduler, _NAMED, False):
        return
    setattr(scheduler, _NAMED, True)
    reserve, apply_async = scheduler.reserve, scheduler.apply_async
    reserved: dict[str, datetime] = {}

    def noted_reserve(entry: Any) -> Any:
        # Beat counts the next interval from this time, so two of them are an interval apart.
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
    """Return the name of the tick for which a message of this task is being sent, or ""."""
    sending = _sending.get()
    if sending is None or task != sending[0].task:
        return ""
    entry, reserved = sending
    try:
        moment = reserved.pop(entry.name, None) or entry.schedule.now()
        due = due_at(entry.schedule, entry.schedule.maybe_make_aware(moment))
        return "" if due is None else tick_name(entry.name, due)
    except Exception:
        # Send the entry despite any error, as beat would without taskguard.
        logger.exception("%s: its tick has no name, so it counts as a message", entry.name)
        return ""


def due_at(plan: Any, moment: datetime) -> datetime | None:
    """Return the last due time of a schedule at this moment, or None for other schedules."""
    if isinstance(plan, crontab):
        return _crontab_due_at(plan, moment)
    if isinstance(plan, schedule):
        return _interval_due_at(plan, moment) if plan.run_every else None
    clocked: datetime | None = getattr(plan, "clocked_time", None)
    return clocked


def _interval_due_at(plan: schedule, moment: datetime) -> datetime:
    """Return the last multiple of the interval. A relative one starts with a local day or hour.

    Celery rounds each time of a relative interval down to the start of such a unit. So two due
    times may be closer together than the interval.
    """
    every: timedelta = plan.run_every
    unit = next((each for each in _UNITS if each <= every), None) if plan.relative else None
    if unit is None:
        return interval_due_at(moment, every)
    offset = (moment.utcoffset() or timedelta()) % unit
    return interval_due_at(moment.astimezone(UTC) + offset, every // unit * unit) - offset


def _crontab_due_at(plan: crontab, moment: datetime) -> datetime | None:
    """Return the last due time of the crontab at `moment`, on that day or an earlier one."""
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
    # When clocks go back, each time of one hour occurs twice. In UTC these are two times.
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
