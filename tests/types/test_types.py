"""Users' type checkers, mypy --strict and pyright, on calls and on the pages' examples.

pyright is basedpyright's, whose wheel contains all that it needs.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.pages import PAGES, blocks_of

HERE = Path(__file__).parent
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
    "reportUnboundVariable": "none",  # the code around an example is only declared
}

_ORDERS = """
    from celery import Celery, Task
    from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
    class Base(DeclarativeBase): ...
    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
    app: Celery
    ship: Task
"""
_APP = """
    from celery import Celery
    app: Celery
"""
# Code around the blocks of a page, in their order. The last one is for all blocks that follow.
_INDEX = """
    from celery import Task
    index: Task
"""
_GUARDED = """
    from sqlalchemy import Executable, text
    from taskguard import Guard
    from taskguard_celery import guarded_task
"""
_PROVIDER = f"""{_APP}
    class provider:
        class TimeoutError(Exception): ...
        @staticmethod
        def charge(cents: int, *, idempotency_key: str) -> str: raise NotImplementedError
        @staticmethod
        def refund(cents: int, *, idempotency_key: str) -> str: raise NotImplementedError
        @staticmethod
        def find(reference: str) -> bool: raise NotImplementedError
        @staticmethod
        def charge_without_key(cents: int, reference: str) -> None: ...
"""
_RECIPES = f"""{_APP}
    from sqlalchemy import Executable
    def pay(invoice_id: int, *, key: str) -> str: raise NotImplementedError
    def paid(invoice_id: int, payment: str) -> Executable: raise NotImplementedError
    def fetch(name: int | str) -> None: ...
    def applied(account_id: int, event_id: int) -> Executable: raise NotImplementedError
    def reported() -> Executable: raise NotImplementedError
