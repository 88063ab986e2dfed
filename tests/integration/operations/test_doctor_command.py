"""`taskguard doctor`: what it prints, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.clock_shim import Postgres, Valkey, server_clock, unavailable
from support.needs import missing, need
from taskguard.cli import main
from taskguard.doctor import Configuration
from taskguard.doctor.clocks import Reading, judge_clocks
from taskguard.doctor.lines import check_lines
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox import servers
from taskguard_sandbox.servers import free_port

SECRET = "s3cret-horse"
FIELDS = ["part", "name", "level", "where", "what", "why", "fix", "link"]
Doctor = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TASKGUARD_LOCKS_URL", "TASKGUARD_LEDGER_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the command: its status, and what it printed."""

    def doctor(*words: str) -> tuple[int, str]:
        try:
            status = main(["doctor", *words])
        except SystemExit as left:
            status = int(left.code or 0)
        said = capsys.readouterr()
        return status, said.out if status != 2 else said.err

    return doctor


@pytest.fixture
def ledger_url(sqlite_url: str) -> str:
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    ledger.close()
    return sqlite_url


def test_nothing_found(doctor: Doctor, ledger_url: str) -> None:
    """Without findings each checked part is named, and the exit status is 0."""
    with servers.Valkey(appendonly="yes") as server:
        status, said = doctor("--locks", server.url, "--ledger", ledger_url)
    assert status == 0
    parts = [line.split()[0] for line in said.splitlines() if line and line[0] != " "]
    assert parts == ["locks", "ledger", "clocks", "0"]
    assert said.count("  nothing found\n") == 3
    assert said.endswith("\n0 errors, 0 warnings, 0 notes.\n")


def test_an_error(doctor: Doctor, sqlite_url: str) -> None:
    """An error shows what, why, the fix and a link, in 80 columns of plain text. The exit status is
    1."""
    status, said = doctor("--ledger", sqlite_url)
    assert status == 1
    assert "  error: tables_missing\n    The ledger's tables do not exist in sqlite" in said
    assert "\n    Fix: Run `taskguard ledger create`.\n    See: docs/how-to/" in said
    assert said.endswith("\n1 error, 0 warnings, 0 notes.\n")
    assert "\x1b" not in said
    indented = [line for line in said.splitlines() if line.startswith("    ")]
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in indented)


def test_what_is_away_is_a_finding(doctor: Doctor) -> None:
    """Both servers are down: there is no traceback or password, and no finding about their
    clocks."""
    locks = f"redis://:{SECRET}@127.0.0.1:{free_port()}/0"
    ledger = f"postgresql+psycopg://u:{SECRET}@127.0.0.1:{free_port()}/shop"
    status, said = doctor("--locks", locks, "--ledger", ledger)
    assert status == 1
    assert "lock_server_away" in said
    assert "ledger_away" in said
    assert "clocks" not in said
    assert "Traceback" not in said
    assert SECRET not in said


def test_json(doctor: Doctor, sqlite_url: str) -> None:
    """With `--json`, a list of findings with fixed fields is printed, and nothing else."""
    dead = f"redis://127.0.0.1:{free_port()}"
    status, said = doctor("--locks", dead, "--ledger", sqlite_url, "--json")
    findings = json.loads(said)
    assert status == 1
    assert [list(each) for each in findings] == [FIELDS, FIELDS]
    assert [(each["part"], each["name"], each["level"]) for each in findings] == [
        ("locks", "lock_server_away", "error"),
        ("ledger", "tables_missing", "error"),
    ]


