"""The tutorial from its first command to its last, as somebody types it: real server and workers.

Only where Redis is differs from what is printed, and `pip`, which `tests/packaging` tries. What
step 5 does by hand (a killed child, a paused one) is in `tests/celery/test_crashes.py`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from support.families import Family
from support.pages import Block, blocks_of
from support.waiting import wait_until

pytestmark = pytest.mark.once

PAGE = "docs/tutorial.md"
STAY = ("worker",)  # until they are stopped
COMMANDS = Path(sysconfig.get_path("scripts"))


@dataclass
class Terminals:
    """A folder in which somebody types what the page says."""

    folder: Path
    valkey: Any
    left_running: list[Family] = field(default_factory=list)

    def write(self, name: str, block: Block) -> None:
        """A file, with this machine's servers."""
        code = block.text.replace("redis://localhost/1", self.valkey.url_of(1))
        (self.folder / name).write_text(code.replace("redis://localhost", self.valkey.url_of(0)))

    def type(self, block: Block) -> str:
        """Each command; what the last one prints."""
        said = ""
        for command in block.text.splitlines():
            program, *words = shlex.split(command)
            if program == "sqlite3":
                said = self._sqlite(*words)
            elif program != "pip":
                said = self._run(program, words)
        return said

    def _sqlite(self, file: str, statement: str) -> str:
        with contextlib.closing(sqlite3.connect(self.folder / file, timeout=60)) as db, db:
            return "\n".join(str(row[0]) for row in db.execute(statement))

    def _run(self, program: str, words: list[str]) -> str:
        environment = {**os.environ, "PYTHONPATH": ".", "RQ_REDIS_URL": self.valkey.url_of(0)}
        command = [str(COMMANDS / program), *words]
        if any(word in STAY for word in words):
            log = self.folder / f"{program}.log"
            started = Family(command, environment=environment, log=log, cwd=self.folder)
            self.left_running.append(started)
            return ""
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def count(self, statement: str) -> int:
        """A number from the database."""
        return int(self._sqlite("shop.db", statement))


@pytest.fixture
def terminals(valkey: Any, redis_url: str, tmp_path: Path) -> Iterator[Terminals]:
    made = Terminals(tmp_path, valkey)
    yield made
    for each in made.left_running:
        each.kill()
    for log in tmp_path.glob("*.log"):
        print(log.read_text(errors="replace")[-4000:])


def test_the_tutorial_ships_each_order_once(terminals: Terminals) -> None:
    """By Celery and by RQ: two messages, one shipment."""
    install, tables, worker, sends, _, rq = blocks_of(PAGE, "sh")
    by_celery, by_rq = blocks_of(PAGE, "python")
    terminals.write("shop.py", by_celery)
    for block in (install, tables, worker):
        terminals.type(block)
    terminals.type(sends)
    with redis.Redis.from_url(terminals.valkey.url_of(0)) as broker:
        wait_until(
            lambda: (
                terminals.count("select count(*) from shipments") > 0
                and not broker.llen("celery")
                and not broker.hlen("unacked")
            ),
            timeout_s=120,
            message="both messages are answered",
        )
    # The last command of that block, asked again now that both have been answered.
    assert terminals._sqlite(*shlex.split(sends.text.splitlines()[-1])[1:]) == "1"

    terminals.write("jobs.py", by_rq)
    terminals.type(rq)
    with redis.Redis.from_url(terminals.valkey.url_of(0)) as broker:
        wait_until(
            lambda: broker.zcard("rq:finished:default") == 2,
            timeout_s=120,
            message="both jobs are finished",
        )
    assert terminals.count("select count(*) from shipments where order_id = 43") == 1
