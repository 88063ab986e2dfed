"""The walk of a relay through the work, in steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.clock import FakeClock
from taskguard.errors import LedgerUnavailableError
from taskguard.outbox.janitor import Janitor


class Ledger:
    """Has ten records, and is down when it is told so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.down = False

    def mark_left(self, *, after: str, page: int) -> str | None:
        if self.down:
            raise LedgerUnavailableError("it is down")
        self.asked.append(after)
        last = int(after or "0") + page
        return None if last >= 10 else str(last)


def made() -> tuple[Janitor, Ledger, Any]:
    clock, ledger = FakeClock(), Ledger()
    runtime: Any = SimpleNamespace(ledger=ledger, runner=SimpleNamespace(clock=clock))
    return Janitor(runtime, page=4), ledger, clock


def test_a_step_reads_one_page_and_a_walk_begins_hourly() -> None:
    janitor, ledger, clock = made()
    for _ in range(9):
        janitor.step()
    assert ledger.asked == ["", "4", "8"]
    clock.advance(3599.0)
    janitor.step()
    assert len(ledger.asked) == 3
    clock.advance(2.0)
    janitor.step()
    assert ledger.asked[3:] == [""]


def test_a_page_that_got_no_answer_is_read_again() -> None:
    janitor, ledger, _ = made()
    for expected in ([""], ["", "4"]):
        ledger.down = True
        with pytest.raises(LedgerUnavailableError):
            janitor.step()
        ledger.down = False
        janitor.step()
        assert ledger.asked == expected


def test_without_a_ledger_there_is_nothing_to_do() -> None:
    runtime: Any = SimpleNamespace(ledger=None, runner=SimpleNamespace(clock=FakeClock()))
    Janitor(runtime).step()
