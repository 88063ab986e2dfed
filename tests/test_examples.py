"""The examples survive what their READMEs tell to try, and their recipes hold.

That each runs by its one command, from the installation that it names, is in `packaging/`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest

from support.needs import need
from support.waiting import patience_s
from taskguard.errors import StaleTokenError
from taskguard_sandbox.servers import Postgres, Valkey

EXAMPLES = Path(__file__).parent.parent / "examples"
OUTCOMES = {
    "celery_shop/shop.py": "shipments: {7: 1, 8: 1, 9: 1}",
    "django_shop/shop.py": "parcels: {7: 1, 8: 1, 9: 1}",
    "rq_invoices/invoices.py": "payments: {7: 1, 8: 1}",
    "billing/billing.py": "payments: {7: 1, 8: 1}",
    "rq_sqlite/measurements.py": "lines: {'a.txt': 9, 'b.txt': 5}",
    "sqlalchemy_shop/shop.py": "orders: {7: ('BILLED', 1, 1), 8: ('BILLED', 1, 1), "
    "9: ('CANCELLED', 0, 0)}",
}


@pytest.mark.parametrize("file", OUTCOMES)
def test_an_example_survives_what_its_readme_tells_to_try(file: str, tmp_path: Path) -> None:
    """The first process that says it is at work is killed; another one does it."""
    need(Valkey)
    need(Postgres)
    # Long enough to be killed meanwhile; for two lines of a file, of which there are several.
    seconds = "3" if "measurements" in file else "6"
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / file), "--seconds", seconds],
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
        assert process.wait(patience_s()) == 0, said
    finally:
        process.kill()
        process.wait(patience_s())
    assert "takes over" in said
    assert OUTCOMES[file] in said.splitlines()


@pytest.mark.parametrize("file", OUTCOMES)
def test_the_task_stands_on_the_first_screen(file: str) -> None:
    """With a README beside it that names the command."""
    first_screen = (EXAMPLES / file).read_text().splitlines()[:50]
    assert any(line.startswith("@guarded_") for line in first_screen)
    blocks = "with guard.transaction() as db:", "with atomic() as guard:"
    assert any(block in line for line in first_screen for block in blocks)
    assert f"python examples/{file}\n" in (EXAMPLES / file).with_name("README.md").read_text()


def test_the_tested_shop_finds_the_wrong_tasks_out() -> None:
    """The README's command shows the correct task's table, and leaves nothing behind."""
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
    assert "transaction.commit done                       2        1" in done.stdout


# -- writes elsewhere -------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recipes of `fenced_elsewhere/elsewhere.py`, as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "fenced_elsewhere"))
    for name in ("elsewhere", "services"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import elsewhere  # type: ignore[import-not-found]

    return elsewhere


def holder(fence: int) -> Any:
    return SimpleNamespace(key="label:7", fence=fence)


def test_fenced_elsewhere_refuses_every_sleeper(tmp_path: Path) -> None:
    """The README's command kills one process and stops two."""
    folder = EXAMPLES / "fenced_elsewhere"
    command = "python examples/fenced_elsewhere/elsewhere.py\n"
    assert command in (folder / "README.md").read_text()
    done = subprocess.run(
        [sys.executable, str(folder / "elsewhere.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("wakes up and is refused") == 2
    assert done.stdout.count("takes over") == 3
    assert done.stdout.splitlines()[-2:] == [
        "charge requests: 2, charges: 1",
        "status and label are the second process's: True",
    ]


def test_an_idempotency_key_is_one_request(elsewhere: ModuleType) -> None:
    """The same again gets the same answer; another body under that key is an error."""
    from services import Shop, serve  # type: ignore[import-not-found]

    shop = Shop()
    with serve(shop) as url:
        charge = {"order": 7, "cents": 990}
        answers = {
            elsewhere.ask("POST", f"{url}/charges", charge, {"Idempotency-Key": "k"})[2]
            for _ in range(3)
        }
        with pytest.raises(HTTPError, match="422"):
            elsewhere.ask(
                "POST", f"{url}/charges", {**charge, "cents": 1}, {"Idempotency-Key": "k"}
            )
        with pytest.raises(HTTPError, match="400"):
            elsewhere.ask("POST", f"{url}/charges", charge)
    assert (answers, shop.charges) == ({b'{"charge": "ch_1"}'}, [charge])


@pytest.mark.parametrize("before", [[], [(5, "first")], [(5, "newer")]], ids=["new", "old", "same"])
def test_an_object_refuses_a_holder_that_slept_between_look_and_write(
    elsewhere: ModuleType, monkeypatch: pytest.MonkeyPatch, before: list[tuple[int, str]]
) -> None:
    """Where there was none, where there was another, and where the newer one wrote the same."""
    from services import Bucket, serve

    bucket = Bucket()
    with serve(bucket) as url:
        place = f"{url}/labels/7.json"
        for fence, value in before:
            elsewhere.put_object(place, value, holder(fence))

        def be_overtaken() -> None:
            monkeypatch.setattr(elsewhere, "an_accident_may_happen_here", lambda: None)
            elsewhere.put_object(place, "newer", holder(8))

        monkeypatch.setattr(elsewhere, "an_accident_may_happen_here", be_overtaken)
        with pytest.raises(StaleTokenError) as raised:
            elsewhere.put_object(place, "late", holder(7))
        assert (raised.value.fence, raised.value.newer_fence) == (7, 8)
        elsewhere.put_object(place, "again", holder(8))  # the same holder may write again
    content, fence = bucket.objects["/labels/7.json"]
    assert (json.loads(content), fence) == ({"fence": 8, "value": "again"}, "8")


def test_an_object_that_an_older_holder_wrote_meanwhile_is_written_over(
    elsewhere: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed condition is not yet a refusal: the newer holder looks again, and writes."""
    from services import Bucket, serve

    bucket = Bucket()
    with serve(bucket) as url:

        def older_writes() -> None:
            monkeypatch.setattr(elsewhere, "an_accident_may_happen_here", lambda: None)
            elsewhere.put_object(f"{url}/o", "older", holder(7))

        monkeypatch.setattr(elsewhere, "an_accident_may_happen_here", older_writes)
        elsewhere.put_object(f"{url}/o", "newer", holder(8))
    assert bucket.objects["/o"][1] == "8"
