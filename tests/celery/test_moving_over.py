"""celery-once, celery-singleton and `once_per="run"`, over the same messages on one real worker.

Each comparison is by library: whether it sends a message, and which bodies run. The page
`docs/how-to/moving-over.md` describes the differences.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.celery_shop import Shop
from support.needs import missing
from support.waiting import patience_s, wait_until
from taskguard.errors import WorkFailedError
from taskguard_celery import enqueue, runtime_of, sweep

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("short_leases")]

OLD = ("celery-once", "celery-singleton")
ALL = (*OLD, "taskguard")


class Move:
    """A shop whose workers run `support.moved_shop`.

    Attributes:
        shop: its database, broker and workers.
        tasks: the module.
    """

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        sys.modules.pop("support.moved_shop", None)
        self.tasks: Any = importlib.import_module("support.moved_shop")

    def send(self, words: str, go: str = "") -> dict[str, bool]:
        """Send a message by each library. Return which libraries sent it."""
        return {library: self.tasks.is_sent(library, words, go) for library in ALL}

    def wait_for_end(self, *accounts: str, count: int = 1, quiet: bool = True) -> None:
        """Wait until so many bodies of each account have ended. `quiet`: and until the broker has
        no message left."""

        def have_ended() -> bool:
            ended = Counter(step.item for step in self.shop.steps("ended"))
            return all(ended[account] >= count for account in accounts)

        wait_until(have_ended, message=f"{count} ended of each of {accounts}")
        if quiet:
            self.shop.wait_for_quiet()

    def most_at_once(self) -> dict[str, int]:
        """Return the highest number of bodies that ran at the same time, by account."""
        steps = [(step.at_s, step.item, 1) for step in self.shop.steps("began")]
        steps += [(step.at_s, step.item, -1) for step in self.shop.steps("ended")]
        at_work, most = Counter[str](), Counter[str]()
        for _, account, change in sorted(steps):
            at_work[account] += change
            most[account] = max(most[account], at_work[account])
        return dict(most)


@pytest.fixture
def move(make_shop: Callable[..., Shop]) -> Iterator[Move]:
    for package in ("celery_once", "celery_singleton"):
        missing(None if importlib.util.find_spec(package) else f"{package} is not installed")
    made = Move(make_shop(SHOP_APP="support.moved_shop"))
    yield made
    made.tasks.close()


def every(answer: bool) -> dict[str, bool]:
    return dict.fromkeys(ALL, answer)


def effects(words: dict[str, tuple[str, ...]]) -> Counter[str]:
    return Counter(f"{account} {each}" for account, listed in words.items() for each in listed)


def test_a_message_is_refused_while_another_one_waits(move: Move) -> None:
    """While a message waits in the broker, each library refuses a second one, and one body runs."""
    assert move.send("first") == every(True)
    assert move.send("second") == every(False)
    with move.shop.worker():
        move.wait_for_end(*ALL)
    assert move.shop.effects() == effects(dict.fromkeys(ALL, ("first",)))


def test_a_message_is_refused_while_another_one_runs(move: Move) -> None:
    """While a body runs, each library refuses a second message. With `duplicate="attach"`, the
    caller gets the first message's result, as with a Singleton that does not raise."""
    tasks = move.tasks
    tasks.singleton.raise_on_duplicate = None
    with move.shop.worker(concurrency=3):
        first = enqueue(tasks.run, ("taskguard", "first", "go"), duplicate="raise").result
        single = tasks.singleton.delay("celery-singleton", "first", "go")
        assert tasks.is_sent("celery-once", "first", "go")
        move.shop.wait_for_steps("began", 3)
        attached = enqueue(tasks.run, ("taskguard", "second"), duplicate="attach")
        assert attached.result.id == first.id
        assert tasks.singleton.delay("celery-singleton", "second").id == single.id
        assert not tasks.is_sent("celery-once", "second")
        assert not tasks.is_sent("taskguard", "second")
        move.shop.let_go()
        assert attached.result.get(timeout=patience_s()) == "first"
        move.wait_for_end(*ALL)
    assert move.shop.effects() == effects(dict.fromkeys(ALL, ("first",)))


