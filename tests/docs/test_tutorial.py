"""The README's four steps and the tutorials, typed as they are printed, on real servers.

Four things differ from the printed text: the servers' addresses, `pip` (which `tests/packaging`
tries), the password of Django's admin (which a person types), and how long a slow task sleeps. It
sleeps until the test wakes it, because a slow machine may need more than the printed 20 seconds to
find the process to kill or pause.
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
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
import redis

from support.families import Family
from support.pages import Block, blocks_of
from support.waiting import patience_s, wait_until
from taskguard_sandbox.servers import free_port

pytestmark = pytest.mark.once

STAY = ("worker", "runserver")  # until they are stopped
SLEEP = re.compile(r"^    time\.sleep\((\w+)\)$", re.MULTILINE)
SLEEP_UNTIL_WOKEN = r"""
    from os.path import exists
    while \1 and not exists(f"awake-{order_id}"):
        time.sleep(0.05)
"""
PASSWORD = "correct horse"
COMMANDS = Path(sysconfig.get_path("scripts"))


@dataclass
class Terminals:
    """A folder in which the page's commands are typed."""

    folder: Path
    valkey: Any
    left_running: list[Family] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self._home = self.folder

    def write(self, name: str, block: Block, *, mode: str = "w") -> None:
        """A file, with this machine's servers. A slow task in it sleeps until it is woken."""
        with (self.folder / name).open(mode) as file:
            file.write(SLEEP.sub(SLEEP_UNTIL_WOKEN, self._here(block.text)))

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

    def _sqlite(self, file: str, statement: str, timeout_s: float = 60) -> str:
        with contextlib.closing(sqlite3.connect(self.folder / file, timeout=timeout_s)) as db, db:
            return "\n".join(str(row[0]) for row in db.execute(statement))

    def _run(self, program: str, words: list[str]) -> str:
        environment = {
            **os.environ,
            "PYTHONPATH": ".",
            "PYTHONUNBUFFERED": "1",  # as in a terminal, lines are printed at once
            "RQ_REDIS_URL": self.valkey.url_of(0),
            "DJANGO_SUPERUSER_PASSWORD": PASSWORD,
        }
        environment.pop("DJANGO_SETTINGS_MODULE", None)  # of tests of Django in this process
        command = [str(COMMANDS / program), *words]
        if "runserver" in words:
            command.append(str(self.port))
        if "createsuperuser" in words:
            command.append("--noinput")
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

    def logs(self) -> str:
        """Return the output of all commands that stay until they are stopped."""
        return "".join(log.read_text(errors="replace") for log in sorted(self.folder.glob("*.log")))

    def wait_for_output(self, block: Block) -> None:
        """Wait until they print these lines. `…` and the numbers of processes may be any."""
        lines = re.sub(r"\d{4,}", "…", block.text).splitlines()
        patterns = [".*?".join(map(re.escape, line.split("…"))) for line in lines]

        def printed() -> bool:
            logged = iter(self.logs().splitlines())
            return all(any(re.search(each, line) for line in logged) for each in patterns)

        wait_until(printed, message=block.text)

    def packer(self, order: int) -> int:
        """Return the process that packs this order, as its job prints it."""
        packing = re.compile(rf"packing order {order} in process (\d+)")
        return int(wait_until(lambda: packing.search(self.logs()), message=packing.pattern)[1])

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

    def pause(self, pid: int) -> None:
        """Pause a process outside of a transaction, in which it would lock all of SQLite."""

        def paused() -> bool:
            os.kill(pid, signal.SIGSTOP)
            try:
                self._sqlite("shop.db", "begin immediate", timeout_s=0.5)
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)
                return False
            return True

        wait_until(paused, message=f"{pid} is paused outside of a transaction")

    def wake(self, order: int) -> None:
        """End the sleep of the task of this order."""
        (self.folder / f"awake-{order}").touch()

    def shipments(self, order: int) -> int:
        """How often it was shipped."""
        return self.count(f"select count(*) from shipments where order_id = {order}")

    def count(self, statement: str) -> int:
        """A number from the database."""
        return int(self._sqlite("shop.db", statement))


