"""Real RQ workers while Redis, the lock server or PostgreSQL is emptied or away."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from rq import Retry

from support.invoices import charge, hold, patient
from support.office import SHORT_LEASES, Office
from taskguard_sandbox.servers import Postgres


@pytest.fixture
def make_office(valkey: Any, redis_url: str, tmp_path: Path) -> Iterator[Callable[..., Office]]:
    """An office with servers of its own in place of the shared ones."""
    made: list[Office] = []

    def make(*, locks: str | None = None, database: str) -> Office:
        made.append(
            Office(
                broker=valkey.url_of(2),
                locks=locks or valkey.url_of(1),
                database=database,
                folder=tmp_path,
            )
        )
        return made[-1]

    yield make
    for office in made:
        office.close()


@pytest.mark.once
def test_without_its_database_nothing_runs_and_nothing_is_lost(make_office: Any) -> None:
    """PostgreSQL is killed in a transaction and before another job. After its start, both jobs have
    one effect."""
    with Postgres(fsync="off") as postgres:
        office = make_office(database=postgres.create_database("office"))
        office.queue.enqueue(hold, 1, 3.0)
        office.worker(**SHORT_LEASES)
        office.wait_for(lambda: office.steps("wrote"), "the write")
        postgres.kill()
        waiting = office.queue.enqueue(charge, 2)
        office.wait_for(lambda: waiting.get_status(refresh=True) == "scheduled", "put off")
        postgres.start()
        office.engine.dispose()  # this test's own connections broke as well
        office.wait_for(lambda: sum(office.effects().values()) >= 2, "both")
        office.wait_for(lambda: waiting.get_status(refresh=True) == "finished", "answered")
        assert office.effects() == Counter({"1": 1, "2": 1})


@pytest.mark.once
def test_a_killed_worker_and_horse_lose_nothing(pg_url: str, make_office: Any) -> None:
    """If worker and horse are killed in a body, RQ's cleaning enqueues the job again, and it is
    done once."""
    office = make_office(database=pg_url)
    job = office.queue.enqueue(charge, 6, 600.0, retry=Retry(max=3))
    worker = office.worker(**SHORT_LEASES)
    office.wait_for(lambda: office.steps("began"), "the body")
    worker.process.kill()
    os.kill(office.steps("began")[0][1], signal.SIGKILL)
    # RQ does this about 90 s later: it takes the job's execution for dead.
    office.connection.zadd(
        office.queue.started_job_registry.key,
        dict.fromkeys(office.connection.zrange(office.queue.started_job_registry.key, 0, -1), 1),
    )
    office.queue.started_job_registry.cleanup()
    office.worker()
    office.wait_for(office.effects, "the effect")
    office.wait_for(lambda: job.get_status(refresh=True) == "finished", "finished")
    assert office.effects() == Counter({"6": 1})


def test_a_body_is_interrupted_when_its_lease_is_lost(office: Any) -> None:
    """With `on_lost="interrupt"`, LeaseLostError ends the body's loop, and the work is done
    again."""
    job = office.queue.enqueue(patient, 9)
    office.worker()
    office.wait_for(lambda: office.steps("began"), "the body")
    with office.engine.begin() as db:  # as after a holder that took it over, and vanished
        for table in ("taskguard_keys", "taskguard_work"):
            db.execute(
                sa.text(f"update {table} set fence = fence + 1, owner = 'x/x', lease_until = 0")
            )
    office.wait_for(lambda: office.steps("interrupted"), "the interrupt")
    office.wait_for(lambda: job.get_status(refresh=True) == "finished", "done again")
    assert office.effects() == Counter({"9": 1})
