"""Real RQ workers on real servers, with jobs enqueued again and work horses killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
import sqlalchemy as sa
from rq import Retry

import taskguard_rq
from support.invoices import (
    charge,
    charge_patiently,
    die,
    index,
)
from support.office import SHORT_LEASES, Office
from taskguard.lock_table import TableLocks
from taskguard_rq import GuardedSimpleWorker, GuardedWorker, preloading


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("taskguard_rq.GuardedWorker", ()),
        ("rq.Worker", ("--with-scheduler",)),
        ("rq.SimpleWorker", ("--with-scheduler",)),
        # It imports all anew for each job.
        pytest.param("rq.worker.SpawnWorker", ("--with-scheduler",), marks=pytest.mark.once),
    ],
)
def test_every_invoice_is_charged_once_and_every_job_is_answered(
    office: Any, kind: str, options: tuple[str, ...]
) -> None:
    """Two workers run three jobs for each invoice. Each invoice has one effect, and each job its
    answer."""
    invoices = range(2 if "Spawn" in kind else 4)
    jobs = [office.queue.enqueue(charge, number, 0.3) for number in invoices for _ in range(3)]
    office.worker(kind, *options)
    office.worker(kind, *options)
    office.wait_for(
        lambda: all(job.get_status(refresh=True) == "finished" for job in jobs), "all finished"
    )
    assert [job.return_value() for job in jobs] == [
        {"invoice": number} for number in invoices for _ in range(3)
    ]
    assert office.effects() == Counter(map(str, invoices))


@pytest.fixture
def beside(valkey: Any, redis_url: str, pg_url: str, tmp_path: Path) -> Iterator[Office]:
    """An office that has no Redis for locks: those are in the ledger's database."""
    made = Office(broker=valkey.url_of(2), locks="ledger://", database=pg_url, folder=tmp_path)
    TableLocks.beside(made.ledger).create_table(unlogged=True)
    yield made
    made.close()


def test_locks_in_the_ledgers_database(beside: Any) -> None:
    """Each invoice is charged once, a horse makes its own connections, and no lock is left."""
    jobs = [beside.queue.enqueue(charge, number, 0.2) for number in range(3) for _ in range(3)]
    beside.worker()
    beside.worker("rq.SimpleWorker", "--with-scheduler")
    beside.wait_for(
        lambda: all(job.get_status(refresh=True) == "finished" for job in jobs), "all finished"
    )
    assert beside.effects() == Counter({str(number): 1 for number in range(3)})
    with beside.engine.connect() as db:
        left = (
            db.execute(sa.text("select key from taskguard_locks where owner <> ''")).scalars().all()
        )
    # The mark that a worker leaves when it starts, and the lease of its relay.
    assert set(left) - {"leader:taskguard-relay:rq"} == {"the ledger"}
    assert "no answer" not in beside.logs()


@pytest.mark.parametrize(
    ("kind", "options", "is_loaded"),
    [
        ("taskguard_rq.GuardedWorker", (), True),
        # With this option RQ loads a module in the worker itself.
        ("rq.Worker", ("--with-scheduler", "-c", "support.invoices"), True),
        ("rq.Worker", ("--with-scheduler",), False),
    ],
)
def test_work_horses_find_drivers_loaded(
    office: Any, kind: str, options: tuple[str, ...], is_loaded: bool
) -> None:
    """A stock worker loads them too if it has loaded the guarded jobs. Each horse then connects,
    and redis-py does not look for its own version in the file system for each connection."""
    office.worker(kind, *options, fresh=True)
    drivers = ("sqlalchemy", "psycopg")
    asked = office.queue.enqueue("support.horse.loaded", *drivers)
    looked = office.queue.enqueue("support.horse.looks_for_version")
    charged = office.queue.enqueue(charge, 1)
    office.wait_for(lambda: charged.get_status(refresh=True) == "finished", "charged")
    assert asked.return_value() == (list(drivers) if is_loaded else [])
    if is_loaded:
        assert looked.return_value() is False
    assert office.effects() == Counter({"1": 1})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("taskguard_rq.GuardedWorker", ()),
        ("rq.Worker", ("--with-scheduler", "-c", "support.self_configured")),
    ],
)
def test_work_horses_load_nothing_anew_where_the_jobs_module_configures(
    office: Any, kind: str, options: tuple[str, ...]
) -> None:
    """If the jobs' module configures taskguard, no horse after the first one loads a driver."""
    locks, ledger = office.environment.values()
    unset = dict.fromkeys(office.environment, "")
    office.worker(kind, *options, fresh=True, **unset, OFFICE_LOCKS=locks, OFFICE_LEDGER=ledger)
    jobs = [office.queue.enqueue("support.self_configured.send", number) for number in range(3)]
    office.wait_for(lambda: jobs[-1].get_status(refresh=True) == "finished", "sent")
    for job in jobs[1:]:
        loaded = job.return_value()
        drivers = ("taskguard", "sqlalchemy", "psycopg", "redis")
        assert [name for name in loaded if name.startswith(drivers)] == []
        assert len(loaded) < 20


