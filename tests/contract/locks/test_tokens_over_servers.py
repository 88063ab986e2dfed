"""Tokens of locks without a ledger, while the kind of lock server changes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pytest_taskguard.lock_contract.server import KEY, granted
from support.lock_servers import LockServer
from taskguard.locks.base import LockProvider
from taskguard.locks.memory import MemoryLocks
from taskguard.model.lease import new_owner


def token(locks: LockProvider) -> int:
    owner = new_owner("m")
    fence = granted(locks, KEY, owner, with_fence=True).fence
    locks.release(KEY, owner)
    return fence


def test_tokens_grow_when_the_server_is_changed(server: LockServer) -> None:
    """Tokens grow when locks move to another kind of server that knows no earlier tokens, and back.
    So a row or service that stores the highest token does not refuse a new holder."""
    if not server.connect().traits.tokens:
        pytest.skip("it issues no tokens")
    tokens = [token(server.connect()), token(MemoryLocks())]
    tokens += [token(server.connect()), token(server.connect()), token(MemoryLocks())]
    assert all(before < after for before, after in pairwise(tokens)), tokens
