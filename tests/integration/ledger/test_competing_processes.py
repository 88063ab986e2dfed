"""Several processes on one database of each kind, in competition for the same work."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.competing import COUNT, EFFECT, request_for
from taskguard.errors import StaleTokenError
from taskguard.ledger.sql import SqlLedger
from taskguard.model.claims import Claimed, MessageRef

TESTS = Path(__file__).resolve().parents[2]
# On an Engine of the user's, claims take steps, which the other databases' do by a URL as well.
CASES = [
    ("sqlite_url", "url"),
    ("pg_url", "url"),
    ("pg_url", "engine"),
    pytest.param("mariadb_url", "url", marks=pytest.mark.debian),
]


@pytest.mark.once
@pytest.mark.parametrize(("database", "kind"), CASES)
def test_processes_that_compete_have_each_effect_once(
    request: pytest.FixtureRequest, database: str, kind: str
) -> None:
    """Processes with neighbouring rows, crossed keys and late holders all succeed, and a stale one
    is refused."""
    url = request.getfixturevalue(database)
    ledger = SqlLedger(url)
    ledger.create_schema()
    # This holder is late for certain: it comes back after all others. Whether late holders among
    # the others meet a takeover depends on the machine.
    late = ledger.claim(request_for(0, "late", MessageRef("late")))
    assert isinstance(late, Claimed)
    engine = sa.create_engine(url)
    with engine.begin() as db:
        # No unique index: the test has to see a double effect.
        db.execute(sa.text("create table effects (item int)"))
    command = [sys.executable, "-m", "support.competing", url, kind]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(seed)],
                    env=os.environ | {"PYTHONPATH": path},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for seed in range(5)
        ]
        for process in processes:
            stack.callback(process.kill)  # before the test waits for it
        for process in processes:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output
            counts.update(json.loads(output.splitlines()[-1]))
    with pytest.raises(StaleTokenError), ledger.transaction(late.claim) as tx:
        tx.db.execute(EFFECT, {"item": 0})
        tx.complete_in_block(late.claim, None)
    with engine.connect() as db:
        effects = Counter(db.execute(sa.text("select item from effects")).scalars())
        states = Counter(db.execute(sa.text("select state from taskguard_work")).scalars())
    assert effects == dict.fromkeys(range(COUNT), 1)
    assert states == {"DONE": COUNT}
    assert counts["Claimed"] == COUNT + counts["stale"] + counts["again"]
    engine.dispose()
    ledger.close()
