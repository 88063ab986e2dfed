"""The README's four steps and the tutorial, typed as they are printed, on real servers.

What differs from what is printed: where servers are, `pip`, which `tests/packaging` tries, and how
long the slow task sleeps. It sleeps until the test wakes it, because a slow machine may need more
than the printed 20 seconds to find the process that is to be killed or paused.
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
from support.waiting import patience_s, wait_until

pytestmark = pytest.mark.once

PAGE = "docs/tutorial.md"
STAY = ("worker",)  # until they are stopped
SLEEP = "    time.sleep(20)\n"
SLEEP_UNTIL_WOKEN = """
    import os.path
    while not os.path.exists(f"awake-{order_id}"):
        time.sleep(0.05)
"""
COMMANDS = Path(sysconfig.get_path("scripts"))


@dataclass
class Terminals:
    """A folder in which the page's commands are typed."""

    folder: Path
    valkey: Any
    left_running: list[Family] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._home = self.folder

    def write(self, name: str, block: Block) -> None:
        """A file, with this machine's servers."""
        (self.folder / name).write_text(self._here(block.text))

    def _here(self, text: str) -> str:
        """With this machine's servers."""
        for printed, here in (
            ("redis://localhost/1", self.valkey.url_of(1)),
            ("redis://localhost", self.valkey.url_of(0)),
        ):
            text = text.replace(printed, here)
        return text

    def type(self, block: Block) -> str:
        """Each command; what the last one prints."""
        said = ""
        for command in self._here(block.text).splitlines():
            program, *words = shlex.split(command)
            if program == "sqlite3":
                said = self._sqlite(*words)
            elif program != "pip":
                said = self._run(program, words)
        return said

    def shell(self, block: Block) -> str:
        """Run the whole block in a shell in its folder, without `pip`. Return the output."""
        lines = self._here(block.text).replace("/tmp/", f"{self._home}/").splitlines()
        typed = "\n".join(line for line in lines if not line.startswith("pip "))
        done = subprocess.run(
            ["bash", "-e", "-c", typed],
            cwd=self.folder,
            env={**os.environ, "PATH": f"{COMMANDS}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

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
        started.wait(patience_s())

    def log(self) -> str:
        """Return the output of the command that was started last."""
        return (self.folder / f"{len(self.left_running)}.log").read_text(errors="replace")

    def worker_pid(self, said: str) -> int:
        """The process that sleeps, as `celery inspect active` prints it.

        That is the process that started first: another one may be deferring a message for the
        same order. The command is repeated while no message runs.
        """
        started = re.compile(r"'time_start': ([\d.]+).*?'worker_pid': (\d+)", re.DOTALL)
        while not (found := started.findall(said)):
            said = self._run("celery", shlex.split("-A shop inspect active"))
        _, pid = min(found, key=lambda each: float(each[0]))
        return int(pid)

    def wake(self, order: int) -> None:
        """End the sleep of the task of this order."""
        (self.folder / f"awake-{order}").touch()

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
    for log in tmp_path.glob("**/*.log"):
        print(log.read_text(errors="replace")[-4000:])


def test_the_four_steps_of_the_readme_charge_a_card_once(terminals: Terminals) -> None:
    """Typed literally, in a folder of their own: two messages, one charge, one receipt."""
    install, tables, worker, sends = blocks_of("README.md", "sh")[:4]
    (shop,) = blocks_of("README.md", "python")
    terminals.shell(install)
    terminals.folder /= "shop"
    terminals.write("shop.py", shop)
    terminals.shell(tables)
    terminals.type(worker)
    wait_until(lambda: " ready." in terminals.log(), message="it is ready")
    assert len(terminals.shell(sends).split()) == 2
    wait_until(lambda: terminals.log().count("succeeded in") == 2, message="both calls")
    assert terminals.log().count("charging 1999 cents") == 1
    assert terminals.log().count("answered as a duplicate") == 1
    assert terminals._sqlite("shop.db", "select receipt from orders") == "receipt-1"


def test_the_tutorial_ships_each_order_once(terminals: Terminals) -> None:
    """Celery and RQ ship each order once, even if a worker is killed or paused."""
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
            message="both messages are answered",
        )
    # The last command of that block, asked again now that both have been answered.
    assert terminals._sqlite(*shlex.split(sends.text.splitlines()[-1])[1:]) == "1"

    terminals.press_ctrl_c()
    assert slow.text.count(SLEEP) == 1
    slowly = slow.text.replace(SLEEP, SLEEP_UNTIL_WOKEN)
    terminals.write("shop.py", replace(quick, text=quick.text.partition("@app.task")[0] + slowly))
    terminals.type(worker)
    wait_until(lambda: " ready." in terminals.log(), message="it is ready")
    child = terminals.worker_pid(terminals.type(kill))
    os.kill(child, signal.SIGKILL)
    terminals.wake(43)
    wait_until(lambda: terminals.shipments(43), message="order 43")
    assert "Worker exited prematurely" in terminals.log()
    assert terminals.shipments(43) == 1
    child = terminals.worker_pid(terminals.type(pause))
    os.kill(child, signal.SIGSTOP)
    terminals.wake(44)
    wait_until(lambda: terminals.type(look) == "1", message="order 44")
    assert "stale commit refused" not in terminals.log()
    os.kill(child, signal.SIGCONT)
    wait_until(lambda: "stale commit refused" in terminals.log(), message="it is refused")
    assert terminals.type(look) == "1"

    terminals.write("jobs.py", by_rq)
    terminals.type(rq)
    with redis.Redis.from_url(terminals.valkey.url_of(0)) as broker:
        wait_until(
            lambda: broker.zcard("rq:finished:default") == 2,
            message="both jobs are finished",
        )
    assert [terminals.shipments(order) for order in (42, 43, 44, 50)] == [1, 1, 1, 1]
