"""Chains, groups, chords, links and replacements of guarded tasks, on real workers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.app.task import Context

from support.needs import missing
from support.waiting import patience_s, wait_until
from taskguard_celery.chords import count_once


def test_chain_and_chord_go_on_over_duplicates(shop: Any) -> None:
    """A duplicate of done work returns the stored result to the next step. If the first message of
    a chain is delivered three times, each step runs once."""
    tasks = shop.tasks
    ids = [str(uuid.uuid4()) for _ in range(3)]
    for _ in range(3):
        signatures = tasks.add.s(1, 2), tasks.add.s(4), tasks.add.s(5)
        steps = [each.set(task_id=id_) for each, id_ in zip(signatures, ids, strict=True)]
        chained = chain(steps).apply_async()
    with shop.worker() as worker:
        assert chained.get(timeout=patience_s()) == 12
        header = [tasks.add.s(100 + number, number) for number in range(5)]
        assert chord(header)(tasks.total.s()).get(timeout=patience_s()) == sum(
            100 + 2 * number for number in range(5)
        )
        task_id = str(uuid.uuid4())
        first = tasks.add.apply_async((50, 1), task_id=task_id)
        assert first.get(timeout=patience_s()) == 51
        first.forget()
        assert tasks.add.apply_async((50, 1), task_id=task_id).get(timeout=patience_s()) == 51
        wait_until(lambda: "duplicate: done" in worker.text(), message="an answer")
        shop.wait_for_quiet()
    added = Counter(step.item for step in shop.steps("added"))
    assert [added[item] for item in ("1", "3", "7", "50")] == [1, 1, 1, 1]


def test_a_group_answers_for_every_member(shop: Any) -> None:
    """A group gets a result for each member, also if two members share a key."""
    tasks = shop.tasks
    with shop.worker(concurrency=4):
        result = group(tasks.add.s(x, 1) for x in (1, 2, 2, 3)).apply_async()
        assert result.get(timeout=patience_s()) == [2, 3, 3, 4]
        result = group(tasks.ship.s(order) for order in (7, 7, 8)).apply_async()
        assert [each["order"] for each in result.get(timeout=patience_s())] == [7, 7, 8]
    assert shop.effects() == Counter({"7": 1, "8": 1})


def test_links_are_called_with_the_result_and_with_the_error(shop: Any) -> None:
    """A link gets the result, and an error link is called for a failure."""
    tasks = shop.tasks
    with shop.worker():
        tasks.add.apply_async((30, 1), link=tasks.add.s(1))
        wait_until(
            lambda: [step.item for step in shop.steps("added")] == ["30", "31"],
            message="the linked task",
        )
        failed = tasks.broken.apply_async((5,), link_error=tasks.complain.s())
        (complaint,) = shop.wait_for_steps("complained")
        assert complaint.item == failed.id


def test_a_task_that_replaces_itself_is_answered_by_its_replacement(shop: Any) -> None:
    """The replacement keeps the task id, and is work of its own on the same key."""
    with shop.worker():
        assert shop.tasks.instead.delay(60).get(timeout=patience_s()) == 61
        shop.wait_for_quiet()
    assert len(shop.steps("replaced")) == 1
    assert len(shop.steps("in its place")) == 1


def test_a_shared_task_is_guarded_like_any_other(shop: Any) -> None:
    """A guarded `@shared_task` runs once, and finds its guard by `current_guard()`."""
    with shop.worker():
        results = [shop.tasks.stamp.delay(1) for _ in range(3)]
        assert [result.get(timeout=patience_s()) for result in results] == ["letter:1"] * 3
    assert shop.effects() == Counter({"letter 1": 1})


@pytest.mark.parametrize("backend", ["django-db", "cache+memory://"])
def test_a_member_that_is_delivered_twice_counts_once(tmp_path: Path, backend: str) -> None:
    """A result backend that counts answers counts a redelivered member of a chord once."""
    found = importlib.util.find_spec("django_celery_results")
    missing(None if found else "django-celery-results is not installed: `make setup` installs it")
    ended = subprocess.run(
        [sys.executable, "-m", "support.django_chord", backend, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=patience_s(),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert "6 SUCCESS" in ended.stdout.splitlines(), ended.stderr


def test_a_member_whose_first_answer_is_not_stored_yet_counts_once() -> None:
    """A duplicate counts once even if it comes before Celery has stored the first result."""
    with Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False) as app:

        @app.task(name="add", shared=False)
        def add(x: int) -> int:
            return x

        result = chord([add.s(1), add.s(2)])(add.s())
        member = {"id": result.parent.results[0].id, "group": result.parent.id}
        body = {**add.s(), "chord_size": 2}
        first = threading.Timer(
            0.3, app.backend.mark_as_done, (member["id"], 1, Context(chord=body, **member))
        )
        add.push_request(chord=body, **member)
        first.start()
        count_once(add, answered=True)
        first.join()
        assert add.request.chord is None
        add.pop_request()
