"""The examples show their task at once, and the recipes of one of them hold.

`packaging/` runs each of them from the installation that its README names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest

from taskguard.errors import StaleTokenError

EXAMPLES = Path(__file__).parent.parent / "examples"
WITH_A_TASK = [
    "celery_shop/shop.py",
    "django_shop/shop.py",
    "rq_invoices/invoices.py",
    "billing/billing.py",
    "rq_sqlite/measurements.py",
    "sqlalchemy_shop/shop.py",
]


@pytest.mark.parametrize("file", WITH_A_TASK)
def test_the_task_is_on_the_first_screen(file: str) -> None:
    """Each example has its guarded task in its first 50 lines, and its README names the command."""
    first_screen = (EXAMPLES / file).read_text().splitlines()[:50]
    assert any(line.startswith("@guarded_") for line in first_screen)
    blocks = "with guard.transaction() as db:", "with atomic() as guard:"
    assert any(block in line for line in first_screen for block in blocks)
    assert f"python examples/{file}\n" in (EXAMPLES / file).with_name("README.md").read_text()


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


def test_an_idempotency_key_is_one_request(elsewhere: ModuleType) -> None:
    """A repeated request gets the first answer. Another body with that key is an error."""
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
    """A late holder is refused if there was no object, another object, or an equal one."""
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
