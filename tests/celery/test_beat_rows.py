"""Around django-celery-beat a new leader respects rows that people have changed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from support.django_shop import django_on
from taskguard_celery import guarded_task
from taskguard_celery.beat import _Term
from taskguard_celery.periodic import findings_of_rows

pytest.importorskip("django_celery_beat")

NAME = "entry"
EVERY = timedelta(hours=1)


def ago(**time: float) -> datetime:
    return datetime.now(UTC) - timedelta(**time)


class Leadership:
    """One whose record is a variable of the test."""

    def __init__(self, **memory: datetime) -> None:
        self.memory: Any = {name: moment.isoformat() for name, moment in memory.items()}

    def remember(self, memory: Any) -> None:
        self.memory = dict(memory)


class Rows:
    """The schedule in the database, with an entry that runs each hour."""

    def __init__(self) -> None:
        from django_celery_beat.models import IntervalSchedule, PeriodicTask

        self.all = PeriodicTask.objects
        self.hourly = IntervalSchedule.objects.create(every=1, period="hours")
        self.sent: list[str] = []

    def make(self, *, changed: datetime | None = None, **values: Any) -> Any:
        """The row as it was left at the time `changed`."""
        row = self.all.create(name=NAME, task="shop.task", interval=self.hourly, **values)
        if changed is not None:
            self.all.filter(name=NAME).update(date_changed=changed)
        return row

    def lead(self, leadership: Leadership, **settings: Any) -> Any:
        """A term of a new leader, which sends what is due."""
        from django_celery_beat.schedulers import DatabaseScheduler

        sent = self.sent

        class Recorder(DatabaseScheduler):  # type: ignore[misc]
            producer = None

            def send_task(self, name: str, *args: Any, **kwargs: Any) -> None:
                sent.append(name)

        app = Celery("rows", set_as_current=False)
        app.conf.update(result_expires=None, **settings)
        of: Any = leadership
        term = _Term.begin(of, Recorder, app, {})
        while not term.tick():
            pass
        return term


@pytest.fixture
def rows(sqlite_url: str) -> Iterator[Rows]:
    with django_on(default=sqlite_url):
        yield Rows()


def switch(rows: Rows) -> None:
    row = rows.all.get(name=NAME)
    row.enabled = False
    row.save()
    row.enabled = True
    row.save()


def remake(rows: Rows, **values: Any) -> None:
    rows.all.get(name=NAME).delete()
    rows.make(**values)


def remake_with_a_start(rows: Rows) -> None:
    remake(rows, start_time=ago(minutes=30))


def set_back(rows: Rows) -> None:
    row = rows.all.get(name=NAME)
    row.last_run_at = ago(hours=5)
    row.save()


def change_its_schedule(rows: Rows) -> None:
    from django_celery_beat.models import IntervalSchedule

    row = rows.all.get(name=NAME)
    row.interval = IntervalSchedule.objects.create(every=10, period="minutes")
    row.save()


@pytest.mark.parametrize(
    ("last_run", "change", "sends"),
    [
        (timedelta(hours=3), lambda _: None, 1),
        (timedelta(minutes=30), lambda _: None, 0),
        (timedelta(hours=3), switch, 0),
        (timedelta(hours=3), remake, 0),
        # One beat sends such an entry at once.
        (timedelta(minutes=30), remake_with_a_start, 1),
        (timedelta(minutes=30), set_back, 1),
        (timedelta(minutes=30), change_its_schedule, 1),
    ],
    ids=[
        "due", "not due", "disabled and enabled", "made anew", "made anew with a start",
        "set back", "another interval",
    ],
)  # fmt: skip
def test_a_row_that_people_changed_counts(
    rows: Rows, last_run: timedelta, change: Callable[[Rows], None], sends: int
) -> None:
    """A new leader sends what a single beat would send after the change."""
    moment = datetime.now(UTC) - last_run
    rows.make(changed=moment, last_run_at=moment, total_run_count=5)
    change(rows)
    leadership = Leadership(**{NAME: moment})
    rows.lead(leadership)
    assert len(rows.sent) == sends
    rows.lead(leadership)
    assert len(rows.sent) == sends


def test_an_entry_of_the_settings_that_was_disabled_is_not_sent_for_that_time(rows: Rows) -> None:
    """An entry of the settings that was disabled meanwhile is not sent, although the scheduler
    saves its row at its start."""
    rows.make(changed=ago(hours=3), last_run_at=ago(hours=3), total_run_count=5)
    switch(rows)
    entries = {NAME: {"task": "shop.task", "schedule": EVERY}}
    rows.lead(Leadership(**{NAME: ago(hours=3)}), beat_schedule=entries)
    assert not rows.sent


def test_an_entry_of_the_settings_that_was_never_sent_is_due_when_its_first_time_is_over(
    rows: Rows,
) -> None:
    """The first interval of an entry counts from the first leader that saw it, and not from each
    start."""
    entries = {NAME: {"task": "shop.task", "schedule": EVERY}}
    rows.lead(leadership := Leadership(), beat_schedule=entries)
    assert not rows.sent
    leadership.memory[NAME] = ago(hours=2).isoformat()
    rows.lead(leadership, beat_schedule=entries)
    assert len(rows.sent) == 1


def test_a_message_whose_row_was_not_saved_is_not_sent_again(rows: Rows) -> None:
    """If the database was down when the scheduler saved the row, the leader's record decides."""
    rows.make(changed=ago(hours=3), last_run_at=ago(hours=3), total_run_count=5)
    rows.lead(Leadership(**{NAME: ago(minutes=5)}))
    assert not rows.sent


def test_an_entry_that_runs_once_runs_once(rows: Rows) -> None:
    """A one-off entry runs once, also with a new leader, and is disabled."""
    rows.make(changed=ago(hours=3), last_run_at=ago(hours=3), one_off=True)
    leadership = Leadership(**{NAME: ago(hours=3)})
    rows.lead(leadership)
    assert len(rows.sent) == 1
    leadership.memory[NAME] = ago(hours=2).isoformat()
    rows.all.update(last_run_at=ago(hours=2))
    rows.lead(leadership)
    assert len(rows.sent) == 1
    assert not rows.all.get(name=NAME).enabled


def test_rows_that_run_once_are_found(rows: Rows) -> None:
    """A row whose messages are all the same work is a finding. A disabled or one-off row is
    none."""
    app = Celery("rows", set_as_current=False)

    @app.task(name="shop.task", shared=False)
    @guarded_task(key="orders")
    def task(shop: str = "") -> None: ...

    def found() -> list[str]:
        return [each.where for _, each in findings_of_rows(app)]

    row = rows.make()
    assert found() == [f"beat's entry {NAME}"]
    for values in (
        {"one_off": True},
        {"args": "no JSON"},
        {"args": "5"},
        {"kwargs": "[5]"},
        {"task": "x"},
        {"enabled": False},
    ):
        rows.all.update(**{"one_off": False, "args": '["a"]', "kwargs": "{}", **values})
        assert found() == []
    row.delete()
    assert found() == []


def test_entries_that_left_the_schedule_leave_the_record(rows: Rows) -> None:
    """An entry that left the schedule leaves the record at once."""
    rows.make(changed=ago(hours=3), last_run_at=ago(minutes=3))
    leadership = Leadership(**{NAME: ago(minutes=3), "gone": ago(hours=3)})
    term = rows.lead(leadership)
    assert leadership.memory.keys() == {NAME}
    rows.all.get(name=NAME).delete()
    term.tick()
    assert not leadership.memory
