"""Compare records with the states of a line (`model/line_states.py`), before and after changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from taskguard.model.line_states import IN_STATE, Event, LineState, is_transition
from taskguard.model.states import State

__all__ = ["LineWatch", "check_line"]

# Events that may happen to lines in each method of a ledger.
_METHODS: Mapping[str, tuple[Event, ...]] = {
    "claim": (Event.CLAIM, Event.SUPERSEDE, Event.END),
    "peek": (),
    "complete_alone": (Event.END,),
    "store_result": (),
    "note": (),
    "fail": (Event.END,),
    "give_back": (),
    "crash": (),
    "end_round": (Event.END,),
    "uncount_crash": (),
    "revoke": (Event.END,),
    "expire": (Event.END,),
    "renew": (),
    "defer": (),
    "of_run": (),
    "join": (),
    "requeue": (Event.REQUEUE,),
    "change": (Event.REQUEUE, Event.DROP),
    "try_pause": (),
    "give_up_pause": (),
    "resume": (),
    "paused": (),
    "pause_of": (),
    "release": (),
    "enqueue": (Event.ENQUEUE, Event.REPLACE),
    "overdue": (),
    "sent": (Event.SEND_AGAIN, Event.UNSEND),
    "abandon": (Event.ABANDON,),
    "park": (Event.PARK, Event.END),
    "park_newest": (Event.PARK, Event.SUPERSEDE),
    "note_notified": (Event.NOTIFY,),
    "promote_next": (Event.PROMOTE,),
    "expired": (Event.EXPIRE,),
    "keep": (Event.KEEP,),
    "leave": (Event.LEAVE,),
    "look": (),
}


def check_line(before: str | None, row: Any, *events: Event) -> None:
    """Fail unless one of these events (any, if none is given) may leave the record as it is."""
    line = None if row.line is None else LineState(row.line)
    old = None if before is None else LineState(before)
    assert is_transition(old, line, *events), f"{row.id}: {old} -> {line} by {list(events)}"
    assert (line is None) == (row.parked is None), f"{row.id}: {line}, parked {row.parked}"
    if line is not None:
        state = State(row.state)
        assert state in IN_STATE[line], f"{row.id}: {line}, and {state}"
        ended = line is LineState.SUPERSEDED and state is State.FAILED
        assert bool(row.final) is ended, f"{row.id}: {line}, final"
        assert (row.due is None) is (line is LineState.WAITING), f"{row.id}: {line}, due {row.due}"


class LineWatch:
    """Checks the records before and after each method of a ledger.

    Args:
        read: returns the records by their ids.

    Attributes:
        stopped: nothing is checked.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read
        self.stopped = False
        self._mutex = threading.RLock()
        self._known: Mapping[str, Any] = {}
        self._under_way: list[tuple[Event, ...]] = []

    def install(self, ledger: Any) -> None:
        """Watch all changes that this ledger makes."""
        for name, events in _METHODS.items():
            if hasattr(ledger, name):
                setattr(ledger, name, self._watched(ledger, name, events))

        @contextmanager
        def watched(*args: Any, **options: Any) -> Iterator[Any]:
            events = Event.END, Event.ENQUEUE, Event.REPLACE
            transaction = type(ledger).transaction(ledger, *args, **options)
            with self.window(*events), transaction as tx:
                yield tx

        ledger.transaction = watched

    def _watched(self, ledger: Any, name: str, events: tuple[Event, ...]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            with self.window(*events):
                # Read here: a mutant may have replaced it.
                return getattr(type(ledger), name)(ledger, *args, **options)

        return watched

    def window(self, *events: Event) -> AbstractContextManager[None]:
        """Return a context in which these events may happen, and others that are under way."""
        return self._window(events)

    @contextmanager
    def _window(self, events: tuple[Event, ...]) -> Iterator[None]:
        with self._mutex:
            rows = self._read()
            if self._under_way:
                self._check(rows)
            self._known = rows
            self._under_way.append(events)
        try:
            yield
            with self._mutex:
                self._check(self._read())
        finally:
            with self._mutex:
                self._under_way.remove(events)

    def _check(self, rows: Mapping[str, Any]) -> None:
        if self.stopped:
            return
        events = {each for those in self._under_way for each in those}
        for name, row in rows.items():
            before = self._known.get(name)
            old = None if before is None else before.line
            if len(self._under_way) > 1 and old != row.line:
                check_line(row.line, row)  # of several changes at once only the last is seen
            elif before != row:
                check_line(old, row, *events) if events else check_line(row.line, row)
                assert events or old == row.line, f"{name}: {old} -> {row.line}"
        self._known = rows
