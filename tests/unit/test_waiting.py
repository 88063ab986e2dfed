"""Tests wait for conditions, and longer where the machine is slower (`support/waiting.py`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support import waiting


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves."""
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(waiting, "time", clock)
    return now_s


def never() -> None:
    """The condition that does not become true."""


@pytest.mark.parametrize(
    ("slowness", "takes_s", "ends_s"),
    [(1.0, 0.0, 25), (1.0, 60.0, 85), (4.0, 0.0, 100), (99.0, 0.0, 240)],
)
def test_patience_grows_with_the_load(
    now_s: list[float],
    monkeypatch: pytest.MonkeyPatch,
    slowness: float,
    takes_s: float,
    ends_s: float,
) -> None:
    """Only the time of the machine's own is multiplied, and never beyond the timeout of a test."""
    monkeypatch.setattr(waiting, "slowness", lambda: slowness)
    with pytest.raises(AssertionError, match="never"):
        waiting.wait_until(never, takes_s=takes_s, interval_s=0.5)
    assert now_s[0] == pytest.approx(ends_s, abs=1.0)


def test_a_suspended_machine_takes_little_patience(
    now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A condition that becomes true during a pause of a minute is still noticed."""
    monkeypatch.setattr(waiting, "slowness", lambda: 1.0)
    seen: list[float] = []

    def condition() -> bool:
        if not seen:
            now_s[0] += 60.0
        seen.append(now_s[0])
        return now_s[0] > 75.0

    assert waiting.wait_until(condition)
