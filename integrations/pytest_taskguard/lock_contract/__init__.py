"""Tests that every lock provider passes, including a provider of your own.

    from pytest_taskguard.lock_contract import *

    @pytest.fixture
    def server():
        return LockServer(connect=…, forget=…, leftovers=…)

in a module of tests is all of it: pytest collects the classes, and gives each test an empty server.

Guarantees: a provider that passes does what `taskguard.locks.LockProvider` says, as far as one
process can show it. Tests of what a provider's `traits` say that it lacks are skipped, with the
reason.

Does not guarantee what only its own server's faults show: kill that, freeze it and empty it
yourself, with a ledger and without.

Read next: `server.py`, then `leases.py`.
"""

from __future__ import annotations

from pytest_taskguard.lock_contract.contention import TestContention
from pytest_taskguard.lock_contract.hints import TestHints
from pytest_taskguard.lock_contract.leases import (
    TestAcquire,
    TestHandOver,
    TestHolders,
    TestRelease,
    TestRenew,
    TestTokens,
)
from pytest_taskguard.lock_contract.order import TestOrder
from pytest_taskguard.lock_contract.server import LockServer, locks
from pytest_taskguard.lock_contract.sessions import (
    TestClose,
    TestSession,
    TestSwallowedReply,
    TestTraits,
)
from pytest_taskguard.lock_contract.sharing import TestSharing, TestSharingInOrder
from pytest_taskguard.lock_contract.waits import TestWait

__all__ = [
    "LockServer",
    "TestAcquire",
    "TestClose",
    "TestContention",
    "TestHandOver",
    "TestHints",
    "TestHolders",
    "TestOrder",
    "TestRelease",
    "TestRenew",
    "TestSession",
    "TestSharing",
    "TestSharingInOrder",
    "TestSwallowedReply",
    "TestTokens",
    "TestTraits",
    "TestWait",
    "locks",
]
