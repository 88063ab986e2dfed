"""The error of a schedule in which an invariant does not hold."""

from __future__ import annotations

__all__ = ["ViolationError"]


class ViolationError(AssertionError):
    """An invariant does not hold."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