def test_one_job_enqueued_many_times_runs_one_body(office: Any) -> None:
    """Two workers get one job twenty times, and its body runs once."""
    job = office.queue.enqueue(charge, 7, 1.0, job_id="charge-7")
    for _ in range(19):
        office.connection.rpush(office.queue.key, job.id)
    office.worker()
    office.worker()
    office.wait_for(office.effects, "the effect")
    office.wait_for(
        lambda: office.queue.count == 0 and job.get_status(refresh=True) == "finished",
        "the queue is empty",
    )
    assert office.effects() == Counter({"7": 1})
    assert len(office.steps("began")) == 1


@pytest.mark.parametrize(
    "kind",
    [
        "taskguard_rq.GuardedWorker",
        "taskguard_rq.GuardedSimpleWorker",
        "taskguard_rq.GuardedSpawnWorker",
        "support.mixed_workers.MixedAfter",
    ],
)
def test_a_job_that_was_put_off_leaves_no_trace_with_a_guarded_worker(
    office: Any, kind: str
) -> None:
    """A deferral leaves no result, no execution, and no counted retry. After it the job is done."""
    if kind.endswith("GuardedSpawnWorker") and int(rq.VERSION.partition(".")[0]) < 3:
        pytest.skip("the children of SpawnWorker are stock workers there")
    office.worker(kind)
    with office.holding("invoice:1"):
        job = office.queue.enqueue(charge, 1)
        office.wait_for(lambda: job.get_status(refresh=True) == "scheduled", "put off")
        started = office.queue.started_job_registry
        office.wait_for(lambda: job.id not in started.get_job_ids(), "no execution left over")
        assert job.results() == []
        assert office.connection.hget(job.key, "result") is None, "dashboards would show it"
    office.wait_for(lambda: job.get_status(refresh=True) == "finished", "done")
    job.refresh()
    assert job.number_of_retries is None
    assert job.return_value() == {"invoice": 1}
    assert office.effects() == Counter({"1": 1})


def test_who_waits_for_a_key_is_put_off_before_its_time_out(office: Any) -> None:
    """A job that waits for its key is deferred before its time-out would fail it."""
    office.worker()
    with office.holding("invoice:1"):
        job = office.queue.enqueue(charge_patiently, 1, job_timeout=16)
        office.wait_for(lambda: job.get_status(refresh=True) in ("scheduled", "failed"), "ended")
    office.wait_for(lambda: job.get_status(refresh=True) in ("finished", "failed"), "done")
    assert job.get_status() == "finished"
    assert office.effects() == Counter({"1": 1})


@pytest.mark.parametrize("said", [{"lib_name": "ours"}, {"lib_version": "1"}, {"lib_name": None}])
def test_what_a_user_says_of_the_client_stays(said: dict[str, str | None]) -> None:
    """A user's own setting of the client's name, or of no name, stays."""
    client = redis.Redis.from_url("redis://127.0.0.1:1", **said)
    preloading.tell_version(client)
    assert client.connection_pool.connection_kwargs.items() >= said.items()
    assert "driver_info" not in client.connection_pool.connection_kwargs


def test_connections_of_a_users_own_are_left_alone() -> None:
    """A connection class of the user's own gets no option, because it may not know it."""

    class Ours(redis.Connection):
        def __init__(self, **options: Any) -> None:
            assert "driver_info" not in options
            super().__init__(**options)

    pool = redis.ConnectionPool(Ours, host="127.0.0.1", port=1)
    preloading.tell_version(redis.Redis(connection_pool=pool))
    assert pool.make_connection()


