"""From ZooKeeper's transaction numbers to tokens of the size of a clock in µs.

Each node says by which transaction it was created (`czxid`). That number grows with each write, and
jumps by 2^32 with each election: no clock does that. So an epoch is a clock, when a transaction
wrote it down, and a token is that clock plus the number of transactions since.

Guarantees: tokens of a later transaction are higher, if servers write less than a million times a
second and, at an election, clocks of two servers are not minutes apart; an epoch begins where the
one before had come to, or at the server's clock if that is further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["NO_EPOCH", "Epoch", "read_epoch"]

# An epoch that an election ended had come no further than this beyond its beginning, if the clock
# has not: as many transactions take a server much longer.
_BEYOND_ELECTION_US = 10_000_000


@dataclass(frozen=True, slots=True)
class Epoch:
    """Where tokens begin.

    Attributes:
        start_us: the token of the transaction that wrote it.
        zxid: that transaction.
        version: of the node that it stands in.
    """

    start_us: int
    zxid: int
    version: int = 0

    def token(self, czxid: int) -> int | None:
        """That of a node; None if there was an election in between."""
        if self.zxid >> 32 != czxid >> 32:
            return None
        return self.start_us + czxid - self.zxid

    def __str__(self) -> str:
        return f"{self.start_us}.{self.zxid}"

    @classmethod
    def parse(cls, text: str) -> Epoch:
        """Raises ValueError."""
        start_us, _, zxid = text.partition(".")
        return cls(int(start_us), int(zxid))


NO_EPOCH = Epoch(0, 0)


def read_epoch(data: bytes, stat: Any) -> Epoch:
    """The epoch that a node says: it holds the one before, and its times say the rest."""
    try:
        before = Epoch.parse(data.decode("ascii"))
    except ValueError:  # not ours; UnicodeDecodeError, too
        before = NO_EPOCH
    reached_us = before.token(stat.mzxid)
    if reached_us is None:
        reached_us = before.start_us + _BEYOND_ELECTION_US
    return Epoch(max(stat.mtime * 1000, reached_us), stat.mzxid, stat.version)
