"""What a kind of database is asked for: each of these is one transaction, and may be asked twice.

Texts are ASCII here, keys are in their order, times µs. An answer that did not come is one of
`ledger.connections.database`'s errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Found", "Steps"]


class Found(NamedTuple):
    """What came of `take()`: a token, or else the key that is taken, by whom, and for how long."""

    token: int | None
    taken: str | None = None
    holder: str | None = None
    left_us: int | None = None


class Steps(ABC):
    """The table, as one kind of database is asked for it."""

    @abstractmethod
    def take(
        self, keys: list[str], owner: str, *, ttl_us: int, fenced: bool, waits_us: int
    ) -> Found:
        """All keys or none; not `fenced`: the token is of no meaning."""

    @abstractmethod
    def free(self, keys: list[str], owner: str) -> int:
        """How many of them were the owner's."""

    @abstractmethod
    def hand_over(self, keys: list[str], owner: str, *, to: str, ttl_us: int) -> int:
        """How many of them are `to`'s."""

    @abstractmethod
    def renew(self, holds: Sequence[tuple[list[str], str, int]]) -> str:
        """One letter for each lease (keys, owner, ttl), which are at least one.

        R renewed, G gone, T taken, S a row is locked by somebody.
        """

    @abstractmethod
    def is_free(self, key: str) -> bool:
        """Whether nobody holds it."""

    @abstractmethod
    def forget(self, *, older_us: int, every_us: int, most: int) -> int:
        """Delete rows of no use for `older_us`, at most so many; how many those were.

        `every_us` > 0: nothing, if that has been done since.
        """
