"""`order="strict"` for RQ, with real workers: no job goes before one that waits for its retry."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from rq import Retry
from rq.job import Job

from support.invoices import strictly, strictly_under_a_decorator
from support.office import FAIRLY_SHORT_LEASES
from support.waiting import wait_until
from taskguard.ledger.tables import WORK
from taskguard.model.states import State
from taskguard_rq import enqueue


def began(office: Any) -> list[int]:
    """Return the numbers of the bodies in the order in which they began. Consecutive attempts count
    once."""
    numbers = [int(item.split()[1]) for item, _ in office.steps("began")]
    return [n for at, n in enumerate(numbers) if at == 0 or numbers[at - 1] != n]


def places(office: Any) -> list[str]:
    """Return the works that still have a position."""
    with office.engine.connect() as db:
        return list(db.execute(sa.select(WORK.c.id).where(WORK.c.parked.is_not(None))).scalars())


def run_behind(
    office: Any, hows: dict[int, str], *, effects: int, retry: Retry | None = None
) -> Job:
    """The first is at work until three others are parked, with two workers. Answers the first."""
    leases = FAIRLY_SHORT_LEASES if "dies" in str(hows) else {}
    for _ in range(2):
        office.worker(**leases)
    first = office.queue.enqueue(strictly, "a", 0, hows.get(0, ""), retry=retry)
    office.wait_for(lambda: office.steps("began"), "the first")
    for number in (1, 2, 3):
        office.queue.enqueue(strictly, "a", number, hows.get(number, ""), retry=retry)
    wait_until(lambda: len(office.ledger.waiting()) == 3)
    office.let_go()
    office.wait_for(lambda: len(office.effects()) == effects, f"{effects} of them")
    return first


@pytest.mark.parametrize("how", ["fails once", "returns Retry", "dies"])
def test_no_message_goes_before_a_retry(office: Any, how: str) -> None:
    """No job goes before a retry of a body that raised, returned `Retry`, or whose horse was
    killed."""
    run_behind(office, {0: how, 2: how}, retry=Retry(max=2, interval=1), effects=4)
    assert began(office) == [0, 1, 2, 3]
    assert set(office.effects().values()) == {1}
    wait_until(lambda: places(office) == [])


@pytest.mark.usefixtures("producer")
def test_who_was_enqueued_before_goes_first(office: Any) -> None:
    """`enqueue()` gives a position: a job that arrives first waits for those enqueued before it."""
    for number in (1, 2, 3):
        enqueue(office.queue, strictly, ("a", number))
    first, *others = office.queue.job_ids
    office.connection.delete(office.queue.key)
    for job in (*reversed(others), first):
        office.queue.push_job_id(job)
    office.worker()
    office.worker()
    office.wait_for(lambda: len(office.effects()) == 3, "all")
    assert began(office) == [1, 2, 3]
    wait_until(lambda: places(office) == [])


def test_who_asks_too_often(office: Any) -> None:
    """A body that returns more retries than it may has failed for good: the next one goes on."""
    run_behind(office, {0: "always Retry"}, effects=3)
    assert began(office) == [0, 1, 2, 3]
    wait_until(lambda: places(office) == [])


@pytest.mark.parametrize(
    ("kind", "ttl", "said"),
    [
        ("rq.SimpleWorker", None, "was delivered by a stock worker"),
        ("taskguard_rq.GuardedSimpleWorker", 600, "a ttl"),
    ],
    ids=["stock worker", "ttl"],
)
def test_whose_place_could_not_be_kept(office: Any, kind: str, ttl: int | None, said: str) -> None:
    """A stock worker, or a job that RQ may drop, is refused with what to do about it."""
    office.worker(kind)
    job = office.queue.enqueue(strictly, "a", 1, ttl=ttl)
    wait_until(lambda: job.get_status(refresh=True) == "failed")
    assert said in job.latest_result().exc_string
    assert office.effects() == {}
    assert places(office) == []


def test_in_the_worker_itself(office: Any) -> None:
    """A worker without forks keeps the order, too."""
    office.queue.enqueue(strictly, "a", 1, "fails once", retry=Retry(max=1))
    office.queue.enqueue(strictly, "a", 2, "fails")
    office.queue.enqueue(strictly, "a", 3)
    office.worker("taskguard_rq.GuardedSimpleWorker")
    office.wait_for(lambda: len(office.effects()) == 2, "two of them")
    assert began(office) == [1, 2, 3]
    wait_until(lambda: places(office) == [])


def test_a_killed_horse_that_rq_gave_up(office: Any) -> None:
    """After the lease, a relay sends the job again. No other job goes before it."""
    run_behind(office, {0: "dies"}, effects=4)
    assert began(office) == [0, 1, 2, 3]
    wait_until(lambda: places(office) == [])


def test_who_has_failed_for_good_lets_the_others_go(office: Any) -> None:
    """If a job fails for good, the next one runs at once. A requeue runs the failed job again."""
    first = run_behind(office, {0: "fails once"}, effects=3)
    wait_until(lambda: first.get_status(refresh=True) == "failed")
    first.requeue()
    office.wait_for(lambda: len(office.effects()) == 4, "the first")
    assert began(office) == [0, 1, 2, 3, 0]
    wait_until(lambda: places(office) == [])


def test_who_kills_his_horse_too_often(office: Any) -> None:
    """After more than `max_crashes`, the work is DEAD and has no position, and the next one goes
    on."""
    run_behind(office, {0: "always dies"}, retry=Retry(max=9, interval=1), effects=3)
    assert began(office) == [0, 1, 2, 3]
    wait_until(lambda: places(office) == [])
    with office.engine.connect() as db:
        dead = db.execute(sa.select(WORK.c.crashes).where(WORK.c.state == "DEAD")).scalars().all()
    assert dead == [3]  # by default


def test_a_retry_for_another_key(office: Any) -> None:
    """If a body changes its job's arguments to another key, the job leaves its line at once for
    that of the other key."""
    first = run_behind(office, {0: "moves"}, retry=Retry(max=2, interval=600), effects=3)
    scheduled = office.queue.scheduled_job_registry
    office.wait_for(lambda: first.id in scheduled, "its retry")
    scheduled.schedule(first, datetime.now(UTC))
    office.wait_for(lambda: len(office.effects()) == 4, "the first")
    items = [item for item, _ in office.steps("began")]
    assert items == ["a 0", "a 1", "a 2", "a 3", "b 0"]
    assert set(office.effects().values()) == {1}
    wait_until(lambda: places(office) == [])


def test_a_job_that_fails_before_its_guard_leaves_its_line(office: Any, producer: None) -> None:
    """A job that fails in a decorator over its guard leaves its line after RQ's retries. The next
    one is promoted."""
    task = strictly_under_a_decorator
    refused = enqueue(office.queue, task, ("a", 0, "refused"), retry=Retry(max=1)).job
    following = enqueue(office.queue, task, ("a", 1)).job
    office.worker()
    office.wait_for(lambda: office.effects()["a 1"], "the next one")
    office.wait_for(lambda: following.get_status(refresh=True) == "finished", "its end")
    assert refused.get_status(refresh=True) == "failed"
    assert len(office.steps("refused")) == 2
    [failed] = office.ledger.list_work(State.FAILED)
    assert failed.error == "it failed before its guard"
