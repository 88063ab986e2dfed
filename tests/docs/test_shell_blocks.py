"""Each command in README, CONTRIBUTING and docs is one that its program takes; most are run.

`pip` is not run here but by `tests/packaging`; of `make` it is asked what it would do. Commands
that stay until they are stopped are started where the tutorial's are (`test_tutorial.py`).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.ledger.conftest import KINDS as LEDGERS
from contract.locks.conftest import KINDS as LOCKS

import taskguard
from support import claims
from support.pages import PAGES, ROOT, commands_of, inline_commands_of, without_blocks
from taskguard.cli import main
from taskguard.ledger.sql import SqlLedger
from taskguard.model.claims import Claimed
from taskguard.model.delivery import Delivery, MessageRef
from taskguard.model.lease import new_owner
from taskguard.model.policy import Policy

pytestmark = pytest.mark.once

LANGUAGES = {"python", "sh", "text"}
LANGUAGES |= {"toml"}  # `tests/packaging` builds a package of it
LANGUAGES |= {"yaml", "ini"}  # their commands are tried here
LANGUAGES |= {"ruby", "elixir"}  # code of other libraries, which a guard replaces
NIGHT = "docs/how-to/at-three-in-the-morning.md"  # `test_night.py` runs its commands
COMMANDS = sorted({command for page in PAGES if page != NIGHT for _, command in commands_of(page)})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# `test_tutorial.py` runs these.
IN_TUTORIALS = {
    "docs/tutorial.md": {"celery", "sqlite3"},
    "docs/tutorial-rq.md": {"python3", ".", "cd", "rq", "sqlite3", "python"},
    "docs/tutorial-django.md": {"python3", ".", "cd", "celery", "django-admin", "python"},
    "README.md": {"python3", ".", "cd", "python", "celery"},
}
SHOP = """
from celery import Celery
from taskguard_celery import guarded_task

app = Celery("shop", broker="memory://")
app.conf.taskguard_locks_url = "memory://"

@app.task
@guarded_task(key="order:<order_id>", recoverable=True)
def ship(order_id, guard): ...
"""


def of_program(*names: str) -> list[str]:
    """The commands that begin so."""
    return [command for command in COMMANDS if shlex.split(command)[0] in names]


def test_each_language_of_a_block_has_tests() -> None:
    """Python, shell, pictures and project files. `make docs` fails for unknown directives."""
    from support.pages import blocks_of

    found = {block.language for page in PAGES for block in blocks_of(page)}
    assert {each for each in found if not each.startswith("{")} <= LANGUAGES
    for page in PAGES:
        left = re.findall(r"^(?:```|:::).*", without_blocks(page), re.MULTILINE)
        assert not left, f"{page}: a fence is not closed"


def test_every_command_has_a_test() -> None:
    """A command of another program needs a test of its own."""
    tried = {"make", "pip", "taskguard", "alembic", ".ci/run"}
    services = {"valkey-server", "celery", "sh"}  # the last starts celery
    more = {**IN_TUTORIALS, "docs/how-to/deploy.md": services}
    for page in PAGES:
        programs = {shlex.split(command)[0] for _, command in commands_of(page)}
        assert programs <= tried | more.get(page, set()), page


@pytest.mark.parametrize("page", PAGES)
def test_make_has_each_target_that_a_page_names(page: str) -> None:
    """In blocks and in prose, with their variables."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]\w*) \??=|^([A-Z]\w*) :=", makefile, re.MULTILINE))
    known = {name for pair in variables for name in pair}
    commands = [command for _, command in commands_of(page) if command.startswith("make ")]
    for command in (*commands, *inline_commands_of(page)):
        if "…" in command and "=…" not in command and '"…"' not in command:
            continue
        for word in shlex.split(command)[1:]:
            name, given, _ = word.partition("=")
            assert (name in known) if given else (name in targets), f"{page}: {command}"