"""
AROUND = {
    "docs/how-to/charge-once.md": (_PROVIDER, _PROVIDER + _GUARDED),
    "docs/how-to/choose.md": (_RECIPES, _RECIPES + _GUARDED),
    "docs/how-to/tenants.md": (_APP, _APP + _GUARDED),
    "docs/how-to/alembic.md": (
        """
        from typing import Any
        context: Any
        connection: Any
        target_metadata: Any
        """,
        "from typing import Any",
    ),
    "docs/how-to/asyncio.md": (
        "",
        """
        import asyncio
        from taskguard import TaskGuard
        tg: TaskGuard
        """,
        _ORDERS,
    ),
    "docs/how-to/changing-a-guard.md": (_APP,),
    "docs/how-to/django.md": (
        "INSTALLED_APPS: list[str] = []",
        """
        # Without types it takes Django's `transaction.atomic()` for a function.
        # pyright: reportGeneralTypeIssues=false
        from typing import Any
        class Order:
            id: int
            objects: Any
            def save(self) -> None: ...
        """,
    ),
    "docs/how-to/elsewhere.md": (
        f"""{_APP}
    from sqlalchemy import Engine, Table
    from redis import Redis
    client: Redis
    elsewhere: Engine
    orders: Table
    def pay(order_id: int, *, idempotency_key: str) -> str: raise NotImplementedError
    """,
    ),
    "docs/how-to/enqueue.md": (
        f"{_ORDERS}\n    from sqlalchemy import Engine\n    engine: Engine",
        f"""{_ORDERS}
    from sqlalchemy import Engine
    from taskguard_celery import enqueue
    engine: Engine
    """,
    ),
    "docs/how-to/long-tasks.md": (
        f"""{_APP}
    def read_lines(file_id: int) -> list[dict[str, str]]: raise NotImplementedError
    """,
    ),
    "docs/how-to/moving-over.md": (
        f"""{_APP}
    # It takes a task of Celery's, without types, for the function that it is made of.
    # pyright: reportFunctionMemberAccess=false
    from redis import Redis
    client: Redis
    """,
    ),
    "docs/how-to/in-order.md": (
        _APP,
        f"{_APP}\n    from taskguard import Guard\n    from taskguard_celery import guarded_task",
    ),
    "docs/how-to/latest-wins.md": (
        _APP,
        f"{_APP}\n    from taskguard import Guard\n    from taskguard_celery import guarded_task",
    ),
    "docs/how-to/limits.md": (_APP,),
    "docs/how-to/one-at-a-time.md": (
        _APP,
        "",
        "\n    from taskguard import TaskGuard\n    tg: TaskGuard",
    ),
    "docs/how-to/own-row.md": (_APP,),
    "docs/how-to/periodic.md": (_APP,),
    "docs/how-to/remove.md": (_APP,),
    "docs/how-to/unique.md": (_INDEX,),
    "docs/how-to/unique-until-ended.md": (
        _APP,
        f"""{_APP}
    from celery import Task
    from taskguard_celery import enqueue
    sync: Task
    """,
    ),
    "docs/how-to/web.md": (
        f"{_ORDERS}\n    from sqlalchemy import Table\n    refunds: Table",
        f"""{_ORDERS}
    from sqlalchemy import Engine
    from taskguard.errors import KeyBusyError
    from taskguard_celery import enqueue
    engine: Engine
    def refund(payment_id: int) -> str: raise NotImplementedError
    """,
    ),
    "docs/tutorial.md": (
        "",
        f"""{_APP}
    from sqlalchemy import text
    from taskguard import Guard
    from taskguard_celery import guarded_task
    """,
    ),
    "docs/reference/options.md": (_APP,),
    "docs/reference/events.md": (
        """
        from typing import Any
        metrics: Any
        """,
    ),
}
# The type of a fixture is unknown, a short class on a page has no types, and Django ships none.
UNTYPED = {"docs/how-to/lock-provider.md", "docs/how-to/queue.md", "docs/how-to/testing.md"}
UNTYPED |= {"docs/tutorial-django.md"}
# Frameworks of the user's, and an instrumentation, that have no types.
UNTYPED |= {"docs/how-to/dashboard.md", "docs/how-to/traces.md"}
# No dependencies of the developers': what is known of them is what the pages use.
NOT_INSTALLED = {
    "fastapi": "def __getattr__(name: str) -> Any: ...",
    "jobs": "ship: Any",
    "flask": "Flask: Any\ndef abort(code: int) -> NoReturn: ...",
    "shop": "ship: Any",
    "prometheus_client": "def __getattr__(name: str) -> Any: ...",
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


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One file for each block of a page, with stubs of what is not installed beside them."""
    folder = tmp_path_factory.mktemp("examples")
    for name, stub in NOT_INSTALLED.items():
        (folder / f"{name}.pyi").write_text(f"from typing import Any, NoReturn\n{stub}\n")
    files = []
    for page in sorted(set(PAGES) - UNTYPED):
        around = AROUND.get(page, ("",))
        for number, block in enumerate(blocks_of(page, "python")):
            before = textwrap.dedent(around[min(number, len(around) - 1)])
            name = page.removesuffix(".md").replace("/", "_").replace("-", "_")
            files.append(folder / f"{name}_{number}.py")
            files[-1].write_text(f"{before}\n{block.text}")
    return files


@pytest.fixture(scope="module", params=["mypy", "basedpyright"])
def errors(request: pytest.FixtureRequest, examples: list[Path]) -> dict[str, dict[int, str]]:
    """Errors, by file and line. One run checks all files, because each run reads the libraries."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: it is in the group dev")
    checker = mypy if request.param == "mypy" else pyright
    found: dict[str, dict[int, str]] = {}
    for (file, line), text in checker(examples[0].parent, CALLS, *examples).items():
        found.setdefault(file, {})[line] = text
    return found


def test_calls_are_taken_or_refused_as_they_run(errors: dict[str, dict[int, str]]) -> None:
    """A guard is never passed, arguments are checked, and types go through guards and steps."""
    lines = CALLS.read_text().splitlines()
    refused = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert len(refused) >= 10
    found = errors.get(CALLS.name, {})
    unexpected = {number: text for number, text in found.items() if number not in refused}
    assert unexpected == {}, "what is right is refused"
    assert refused - found.keys() == set(), "what is wrong is taken"


def test_the_examples_of_the_pages_are_typed(
    errors: dict[str, dict[int, str]], examples: list[Path]
) -> None:
    """The examples of the pages pass a strict type check."""
    assert len(examples) >= 24
    wrong = {file: found for file, found in errors.items() if file != CALLS.name}
    assert wrong == {}, wrong