def test_without_a_scheduler_nothing_is_lost_and_the_log_says_what_is_missing(office: Any) -> None:
    """A stock worker without `--with-scheduler` logs an error, and the job is still done."""
    office.worker("rq.Worker")
    with office.holding("invoice:1"):
        job = office.queue.enqueue(charge, 1)
        office.wait_for(lambda: "--with-scheduler" in office.logs(), "the error")
    office.wait_for(lambda: job.get_status(refresh=True) == "finished", "done")
    assert office.effects() == Counter({"1": 1})


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({}, True),
        ({"with_scheduler": True}, True),
        ({"with_scheduler": False}, False),
    ],
)
def test_the_scheduler_is_on_by_default(office: Any, options: dict[str, bool], runs: bool) -> None:
    """The scheduler is on by default. Arguments in Python may turn it off; `rq worker` cannot."""
    worker = GuardedSimpleWorker([office.queue], connection=office.connection)
    worker.work(burst=True, **options)
    assert (worker.scheduler is not None) == runs


def test_a_killed_work_horse_is_done_again(office: Any) -> None:
    """If a horse is killed in a body, the retry waits for the lease, and charges once."""
    job = office.queue.enqueue(charge, 3, 600.0, retry=Retry(max=3))
    office.worker(**SHORT_LEASES)
    office.wait_for(lambda: office.steps("began"), "the body")
    os.kill(office.steps("began")[0][1], signal.SIGKILL)
    office.wait_for(office.effects, "the effect")
    office.wait_for(lambda: job.get_status(refresh=True) == "finished", "finished")
    assert office.effects() == Counter({"3": 1})


@pytest.mark.once
def test_an_orphaned_horse_is_harmless(office: Any) -> None:
    """If a worker is killed and its horse lives on, a second delivery of the job has no second
    effect."""
    job = office.queue.enqueue(charge, 4, 4.0)
    worker = office.worker()
    office.wait_for(lambda: office.steps("began"), "the body")
    worker.process.kill()
    office.connection.rpush(office.queue.key, job.id)
    office.worker()
    office.wait_for(office.effects, "the effect")
    office.wait_for(
        lambda: office.queue.count == 0 and job.get_status(refresh=True) == "finished", "answered"
    )
    assert office.effects() == Counter({"4": 1})


@pytest.mark.once
def test_a_paused_horse_is_refused(office: Any) -> None:
    """A horse is paused beyond its lease, and another job does the work. The late commit is
    refused."""
    first = office.queue.enqueue(index, 5, "first", True)
    office.worker(**SHORT_LEASES)
    office.wait_for(lambda: office.steps("began"), "the body")
    horse = office.steps("began")[0][1]
    os.kill(horse, signal.SIGSTOP)
    second = office.queue.enqueue(index, 5, "second")
    office.worker(**SHORT_LEASES)
    office.wait_for(lambda: second.get_status(refresh=True) == "finished", "the other one")
    office.let_go()
    os.kill(horse, signal.SIGCONT)
    office.wait_for(lambda: "stale commit refused" in office.logs(), "the refusal")
    office.wait_for(lambda: first.get_status(refresh=True) == "finished", "answered as well")
    assert first.return_value() == "second"
    assert office.effects() == Counter({"5 second": 1})


def test_a_job_that_kills_its_horse_is_dead_after_max_crashes(office: Any) -> None:
    """The work is DEAD, and the queue goes on."""
    job = office.queue.enqueue(die, 13, retry=Retry(max=10))
    office.worker(**SHORT_LEASES)
    office.wait_for(lambda: "is DEAD" in office.logs(), "DEAD")
    other = office.queue.enqueue(charge, 1)
    office.wait_for(lambda: other.get_status(refresh=True) == "finished", "the queue goes on")
    assert len(office.steps("began")) <= 2 + 1
    assert job.id


def test_a_worker_whose_ledger_may_not_be_written_does_not_start(office: Any, pg_url: str) -> None:
    """A worker whose ledger is not writable does not start, because it would defer every job."""
    with office.engine.begin() as db:
        db.exec_driver_sql("alter table taskguard_work drop column lease_until")
    taskguard_rq.configure(locks=None, ledger=pg_url)
    worker = GuardedWorker([office.queue], connection=office.connection)
    with pytest.raises(SystemExit, match="lease_until"):
        worker.work(burst=True)
