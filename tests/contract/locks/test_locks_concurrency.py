"""Exclusion and tokens among processes, which only what has a URL can show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import support
from pytest_taskguard.lock_contract.contention import Turn, check_turns
from support.lock_servers import LockServer
from support.waiting import patience_s
from taskguard.locks.base import LockProvider

pytestmark = pytest.mark.once

TESTS = Path(support.__path__[0]).parent


# The others have the code of one of these. Locks in memory or of a session have no other process.
@pytest.mark.parametrize(
    "server",
    [
        *("valkey", "cluster", "redlock", "pg_table", "pg_advisory"),
        *(
            pytest.param(kind, marks=pytest.mark.debian)
            for kind in (
                *("sentinel", "mariadb_table", "mariadb_get_lock"),
                *("etcd", "consul", "zookeeper"),
            )
        ),
    ],
    indirect=True,
)
def test_processes(server: LockServer, locks: LockProvider, tmp_path: Path) -> None:
    """Processes with several threads exclude each other, on each kind of lock server."""
    assert server.url is not None
    counter = tmp_path / "counter"
    counter.write_text("0")
    command = [sys.executable, "-m", "support.lock_counter", server.url, str(counter), "4", "20"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    workers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    turns: list[Turn] = []
    for worker in workers:
        output, _ = worker.communicate(timeout=patience_s())
        assert worker.returncode == 0
        turns += [Turn(**turn) for turn in json.loads(output)]
    check_turns(turns, counter, 240, tokens=locks.traits.tokens)
