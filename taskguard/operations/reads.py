"""Questions of operators about keys, work, lines and workers.

Guarantees: each question is a few reads by primary key, or of the first rows of an index, in one
read-only transaction. It takes milliseconds with ten million records. A question that no index
answers reads a bounded number of records, and says so in `Page.note`.

All methods raise ConfigurationError without a ledger, and LedgerUnavailableError if the database
does not answer.

Read next: `ledger/operations/questions.py`, which has the statements.
"""

from __future__ import annotations

from taskguard.model.snapshots import SnapshotView
from taskguard.model.views import (
    ActionView,
    Counted,
    Explained,
    Held,
    KeyView,
    LineView,
    Page,
    WaitingView,
    WorkerView,
    WorkFilter,
    WorkItem,
)
from taskguard.operations.base import Base

__all__ = ["Reads"]


class Reads(Base):
    """The questions. Names of keys and work are as errors and the log show them."""

    def explain(self, asked: str, *, message: bool = False) -> Explained:
        """Say what is going on with a key, with work, or with a message, and what to do.

        Args:
            asked: a key ("order:42"), the id of work ("shop.ship order:42"), or the beginning of
                one. With or without this application's namespace.
            message: it is the id of a Celery message or an RQ job instead.
        """
        raise NotImplementedError

    def key(self, key: str) -> KeyView | None:
        """Return a key with its holders, line and past. None: nothing is on record."""
        raise NotImplementedError

    def keys(
        self,
        *,
        paused: bool = False,
        longer_s: float = 0.0,
        limit: int = 100,
        after: str | None = None,
    ) -> Page[Held]:
        """Return held keys, the longest held first.

        A key is listed once its lease was renewed, which happens after a third of `ttl_s`. Shorter
        holders are not listed, and neither are plain locks.

        Args:
            paused: return paused keys instead.
            longer_s: only keys that are held for at least this time, in seconds.
            limit: maximum number of rows.
            after: `Page.after` of the page before.
        """
        raise NotImplementedError

    def work(self, work: str, *, arguments: bool = False) -> WorkItem | None:
        """Return the record of work with its history, or None.

        Args:
            work: its id.
            arguments: also return the stored call, the result and the progress, which may contain
                private data.
        """
        raise NotImplementedError

    def list_work(
        self, only: WorkFilter, *, limit: int = 100, after: str | None = None
    ) -> Page[WorkItem]:
        """Return work, without history, arguments and results.

        FAILED, DEAD and overdue work is found by an index, the latest first. Other work is found by
        its key, its task or the beginning of its id. Without one of these, only some records are
        read, and `Page.note` says so.
        """
        raise NotImplementedError

    def waiting(
        self,
        *,
        key: str | None = None,
        task: str | None = None,
        older_s: float = 0.0,
        limit: int = 100,
        after: str | None = None,
    ) -> Page[WaitingView]:
        """Return messages that wait in line, by key and position.

        Args:
            key: only the line of this key.
            task: only messages of this task.
            older_s: only messages that wait for at least this time, in seconds.
            limit: maximum number of rows.
            after: `Page.after` of the page before.
        """
        raise NotImplementedError

    def lines(self, *, limit: int = 50) -> Page[LineView]:
        """Return lines, the longest first. At most 1,000 lines are read."""
        raise NotImplementedError

    def workers(self, *, limit: int = 1000) -> Page[WorkerView]:
        """Return workers, the last seen first."""
        raise NotImplementedError

    def actions(
        self,
        *,
        key: str | None = None,
        work: str | None = None,
        since_s: float | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page[ActionView]:
        """Return what operators changed, the latest first.

        Args:
            key: only changes of this key, among the last 10,000.
            work: only changes of this work, among the last 10,000.
            since_s: only changes since this time, in seconds since 1970.
            limit: maximum number of rows.
            after: `Page.after` of the page before.
        """
        raise NotImplementedError

    def counts(self, *, since_s: float | None = None) -> tuple[Counted, ...]:
        """Return counters by task.

        Args:
            since_s: since this time, in seconds since 1970, at most 48 hours ago. None: for ever.
        """
        raise NotImplementedError

    def snapshot(self, *, max_age_s: float = 15.0) -> SnapshotView:
        """Return figures of the whole ledger, taken anew if they are older than `max_age_s`."""
        raise NotImplementedError
