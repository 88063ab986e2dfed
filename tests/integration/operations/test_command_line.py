"""Behaviour of all `taskguard` commands: pipes, sources of URLs, readable names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import taskguard
from support import claims
from support.guarded_shop import GuardedShop
from taskguard.cli import main
from taskguard.model.claims import Claimed
from taskguard.run.names import Names

LEDGER, LOCKS = "TASKGUARD_LEDGER_URL", "TASKGUARD_LOCKS_URL"
# Each prints more than a line, or would.
PRINTING = (
    "--help",
    "ledger create --sql",
    "locks create --sql",
    "ledger create --url {url}",
    "ledger upgrade --url {url}",
    "work list --state NEW --limit 5000 --url {url}",
    "work show {work} --url {url}",
    "work requeue nothing --reason x --url {url}",
    "waiting --url {url}",
    "purge --url {url}",
    "doctor --ledger {url}",
    "keys release nothing --reason x --ledger {url}",
    "sweep",
)


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (LEDGER, LOCKS):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


def test_a_reader_that_goes_away_is_no_error(url: str, tmp_path: Path) -> None:
    """If the reader of a command's pipe has gone, there is no traceback and no message."""
    shop = GuardedShop(url)
    work = "ship order:0"
    for number in range(300):  # their list takes two buffers of 8 KiB
        shop.ledger.enqueue(None, claims.request(number, call="{}"))
    shop.close()
    for command in PRINTING:
        words = [word.format(url=url, work=work) for word in command.split()]
        running = subprocess.Popen(
            [sys.executable, "-m", "taskguard", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
        )
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        said = running.stderr.read().decode()
        running.stderr.close()
        status = running.wait()
        # argparse hears nothing of its help; what is refused is said on the other stream.
        by_argparse = words[-1] in ("--help", "--version")
        assert by_argparse or (status == 141) == (not said), (command, status, said)
        assert "Traceback" not in said
        assert "BrokenPipe" not in said


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`taskguard --version` prints the version."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"taskguard {taskguard.__version__}\n"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("work list", f"--url, or set {LOCKS} or {LEDGER}"),
        ("ledger create", f"--url, or set {LEDGER}"),
        ("purge", f"--url, or set {LEDGER}"),
        ("waiting", f"--url, or set {LOCKS} or {LEDGER}"),
        ("locks create", f"--url, or set {LOCKS}"),
        ("keys release a --reason x", f"--locks or --url, or set {LOCKS} or {LEDGER}"),
        ("work list --url nothing", "--url: The ledger's URL is malformed"),
        ("work list --url oracle://x/y", "--url: A database of kind 'oracle' cannot have a ledger"),
        ("ledger create --sql --url nothing", "--url: The ledger's URL is malformed"),
        ("locks create --url redis://x", "--url: "),
        ("locks create --sql --url sqlite:///x", "--url: taskguard has no lock table for sqlite"),
        (
            "keys release a --reason x --locks http://x",
            "--locks: The lock server's URL starts with http",
        ),
        ("keys release a --reason x --ledger nothing", "--url: The ledger's URL is malformed"),
    ],
)
def test_an_error_names_the_option(
    command: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error names the option that is missing or wrong."""
    assert main(command.split()) == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("work list", LEDGER),
        ("keys release a --reason x", LEDGER),
        ("keys release a --reason x", LOCKS),
        ("locks create", LOCKS),
        ("locks create", LEDGER),
    ],
)
def test_an_error_names_the_variable(
    command: str,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error names the environment variable that is wrong."""
    monkeypatch.setenv(variable, "nothing")
    assert main(command.split()) == 1
    assert capsys.readouterr().err.startswith(f"taskguard: {variable}: ")


@pytest.mark.parametrize("option", ["--locks", "--ledger"])
def test_the_doctor_names_the_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The finding of a wrong URL names the doctor's option."""
    assert main(["doctor", option, "nothing"]) == 1
    assert f"    the settings: {option}: " in capsys.readouterr().out


def test_an_age_that_the_help_offers_is_taken(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each age in the help is accepted."""
    GuardedShop(url).close()
    with pytest.raises(SystemExit):
        main(["purge", "--help"])
    [offered] = re.findall(r"--older-than AGE\s+(.*?) \(the default\)", capsys.readouterr().out)
    ages = re.findall(r"\d+[smhd]", offered)
    assert len(ages) == 3
    for age in ages:
        assert main(["purge", "--older-than", age, "--url", url]) == 0


def test_a_database_is_named_as_in_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A database is shown as in its URL: a relative file stays relative."""
    monkeypatch.chdir(tmp_path)
    for url, place in (
        ("sqlite:///here.db", "here.db"),
        (f"sqlite:///{tmp_path}/there.db", f"{tmp_path}/there.db"),
    ):
        assert main(["ledger", "create", "--url", url]) == 0
        assert capsys.readouterr().out == f"created: the ledger's tables in sqlite {place}\n"
        assert main(["ledger", "upgrade", "--url", url]) == 0
        said = capsys.readouterr().out
        assert said.endswith(f"already: the ledger's tables in sqlite {place}\n")


def test_lists_of_work_show_no_leaders(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A leader's record is not listed as work."""
    shop = GuardedShop(url)
    seen: list[int] = []

    def lead(leadership: taskguard.Leadership) -> None:
        assert leadership.remember("x")
        seen.append(main(["work", "list", "--state", "PROCESSING", "--url", url]))

    shop.tg.leader("beat").run(lead)
    shop.close()
    assert seen == [0]
    assert capsys.readouterr().err == "taskguard: no work is PROCESSING\n"


def test_dead_work_says_which_holder_vanished(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The list and the record of DEAD work name the process that vanished."""
    shop = GuardedShop(url)
    claimed = shop.ledger.claim(claims.request(max_crashes=1))
    assert isinstance(claimed, Claimed)
    claims.end_leases(shop.engine)
    shop.ledger.claim(claims.request(max_crashes=1))
    shop.close()
    why = Names(shop.ledger).described(claimed.claim.owner) + " vanished"
    assert re.match(r".* on .*, pid \d+, message .* vanished", why)
    assert main(["work", "list", "--url", url]) == 0
    assert capsys.readouterr().out.endswith(f"ship order:1\t{why}\n")
    assert main(["work", "show", "ship order:1", "--url", url]) == 0
    assert f"  error  {why}\n" in capsys.readouterr().out


def test_work_in_progress_names_its_process(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The process is shown after the stored owner."""
    shop = GuardedShop(url)
    claimed = shop.ledger.claim(claims.request())
    assert isinstance(claimed, Claimed)
    shop.close()
    owner = claimed.claim.owner
    process = owner.process  # it is not on record
    assert main(["work", "show", "ship order:1", "--url", url]) == 0
    assert f"  at     {process}; owner {owner}, fence " in capsys.readouterr().out