def test_make_check_selects_tests_by_each_of_its_words() -> None:
    """A word that no longer names a folder or a contract suite's kind would select nothing."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    checked = re.search(r"^CHECKED = (.*?)-m .*?-k '(.*?)'", makefile, re.MULTILINE | re.DOTALL)
    assert checked is not None
    folders = re.findall(r"tests/[\w/.]+", checked[1])
    assert all((ROOT / each).exists() for each in folders)
    kinds = {*map(str, LEDGERS), *map(str, LOCKS)}
    assert set(checked[2].split(" or ")) <= {Path(each).name for each in folders} | kinds


@pytest.mark.parametrize("command", of_program("pip"))
def test_what_pip_installs_exists(command: str) -> None:
    """The distribution by its name, or the checkout, with extras that it has."""
    program, install, what = shlex.split(command)
    found = re.fullmatch(r"([\w-]+|\.)\[([\w,]+)\]", what)
    assert (program, install) == ("pip", "install")
    assert found is not None
    assert found[1] in (PROJECT["name"], ".")
    assert set(found[2].split(",")) <= set(PROJECT["optional-dependencies"])


def test_celery_takes_the_commands_of_services(shop: str) -> None:
    """Up to their last option; they are not started. `HOSTNAME` is the container's."""
    from celery.bin.celery import celery

    assert shop
    page = "docs/how-to/deploy.md"
    found = [shlex.split(command) for _, command in commands_of(page)]
    found = [shlex.split(words[2]) if words[0] == "sh" else words for words in found]
    commands = [words[1:] for words in found if words[0] == "celery"]
    assert {words[2] for words in commands} == {"worker", "inspect"}
    for words in commands:
        with pytest.raises(SystemExit, match="0"):
            celery.main([*words, "--help"])


@pytest.fixture
def shop(
    tmp_path: Path, sqlite_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A folder with `shop.py`, and a ledger with DEAD work and a key whose holder is gone."""
    (tmp_path / "shop.py").write_text(SHOP)
    # Celery gives an app's tasks to all later apps of the process.
    monkeypatch.setattr("celery._state._on_app_finalizers", set())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TASKGUARD_LEDGER_URL", sqlite_url)
    monkeypatch.setenv("TASKGUARD_LOCKS_URL", "memory://")
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    tg = taskguard.connect(locks=None, ledger=ledger)
    dies = Delivery(
        keys=("order:42",),
        work="shop.ship order:42",
        task="shop.ship",
        message=MessageRef("m"),
        policy=Policy(max_crashes=1),
    )
    with pytest.raises(SystemExit):
        tg.runner.deliver(dies, lambda guard: sys.exit("out of memory"))
    with pytest.raises(taskguard.errors.WorkDeadError):
        tg.runner.deliver(dies, lambda guard: None)
    gone = claims.request(work=None, keys=("inventory:42",), owner=new_owner(), ttl_s=600.0)
    assert isinstance(ledger.claim(gone), Claimed)
    ledger.close()
    yield redis_url
    sys.modules.pop("shop", None)


@pytest.mark.parametrize("command", of_program("taskguard"))
def test_the_command_does_as_a_page_says(
    command: str,
    shop: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Each succeeds, on a ledger with one DEAD work; `relay` is stopped after its first round.

    `exporter` listens on a free port, and is stopped at once.
    """
    words = shlex.split(command)[1:]
    words = [shop if word == "redis://localhost" else word for word in words]
    if "postgresql+psycopg://shop@localhost/shop" in words:
        words[-1] = request.getfixturevalue("pg_url")
    if words[0] == "locks":
        monkeypatch.setenv("TASKGUARD_LOCKS_URL", request.getfixturevalue("pg_url"))
    if words[0] == "exporter":
        pytest.importorskip("prometheus_client")
        monkeypatch.setattr("taskguard.cli.exporter._until_stopped", lambda: None)
        assert main([*words, "--port", "0"]) == 0
        return
    if words[0] == "completions":
        pytest.importorskip("shtab")
    # The command sets the signals that stop a relay. This process keeps its own.
    monkeypatch.setattr("taskguard.cli.sweep.signal.signal", lambda *_: None)
    monkeypatch.setattr("taskguard.cli.sweep.threading.Event", _SetAfterOne)
    if words[0] == "dashboard":
        words = ["dashboard", "--ledger", request.getfixturevalue("sqlite_url"), "--port", "0"]
        monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    if words == ["--version"]:
        with pytest.raises(SystemExit, match="0"):
            main(words)
        return
    assert main(words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    if words[:2] in (["work", "list"], ["work", "show"]):
        assert "shop.ship order:42" in said
    if words[:2] == ["work", "requeue"]:
        assert "is NEW" in said


class _SetAfterOne:
    """Stands for the Event that stops a relay."""

    def __init__(self) -> None:
        self._waited = False

    def is_set(self) -> bool:
        return self._waited

    def wait(self, _timeout_s: float) -> None:
        self._waited = True


@pytest.mark.parametrize("command", of_program("alembic"))
def test_alembic_takes_the_command(command: str, tmp_path: Path) -> None:
    """In a folder of its own making."""
    alembic = [sys.executable, "-m", "alembic"]
    words = shlex.split(command)[1:]
    for each in (["init", "migrations"], words):
        done = subprocess.run(
            [*alembic, *each], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
