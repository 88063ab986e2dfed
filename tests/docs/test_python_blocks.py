"""Each block of Python in README and docs runs, page by page, in realistic surroundings.

Those are in `support/page_surroundings.py`, which says for each block what has to come of it, too.
Lock server and broker are in memory, the ledger in SQLite or PostgreSQL.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery._state
import kombu.transport.memory
import pytest

import taskguard_celery
from support.page_surroundings import SURROUNDINGS, Place, stand_ins
from support.pages import PAGES, blocks_of

pytestmark = pytest.mark.once

# Their blocks are files of a project, which `test_tutorial.py` runs with the commands of the page.
PROJECTS = {"docs/tutorial-rq.md", "docs/tutorial-django.md"}
WITH_PYTHON = [page for page in PAGES if blocks_of(page, "python") and page not in PROJECTS]
# SQLite's asynchronous driver is no dependency, and it has no schemas.
ON_POSTGRESQL = {"docs/how-to/asyncio.md", "docs/how-to/tenants.md"}
BY_SETTINGS = {"docs/how-to/django.md"}  # `atomic()` belongs to the ledger of Django's settings
BROKER = "memory://"


@pytest.fixture
def taskguard_ledger(request: pytest.FixtureRequest, page: str, tmp_path: Path) -> str:
    """The database of the plugin's fixtures, and of the page."""
    if page in ON_POSTGRESQL:
        return str(request.getfixturevalue("pg_url"))
    return f"sqlite:///{tmp_path / 'shop.db'}"


@pytest.fixture
def place(
    request: pytest.FixtureRequest,
    page: str,
    taskguard_ledger: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    """A module `shop`, in which a page's blocks run; nothing of it stays."""
    memory = request.getfixturevalue("taskguard_memory") if page not in BY_SETTINGS else None
    # Its own tasks only, whatever was imported before.
    monkeypatch.setattr("celery._state._on_app_finalizers", set())
    current = celery._state._tls.current_app
    names = types.ModuleType("shop")
    for name, module in {"shop": names, **stand_ins()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    made = Place(names, memory, taskguard_ledger, request.getfixturevalue)
    yield made
    found = [each for each in vars(names).values() if isinstance(each, celery.Celery)]
    for app in {id(app): app for app in [*made.apps, *found]}.values():
        taskguard_celery.runtime_of(app).close()
        app.close()
    celery._state._set_current_app(current)
    kombu.transport.memory.Transport.global_state.clear()


def placed(code: str, url: str) -> str:
    """The code, with the servers that are here."""
    return (
        code.replace('"redis://localhost/1"', repr("memory://"))
        .replace('"redis://localhost"', repr(BROKER))
        .replace('"postgresql+psycopg://shop@localhost/shop"', repr(url))
        .replace('"sqlite:///shop.db"', repr(url))
    )


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: str, place: Place) -> None:
    """Each block does what its page says. A new page needs an entry in `page_surroundings.py`."""
    assert page in SURROUNDINGS, f"add the set-up of {page} to support/page_surroundings.py"
    surroundings = SURROUNDINGS[page](place)
    for block in blocks_of(page, "python"):
        more = next(surroundings, surroundings)
        assert more is None, f"{block}: say in support/page_surroundings.py what comes of it"
        run(block.text, where=f"{block}", line=block.line, place=place)
    left = next(surroundings, surroundings)
    assert left is surroundings, f"{page} has fewer blocks than its surroundings know of"


def run(text: str, *, where: str, line: int, place: Place) -> None:
    """Run the text as a module whose lines have the numbers of the page."""
    code = "\n" * line + placed(text, place.url)
    names: dict[str, Any] = vars(place.names)
    exec(compile(code, where, "exec", dont_inherit=True), names)


def test_no_page_is_known_that_is_not_there() -> None:
    """No surroundings are left of a page that was moved or removed."""
    assert set(SURROUNDINGS) == set(WITH_PYTHON)
