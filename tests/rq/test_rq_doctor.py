"""Findings about RQ's queues: jobs that wait, and their workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from rq import Queue, Retry

import taskguard_rq
from support import invoices
from support.office import Office
from taskguard.cli import main
from taskguard.integration import Level
from taskguard_rq import guarded_job
from taskguard_rq.cron import LeaderCronScheduler
from taskguard_rq.health import JobFacts, judge_job

Doctor = Callable[[], tuple[int, list[tuple[str, str, str]]]]


@guarded_job(key="invoice:<invoice>")
def charge(invoice: int) -> None: ...


@guarded_job(key="invoice:<invoice>", recoverable=True)
def stored(invoice: int) -> None: ...


@guarded_job(key="invoices")
def constant() -> None: ...


@guarded_job(key="invoices", once_per="key")
def explicit() -> None: ...


def plain() -> None: ...


@pytest.fixture
def doctor(
    office: Office, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    """Runs the command: its status, and (part, name, where) of what it found in the queue."""
    for name, value in office.environment.items():
        monkeypatch.setenv(name, value)

    def doctor() -> tuple[int, list[tuple[str, str, str]]]:
        status = main(["doctor", "--rq", office.broker, "--json"])
        findings = json.loads(capsys.readouterr().out)
        # Its own servers are of tests, which keep nothing.
        of_jobs = [each for each in findings if each["part"] == "settings"]
        return status, [(each["name"], each["level"], each["where"]) for each in of_jobs]

    return doctor


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (charge, {"retry": Retry(max=3)}, []),
        (charge, {}, [("no_retry", "warning")]),
        (stored, {}, []),
        (plain, {}, []),
        (charge, {"retry": Retry(max=3), "job_timeout": -1}, [("no_time_limit", "note")]),
        (charge, {"retry": Retry(max=3), "ttl": 30}, [("job_ttl", "warning")]),
        (charge, {"retry": Retry(max=3), "ttl": 3600}, []),
    ],
)
def test_jobs_that_wait(
    office: Office, doctor: Doctor, function: Any, options: dict[str, Any], expected: Any
) -> None:
    """Each guarded function has its findings once, however many jobs it has. A function without a
    guard has none."""
    args = () if function is plain else (1,)
    for _ in range(2):
        office.queue.enqueue(function, args=args, **options)
    _, findings = doctor()
    assert [(name, level) for name, level, _ in findings] == expected
    assert all(function.__name__ in where for _, _, where in findings)


def test_a_job_whose_function_is_not_to_be_found_is_left_out(
    office: Office, doctor: Doctor
) -> None:
    """A function that cannot be imported here has no finding."""
    office.queue.enqueue("no.such.module.function")
    assert doctor()[1] == []


def test_a_queue_without_a_scheduler(office: Office, doctor: Doctor) -> None:
    """A queue has a finding if none of its workers runs a scheduler. A `GuardedWorker` runs one."""
    office.queue.enqueue(plain)
    assert doctor()[1] == []  # no worker listens to it yet
    office.worker("rq.worker.SimpleWorker")
    assert doctor()[1] == [("no_scheduler", "warning", "the queue invoices")]
    office.worker("taskguard_rq.GuardedWorker")
    assert doctor()[1] == []


def test_a_cron_job_that_runs_once(
    office: Office, doctor: Doctor, caplog: pytest.LogCaptureFixture
) -> None:
    """A cron job whose jobs are all the same work is a finding of the command and of the
    scheduler's start."""
    crons = [LeaderCronScheduler(connection=office.connection, name=f"cron {n}") for n in range(2)]
    for cron in crons:
        cron.register(charge, "invoices", args=(1,), interval=60)
        cron.register(invoices.tick, "invoices", interval=60)
        cron.register(plain, "invoices", interval=60)
        cron.register_birth()
    crons[0]._say_findings()
    name = f"{charge.__module__}.charge"
    assert [(each[0], each[2]) for each in doctor()[1]] == [
        ("periodic_once", f"the cron job {name}")
    ]
    assert caplog.text.count("(finding periodic_once)") == 1


def test_a_job_whose_key_has_no_arguments(office: Office, doctor: Doctor) -> None:
    """A waiting job whose key has no arguments is a finding, unless its guard has an explicit
    `once_per`, or an entry of a cron is the finding."""
    for function in (constant, explicit, constant):
        office.queue.enqueue(function, retry=Retry(max=3))
    name = f"{constant.__module__}.constant"
    assert doctor()[1] == [("constant_key", "warning", f"the job {name}")]
    cron = LeaderCronScheduler(connection=office.connection, name="cron")
    for function in (constant, explicit):
        cron.register(function, "invoices", interval=60)
    cron.register_birth()
    assert doctor()[1] == [("periodic_once", "warning", f"the cron job {name}")]


def test_locks_and_ledger_come_from_the_environment(
    office: Office, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the environment has no ledger, the doctor reports an error."""
    monkeypatch.delenv("TASKGUARD_LEDGER_URL")
    taskguard_rq.configure()
    status, findings = doctor()
    assert (status, findings) == (1, [("misconfigured", "error", "the settings")])


def test_nothing_is_changed(office: Office, doctor: Doctor) -> None:
    """The doctor changes no key in Redis. Reading some of RQ's registries would requeue jobs."""
    job = office.queue.enqueue(invoices.charge, 1)
    before = {key: office.connection.dump(key) for key in office.connection.scan_iter()}
    doctor()
    assert {key: office.connection.dump(key) for key in office.connection.scan_iter()} == before
    assert Queue("invoices", connection=office.connection).job_ids == [job.id]


def test_rules_are_about_facts_alone() -> None:
    """A job with retries and a time limit has no finding. A job without retries has a warning."""
    best = JobFacts(name="charge", retries=3, limit_s=180.0)
    assert list(judge_job(best)) == []
    (finding,) = judge_job(JobFacts(name="charge", retries=None, limit_s=180.0))
    assert finding.level is Level.WARNING


def test_a_worker_that_starts_says_what_is_wrong(office: Office) -> None:
    """A worker logs at its start that its queue's server does not persist, and that its database
    does not flush."""
    office.worker("taskguard_rq.GuardedWorker")
    log = office.logs()
    for name in ("queue_no_persistence", "commits_unflushed"):
        assert log.count(f"(finding {name})") == 1
    assert "Traceback" not in log
