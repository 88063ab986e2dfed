"""The fixtures. They load SQLAlchemy and fakeredis only where a test asks for one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_taskguard.exploring import Explorer
    from pytest_taskguard.memory import Memory


# An assertion of the suite says what it compared, as those of a user's own modules do.
pytest.register_assert_rewrite("pytest_taskguard.lock_contract")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """In a Django project the ledger is in Django's test database."""
    from pytest_taskguard import django

    if django.is_wanted(session.config):
        session.config.pluginmanager.register(django, "taskguard_django")


@pytest.fixture
def taskguard_ledger(tmp_path: Path) -> Any:
    """The ledger's database: a SQLAlchemy URL or an Engine; by default a file of SQLite.

    In a Django project with pytest-django it is Django's test database (`django.py`).

    Override it to give your tasks the database that they write to: a test database, one for each
    pytest-xdist worker. Its taskguard tables are created where they are missing, and emptied after
    each test; one that has work on record is refused.
    """
    return f"sqlite:///{tmp_path / 'taskguard.db'}"


@pytest.fixture
def taskguard_memory(taskguard_ledger: Any) -> Iterator[Memory]:
    """Every guard of the process runs on a Redis in memory and on `taskguard_ledger`."""
    from taskguard.drivers import extras_named

    with extras_named("The fixture taskguard_memory", "pytest"):
        from pytest_taskguard.memory import Memory

    memory = Memory(taskguard_ledger)
    with memory.process():
        yield memory
    memory.close()


@pytest.fixture
def _taskguard_explorer(taskguard_memory: Memory) -> Explorer:
    from pytest_taskguard.exploring import Explorer

    return Explorer(taskguard_memory)


@pytest.fixture
def deliver_twice(_taskguard_explorer: Explorer) -> Any:
    """`deliver_twice(task, args)`: one message, delivered twice; returns both answers."""
    return _taskguard_explorer.deliver_twice


@pytest.fixture
def lose_lease_at(_taskguard_explorer: Explorer) -> Any:
    """`lose_lease_at(task, args, at=…)`: a holder paused there while another does the work."""
    return _taskguard_explorer.lose_lease_at


@pytest.fixture
def explore_crashes(_taskguard_explorer: Explorer) -> Any:
    """`explore_crashes(task, args, effects=…)`: killed at each boundary, delivered again."""
    return _taskguard_explorer.explore_crashes
