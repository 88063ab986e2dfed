"""The fixtures. They import SQLAlchemy and fakeredis only if a test uses one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_taskguard.exploring import Explorer
    from pytest_taskguard.memory import Memory


# Make failed assertions of the suite show their values, as in a user's own modules.
pytest.register_assert_rewrite("pytest_taskguard.lock_contract")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Put the ledger into Django's test database, if this is a Django project."""
    from pytest_taskguard import django

    if django.is_wanted(session.config):
        session.config.pluginmanager.register(django, "taskguard_django")


@pytest.fixture
def taskguard_ledger(tmp_path: Path) -> Any:
    """The ledger's database: a SQLAlchemy URL or an Engine. Default: a SQLite file in `tmp_path`.

    In a Django project with pytest-django, it is Django's test database (`django.py`).

    Override it with the test database that your tasks write to, one for each pytest-xdist worker.
    Missing taskguard tables are created. They are emptied after each test. If the database has
    records of work at the start, the fixture raises ConfigurationError.
    """
    return f"sqlite:///{tmp_path / 'taskguard.db'}"


@pytest.fixture
def taskguard_memory(taskguard_ledger: Any) -> Iterator[Memory]:
    """Make every guard of the process use a Redis in memory and `taskguard_ledger`."""
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
    """`deliver_twice(task, args)`: deliver one message twice, and return both results."""
    return _taskguard_explorer.deliver_twice


@pytest.fixture
def lose_lease_at(_taskguard_explorer: Explorer) -> Any:
    """`lose_lease_at(task, args, at=…)`: pause a holder while another one does its work."""
    return _taskguard_explorer.lose_lease_at


@pytest.fixture
def explore_crashes(_taskguard_explorer: Explorer) -> Any:
    """`explore_crashes(task, args, effects=…)`: kill a task at each boundary, and deliver again."""
    return _taskguard_explorer.explore_crashes
