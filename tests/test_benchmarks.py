"""The benchmark runs, and what it counts (as opposed to times) is as promised."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from taskguard_sandbox.servers import DebianPostgres, MariaDB, Postgres

HERE = Path(__file__).resolve().parent.parent


def _run(*names: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *names, "--quick"],
        cwd=HERE,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def output() -> str:
    # Not after others: their watchdogs linger, and threads are counted.
    return _run("startup", "leases")


def test_many_leases_are_kept_by_three_threads_in_few_round_trips(output: str) -> None:
    """Over five renewal intervals no lease is lost, and leases share round trips."""
    assert "held after 5 renewal intervals: 300" in output
    assert "lost: 0" in output
    assert "threads for it, at most: 3" in output
    trips = re.search(r"lock server and ledger: (\d+)", output)
    assert trips is not None
    assert 0 < int(trips[1]) <= 100


def test_a_delivery_leads_through_no_more_files_than_it_did() -> None:
    """A change that makes the path of a first delivery longer has to raise these numbers on
    purpose."""
    own, lent = map(int, re.findall(r"(\d+) files", _run("route")))
    # These have files of their own: marks, chords, tracing and the queue of promoted messages.
    # So do the parts of a ledger, errors, and statements past SQLAlchemy. The last ones are the
    # claim, its tracked lease, and the attempt with its result as JSON. The name of the worker has
    # two: how an owner says which worker it is, and whether the worker is on record. Counts have
    # three: the outcome of a delivery, the counters, and when they are sent. A span has one.
    assert own <= 49
    assert lent <= 50


def test_a_call_is_measured_in_processor_time_of_each_process_on_each_database() -> None:
    """Each database that is installed has a table of client, database and Redis, by hand and with
    taskguard. The output has the time of a flush, and says which databases are missing."""
    output = _run("guarded", "--beside-load")
    tables = output.split("A guarded call on ")[1:]
    kinds = (Postgres, DebianPostgres, MariaDB)
    missing = [kind for kind in kinds if kind.available() is not None]
    assert len(tables) == len(kinds) + 1 - len(missing)
    assert output.count("skipped: ") == len(missing)
    for table in tables:
        assert re.search(r"a flush takes [\d,]+ µs here", table)
        assert "beside load: µs" in table
        parts = (
            ("client", "Redis") if table.startswith("SQLite") else ("client", "database", "Redis")
        )
        for name in ("by hand, no effect", "taskguard, no effect"):
            _, _, lines = table.partition(f"│ {name} ")
            for part in parts:
                used = re.search(rf"│ {part} +│ +([\d,]+) \[.+?\] +│ +(\d+\.\d\d) \[", lines)
                assert used is not None
                assert int(used[1].replace(",", "")) > 0


def test_a_sweep_puts_each_overdue_work_into_its_queue_once() -> None:
    """To Celery and to RQ; no transaction is about more than one page of them."""
    output = _run("sweep")
    assert output.count("sent: 1,000, in the queue: 1,000, refused: 0") == 2
    assert output.count("at most, 500 items at a time") == 2


def test_a_lock_without_a_ledger_loads_redis_py_alone(output: str) -> None:
    """The time to it is measured beside redis-py's own lock; that to a guarded call, too."""
    assert "it loads ['redis']" in output
    for what in ("a lock, with locks only", "a guarded call"):
        assert re.search(rf"taskguard: {what} +│ +[\d,]+ │ +\d+\.\d\d ", output)


def test_questions_of_operators_are_measured() -> None:
    """Each question, page and scrape has its median and its 95th percentile."""
    if missing := Postgres.available():
        pytest.skip(missing)
    found = re.findall(r"^  (\S.*?) +p50 +[\d.]+  p95 +[\d.]+", _run("operations"), re.MULTILINE)
    assert {"explain a key", "keys --paused", "page /waiting", "scrape of 50 tasks"} <= set(found)


def test_counts_of_many_processes_are_all_accounted_for() -> None:
    """The ledger and what was reported as lost have each outcome. It fails otherwise."""
    assert "reported lost" in _run("counts")
