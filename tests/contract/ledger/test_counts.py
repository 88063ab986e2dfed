"""Counts and happenings, in each database: numbers are added once, in minutes and in total."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import sqlalchemy as sa
from contract.ledger.conftest import Book

from taskguard.ledger.parts import counts as parts
from taskguard.ledger.tables import COUNTS, HAPPENINGS
from taskguard.metrics import zeros_of_process, zeros_of_task
from taskguard.model.counts import Count, Noted
from taskguard.model.history import Happened

DONE, FAILED = "deliveries/done", "deliveries/failed"


@pytest.fixture(autouse=True)
def in_a_database(book: Book) -> None:
    """The simulation's ledger has no counts. The steps of a claim do not matter for them."""
    if book.kind == "memory" or book.kind.endswith("in steps"):
        pytest.skip("it has no counts of its own")


@pytest.fixture(autouse=True)
def without_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short deadline of a call is not what these tests are about: a machine may be slow."""
    monkeypatch.setattr(parts, "_LONGEST_S", 60.0)
    monkeypatch.setattr(parts, "_LOCK_S", 30.0)


def totals(book: Book) -> dict[tuple[str, str], float]:
    return {(row.task, row.what): row.n for row in book.ledger.counts()}


def test_numbers_are_added_to_the_totals_and_to_the_minute(book: Book) -> None:
    """A second call adds to the rows of the first one. Fractions stay."""
    before = int(time.time() / 60)
    book.ledger.add_counts([Count("b", DONE, 2), Count("a", DONE, 1), Count("a", "wait/sum", 0.25)])
    book.ledger.add_counts([Count("a", DONE, 3), Count("a", "wait/sum", 0.5)])
    assert totals(book) == {("a", DONE): 4, ("a", "wait/sum"): 0.75, ("b", DONE): 2}
    by_minute = book.ledger.counts(since_s=3600.0)
    assert all(before - 1 <= row.minute <= time.time() / 60 + 1 for row in by_minute)
    added: Counter[tuple[str, str]] = Counter()
    for row in by_minute:
        added[row.task, row.what] += row.n  # type: ignore[assignment]  # a minute may have ended
    assert dict(added) == totals(book)


def test_minutes_before_the_time_that_is_asked_for_are_left_out(book: Book) -> None:
    """The totals have them still."""
    book.ledger.add_counts([Count("a", DONE, 1)])
    with book.engine.begin() as db:
        db.execute(sa.update(COUNTS).where(COUNTS.c.bucket > 0).values(bucket=COUNTS.c.bucket - 90))
    book.ledger.add_counts([Count("a", DONE, 10)])
    assert [row.n for row in book.ledger.counts(since_s=3600.0)] == [10]
    assert totals(book) == {("a", DONE): 11}


def test_counters_of_a_task_begin_at_zero_once(book: Book) -> None:
    """So that a monitoring system sees the first failure as an increase."""
    book.ledger.add_counts([Count("a", FAILED, 2)])
    book.ledger.begin_counts(["a", "b"])
    book.ledger.begin_counts(["b"])
    found = totals(book)
    assert found.pop(("a", FAILED)) == 2
    assert set(found.values()) == {0}
    of_tasks = {(task, what) for task in "ab" for what in zeros_of_task()} - {("a", FAILED)}
    assert found.keys() == of_tasks | {("", what) for what in zeros_of_process()}


def test_happenings_are_added_with_the_time_of_the_database(book: Book) -> None:
    """Texts are cut, and stored with escapes if the database lacks a character."""
    before_us = time.time() * 1e6
    book.ledger.note_happenings(
        [
            Noted(what=Happened.DUPLICATE, n=3, key="order:1", task="ship", work="ship order:1"),
            Noted(what=Happened.LEASE_LOST, key="order:2", owner="x/m", fence=7, detail="e" * 999),
        ]
    )
    with book.engine.connect() as db:
        first, second = db.execute(sa.select(HAPPENINGS).order_by(HAPPENINGS.c.key)).all()
    assert abs(first.at - before_us) < 60e6
    assert (first.what, first.n, first.work, first.fence) == ("duplicate", 3, "ship order:1", None)
    assert (second.owner, second.fence, second.n, len(second.detail)) == ("x/m", 7, 1, 500)


def test_an_error_before_the_commit_adds_nothing(book: Book) -> None:
    """Not even to the totals, if the happenings cannot be stored."""

    def interrupted() -> None:
        raise TimeoutError

    rows = [Count("a", DONE, 1)]
    happened = [Noted(what=Happened.DUPLICATE, key="k")]
    with pytest.raises(TimeoutError):
        book.ledger.add_counts(rows, happened=happened, committing=interrupted)
    assert totals(book) == {}
    book.ledger.add_counts(rows, happened=happened)
    assert totals(book) == {("a", DONE): 1}


def test_many_rows_are_added(book: Book) -> None:
    """More than one statement of SQLite can have."""
    rows = [Count(f"task{number}", DONE, 1) for number in range(1_100)]
    book.ledger.add_counts(rows)
    assert len(book.ledger.counts()) == 1_100


def test_processes_add_to_the_same_counters_at_once(book: Book) -> None:
    """No number is lost, and none is added twice. A refused call may be repeated."""
    rows = [Count(task, DONE, 1) for task in "abcdef"]
    refused: list[Exception] = []

    def add(order: int) -> None:
        ledger = book.again()
        for _ in range(5):
            for _ in range(20):
                try:
                    ledger.add_counts(rows[::order])
                    break
                except Exception as error:  # a lock timeout, on SQLite
                    refused.append(error)

    threads = [threading.Thread(target=add, args=(order,)) for order in (1, -1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals(book) == {(task, DONE): 15 for task in "abcdef"}, refused
