"""Listeners hear everything and break nothing."""

from __future__ import annotations

import logging
import re

import pytest

from taskguard import events
from taskguard.events import Deferred, Duplicate, Event, Events, Lost, StaleRefused, log_event

NAMES = [
    "acquired",
    "contended",
    "renewed",
    "renewal_failed",
    "lost",
    "released",
    "claimed",
    "takeover",
    "duplicate",
    "deferred",
    "parked",
    "promoted",
    "completed",
    "stale_refused",
    "failed",
    "dead",
    "lock_unavailable",
    "lock_overruled",
    "done_elsewhere",
    "delivered",
]
# The class with slots replaces the one that the decorator got, which stays until it is collected.
KINDS = list({kind.name: kind for kind in Event.__subclasses__()}.values())


def test_there_is_one_class_for_every_event_and_a_row_for_it_in_the_table() -> None:
    """The documentation's table, the classes and the promised names are the same set."""
    classes = {each.name for each in KINDS}
    rows = set(re.findall(r"^\| (\w+) \|", events.__doc__ or "", re.MULTILINE)) - {"event"}
    assert classes == rows == set(NAMES)


def test_the_level_in_the_table_is_the_level_of_the_log() -> None:
    """The levels in the table are those of `log_event`."""
    for kind in KINDS:
        row = re.search(
            rf"^\| {kind.name} \|.*\| (\w+)[^|]*\|$", events.__doc__ or "", re.MULTILINE
        )
        assert row is not None
        assert row[1] == logging.getLevelName(kind.level).lower()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_event_can_be_logged(kind: type[Event], caplog: pytest.LogCaptureFixture) -> None:
    """Its text fits its fields, and a key with a percent sign does no harm."""
    caplog.set_level(logging.DEBUG, logger="taskguard")
    log_event(kind(key="order:100%25", task="shop.ship", message="m1"))
    assert "%(" not in caplog.text


def test_a_log_line_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The id of a message can be anything. It forges no line and controls no terminal."""
    caplog.set_level(logging.INFO, logger="taskguard")
    log_event(Duplicate(key="order:7", message="m\nFORGED\x1b[2J\u202e", task="shop.ship"))
    assert "m\\nFORGED\\x1b[2J\\u202e" in caplog.text
    assert not set(caplog.text[:-1]) & set("\n\x1b\u202e")


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (Duplicate(key="k"), "INFO"),
        (Deferred(key="k"), "INFO"),
        (Lost(key="k"), "WARNING"),
        (StaleRefused(key="k"), "WARNING"),
    ],
)
def test_the_default_listener_logs(
    event: Event, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Duplicates and deferrals at INFO, lost leases and stale commits at WARNING."""
    caplog.set_level(logging.DEBUG, logger="taskguard")
    Events().emit(event)
    assert [record.levelname for record in caplog.records] == [level]


def test_a_listener_that_raises_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The others hear the event; the error is logged once per kind of event."""
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("listener")

    listeners = Events(broken, heard.append)
    for _ in range(3):
        listeners.emit(Lost(key="k"))
    assert len(heard) == 3
    assert len(caplog.records) == 1


def test_a_listener_can_be_taken_away() -> None:
    """The function that `listen` returns removes the listener."""
    heard: list[Event] = []
    listeners = Events(lambda event: None)
    stop = listeners.listen(heard.append)
    listeners.emit(Lost(key="k"))
    stop()
    listeners.emit(Lost(key="k"))
    assert len(heard) == 1
