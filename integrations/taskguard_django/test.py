"""Tests of guarded tasks in a Django project: `GuardedTestCase`.

    class ShippingTest(GuardedTestCase):
        def test_an_order_is_shipped_once(self):
            order = Order.objects.create()
            for _ in range(2):
                ship.apply((order.pk,)).get()
            self.assertEqual(Parcel.objects.count(), 1)

Guarantees: every guard of the process has its ledger in Django's test database, which is empty at
a test's beginning, and its locks in memory: no lock server is asked, and none is needed.

Does not guarantee what only several processes show. With `TestCase`, whose transaction is never
committed, bodies with `atomic()` cannot be tested: the ledger has connections of its own.
With pytest-django, `pytest_taskguard`'s fixtures do the same.
"""

from __future__ import annotations

from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.test import TransactionTestCase

from taskguard import events
from taskguard.integration import Overrides, overridden
from taskguard.locks import MemoryLocks
from taskguard_django.conf import alias, ledger
from taskguard_django.operations import TABLES

__all__ = ["GuardedTestCase", "forget"]

_EMPTIED = [table for table in TABLES if table != "taskguard_schema"]


def forget() -> None:
    """Empty the ledger in Django's database: no work was ever done, no key was ever held.

    It uses Django's connection, which refuses tests that may not use that database.
    """
    connection = connections[alias()]
    there = connection.introspection.table_names()
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        for table in _EMPTIED:
            if table in there:
                cursor.execute(f"DELETE FROM {table}")  # noqa: S608  # names of our own


class _WithTheLedgers:
    """The databases that Django gives to a test: the default one, and that of the ledger."""

    def __get__(self, instance: object, owner: type) -> set[str]:
        return {DEFAULT_DB_ALIAS, alias()}


class GuardedTestCase(TransactionTestCase):
    """A `TransactionTestCase` whose guards are on the test database, with locks in memory.

    Attributes:
        taskguard_events: what has happened in the test, oldest first; see `taskguard.events`.
    """

    databases = _WithTheLedgers()
    taskguard_events: list[events.Event]

    @classmethod
    def setUpClass(cls) -> None:
        """Raises ConfigurationError where the test database cannot have a ledger."""
        super().setUpClass()
        ledger()

    def run(self, result: Any = None) -> Any:
        """Set up here, not in `setUp`, which a subclass may define without calling this one's."""
        self.taskguard_events = []
        by = Overrides(MemoryLocks(), ledger(), self.taskguard_events.append)
        forget()
        try:
            with overridden(by):
                return super().run(result)
        finally:
            forget()
