"""What a kind of database is asked for: each of these is one transaction, and may be asked twice.

Who shares a key stands in the place of its owner: a JSON object, of each until when, as a text.

Texts are ASCII here, keys are in their order, times µs. An answer that did not come is one of
`ledger.connections.database`'s errors.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Found", "Row", "Steps", "shares_in"]


class Found(NamedTuple):
    """What came of `take()`: a token, or else the key that is taken, by whom, and for how long."""

    token: int | None
    taken: str | None = None
    holder: str | None = None
    left_us: int | None = None


class Row(NamedTuple):
    """A row of the table; times in µs of the database's clock."""

    owner: str
    until_us: int
    fence: int
    now_us: int

    @property
    def is_shared(self) -> bool:
        """Whether its holders share the key."""
        return self.owner.startswith("{")

    @property
    def holders(self) -> dict[str, int]:
        """Each holder, and how many µs its lease still lasts."""
        ends = shares_in(self.owner) if self.is_shared else {self.owner: self.until_us}
        return {each: end - self.now_us for each, end in ends.items() if end > self.now_us}


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
    def see(self, key: str) -> Row | None:
        """Read its row, without a lock."""

    @abstractmethod
    def share(
        self, key: str, owner: str, *, ttl_us: int, fenced: bool, waits_us: int, most: int
    ) -> Found:
        """A share of the key, where fewer than `most` hold it."""

    @abstractmethod
    def unshare(self, key: str, owner: str) -> bool:
        """Whether it had a share, which has ended."""

    @abstractmethod
    def renew_shares(self, shares: Sequence[tuple[str, str, int]]) -> str:
        """As `renew()`, for shares (key, owner, ttl)."""

    def has_room(self, key: str, *, most: int) -> bool:
        """Whether fewer than `most` hold it."""
        row = self.see(key)
        return row is None or len(row.holders) < most

    @abstractmethod
    def forget(self, *, older_us: int, every_us: int, most: int) -> int:
        """Delete rows of no use for `older_us`, at most so many; how many those were.

        `every_us` > 0: nothing, if that has been done since.
        """


def shares_in(owner: str) -> dict[str, int]:
    """Who shares the key, until when in µs, by the owner in its row; {} where one has it alone."""
    if not owner.startswith("{"):
        return {}
    return {who: int(until_us) for who, until_us in json.loads(owner).items()}