def test_a_message_that_is_sent_after_the_end_runs(move: Move) -> None:
    """After the end, each library sends and runs the next message."""
    with move.shop.worker():
        for count, words in enumerate(("first", "second"), start=1):
            assert move.send(words) == every(True)
            move.wait_for_end(*ALL, count=count)
    assert move.shop.effects() == effects(dict.fromkeys(ALL, ("first", "second")))


def test_a_message_that_is_sent_after_a_failure_runs(move: Move) -> None:
    """After a failure, each library sends and runs the next message. A message that belongs to the
    run that failed does not run: its caller reads WorkFailedError."""
    tasks = move.tasks
    with move.shop.worker(concurrency=3):
        assert all(tasks.is_sent(library, "fails", "go") for library in OLD)
        first = enqueue(tasks.run, ("taskguard", "fails", "go")).result
        move.shop.wait_for_steps("began", 3)
        second = enqueue(tasks.run, ("taskguard", "second")).result
        move.shop.let_go()
        with pytest.raises(ValueError, match="taskguard"):
            first.get(timeout=patience_s())
        with pytest.raises(WorkFailedError, match="ValueError: taskguard"):
            second.get(timeout=patience_s())
        move.wait_for_end(*ALL)
        assert move.send("third") == every(True)
        move.wait_for_end(*ALL, count=2)
    assert move.shop.effects() == effects(dict.fromkeys(ALL, ("third",)))


def test_what_delay_sent_before_the_end_starts_the_next_run(move: Move) -> None:
    """`delay()` of a guarded task does not look in the ledger. So a copy that is in the broker
    when the run ends starts the next run. It does not run at the same time."""
    for words in ("first", "second"):
        move.tasks.run.delay("taskguard", words)
    with move.shop.worker(concurrency=1):
        move.wait_for_end("taskguard", count=2)
    assert move.shop.effects() == effects({"taskguard": ("first", "second")})
    assert move.most_at_once() == {"taskguard": 1}


def test_the_newest_arguments_run_after_those_that_run(move: Move) -> None:
    """If the arguments change while a body runs, both old libraries lose the change. If celery-once
    unlocks before the body, both bodies run at the same time. With `duplicate="replace"` the newest
    arguments run next."""
    tasks = move.tasks
    with move.shop.worker(concurrency=5):
        assert move.send("old", "go") == every(True)
        tasks.unlocked_once.delay("unlocked", "old", "go")
        move.shop.wait_for_steps("began", 4)
        tasks.unlocked_once.delay("unlocked", "new", "go")
        move.shop.wait_for_steps("began", 5)
        for words in ("new", "newest"):
            last = enqueue(tasks.run, ("taskguard", words), duplicate="replace")
            assert not any(tasks.is_sent(library, words) for library in OLD)
        move.shop.let_go()
        assert last.result.get(timeout=patience_s()) == "newest"
        move.wait_for_end(*OLD)
        move.wait_for_end("unlocked", count=2)
    ran = {**dict.fromkeys(OLD, ("old",)), "unlocked": ("old", "new")}
    assert move.shop.effects() == effects({**ran, "taskguard": ("old", "newest")})
    assert move.most_at_once() == {**dict.fromkeys(ALL, 1), "unlocked": 2}


def test_after_a_kill_a_lock_stays_and_a_run_goes_on(move: Move) -> None:
    """If a worker is killed, both old libraries refuse messages until their lock expires: after an
    hour, or never. A guard's run is continued when its lease has ended: a new message does it, and
    a sweep if the run has a stored call."""
    shop, tasks = move.shop, move.tasks
    with shop.worker(concurrency=4) as worker:
        assert move.send("first", "never") == every(True)
        tasks.run.delay("by delay()", "first", "never")
        shop.wait_for_steps("began", 4)
        worker.kill()
    with shop.worker():
        wait_until(lambda: sweep(tasks.app).sent, takes_s=3, message="the stored call is overdue")
        enqueue(tasks.run, ("by delay()", "second"), duplicate="raise")
        shop.let_go("never")
        move.wait_for_end("taskguard", "by delay()", quiet=False)
        wait_until(lambda: tasks.is_sent("taskguard", "third"), message="the end is committed")
        move.wait_for_end("taskguard", count=2, quiet=False)
        assert not any(tasks.is_sent(library, "third") for library in OLD)
    assert 3000 < tasks.lock_ttl_s("celery-once") <= 3600
    assert tasks.lock_ttl_s("celery-singleton") == -1