class Browser:
    """A person who uses Django's admin."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/admin/"
        self._cookies = CookieJar()
        handler = urllib.request.HTTPCookieProcessor(self._cookies)
        self._opener = urllib.request.build_opener(handler)

    def submit(self, page: str, **fields: str) -> str:
        """Open a page with a form, and send it. Return the text of the page that follows."""
        self._open(page)
        (token,) = (each.value for each in self._cookies if each.name == "csrftoken")
        return self._open(page, {"csrfmiddlewaretoken": token, **fields})

    def answers(self) -> bool:
        """Return True if the server is up."""
        try:
            return bool(self._open(""))
        except OSError:
            return False

    def rows(self, page: str) -> list[list[str]]:
        """Return the cells of a list, by row."""
        rows = re.findall(r"<tr><td.*?</tr>", self._open(page), re.DOTALL)
        return [re.findall(r'<t[dh] class="field-[^>]*>(?:<a[^>]*>)?(.*?)<', row) for row in rows]

    def works(self) -> list[list[str]]:
        """Return the columns of the list of works that the page prints."""
        return [[row[0], row[2], row[3], row[-1]] for row in self.rows("taskguard/work/")]

    def _open(self, page: str, fields: dict[str, str] | None = None) -> str:
        data = None if fields is None else urllib.parse.urlencode(fields).encode()
        with self._opener.open(self._url + page, data, timeout=patience_s()) as answer:
            return str(answer.read().decode())


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
    """Celery ships each order once, even if a worker is killed or paused."""
    _, tables, worker, sends, kill, pause, look = blocks_of("docs/tutorial.md", "sh")
    quick, slow = blocks_of("docs/tutorial.md", "python")
    terminals.write("shop.py", quick)
    terminals.type(tables)
    terminals.type(worker)
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
    assert SLEEP.search(slow.text)
    kept = quick.text.partition("@app.task")[0]
    terminals.write("shop.py", replace(quick, text=kept + slow.text))
    terminals.type(worker)
    wait_until(lambda: " ready." in terminals.log(), message="it is ready")
    child = terminals.worker_pid(terminals.type(kill))
    os.kill(child, signal.SIGKILL)
    terminals.wake(43)
    wait_until(lambda: terminals.shipments(43), message="order 43")
    assert "Worker exited prematurely" in terminals.log()
    assert terminals.shipments(43) == 1
    child = terminals.worker_pid(terminals.type(pause))
    terminals.pause(child)
    terminals.wake(44)
    wait_until(lambda: terminals.type(look) == "1", message="order 44")
    assert "stale commit refused" not in terminals.log()
    os.kill(child, signal.SIGCONT)
    wait_until(lambda: "stale commit refused" in terminals.log(), message="it is refused")
    assert terminals.type(look) == "1"
    assert [terminals.shipments(order) for order in (42, 43, 44)] == [1, 1, 1]


def test_the_tutorial_of_rq_ships_each_order_once(terminals: Terminals) -> None:
    """RQ ships each order once, even if a work horse is killed or paused."""
    page = "docs/tutorial-rq.md"
    _, tables, worker, twice, one, kill, another, pause, last = blocks_of(page, "sh")
    jobs, place = blocks_of(page, "python")
    answered, taken_over, refused = blocks_of(page, "text")
    assert SLEEP.search(jobs.text)
    terminals.write("jobs.py", jobs)
    terminals.write("place.py", place)
    terminals.type(tables)
    terminals.type(worker)
    terminals.type(twice)
    terminals.wait_for_output(answered)
    assert terminals.logs().count("packing order 42") == 1
    assert terminals.type(one) == "1"

    terminals.type(kill)
    os.kill(terminals.packer(43), signal.SIGKILL)
    terminals.wake(43)
    wait_until(lambda: terminals.type(another) == "1", takes_s=5, message="order 43")
    terminals.wait_for_output(taken_over)
    assert terminals.type(another) == "1"

    terminals.type(worker)
    terminals.type(pause)
    horse = terminals.packer(44)
    wait_until(lambda: terminals.log().count("jobs.ship(44, 20)"), message="both jobs are taken")
    terminals.pause(horse)
    terminals.wake(44)
    wait_until(lambda: terminals.type(last) == "1", takes_s=5, message="order 44")
    assert "stale commit refused" not in terminals.logs()
    os.kill(horse, signal.SIGCONT)
    terminals.wait_for_output(refused)
    assert terminals.type(last) == "1"


def test_the_tutorial_of_django_ships_each_order_once(terminals: Terminals) -> None:
    """A duplicate adds no parcel. A failure rolls back, and the admin shows its error."""
    page = "docs/tutorial-django.md"
    _, project, tables, worker, server, twice, fails = blocks_of(page, "sh")
    settings, *files = blocks_of(page, "python")
    duplicate, shown = blocks_of(page, "text")
    terminals.type(project)
    terminals.write("shop/settings.py", settings, mode="a")
    names = ["shop/celery.py", "shop/__init__.py", "models.py", "admin.py", "tasks.py"]
    for name, block in zip(names, files, strict=True):
        terminals.write(name if "/" in name else f"orders/{name}", block)
    terminals.type(tables)
    terminals.type(worker)
    terminals.type(server)
    browser = Browser(terminals.port)
    wait_until(browser.answers, message="the server answers")
    browser.submit("login/?next=/admin/", username="admin", password=PASSWORD)
    for address in ("1 Main Street", ""):
        browser.submit("orders/order/add/", address=address)

    terminals.type(twice)
    terminals.wait_for_output(duplicate)
    assert terminals.logs().count("succeeded in") == 2
    assert browser.rows("orders/order/") == [["2", "-", "0"], ["1", "1 Main Street", "1"]]

    terminals.type(fails)
    wait_until(lambda: browser.works()[0][1] == "FAILED", message="order 2 fails")
    assert browser.works() == [re.split(" {2,}", line) for line in shown.text.splitlines()[1:]]
    assert "ValueError: the order has no address" in terminals.logs()
    assert browser.rows("orders/order/")[0] == ["2", "-", "0"]
    browser.submit("orders/order/2/change/", address="2 Main Street")
    terminals.type(fails)
    wait_until(lambda: browser.works()[0][1] == "DONE", message="order 2 is shipped")
    assert browser.works()[0][2] == "2"
    assert browser.rows("orders/order/")[0] == ["2", "2 Main Street", "1"]
