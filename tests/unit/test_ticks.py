"""Names of ticks: every sender gives a tick the same name, and no sender gives two ticks
one name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab, schedule

from taskguard.integration import interval_due_at, tick_name
from taskguard_celery.ticks import due_at

BERLIN = ZoneInfo("Europe/Berlin")


def app_in(zone: Any) -> Any:
    """Return the part of an app that a schedule uses."""
    return SimpleNamespace(
        timezone=zone, conf=SimpleNamespace(enable_utc=True), now=lambda: datetime.now(zone)
    )


def at(text: str) -> datetime:
    """A moment in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_a_name_says_entry_and_due_time_without_blanks() -> None:
    """A tick's name contains its entry, escaped, and its due time in UTC."""
    due = datetime(2026, 7, 1, 14, 0, tzinfo=BERLIN)
    assert tick_name("clean up{1}", due) == "clean%20up%7B1%7D@2026-07-01T12:00:00Z"
    assert tick_name("a", at("2026-07-01T00:00:00.5")) == "a@2026-07-01T00:00:00.500000Z"


@pytest.mark.parametrize("seconds", [0.1, 1.0, 7.0, 86_400.0])
def test_sends_that_are_an_interval_apart_have_due_times_of_their_own(seconds: float) -> None:
    """Exactly an interval apart, wherever in it they begin; all of one interval have one."""
    every = timedelta(seconds=seconds)
    for share in (0.0, 0.3, 0.999_999):
        first = at("2026-11-23T12:34:56.789012") + every * share
        moments = [first + number * every for number in range(50)]
        dues = [interval_due_at(moment, every) for moment in moments]
        assert dues == [dues[0] + number * every for number in range(50)]
        assert all(due <= moment < due + every for due, moment in zip(dues, moments, strict=True))


@pytest.mark.parametrize(
    ("plan", "moment", "due"),
    [
        ({"minute": 0, "hour": 4}, "2026-11-23T04:00:00.01", "2026-11-23T04:00"),
        ({"minute": 0, "hour": 4}, "2026-11-23T03:59:59.99", "2026-11-22T04:00"),
        ({"minute": "*/15"}, "2026-11-23T00:14:59", "2026-11-23T00:00"),
        ({"minute": 30, "hour": 9, "day_of_week": "mon-fri"}, "2026-11-22T12", "2026-11-20T09:30"),
        ({"minute": 0, "hour": 0, "day_of_month": 31}, "2026-11-23T12:00", "2026-10-31T00:00"),
        (
            {"minute": 5, "hour": 0, "day_of_month": 29, "month_of_year": 2},
            "2027-11-23T12:00",
            "2024-02-29T00:05",
        ),
    ],
)  # fmt: skip
def test_of_a_crontab_the_last_time_that_has_come_is_due(
    plan: dict[str, Any], moment: str, due: str
) -> None:
    """However long ago that is."""
    assert due_at(crontab(**plan, app=app_in(UTC)), at(moment)) == at(due)


def test_a_crontab_goes_by_the_time_zone_of_its_app() -> None:
    """The hour that comes twice in autumn has two ticks; the one that never comes has none."""
    half_past_two = crontab(minute=30, hour=2, app=app_in(BERLIN))
    assert due_at(half_past_two, at("2026-10-25T00:31")) == at("2026-10-25T00:30")
    assert due_at(half_past_two, at("2026-10-25T01:31")) == at("2026-10-25T01:30")
    assert due_at(half_past_two, at("2026-07-01T12:00")) == at("2026-07-01T00:30")


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kolkata", "America/St_Johns"])
@pytest.mark.parametrize(
    "every",
    [{"days": 1}, {"days": 3}, {"hours": 1}, {"hours": 5}, {"minutes": 90}, {"seconds": 90}],
    ids=str,
)
def test_each_time_of_a_relative_interval_is_a_tick(zone: str, every: dict[str, int]) -> None:
    """Celery rounds each time down to the day, hour or minute of its timezone, also after a gap."""
    plan = schedule(timedelta(**every), relative=True, app=app_in(ZoneInfo(zone)))
    for minutes in range(0, 60 * 24 * 3, 321):
        moment = (at("2026-07-01T00:00:07") + timedelta(minutes=minutes)).astimezone(ZoneInfo(zone))
        dues = []
        for _ in range(5):
            dues.append(due_at(plan, moment))
            plan.nowfun = lambda moment=moment: moment
            moment += plan.remaining_estimate(moment)
        assert len(set(dues)) == 5


def test_a_relative_interval_of_one_day_is_due_at_midnight() -> None:
    """Whichever beat sends it, however late."""
    plan = schedule(timedelta(days=1), relative=True, app=app_in(BERLIN))
    for late in ("2026-06-30T22:00", "2026-07-01T05:00", "2026-07-01T21:59"):
        assert due_at(plan, at(late).astimezone(BERLIN)) == at("2026-06-30T22:00")


def test_other_schedules() -> None:
    """A plain interval, a clocked time of django-celery-beat's, and anything else."""
    moment = at("2026-07-01T12:00:59")
    assert due_at(schedule(60.0, app=app_in(UTC)), moment) == at("2026-07-01T12:00")
    assert due_at(SimpleNamespace(clocked_time=moment), at("2026-07-02T00:00")) == moment
    assert due_at(object(), moment) is None
