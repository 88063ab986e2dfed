"""Django's connection for guarded transactions, which begin, commit and roll back as in Django.

Guarantees: the transaction is Django's outermost `atomic`, on Django's connection of this thread.
Hooks of `transaction.on_commit` run after its COMMIT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import Error, connections, transaction

from taskguard import errors
from taskguard.integration import ExternalConnection
from taskguard_django.conf import alias

__all__ = ["DjangoConnection", "connection"]


def connection(using: str | None = None) -> DjangoConnection:
    """Return Django's connection of this thread, for example for `enqueue(…, session=…)`.

        with transaction.atomic():
            order.save()
            taskguard_celery.enqueue(ship, (order.id,), session=taskguard_django.connection())

    Args:
        using: an alias of DATABASES. Default: that of the ledger.

    Raises:
        ConfigurationError: the ledger's alias is not in DATABASES.
    """
    return DjangoConnection(alias() if using is None else using)


class DjangoConnection(ExternalConnection):
    """Django's connection as an `ExternalConnection`, for one transaction at a time.

    Attributes:
        hook_error: the error that a hook of `on_commit` raised after the last COMMIT, or None.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self.kind = connections[using].vendor
        self.hook_error: BaseException | None = None
        self._block: Any = None
        self._committed = False

    @property
    def _wrapper(self) -> Any:
        return connections[self.using]

    @property
    def driver(self) -> Any:
        """The connection of psycopg or sqlite3."""
        return self._wrapper.connection

    @property
    def in_transaction(self) -> bool:
        """True inside `atomic`."""
        return bool(self._wrapper.in_atomic_block)

    @property
    def broken(self) -> bool:
        """True if the driver has closed the connection."""
        driver = self.driver
        return driver is None or getattr(driver, "closed", False) is True

    def open(self) -> None:
        """Enter `transaction.atomic(durable=True)`."""
        wrapper = self._wrapper
        if wrapper.in_atomic_block:
            raise errors.TransactionUsageError(
                f"taskguard_django.atomic() on {self.using!r} was entered within "
                "transaction.atomic(), so DONE would depend on the outer COMMIT. Remove the outer "
                "block. In a view, that can be ATOMIC_REQUESTS: use "
                "@transaction.non_atomic_requests. In a test, it can be TestCase: use "
                "taskguard_django.test.GuardedTestCase, or with pytest-django "
                "django_db(transaction=True)."
            )
        if not wrapper.get_autocommit():
            raise errors.ConfigurationError(
                f"The database {self.using!r} has AUTOCOMMIT=False, so Django's atomic() does not "
                "commit. Remove that setting."
            )
        self._committed, self.hook_error = False, None
        block = transaction.atomic(using=self.using, durable=True)
        block.__enter__()
        self._block = block
        transaction.on_commit(self._note_commit, using=self.using)  # before all others

    def _note_commit(self) -> None:
        self._committed = True

    def flush(self) -> None:
        """Raise TransactionUsageError if Django would silently roll back the block."""
        wrapper = self._wrapper
        if wrapper.needs_rollback or wrapper.closed_in_transaction or not wrapper.in_atomic_block:
            raise errors.TransactionUsageError(
                f"Django rolls back the guarded transaction on {self.using!r}, because of "
                "set_rollback(True), a caught error in an inner atomic(savepoint=False), or a "
                "connection that was closed in the block. Nothing is written, and the work is not "
                "DONE. To write nothing, raise an exception. Put parts that may fail into a "
                "savepoint."
            )

    def commit(self) -> None:
        """Leave the `atomic` block. Keep an error of a hook in `hook_error`."""
        self.flush()
        block, self._block = self._block, None
        try:
            block.__exit__(None, None, None)
        except BaseException as error:
            if not self._committed:
                raise
            self.hook_error = error

    def roll_back(self) -> None:
        """Leave the `atomic` block by an exception, which rolls back."""
        block, self._block = self._block, None
        if block is not None:
            error = transaction.TransactionManagementError("rolled back by taskguard")
            block.__exit__(type(error), error, None)

    def after_commit(self, function: Callable[[], None]) -> None:
        """Register a function by `transaction.on_commit`."""
        transaction.on_commit(function, using=self.using)

    def origin(self, error: BaseException) -> BaseException | None:
        """Return the driver's error under an error of Django, or None."""
        return error.__cause__ if isinstance(error, Error) else None

    def watch_statements(
        self, asked: Callable[[], None], done: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch statements by Django's `connection.execute_wrapper`."""

        def execute(execute: Any, *given: Any) -> Any:
            asked()
            answer = execute(*given)
            done()
            return answer

        watching = self._wrapper.execute_wrapper(execute)
        watching.__enter__()
        return lambda: watching.__exit__(None, None, None)
