"""The examples run by one command each, on servers of their own, and show what they promise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.needs import need
from taskguard.testing.servers import Postgres, Valkey

EXAMPLES = Path(__file__).parent.parent / "examples"
OUTCOMES = {
    "celery_shop/shop.py": "shipments: {7: 1, 8: 1, 9: 1}",
    "rq_invoices/invoices.py": "payments: {7: 1, 8: 1}",
    "sqlalchemy_shop/shop.py": "orders: {7: ('BILLED', 1, 1), 8: ('BILLED', 1, 1), "
    "9: ('CANCELLED', 0, 0)}",
}


@pytest.mark.parametrize(("file", "outcome"), OUTCOMES.items())
def test_an_example_does_everything_once_and_says_so(
    file: str, outcome: str, tmp_path: Path
) -> None:
    """From another folder, as a user would start it."""
    need(Valkey)
    need(Postgres)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == outcome
    assert "answered as a duplicate" in done.stdout


@pytest.mark.parametrize("file", OUTCOMES)
def test_an_example_survives_what_its_readme_tells_to_try(file: str, tmp_path: Path) -> None:
    """The first process that says it is at work is killed; another one does it."""
    need(Valkey)
    need(Postgres)
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / file), "--seconds", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        with process.stdout:
            said = ""
            for line in process.stdout:
                if " by process " in line and " by process " not in said:
                    os.kill(int(line.split()[-1]), signal.SIGKILL)
                said += line
        assert process.wait(60) == 0, said
    finally:
        process.kill()
        process.wait(30)
    assert "takes over" in said
    assert OUTCOMES[file] in said.splitlines()


@pytest.mark.parametrize("file", OUTCOMES)
def test_the_task_stands_on_the_first_screen(file: str) -> None:
    """With a README beside it that names the command."""
    first_screen = (EXAMPLES / file).read_text().splitlines()[:50]
    assert any(line.startswith("@guarded_") for line in first_screen)
    assert any("with guard.transaction() as db:" in line for line in first_screen)
    assert f"python examples/{file}\n" in (EXAMPLES / file).with_name("README.md").read_text()


def test_the_tested_shop_finds_the_wrong_tasks_out() -> None:
    """By the command that its README names; it shows the right one's table, and leaves nothing."""
    folder = EXAMPLES / "tested_shop"
    assert "python -m pytest examples/tested_shop\n" in (folder / "README.md").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rP", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder.parent.parent,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
    assert "transaction.commit done                 2        1" in done.stdout
