"""Overrides hold for every thread of the process, at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import taskguard
from support.waiting import patience_s
from taskguard.integration import Overrides, overridden
from taskguard.locks.memory import MemoryLocks


def test_a_runner_that_is_made_as_overrides_begin_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If another thread makes the guard's own runner meanwhile, the block does not use that one."""
    with overridden(Overrides(MemoryLocks(), None, lambda _event: None)):
        tg = taskguard.connect(locks=MemoryLocks(), ledger=None)
    making, begun, make = threading.Event(), threading.Event(), tg._make

    def make_slowly(*args: Any, **options: Any) -> Any:
        making.set()
        begun.wait(0.2)  # this wait times out if overrides wait for the runner
        return make(*args, **options)

    monkeypatch.setattr(tg, "_make", make_slowly)
    by = Overrides(MemoryLocks(), None, lambda _event: None)
    with ThreadPoolExecutor(1) as other:
        made = other.submit(lambda: tg.runner)
        assert making.wait(patience_s())
        with overridden(by):
            begun.set()
            own = made.result()
            assert tg.runner.locks is by.locks
        assert tg.runner is own
    tg.close()