def test_strict(doctor: Doctor) -> None:
    """A warning exits with 0, and with `--strict` with 1. A note always exits with 0."""
    with servers.Valkey(appendonly="no") as server:  # found without a ledger only
        assert doctor("--locks", server.url)[0] == 0
        assert doctor("--locks", server.url, "--strict")[0] == 1
    with servers.Valkey(appendonly="yes") as server:
        assert doctor("--locks", server.url, "--strict")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to check: pass --celery"),
        (("--celery", "no.such:app"), "no Celery app at 'no.such:app'"),
        (("--celery", "shop:app", "--locks", "memory://"), "remove --locks and --ledger"),
        (("--rq", f"http://:{SECRET}@x"), "--rq: the URL"),
        (("--celery", "shop:app", "--rq", "redis://x"), "not allowed with"),
        (("--jason",), "unrecognized arguments"),
    ],
)
def test_asked_wrongly(doctor: Doctor, words: tuple[str, ...], message: str) -> None:
    """A wrong call exits with 2 and one sentence, so that CI can tell it from a finding."""
    status, said = doctor(*words)
    assert status == 2
    assert message in said
    assert SECRET not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--locks", f"nosuch://:{SECRET}@x"), "nosuch://"),
        (("--ledger", f"nosuch://:{SECRET}@x"), "cannot have a ledger"),
    ],
)
def test_a_wrong_url_is_a_finding(doctor: Doctor, words: tuple[str, ...], message: str) -> None:
    """A wrong URL is an error, because nothing guarded could run."""
    status, said = doctor(*words)
    assert (status, "error: misconfigured" in said, SECRET in said) == (1, True, False)
    assert message in said


