"""Answers the questions of operators: `ports.Questions`.

Guarantees: a question changes nothing. Each of its transactions is short. No delivery imports the
statements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import sqlalchemy as sa

from taskguard.errors import ConfigurationError
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.parts.base import Part
from taskguard.model.policy import MOST_ROWS, check_number

if TYPE_CHECKING:
    from taskguard.ledger.operations.views import Asked
    from taskguard.model.views import (
        ActionView,
        Held,
        KeyView,
        LineView,
        Page,
        WaitingView,
        WorkerView,
        WorkFilter,
        WorkItem,
    )

__all__ = ["SqlQuestions"]

_LONGEST_S = 5.0


class SqlQuestions(Part):
    """Keys, work, lines and workers, as operators see them."""

    @contextmanager
    def _asked(self) -> Iterator[Asked]:
        from taskguard.ledger.operations.views import Asked

        dialect = self._database.dialect
        try:
            with self._database.transaction() as db, dialect.answering(db, _LONGEST_S):
                dialect.only_read(db)
                yield Asked(db, self._database.now_us(db))
        except (sa.exc.DataError, OverflowError, ValueError) as error:
            raise ConfigurationError(
                f"{self._database.place} cannot look for this: {_reason(error)}. Names on record "
                "have no NUL, and `after` is `Page.after` of the page before."
            ) from error

    @retried
    def clock_s(self) -> float:
        """Return the database's clock in seconds since 1970."""
        return self._database.clock_us() / 1e6

    @retried
    def key_view(self, key: str) -> KeyView | None:
        """Return a key with everything on record, or None if nothing is."""
        from taskguard.ledger.operations import keys

        with self._asked() as asked:
            return keys.key_view(asked, key)

    @retried
    def keys_beginning_with(self, prefix: str, *, limit: int) -> list[str]:
        """Return keys that begin with a text, without slots."""
        from taskguard.ledger.operations import keys

        with self._asked() as asked:
            return keys.keys_beginning_with(asked, prefix, limit=_checked(limit))

    @retried
    def held_keys(
        self, *, longer_s: float = 0.0, limit: int = 100, after: str | None = None
    ) -> Page[Held]:
        """Return the keys of work that runs long, the longest held first."""
        from taskguard.ledger.operations import keys

        with self._asked() as asked:
            return keys.held(asked, longer_s=longer_s, limit=_checked(limit), after=after)

    @retried
    def paused_keys(self, *, limit: int = 100) -> Page[Held]:
        """Return the keys that operators have paused, the last paused first."""
        from taskguard.ledger.operations import keys

        with self._asked() as asked:
            return keys.paused(asked, limit=_checked(limit))

    @retried
    def work_item(self, work: str, *, arguments: bool = False) -> WorkItem | None:
        """Return the record of work with its history, or None."""
        from taskguard.ledger.operations import works

        with self._asked() as asked:
            return works.item(asked, work, arguments=arguments)

    @retried
    def works_named(self, ids: list[str], *, prefixes: list[str], limit: int) -> list[WorkItem]:
        """Return work with one of these ids, or else with one of these beginnings of ids."""
        from taskguard.ledger.operations import works

        with self._asked() as asked:
            found = works.by_ids(asked, ids)
            return found or works.beginning_with(asked, prefixes, limit=_checked(limit))

    @retried
    def tasks(self) -> list[str]:
        """Return the names of tasks that have counted something."""
        from taskguard.ledger.operations import works

        with self._asked() as asked:
            return works.tasks(asked)

    @retried
    def works(
        self, only: WorkFilter, *, limit: int = 100, after: str | None = None
    ) -> Page[WorkItem]:
        """Return work by a filter; see `tg.operations.list_work()`."""
        from taskguard.ledger.operations import works

        return works.listed(self._asked, only, limit=_checked(limit), after=after)

    @retried
    def works_of_message(self, message: str, *, namespace: str = "") -> Page[WorkItem]:
        """Return the work of a message. Without an index, records are read for a few seconds."""
        from taskguard.ledger.operations import works

        return works.of_message(self._asked, message, namespace=namespace)

    @retried
    def waiting_messages(
        self,
        *,
        key: str | None = None,
        task: str | None = None,
        older_s: float = 0.0,
        limit: int = 100,
        after: str | None = None,
    ) -> Page[WaitingView]:
        """Return messages that wait, by key and position."""
        from taskguard.ledger.operations import lines

        with self._asked() as asked:
            return lines.waiting(
                asked, key=key, task=task, older_s=older_s, limit=_checked(limit), after=after
            )

    @retried
    def longest_lines(self, *, limit: int = 50) -> Page[LineView]:
        """Return the longest lines, at most 100 of them."""
        from taskguard.ledger.operations import lines

        with self._asked() as asked:
            return lines.longest(asked, limit=min(_checked(limit), lines.MOST_LISTED))

    @retried
    def list_workers(self, *, limit: int = 1000) -> Page[WorkerView]:
        """Return workers, the last seen first."""
        from taskguard.ledger.operations import records

        with self._asked() as asked:
            return records.workers(asked, limit=_checked(limit))

    @retried
    def list_actions(
        self,
        *,
        key: str | None = None,
        work: str | None = None,
        since_s: float | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page[ActionView]:
        """Return what operators changed, the latest first."""
        from taskguard.ledger.operations import records

        with self._asked() as asked:
            return records.actions(
                asked, key=key, work=work, since_s=since_s, limit=_checked(limit), after=after
            )


def _reason(error: BaseException) -> str:
    """Return the driver's own text, without the statement and its values."""
    return str(getattr(error, "orig", error)).partition("\n")[0]


def _checked(limit: int) -> int:
    check_number("limit", limit, at_least=1, at_most=MOST_ROWS, whole=True)
    return limit
