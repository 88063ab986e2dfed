"""A change of leader changes nothing in what beat sends and when, in every time zone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import Scheduler
from celery.schedules import crontab, schedule, solar
from celery.utils.time import timezone as celery_timezone
from hypothesis import given, settings
from hypothesis import strategies as st

from taskguard.integration import tick_name
from taskguard_celery.beat import _Term
from taskguard_celery.ticks import due_at

SENT_FOR = timedelta(hours=42)
A_MOMENT = timedelta(seconds=1)
# In each zone the clocks change soon after one of these. Lord Howe changes by half
# an hour.
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"]
STARTS = [
    datetime(2026, month, day, hour, 3, 20, 250_000, tzinfo=UTC)
    for (month, day), hour in itertools.product(
        [(3, 7), (3, 28), (4, 4), (7, 30), (10, 3), (10, 24), (10, 31)], [1, 13]
    )
]


class Clock:
    """The time of all beats."""

    def __init__(self, now: datetime) -> None:
        self.now = now


class Recorder(Scheduler):
    """Celery's own scheduler, which notes what it would send.

    It asks each entry in each turn: old versions of Celery wait for the wrong entry now and then.
    """

    producer = None
    max_interval = 3600
    sent: list[tuple[str, datetime]]
    ticks: list[str | None]

    def tick(self, *args: Any, **kwargs: Any) -> Any:
        self._heap = None
        return super().tick(*args, **kwargs)

    def apply_async(self, entry: Any, producer: Any = None, **_: Any) -> None:
        moment = entry.schedule.maybe_make_aware(self.schedule[entry.name].last_run_at)
        due = due_at(entry.schedule, moment)
        self.sent.append((entry.name, moment.astimezone(UTC)))
        self.ticks.append(None if due is None else tick_name(entry.name, due))


class Memory:
    """A leadership whose record is a variable of the test."""

    def __init__(self, memory: Any = None) -> None:
        self.memory = memory

    def remember(self, memory: Any) -> None:
        self.memory = dict(memory)


def plans(clock: Clock) -> dict[str, Any]:
    """One schedule of each kind."""

    def in_tokyo() -> datetime:
        return clock.now.astimezone(ZoneInfo("Asia/Tokyo"))

    def without_a_zone() -> datetime:
        return clock.now.replace(tzinfo=None)

    made: dict[str, Any] = {
        "at 8": crontab(hour=8, minute=0),
        "at 2:30 and 9": crontab(hour="2,9", minute=30),
        "often": crontab(minute="10,50", hour="*/4"),
        "of a day": crontab(hour=0, minute=15, day_of_month="1,8,25,29,31"),
        "of a week": crontab(hour=23, minute=45, day_of_week="sun,mon"),
        "of Tokyo": crontab(hour="8,9", minute=0, nowfun=in_tokyo),
        "without a zone": crontab(hour="8,20", minute=0, nowfun=without_a_zone),
        "interval": 20_000.0,
        "interval of Tokyo": schedule(30_000.0, nowfun=in_tokyo),
        "relative hours": schedule(timedelta(hours=5), relative=True),
        "relative days": schedule(timedelta(days=1), relative=True),
        "relative days of Tokyo": schedule(timedelta(days=1), relative=True, nowfun=in_tokyo),
        "relative days without a zone": schedule(
            timedelta(days=1), relative=True, nowfun=without_a_zone
        ),
    }
    if find_spec("ephem"):
        made["sunrise"] = solar("sunrise", 52.5, 13.4)
    return made


def app_of(clock: Clock, **options: Any) -> Celery:
    """An app whose time is the clock's."""

    class ClockedCelery(Celery):
        def now(self) -> datetime:
            return clock.now.astimezone(self.timezone)

    app = ClockedCelery("times", set_as_current=False)
    app.conf.update(result_expires=None, **options)
    app.conf.beat_schedule = {
        name: {"task": "shop.task", "schedule": plan} for name, plan in plans(clock).items()
    }
    return app


def run(term: _Term, clock: Clock, until: datetime) -> None:
    """Beat's loop; a turn takes a moment."""
    while clock.now < until:
        clock.now = min(until, clock.now + timedelta(seconds=max(term.tick(), 0.005)))


def terms(app: Celery, kind: type[Recorder]) -> Iterator[_Term]:
    """One after the other, each with the record of the one before."""
    leadership: Any = Memory()
    while True:
        leadership = Memory(leadership.memory)
        yield _Term.begin(leadership, kind, app, {})


Changes = list[tuple[timedelta, timedelta]]
Sent = list[tuple[str, datetime]]


def sent_by(
    start: datetime, changes: Changes, *, new_leader: bool, **options: Any
) -> type[Recorder]:
    """Send for some time; `changes` says when no beat leads, and for how long."""
    clock = Clock(start)
    kind = type("Journal", (Recorder,), {"sent": [], "ticks": []})
    each_term = terms(app_of(clock, **options), kind)
    term = next(each_term)
    for after, gap in changes:
        run(term, clock, start + after)
        clock.now += gap
        if new_leader:
            term = next(each_term)
    run(term, clock, start + SENT_FOR)
    return kind


def differences(some: Sent, others: Sent) -> set[tuple[str, datetime]]:
    """Return the messages that are in one of them only, up to a moment."""

    def alone(some: Sent, others: Sent) -> set[tuple[str, datetime]]:
        return {
            (name, at)
            for name, at in some
            if not any(name == other and abs(at - then) < A_MOMENT for other, then in others)
        }

    return alone(some, others) | alone(others, some)


seconds = st.integers(0, int(SENT_FOR.total_seconds()))


@given(
    start=st.sampled_from(STARTS),
    zone=st.sampled_from(ZONES),
    utc=st.booleans(),
    changes=st.lists(
        st.tuples(
            seconds.map(lambda s: timedelta(seconds=s)),
            st.sampled_from([0, 0, 5, 3600, 20_000]).map(lambda s: timedelta(seconds=s)),
        ),
        max_size=3,
    ).map(sorted),
)
@settings(deadline=None, max_examples=20)
def test_a_change_of_leader_sends_what_one_beat_sends(
    start: datetime, zone: str, utc: bool, changes: Changes
) -> None:
    """A change of leader neither adds nor drops a message of any kind of schedule, also over
    changes of the clocks."""
    options = {"timezone": zone, "enable_utc": utc}
    alone = sent_by(start, changes, new_leader=False, **options)
    led = sent_by(start, changes, new_leader=True, **options)
    assert not differences(alone.sent, led.sent)
    assert len(alone.sent) == len(led.sent)
    sent = {name for name, _ in alone.sent}
    assert sent >= {"at 8", "of Tokyo", "relative hours", "interval"}
    # Old versions of Celery shorten an interval when the clocks change.
    intervals = ("interval", "relative%20hours")
    named = [tick for tick in led.ticks if tick is not None and not tick.startswith(intervals)]
    assert len(named) == len(set(named))


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's timezone, which Celery caches."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        patch.delitem(vars(celery_timezone), "local", raising=False)
        time.tzset()
        yield
    vars(celery_timezone).pop("local", None)
    time.tzset()


@pytest.mark.usefixtures("in_new_york")
def test_in_the_timezone_of_the_machine() -> None:
    """That also holds in the machine's timezone, with `enable_utc=False`."""
    changes = [(timedelta(hours=20), timedelta(0))]
    alone, led = (
        sent_by(STARTS[-1], changes, new_leader=each, enable_utc=False) for each in (False, True)
    )
    assert not differences(alone.sent, led.sent)
