"""`atomic` and `checkpoint`: commit DONE or progress in Django's transaction.

    with taskguard_django.atomic():
        order.save()

Guarantees: for writes on Django's connection in the block, the guarantees of `guard.transaction()`.
If the body itself runs COMMIT in SQL (`cursor.execute("commit")`), the block raises
TransactionUsageError and the work is not DONE. The writes before that COMMIT are committed.

Writes to other databases, or on other threads' connections, are not protected.
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
    """Open Django's transaction and commit this work's effects in it together with DONE.

    This is `transaction.atomic(durable=True)` that writes PROCESSING -> DONE last. An exception in
    the block rolls it back. An inner `transaction.atomic()` is a savepoint. Hooks of
    `transaction.on_commit` run after the COMMIT. The block raises a hook's error, but DONE stays
    committed.

    Args:
        using: an alias of DATABASES for the ledger's database. Default: that of the ledger.
        guard: the body's guard. Default: `taskguard.current_guard()`.

    Raises:
        StaleTokenError: a newer holder exists. Nothing was written.
        TransactionRetryError: deadlock or serialization failure. The runner runs the body again.
        TransactionUsageError: the block is within `transaction.atomic()` or outside a guarded body,
            DONE is committed already, or Django would roll back (`set_rollback(True)`).
        ConfigurationError: `using` is another database than the ledger's.
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
    """Open a transaction like `atomic()` that commits `progress` with the effects, not DONE.

    A later holder finds the progress in `guard.progress` and continues from there.

    Args:
        progress: a value that JSON can store.
        using: as for `atomic()`.
        guard: as for `atomic()`.

    Raises the errors of `atomic()`.
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
            f"taskguard_django.{called}() was called outside a guarded body. Call it in the body, "
            "in the thread that runs it, or pass the body's guard: guard=guard. Elsewhere, use "
            "Django's own transaction.atomic()."
        ) from None