def test_a_task_that_retries_itself(move: Move) -> None:
    """celery-once sends a retry without its lock. A Singleton's own lock refuses the retry. So that
    is lost, and the lock stays. A guard's retry is the next attempt of its run."""
    tasks = move.tasks
    with move.shop.worker():
        for send, account in zip(
            (tasks.retried_once, tasks.retried_singleton, tasks.retried_run), ALL, strict=True
        ):
            send.delay(account)
        move.wait_for_end("celery-once", "taskguard")
    began = Counter(step.item for step in move.shop.steps("began"))
    assert began == {"celery-once": 2, "celery-singleton": 1, "taskguard": 2}
    assert tasks.lock_ttl_s("celery-once") == -2
    assert tasks.lock_ttl_s("celery-singleton") == -1


def test_a_message_that_is_delivered_twice(move: Move) -> None:
    """Both old libraries look when a message is sent. If the broker delivers it twice, both
    deliveries run, at the same time. A guard lets one of them run."""
    for name, account in zip(("once", "singleton", "run"), ALL, strict=True):
        move.tasks.app.send_task(f"moved.{name}", (account, "first", "go"))
    with move.shop.broker() as broker:
        queue = move.tasks.app.conf.task_default_queue
        for message in broker.lrange(queue, 0, -1):
            broker.lpush(queue, message)
    with move.shop.worker(concurrency=6):
        move.shop.wait_for_steps("began", 5)
        move.shop.let_go()
        move.wait_for_end(*ALL)
    twice = dict.fromkeys(OLD, ("first", "first"))
    assert move.shop.effects() == effects({**twice, "taskguard": ("first",)})
    assert move.most_at_once() == {**dict.fromkeys(OLD, 2), "taskguard": 1}


def test_a_body_that_takes_longer_than_the_lock(move: Move) -> None:
    """A lock with an expiry ends while the body runs, and a second body runs at the same time. A
    guard renews its lease."""
    tasks, accounts = move.tasks, dict.fromkeys(ALL, "first")
    once = tasks.once.apply_async, {"once": {"timeout": 1}}
    single = tasks.brief_singleton.apply_async, {}
    with move.shop.worker(concurrency=6):
        for (send, options), account in zip((once, single), OLD, strict=True):
            send((account, "first", "go"), **options)
        assert tasks.is_sent("taskguard", "first", "go")
        move.shop.wait_for_steps("began", 3)

        def is_free(library: str) -> bool:
            return tasks.lock_ttl_s(library) == -2

        wait_until(lambda: all(map(is_free, OLD)), takes_s=1, message="both locks expire")
        for (send, options), account in zip((once, single), OLD, strict=True):
            send((account, "second", "go"), **options)
        assert not tasks.is_sent("taskguard", "second", "go")
        move.shop.wait_for_steps("began", 5)
        move.shop.let_go()
        move.wait_for_end(*accounts)
    assert move.most_at_once() == {**dict.fromkeys(OLD, 2), "taskguard": 1}


@pytest.mark.parametrize("name", ["guarded_once", "guarded_singleton"])
def test_a_guard_in_addition_to_the_old_library(move: Move, name: str) -> None:
    """A deploy may add the guard first. If the key is taken, the message is deferred, although the
    library still has its lock. After the end the library sends the next message."""
    task = getattr(move.tasks, name)
    with move.shop.worker():
        with runtime_of(move.tasks.app).lock("account:7"):
            task.delay("7", "first")
            wait_until(lambda: " deferred" in move.shop.logs(), message="it is deferred")
            with pytest.raises(move.tasks.DUPLICATES):
                task.delay("7", "second")
        move.wait_for_end("7")
        task.delay("7", "third")
        move.wait_for_end("7", count=2)
    assert move.shop.effects() == effects({"7": ("first", "third")})
