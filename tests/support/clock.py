"""A clock that only the test moves."""

from __future__ import annotations


class FakeClock:
    """Starts at 1,000 s; `sleep` moves it on."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1_790_000_000.0 + self.now_s

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
