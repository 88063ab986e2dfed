"""The benchmark runs, and what it counts (as opposed to times) is as promised."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from taskguard_sandbox.servers import MariaDB

HERE = Path(__file__).resolve().parent.parent


def _run(*names: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *names, "--quick"],
        cwd=HERE,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
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
    # claim, its tracked lease, and the attempt with its result as JSON.
    assert own <= 43
    assert lent <= 44


def test_mariadb_is_measured_beside_the_same_by_hand() -> None:
    """MariaDB is measured if it is installed. Otherwise the output says that it is not."""
    output = _run("mariadb")
    if MariaDB.available() is not None:
        assert "mariadb: skipped" in output
        return
    ours = re.search(r"taskguard, the effect by PyMySQL +│ +[\d,]+ │ +(\d+\.\d+) ", output)
    assert ours is not None
    assert float(ours[1]) > 0
    assert "by hand: redis-py and PyMySQL" in output


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
