"""Operations of transactions for a lock's steps, and a request that kazoo lacks.

Guarantees: the operations of a step fail together if another owner has the key, or if it is not
free. For the connection, see `session.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kazoo import exceptions as errors
from kazoo.protocol.serialization import (
    CheckVersion,
    Create,
    Delete,
    SetData,
    Transaction,
    int_struct,
    read_string,
    write_string,
)
from kazoo.protocol.states import ZnodeStat

__all__ = [
    "CheckVersion",
    "GetEphemerals",
    "Nodes",
    "SetData",
    "Transaction",
    "ZnodeStat",
    "creating",
    "errors",
    "freeing",
    "handing",
]

_EPHEMERAL = 1
_ANY_VERSION = -1


class Nodes(NamedTuple):
    """The two nodes of a key and its owner."""

    lock: str
    hold: str


def creating(nodes: Nodes, value: bytes, acl: Sequence[Any]) -> list[Any]:
    """Return the operations that take a key if it is free."""
    return [
        Create(nodes.lock, value, acl, _EPHEMERAL),
        Create(nodes.hold, b"", acl, _EPHEMERAL),
    ]


def freeing(nodes: Nodes) -> list[Any]:
    """Return the operations that free a key if the owner still has it."""
    return [Delete(nodes.hold, _ANY_VERSION), Delete(nodes.lock, _ANY_VERSION)]


def handing(mine: Nodes, theirs: Nodes, value: bytes, acl: Sequence[Any]) -> list[Any]:
    """Return the operations that hand a key to another owner if the owner still has it."""
    return [
        Delete(mine.hold, _ANY_VERSION),
        SetData(mine.lock, value, _ANY_VERSION),
        Create(theirs.hold, b"", acl, _EPHEMERAL),
    ]


class GetEphemerals:
    """Request for the paths of this session's ephemeral nodes, since ZooKeeper 3.6."""

    type = 103

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def serialize(self) -> bytearray:
        return bytearray(write_string(self.prefix))

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> list[str]:
        (count,) = int_struct.unpack_from(data, offset)
        offset += int_struct.size
        found = []
        for _ in range(count):
            path, offset = read_string(data, offset)
            found.append(path)
        return found
