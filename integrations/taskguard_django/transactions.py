"""`atomic` and `checkpoint`: Django's transaction in a guarded body, with DONE or progress in it.

    with taskguard_django.atomic():
        order.save()

Guarantees what `guard.transaction()` does, for what is written by Django's connection in the block.
A COMMIT in SQL (`cursor.execute("commit")`) is noticed: the block ends by TransactionUsageError and
the work is not DONE; what had been written before it is committed, by the body's own statement.
Does not guarantee anything for other databases, or other threads' connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from taskguard import Guard, current_guard, errors
from taskguard_django.connection import connection

__all__ = ["atomic", "checkpoint"]


@contextmanager
def atomic(using: str | None = None, *, guard: Guard | None = None) -> Iterator[Guard]:
    """Django's transaction that commits this work's effects together with DONE.

    It is `transaction.atomic(durable=True)` with PROCESSING -> DONE written last. Left by an
    exception, nothing is written; `transaction.atomic()` within it is a savepoint, hooks of
    `transaction.on_commit` run after the COMMIT, and what they raise comes out of the block, with
    DONE committed.

    Args:
        using: an alias of DATABASES; by default that of the ledger, and any other has to reach
            the same database.
        guard: the body's guard; by default `taskguard.current_guard()`.

    Raises:
        StaleTokenError: a newer holder exists; nothing was written.
        TransactionRetryError: deadlock or serialization failure; the runner runs the body again.
        TransactionUsageError: within `transaction.atomic()`, outside a guarded body, DONE is
            committed already, or Django would roll back (`set_rollback(True)`).
        ConfigurationError: another database than the ledger's.
    """
    guard = _guard_here("atomic") if guard is None else guard
    on = connection(using)
    with guard.transaction(on):
        yield guard
    if on.hook_error is not None:
        raise on.hook_error


@contextmanager
def checkpoint(
    progress: Any, using: str | None = None, *, guard: Guard | None = None
) -> Iterator[Guard]:
    """Like `atomic()`, but commits JSON `progress` with the effects, and not DONE.

    A later holder finds it in `guard.progress` and goes on from there.
    """
    guard = _guard_here("checkpoint") if guard is None else guard
    on = connection(using)
    with guard.checkpoint(progress, on):
        yield guard
    if on.hook_error is not None:
        raise on.hook_error


def _guard_here(called: str) -> Guard:
    try:
        return current_guard()
    except errors.TransactionUsageError:
        raise errors.TransactionUsageError(
            f"taskguard_django.{called}() was called outside a guarded body. Call it in the body "
            "itself, in the thread that runs it, or hand the body's guard in: guard=guard. "
            "Elsewhere Django's own transaction.atomic() is what you want."
        ) from None
