"""From ZooKeeper's transaction numbers to tokens of the size of a clock in µs.

Each node has the number of the transaction that created it (`czxid`). The number grows with each
write, and jumps by 2^32 with each election, which no clock does. So an epoch records the server's
clock at one transaction, and a token is that clock plus the number of transactions since.

Guarantees: tokens of a later transaction are higher, if servers write less than a million times a
second, and the clocks of two servers are not minutes apart at an election. An epoch begins at the
highest token of the one before, or at the server's clock if that is higher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["NO_EPOCH", "Epoch", "read_epoch"]

# Upper bound of the tokens of an epoch that an election ended, above its first one. A server needs
# much longer for as many transactions.
_BEYOND_ELECTION_US = 10_000_000


@dataclass(frozen=True, slots=True)
class Epoch:
    """The start of tokens.

    Attributes:
        start_us: the token of the transaction that wrote the epoch, in µs since 1970.
        zxid: the number of that transaction.
        version: the version of its node.
    """

    start_us: int
    zxid: int
    version: int = 0

    def token(self, czxid: int) -> int | None:
        """Return the token of a node, or None if there was an election in between."""
        if self.zxid >> 32 != czxid >> 32:
            return None
        return self.start_us + czxid - self.zxid

    def __str__(self) -> str:
        return f"{self.start_us}.{self.zxid}"

    @classmethod
    def parse(cls, text: str) -> Epoch:
        """Parse the text of an epoch. Raises ValueError."""
        start_us, _, zxid = text.partition(".")
        return cls(int(start_us), int(zxid))


NO_EPOCH = Epoch(0, 0)


def read_epoch(data: bytes, stat: Any) -> Epoch:
    """Return the epoch of a node, from its times and from the previous epoch that it stores."""
    try:
        before = Epoch.parse(data.decode("ascii"))
    except ValueError:  # another program wrote it; also UnicodeDecodeError
        before = NO_EPOCH
    reached_us = before.token(stat.mzxid)
    if reached_us is None:
        reached_us = before.start_us + _BEYOND_ELECTION_US
    return Epoch(max(stat.mtime * 1000, reached_us), stat.mzxid, stat.version)
