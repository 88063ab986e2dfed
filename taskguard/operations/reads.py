"""Questions of operators about keys, work, lines and workers.

Guarantees: each question is a few reads by primary key, or of the first rows of an index, in one
read-only transaction. It takes milliseconds with ten million records. A question that no index
answers reads a bounded number of records, and says so in `Page.note`.

All methods raise ConfigurationError without a ledger, and LedgerUnavailableError if the database
does not answer.

Read next: `ledger/operations/questions.py`, which has the statements.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

from taskguard.errors import KeyArgumentError
from taskguard.keys import finish_key
from taskguard.model.counts import Count
from taskguard.model.history import Happened
from taskguard.model.lease import Owner
from taskguard.model.snapshots import SnapshotView
from taskguard.model.views import (
    ActionView,
    Explained,
    Held,
    KeyView,
    LineView,
    Page,
    Past,
    WaitingView,
    WorkerView,
    WorkFilter,
    WorkItem,
)
from taskguard.operations.advice import advice_on
from taskguard.operations.base import Base

__all__ = ["Reads"]

_MOST_OTHERS = 10
_Found = TypeVar("_Found")


class Reads(Base):
    """The questions. Names of keys and work are as errors and the log show them."""

    def now_s(self) -> float:
        """Return the database's clock, in seconds since 1970. Ages count from it."""
        return self._ledger.clock_s()

    def told(self, text: str) -> str:
        """Return a text on record with the names of the processes that it has."""
        return self._runner.names.told(text)

    def described(self, owner: Owner) -> str:
        """Return the process and the message of an owner."""
        return self._runner.names.described(owner)

    def in_words(self, past: Past) -> str:
        """Return the text of something that happened, with the names of the processes in it.

        It is empty for DEAD, because the error of the work says it.
        """
        if past.what == Happened.DEAD.value:
            return ""
        if past.what == Happened.TAKEOVER.value:
            return f"by {self.described(Owner.parse(past.text))}"
        return self.told(past.text.removeprefix(f"{past.what}: "))

    def explain(self, asked: str, *, message: bool = False) -> Explained:
        """Say what is going on with a key, with work, or with a message, and what to do.

        Args:
            asked: a key ("order:42"), the id of work ("shop.ship order:42"), or the beginning of
                one. With or without this application's namespace, and with or without the escapes
                that keys have: "order:a b" also finds "order:a%20b".
            message: it is the id of a Celery message or an RQ job instead.
        """
        if message:
            return self._explain_message(asked)
        names, ids = self._names(asked), self._ids(asked)
        work = self._first(self._ledger.work_item, ids) if " " in asked else None
        key = None if work is not None else self._first(self._ledger.key_view, names)
        if work is not None or key is not None:
            return self._explained(asked, key, work)
        # A key that was never claimed has no record: its work is named by its task.
        tasks = self._ledger.tasks()
        of_tasks = [f"{task} {name}" for task in tasks for name in names]
        works = self._ledger.works_named(
            [*ids, *of_tasks], prefixes=[*ids, *names], limit=_MOST_OTHERS
        )
        if len(works) == 1:
            return self._explained(asked, None, self._ledger.work_item(works[0].id))
        keys = [
            each
            for name in names
            for each in self._ledger.keys_beginning_with(name, limit=_MOST_OTHERS)
        ]
        if len(keys) == 1 and not works:
            return self._explained(asked, self._ledger.key_view(keys[0]), None)
        others = (*(each.id for each in works), *keys)
        return Explained(asked, self._ledger.clock_s(), others=others[:_MOST_OTHERS])

    def key(self, key: str) -> KeyView | None:
        """Return a key with its holders, line and past. None: nothing is on record."""
        return self._first(self._ledger.key_view, self._names(key))

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
            paused: return paused keys instead, of the last 1,000 pauses.
            longer_s: only keys that are held for at least this time, in seconds.
            limit: maximum number of rows.
            after: `Page.after` of the page before.
        """
        if paused:
            return self._ledger.paused_keys(limit=limit)
        return self._ledger.held_keys(longer_s=longer_s, limit=limit, after=after)

    def work(self, work: str, *, arguments: bool = False) -> WorkItem | None:
        """Return the record of work with its history, or None.

        Args:
            work: its id.
            arguments: also return the stored call, the result and the progress, which may contain
                private data.
        """
        find = functools.partial(self._ledger.work_item, arguments=arguments)
        return self._first(find, self._ids(work))

    def list_work(
        self, only: WorkFilter, *, limit: int = 100, after: str | None = None
    ) -> Page[WorkItem]:
        """Return work, without history, arguments and results.

        FAILED and DEAD work is found by an index, the latest first. So is overdue work, the longest
        overdue first, on one page. Other work is found by its key, its task or the beginning of its
        id. Without one of these, only some records are read, and `Page.note` says so.
        """
        return self._ledger.works(only, limit=limit, after=after)

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
        return self._ledger.waiting_messages(
            key=key, task=task, older_s=older_s, limit=limit, after=after
        )

    def lines(self, *, limit: int = 50) -> Page[LineView]:
        """Return lines, the longest first. At most 1,000 lines are read."""
        return self._ledger.longest_lines(limit=limit)

    def workers(self, *, limit: int = 1000) -> Page[WorkerView]:
        """Return workers, the last seen first."""
        return self._ledger.list_workers(limit=limit)

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
        return self._ledger.list_actions(
            key=key, work=work, since_s=since_s, limit=limit, after=after
        )

    def counts(self, *, since_s: float | None = None) -> list[Count]:
        """Return counters by task.

        Args:
            since_s: those of each minute since this time, in seconds since 1970, at most 48 hours
                ago. None: the totals of all time.
        """
        if since_s is None:
            return self._ledger.counts()
        return self._ledger.counts(since_s=self._ledger.clock_s() - since_s)

    def snapshot(self, *, max_age_s: float = 15.0) -> SnapshotView:
        """Return figures of the whole ledger, taken anew if they are older than `max_age_s`."""
        return self._ledger.snapshot(max_age_s=max_age_s)

    def _explain_message(self, message: str) -> Explained:
        found = self._ledger.works_of_message(message, namespace=self._namespace)
        if len(found.items) == 1:
            work = self._ledger.work_item(found.items[0].id)
            return self._explained(message, None, work)
        others = tuple(each.id for each in found.items)
        return Explained(message, self._ledger.clock_s(), others=others, note=found.note)

    def _explained(self, asked: str, key: KeyView | None, work: WorkItem | None) -> Explained:
        if key is None and work is not None:
            names = [work.key, *work.key.split(",")]
            found = (self._ledger.key_view(name) for name in dict.fromkeys(names))
            views = [each for each in found if each is not None]
            key = next((each for each in views if each.holders), views[0] if views else None)
        now_s = self._ledger.clock_s()
        return Explained(asked, now_s, key, work, advice=advice_on(key, work, now_s=now_s))

    def _names(self, key: str) -> list[str]:
        """Return the keys that a text may mean, the likeliest first."""
        return list(dict.fromkeys([key, self._namespace + key, *self._escaped(key)]))

    def _ids(self, work: str) -> list[str]:
        """Return the ids of work that a text may mean, the likeliest first."""
        task, blank, value = work.rpartition(" ")
        found = [work, f"{task}{blank}{self._namespace}{value}"]
        # A blank ends the task, and a second one the name of a message. Others belong to the key.
        for place in [place for place, sign in enumerate(work) if sign == " "][:2]:
            before, after = work[: place + 1], work[place + 1 :]
            found += [before + name for name in self._escaped(after)]
        return list(dict.fromkeys(found))

    def _escaped(self, key: str) -> list[str]:
        """Return the key that a template would make of a text. Nothing: none can."""
        own = key.removeprefix(self._namespace)
        with contextlib.suppress(KeyArgumentError):
            return [self._namespace + finish_key(own)]
        return []

    @staticmethod
    def _first(find: Callable[[str], _Found | None], names: Iterable[str]) -> _Found | None:
        found = (find(name) for name in dict.fromkeys(names))
        return next((each for each in found if each is not None), None)
