"""The tutorial from its first command to its last, as somebody types it: real server and workers.

Only where Redis is differs from what is printed, and `pip`, which `tests/packaging` tries.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
            log = self.folder / f"{len(self.left_running) + 1}.log"
            started = Family(command, environment=environment, log=log, cwd=self.folder)
            self.left_running.append(started)
            return ""
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def press_ctrl_c(self) -> None:
        """In the terminal of what was started last."""
        started = self.left_running[-1].process
        started.send_signal(signal.SIGINT)
        started.wait(60)

    def log(self) -> str:
        """What the terminal of what was started last shows."""
        return (self.folder / f"{len(self.left_running)}.log").read_text(errors="replace")

    def worker_pid(self, said: str) -> int:
        """As `celery inspect active` prints it; asked again where the message is not there yet."""

        def found() -> Any:
            return re.search(r"'worker_pid': (\d+)", said)

        while not found():
            said = self._run("celery", shlex.split("-A shop inspect active"))
        return int(found()[1])

    def shipments(self, order: int) -> int:
        """How often it was shipped."""
        return self.count(f"select count(*) from shipments where order_id = {order}")

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
    """By Celery and by RQ, also if a worker is killed or paused: two messages, one shipment."""
    install, tables, worker, sends, kill, pause, look, _, rq = blocks_of(PAGE, "sh")
    quick, slow, by_rq = blocks_of(PAGE, "python")
    terminals.write("shop.py", quick)
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

    terminals.press_ctrl_c()
    terminals.write(
        "shop.py", replace(quick, text=quick.text.partition("@app.task")[0] + slow.text)
    )
    terminals.type(worker)
    wait_until(lambda: " ready." in terminals.log(), timeout_s=120, message="it is ready")
    child = terminals.worker_pid(terminals.type(kill))
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: terminals.shipments(43), timeout_s=120, message="order 43")
    assert "Worker exited prematurely" in terminals.log()
    assert terminals.shipments(43) == 1
    child = terminals.worker_pid(terminals.type(pause))
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: terminals.type(look) == "1", timeout_s=120, message="order 44")
    assert "stale commit refused" not in terminals.log()
    os.kill(child, signal.SIGCONT)
    wait_until(
        lambda: "stale commit refused" in terminals.log(), timeout_s=120, message="it is refused"
    )
    assert terminals.type(look) == "1"

    terminals.write("jobs.py", by_rq)
    terminals.type(rq)
    with redis.Redis.from_url(terminals.valkey.url_of(0)) as broker:
        wait_until(
            lambda: broker.zcard("rq:finished:default") == 2,
            timeout_s=120,
            message="both jobs are finished",
        )
    assert [terminals.shipments(order) for order in (42, 43, 44, 50)] == [1, 1, 1, 1]
