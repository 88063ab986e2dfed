"""All commands of the parser: help, JSON, exit statuses, the reference page, tab completion."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.drivers import run_without
from support.pages import ROOT
from taskguard.cli import main, make_parser

WITHOUT_JSON = {
    "ledger create",
    "ledger upgrade",
    "locks create",
    "sweep",
    "relay",
    "exporter",
    "dashboard",
    "completions",
}
"""Commands that set up or serve something."""


def commands_of(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command that runs something, with its parser."""
    nested = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if name and not (nested and nested[0].required):
        yield name, parser
    for action in nested:
        for word, each in action.choices.items():
            yield from commands_of(each, f"{name} {word}".strip())


COMMANDS = dict(commands_of(make_parser()))


def options_of(parser: argparse.ArgumentParser) -> dict[str, str | None]:
    """Return the help of each option."""
    return {name: each.help for each in parser._actions for name in each.option_strings}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_json_and_a_status_for_wrong_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option has a help, and the reference page names it."""
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    assert capsys.readouterr().out.startswith(f"usage: taskguard {command} ")
    options = options_of(COMMANDS[command])
    assert ("--json" in options) == (command not in WITHOUT_JSON)
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert f"`{command.split(maxsplit=1)[0]}" in page
    for name, text in options.items():
        assert text, name
        assert name in page or not name.startswith("--") or name == "--help", name
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), "--no-such-option"])


def test_celery_and_app_name_an_application_for_each_command() -> None:
    """Whichever of the two a command's page uses, an operator need not remember it."""
    both = {"--celery", "--app"}
    taken = {command: both & set(options_of(parser)) for command, parser in COMMANDS.items()}
    assert {command for command, options in taken.items() if options == both} >= {
        "sweep",
        "relay",
        "doctor",
        "explain",
        "dashboard",
    }
    assert [command for command, options in taken.items() if options not in (both, set())] == []


def test_the_script_of_bash_completes_commands_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bash takes the script. The completions are those of the parser."""
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    assert main(["completions", "bash"]) == 0
    script = tmp_path / "taskguard.bash"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run([bash, "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for line, found in {
        "taskguard wor": {"work", "workers"},
        "taskguard work re": {"requeue"},
        "taskguard work list --st": {"--state"},
        "taskguard work list --state DE": {"DEAD"},
    }.items():
        words = line.split()
        typed = f"COMP_WORDS=({line}) COMP_CWORD={len(words) - 1} COMP_LINE='{line}'"
        asked = f"{typed} COMP_POINT={len(line)}; _shtab_taskguard taskguard {words[-1]} x"
        done = subprocess.run(
            [bash, "-c", f"source {script}; {asked}; echo ${{COMPREPLY[@]}}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert set(done.stdout.split()) == found, (line, done)


def test_a_command_names_the_extra_that_it_needs(sqlite_url: str) -> None:
    """Completions and the screen of `top` are the only commands that need the extra `cli`."""
    run_without(
        {"rich", "shtab"},
        "import contextlib, io\n"
        "from taskguard.cli import main\n"
        "said = io.StringIO()\n"
        "with contextlib.redirect_stderr(said):\n"
        "    assert main(['completions', 'bash']) == 1\n"
        'assert "celery-taskguard[cli]" in said.getvalue(), said.getvalue()\n'
        f"assert main(['ledger', 'create', '--url', {sqlite_url!r}]) == 0\n"
        f"assert main(['top', '--once', '--url', {sqlite_url!r}]) == 0\n",
    )
