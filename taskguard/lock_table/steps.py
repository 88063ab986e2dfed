"""The operations of a lock table: each is one transaction and may be repeated.

The owner of a shared key is a JSON object in text form: the end of the lease for each owner.

Texts are ASCII here, keys are sorted, and times are in µs. Failures are the errors of
`ledger.connections.database`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Found", "Row", "Steps", "shares_in"]


class Found(NamedTuple):
    """The answer of `take()`: a token, or the first taken key, its holder and remaining time."""

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
        """Return whether the row is of a shared key."""
        return self.owner.startswith("{")

    @property
    def holders(self) -> dict[str, int]:
        """Return the remaining µs of each holder's lease."""
        ends = shares_in(self.owner) if self.is_shared else {self.owner: self.until_us}
        return {each: end - self.now_us for each, end in ends.items() if end > self.now_us}


class Steps(ABC):
    """The operations on the table, for one kind of database."""

    @abstractmethod
    def take(
        self, keys: list[str], owner: str, *, ttl_us: int, fenced: bool, waits_us: int
    ) -> Found:
        """Take all keys or none. If not `fenced`, the token has no meaning."""

    @abstractmethod
    def free(self, keys: list[str], owner: str) -> int:
        """Free the keys that the owner holds; return how many."""

    @abstractmethod
    def hand_over(self, keys: list[str], owner: str, *, to: str, ttl_us: int) -> int:
        """Hand the owner's keys over to `to`; return how many `to` holds then."""

    @abstractmethod
    def renew(self, holds: Sequence[tuple[list[str], str, int]]) -> str:
        """Renew one or more leases (keys, owner, ttl); return one letter for each.

        R: renewed, G: gone, T: taken, S: another transaction has locked a row.
        """

    @abstractmethod
    def see(self, key: str) -> Row | None:
        """Read the key's row without locking it."""

    @abstractmethod
    def share(
        self, key: str, owner: str, *, ttl_us: int, fenced: bool, waits_us: int, most: int
    ) -> Found:
        """Take a share of the key if fewer than `most` owners hold one."""

    @abstractmethod
    def unshare(self, key: str, owner: str) -> bool:
        """End the owner's share; return whether it had one."""

    @abstractmethod
    def renew_shares(self, shares: Sequence[tuple[str, str, int]]) -> str:
        """Renew shares (key, owner, ttl); return the letters of `renew()`."""

    def has_room(self, key: str, *, most: int) -> bool:
        """Return whether fewer than `most` owners hold the key."""
        row = self.see(key)
        return row is None or len(row.holders) < most

    @abstractmethod
    def forget(self, *, older_us: int, every_us: int, most: int) -> int:
        """Delete at most `most` rows that were unused for `older_us`; return how many.

        If `every_us` > 0, do nothing if a process did so in the last `every_us`.
        """


def shares_in(owner: str) -> dict[str, int]:
    """Return each sharing owner with the end of its lease in µs; {} if the key is not shared."""
    if not owner.startswith("{"):
        return {}
    return {who: int(until_us) for who, until_us in json.loads(owner).items()}