def test_the_environment_says_what_is_not_given(
    doctor: Doctor, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that are not given come from the environment."""
    monkeypatch.setenv("TASKGUARD_LEDGER_URL", ledger_url)
    monkeypatch.setenv("TASKGUARD_LOCKS_URL", "memory://")
    status, said = doctor()
    assert (status, "MemoryLocks" in said, "SqlLedger" in said) == (0, True, True)


def test_it_leaves_no_connection_open(ledger_url: str, redis_url: str, tmp_path: Path) -> None:
    """The command closes all connections. It runs in a process in which each warning is an
    error."""
    command = [sys.executable, "-W", "error", "-X", "dev", "-m", "taskguard", "doctor"]
    done = subprocess.run(
        [*command, "--locks", redis_url, "--ledger", ledger_url],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing found" in done.stdout


def test_locks_in_memory(doctor: Doctor, ledger_url: str) -> None:
    """Locks in memory are a note with a ledger, and a warning without one."""
    assert "note: locks_in_memory" in doctor("--locks", "memory://", "--ledger", ledger_url)[1]
    assert "warning: locks_in_memory" in doctor("--locks", "memory://")[1]


def test_alembic(
    doctor: Doctor, ledger_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor finds out whether the `env.py` of this folder would drop the ledger's tables."""
    from alembic import command, config

    monkeypatch.chdir(tmp_path)
    assert "migrations" not in doctor("--ledger", ledger_url)[1]
    command.init(config.Config("alembic.ini"), "migrations")
    assert "warning: alembic_drops" in doctor("--ledger", ledger_url)[1]
    file = tmp_path / "migrations" / "env.py"
    text = file.read_text().replace(
        "connection=connection,", "connection=connection, include_name=taskguard.include_name,"
    )
    file.write_text(text)
    said = doctor("--ledger", ledger_url)[1]
    assert "migrations" in said
    assert "alembic_drops" not in said
    # The settings may be in pyproject.toml, too.
    (tmp_path / "alembic.ini").unlink()
    (tmp_path / "pyproject.toml").write_text(
        '[tool.alembic]\nscript_location = "%(here)s/migrations"'
    )
    assert "migrations" in doctor("--ledger", ledger_url)[1]


def test_what_many_tasks_have_is_said_once(
    doctor: Doctor, ledger_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding of many tasks is printed once, with three names. JSON has each."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())
    (tmp_path / "many_tasks.py").write_text(
        "from celery import Celery\n"
        "from taskguard_celery import guarded_task\n"
        "app = Celery('many', broker='amqp://', set_as_current=False)\n"
        "app.conf.taskguard_locks_url = 'memory://'\n"
        f"app.conf.taskguard_ledger_url = {ledger_url!r}\n"
        "app.conf.task_acks_late = app.conf.task_reject_on_worker_lost = True\n"
        "def ship(n): ...\n"
        "for n in range(5):\n"
        "    guarded = guarded_task(key='order:<n>')(ship)\n"
        "    app.task(name=f'ship{n}', shared=False, acks_late=False)(guarded)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    said = doctor("--celery", "many_tasks:app")[1]
    assert said.count("warning: early_ack") == 1
    assert "the tasks ship0, ship1, ship2, and 2 more" in " ".join(said.split())
    findings = json.loads(doctor("--celery", "many_tasks:app", "--json")[1])
    sys.modules.pop("many_tasks")
    assert [each["name"] for each in findings].count("early_ack") == 5


@pytest.mark.parametrize(
    ("waiting", "relay", "name", "text"),
    [
        (("shop", "celery"), "", "stranded_lines", "`taskguard relay --celery MODULE:APP`"),
        (("shop", "rq"), "", "stranded_lines", "`taskguard relay --rq REDIS_URL`"),
        (("shop", "rq"), "celery", "stranded_lines", "worker of rq"),
        (("former", "celery"), "", "stranded_lines", "worker of celery"),
        (("other", "celery"), "", "stranded_namespace", "['other']"),
        (("shop", "celery"), "celery", None, ""),
        (("shop", "rq"), "celery+rq", None, ""),
    ],
)
def test_lines_without_a_relay(
    waiting: tuple[str, str], relay: str, name: str | None, text: str
) -> None:
    """The finding names the command for this application's namespaces, and the setting for
    others."""
    ledger = SimpleNamespace(
        count_waiting=lambda: {waiting: 1234},
        holders=lambda key: [1] if relay and key.endswith(f"-relay:{relay}") else [],
    )
    runtime: Any = SimpleNamespace(ledger=ledger, namespace="shop", formerly_namespaces=("former",))
    found = check_lines(runtime, Configuration(lambda: runtime))
    assert [each.name for each in found] == ([] if name is None else [name])
    assert all("1,234" in each.what and text in each.fix for each in found)


class TestClocks:
    def test_servers_whose_clocks_are_wrong(self, doctor: Doctor) -> None:
        """The finding shows the largest distance between two clocks."""
        missing(unavailable())
        need(Valkey)
        need(Postgres)
        with server_clock() as wrong, Valkey(wrong) as locks:
            locks.jump(7.0)
            status, said = doctor("--locks", locks.url)
            assert (status, "warning: clocks_apart" in said) == (0, True)
            apart_s = float(re.findall(r"clocks are ([\d.]+) s apart", said)[0])
            assert 5.0 < apart_s < 9.0
        with server_clock() as wrong, Postgres(wrong) as database:
            url = database.create_database("shop")
            assert "clocks_apart" not in doctor("--ledger", url)[1]
            database.jump(-30.0)
            said = doctor("--ledger", url)[1]
            assert "warning: clocks_apart" in said

    @pytest.mark.parametrize(
        ("readings", "where"),
        [
            ([], None),
            ([Reading("a", 0.9)], None),
            ([Reading("a", 1.4, error_s=0.5)], None),
            ([Reading("a", 1.6, error_s=0.5)], "this machine and a"),
            ([Reading("a", -0.6), Reading("b", 0.6)], "a and b"),
            ([Reading("a", -0.6), Reading("b", 0.3)], None),
        ],
    )
    def test_what_a_slow_answer_can_explain_is_no_finding(
        self, readings: list[Any], where: str | None
    ) -> None:
        """A distance that a slow answer can explain is no finding, for any pair of clocks."""
        found = judge_clocks([Reading("this machine", 0.0), *readings])
        assert [each.where for each in found] == ([] if where is None else [where])
