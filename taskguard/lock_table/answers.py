"""Retries, and a database's errors as those of a lock server.

Guarantees: every failure is raised as LockServerUnavailableError, which says what to do and never
contains a password.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from taskguard.errors import (
    LedgerSchemaError,
    LedgerUnavailableError,
    LockServerUnavailableError,
    TransactionRetryError,
)
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.dialects import Fault

__all__ = ["Answers"]

_T = TypeVar("_T")
_RETRIES = 3


class Answers:
    """Runs a lock provider's calls to its database.

    Args:
        answer_s: how many seconds one answer may take.
    """

    def __init__(self, database: Database, *, answer_s: float) -> None:
        self._database = database
        self._answer_s = answer_s

    def of(self, ask: Callable[[], _T], *, on_retry: Callable[[], None] = lambda: None) -> _T:
        """Return the answer of `ask`. Retry if its connection was dead or its transaction failed.

        A call that timed out is not repeated, because the database is frozen or overloaded.
        """
        lost = refused = 0
        requested_at_s = time.monotonic()
        while True:
            try:
                return ask()
            except TransactionRetryError as error:
                refused += 1
                if refused > _RETRIES:
                    raise self._unavailable(error) from error
            except LedgerUnavailableError as error:
                lost += 1
                if lost > 1 or time.monotonic() - requested_at_s >= self._answer_s:
                    raise self._unavailable(error) from error
                on_retry()
            except LedgerSchemaError as error:
                raise self._unavailable(error) from error
            except self._database.engine.dialect.loaded_dbapi.Error as error:
                raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> LockServerUnavailableError:
        place = self._database.place
        if isinstance(error, LedgerSchemaError):
            return LockServerUnavailableError(
                f"The locks in {place} cannot be used: {self._refusal(error)}"
            )
        said = str(error).partition("\n")[0].rstrip(".")
        return LockServerUnavailableError(f"The locks in {place} gave no answer: {said}.")

    def _refusal(self, error: LedgerSchemaError) -> str:
        cause: Any = error.__cause__
        origin = getattr(cause, "orig", None) or cause
        dialect, driver = self._database.dialect, self._database.engine.dialect.loaded_dbapi
        missing = (
            dialect.fault(origin, driver) is Fault.NO_TABLE
            or getattr(origin, "sqlstate", None) == "42883"  # undefined_function
        )
        if missing:
            return (
                "the table taskguard_locks or one of its functions does not exist. Run "
                "`taskguard locks create`."
            )
        said = str(origin.args[-1] if origin.args else origin).partition("\n")[0]
        return (
            f"{said}. Grant SELECT, INSERT, UPDATE and DELETE on taskguard_locks to its user. If a "
            "column or a function is missing, run `taskguard locks create`."
        )
