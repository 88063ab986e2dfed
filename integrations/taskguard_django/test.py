"""Test guarded tasks in a Django project with `GuardedTestCase`.

    class ShippingTest(GuardedTestCase):
        def test_an_order_is_shipped_once(self):
            order = Order.objects.create()
            for _ in range(2):
                ship.apply((order.pk,)).get()
            self.assertEqual(Parcel.objects.count(), 1)

Guarantees: every guard of the process has its ledger in Django's test database, and its locks in
memory. The ledger is empty at the beginning of a test. No lock server is needed.

To test several processes, use real servers. `TestCase` cannot test bodies with `atomic()`: it never
commits its transaction, and the ledger has connections of its own. With pytest-django, use the
fixtures of `pytest_taskguard`.
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
    """Empty the ledger in Django's database.

    Uses Django's connection, which raises an error in a test that may not use that database.
    """
    connection = connections[alias()]
    there = connection.introspection.table_names()
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        for table in _EMPTIED:
            if table in there:
                cursor.execute(f"DELETE FROM {table}")  # noqa: S608  # names of our own


class _WithTheLedgers:
    """The databases that a test may use: the default one, and the ledger's."""

    def __get__(self, instance: object, owner: type) -> set[str]:
        return {DEFAULT_DB_ALIAS, alias()}


class GuardedTestCase(TransactionTestCase):
    """A `TransactionTestCase` whose guards use the test database, and locks in memory.

    Attributes:
        taskguard_events: the events of the test, oldest first. See `taskguard.events`.
    """

    databases = _WithTheLedgers()
    taskguard_events: list[events.Event]

    @classmethod
    def setUpClass(cls) -> None:
        """Raise ConfigurationError if the test database cannot have a ledger."""
        super().setUpClass()
        ledger()

    def run(self, result: Any = None) -> Any:
        """Run the test with the guards set up, even if a subclass overrides `setUp`."""
        self.taskguard_events = []
        by = Overrides(MemoryLocks(), ledger(), self.taskguard_events.append)
        forget()
        try:
            with overridden(by):
                return super().run(result)
        finally:
            forget()
