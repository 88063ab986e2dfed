"""A lock server under test, of whatever kind, and a way to reach it from another process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from taskguard.locks.base import LockProvider


@dataclass(frozen=True)
class LockServer:
    """One server under test.

    Attributes:
        connect: a provider as another process would have it.
        forget: the server loses its memory.
        leftovers: what stands in the server, apart from tokens.
        url: None where the server is in this process alone.
        deafened: a provider that gets no replies to what it sends: None where there is no wire.
    """

    connect: Callable[[], LockProvider]
    forget: Callable[[], object]
    leftovers: Callable[[], list[str]]
    url: str | None = None
    deafened: Callable[[], AbstractContextManager[LockProvider]] | None = None


def redlock_url(*ports: int) -> str:
    """Of several servers on this machine."""
    return "redlock://" + ",".join(f"127.0.0.1:{port}" for port in ports)
