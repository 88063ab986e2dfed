"""The checks of a storm's record detect each violation: one forged history for each invariant."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from storm.audit import Change
from storm.invariants import Findings, double_and_lost
from storm.scenario import Item, Record

KEY = "item:c1"


class History:
    """A correct history of one work with two holders, the first of which came too late."""

    def __init__(self) -> None:
        self.items = [Item("c1", "plain", 0.0, by_rq=False, messages=["c1-1"])]
        self.effects = [("c1", 2)]
        self.work_items = {KEY: "DONE"}
        self.lock_keys: list[str] = []
        self.resent = 0
        self.most_copies = 1
        self.changes: list[Change] = []
        self.key("a", 1, old=None, until=100, at=50)
        self.work("PROCESSING", 1, old=None)
        self.key("b", 2, old=("a", 1, 100), until=200, at=150)
        self.work("PROCESSING", 2, old=("PROCESSING", 1))
        self.key("", 2, old=("b", 2, 200), until=0, at=160)
        self.work("DONE", 2, old=("PROCESSING", 2))
        self.lines = [
            line(1, "claimed", fence=1, took_s=0.1),
            line(3, "claimed", fence=2, took_s=0.1),
            line(3, "takeover", fence=2, attempt=2),
            line(4, "completed", fence=2),
            line(4, "reported", item="c1", how="ok"),
            line(5, "stale_refused", fence=1),
            line(6, "duplicate", reason="done"),
        ]

    def key(
        self, owner: str, fence: int, *, old: tuple[str, int, int] | None, until: int, at: int
    ) -> None:
        """The key's row changes."""
        before = (None, None, None) if old is None else old
        number = len(self.changes)
        self.changes.append(
            Change(
                number,
                at,
                "key",
                KEY,
                None,
                None,
                before[1],
                fence,
                before[0],
                owner,
                before[2],
                until,
            )
        )

    def work(self, state: str, fence: int, *, old: tuple[str, int] | None) -> None:
        """The work's row changes."""
        before = (None, None) if old is None else old
        number = len(self.changes)
        self.changes.append(
            Change(number, 0, "work", KEY, before[0], state, before[1], fence, None, "", None, 0)
        )

    def wrong(self) -> list[str]:
        """Return the violations that are found."""
        return Findings(self.record()).wrong

    def record(self) -> Record:
        return Record(
            "taskguard", self.items, 1, Counter(), self.resent, 0, self.most_copies, self.lines,
            self.changes, self.effects, self.work_items, self.lock_keys, 1.0,
        )  # fmt: skip


def line(t: float, name: str, **values: Any) -> dict[str, Any]:
    """A line of the journal."""
    return {
        "t": t, "at_us": int(t), "pid": 1, "name": name, "key": KEY, "message": "c1-1", **values
    }  # fmt: skip


def token_goes_back(history: History) -> None:
    history.lines.append(line(9, "claimed", fence=1, took_s=0.1))


def double_effect(history: History) -> None:
    history.effects.append(("c1", 2))


def late_commit(history: History) -> None:
    history.work("DONE", 1, old=("PROCESSING", 1))


def refused_for_nothing(history: History) -> None:
    history.lines.append(line(7, "stale_refused", fence=2))


def taken_too_early(history: History) -> None:
    history.key("c", 3, old=("b", 2, 300), until=400, at=200)
    history.key("", 3, old=("c", 3, 400), until=0, at=250)


def done_again(history: History) -> None:
    history.work("PROCESSING", 2, old=("DONE", 2))


def answered_too_early(history: History) -> None:
    history.lines.append(line(-1, "duplicate", reason="done"))


def dropped_for_nothing(history: History) -> None:
    history.lines.append(line(-1, "duplicate", reason="superseded"))


def reported_ok_without_a_commit(history: History) -> None:
    history.lines.append(line(-1, "reported", item="c1", how="ok"))


def stale_and_yet_written(history: History) -> None:
    history.effects = [("c1", 1)]


def effect_lost(history: History) -> None:
    history.effects = []


def too_many_sent_again(history: History) -> None:
    history.resent = 1


def copies_without_end(history: History) -> None:
    history.most_copies = 100


def lock_left(history: History) -> None:
    history.lock_keys = ["taskguard:lock"]


def key_left(history: History) -> None:
    history.key("c", 3, old=("", 2, 0), until=400, at=200)


def overtaken_without_a_report(history: History) -> None:
    history.lines.append(line(8, "completed", fence=1))


def test_a_right_history_is_right() -> None:
    """No violation is found in a correct history, and its events are counted."""
    history = History()
    assert history.wrong() == []
    assert double_and_lost(history.record()) == (0, 0)
    seen = Findings(history.record()).seen()
    assert (seen["takeovers"], seen["stale commits refused"], seen["second holders"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("forge", "invariant"),
    [
        (token_goes_back, "S1"),
        (double_effect, "S2"),
        (late_commit, "S3"),
        (refused_for_nothing, "S4"),
        (taken_too_early, "S5"),
        (done_again, "S6"),
        (answered_too_early, "S7"),
        (dropped_for_nothing, "S7"),
        (reported_ok_without_a_commit, "S8"),
        (stale_and_yet_written, "S8"),
        (effect_lost, "L1"),
        (too_many_sent_again, "L1"),
        (copies_without_end, "L1"),
        (lock_left, "L4"),
        (key_left, "L4"),
        (overtaken_without_a_report, "S3"),
    ],
)
def test_a_forged_history_is_found_out(forge: Any, invariant: str) -> None:
    """A forged history is reported under the name of the invariant that it violates."""
    history = History()
    forge(history)
    assert [text for text in history.wrong() if text.startswith(invariant)]
