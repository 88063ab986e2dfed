"""What users' type checkers say: mypy --strict and pyright, of calls and of the README's examples.

pyright is basedpyright's, whose wheel brings all that it runs on.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
CALLS = HERE / "calls.py"
# Celery and Django ship no types, so that their decorators have none.
MYPY = (
    *("--strict", "--allow-untyped-decorators", "--ignore-missing-imports", "--config-file="),
    *("--follow-imports=silent", "--no-error-summary", "--hide-error-context"),
)
PYRIGHT = {
    "typeCheckingMode": "standard",
    "reportMissingTypeStubs": "none",
    # It takes a task of Celery's, without types, for the function that it is made of.
    "reportAttributeAccessIssue": "none",
    "reportUnboundVariable": "none",  # what stands around an example is only declared
}

# What stands around an example, by a name that is in it.
AROUND = {
    "queue.enqueue": """
        from rq import Queue
        from taskguard import Guard
        queue: Queue
    """,
    "@tg.guarded": "from taskguard import Guard",
    "row=GuardedRow": """
        from celery import Celery
        from sqlalchemy import Table
        from taskguard import Guard
        from taskguard_celery import guarded_task
        app: Celery
        orders: Table
    """,
    "with Session(engine)": """
        from celery import Task
        from sqlalchemy import Engine
        from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
        class Order(DeclarativeBase):
            id: Mapped[int]
        engine: Engine
        ship: Task
    """,
    "INSTALLED_APPS": "INSTALLED_APPS: list[str] = []",
    "with atomic()": """
        from typing import Any
        from celery import shared_task
        transaction: Any  # without types pyright takes Django's for a function
        Order: Any
        order: Any
    """,
    "explore_crashes": """
        from collections.abc import Callable
        from typing import Any
        from celery import Task
        ship: Task
    """,
}

pytestmark = [pytest.mark.once, pytest.mark.timeout(900)]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(cache: Path, *files: Path) -> dict[tuple[str, int], str]:
    """Errors, by file and line."""
    said = run(sys.executable, "-m", "mypy", *MYPY, f"--cache-dir={cache}", *map(str, files))
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", said, re.MULTILINE)
    return {(Path(file).name, int(line)): text for file, line, text in found}


def pyright(folder: Path, *files: Path) -> dict[tuple[str, int], str]:
    """Errors, by file and line."""
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps(PYRIGHT | {"include": list(map(str, files))}))
    python = f"--pythonpath={sys.executable}"
    said = run(sys.executable, "-m", "basedpyright", "-p", str(config), python, "--outputjson")
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in json.loads(said)["generalDiagnostics"]
        if each["severity"] == "error"
    }


@pytest.fixture(params=["mypy", "basedpyright"])
def errors_of(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[..., dict[tuple[str, int], str]]:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: it is in the group dev")
    checker = mypy if request.param == "mypy" else pyright
    return lambda *files: checker(tmp_path, *files)


def test_calls_are_taken_or_refused_as_they_run(
    errors_of: Callable[..., dict[tuple[str, int], str]],
) -> None:
    """A guard is never passed, arguments are checked, and types go through guards and steps."""
    lines = CALLS.read_text().splitlines()
    refused = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert len(refused) >= 10
    found = errors_of(CALLS)
    told = {number: text for (_, number), text in found.items() if number not in refused}
    assert told == {}, "what is right is refused"
    assert refused - {number for _, number in found} == set(), "what is wrong is taken"


def test_the_readmes_examples_are_typed(
    errors_of: Callable[..., dict[tuple[str, int], str]], tmp_path: Path
) -> None:
    """As a program that is checked strictly would have them."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    files = []
    for number, block in enumerate(blocks):
        around = [textwrap.dedent(text) for name, text in AROUND.items() if name in block]
        files.append(tmp_path / f"example_{number}.py")
        files[-1].write_text("\n".join([*around, block]))
    assert errors_of(*files) == {}
