"""Acquire and release of one free lock on ZooKeeper, beside kazoo's Lock and the least that there
is, one node by hand; and how 1,000 leases are renewed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from kazoo.client import KazooClient
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import Ping

from benchmarks.measure import CONSOLE, in_turns, show
from taskguard.locks.base import Hold
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import ZooKeeper
from taskguard_zookeeper import ZooKeeperLocks

PEER = "kazoo Lock"
LEASES = 1_000


def main(*, quick: bool) -> None:
    """Print the tables."""
    reason = ZooKeeper.available()
    if reason is not None:
        CONSOLE.print(f"ZooKeeper: skipped: {reason}")
        return
    with ZooKeeper() as server:
        ours = ZooKeeperLocks(server.url, socket_timeout_s=10.0)
        client = KazooClient(f"127.0.0.1:{server.port}")
        client.start()
        try:
            cases = _cases(ours, client)
            trips = {name: f"{_requests(case)} requests" for name, case in cases.items()}
            found = in_turns(
                cases, reference=PEER, rounds=5 if quick else 25, repeats=20 if quick else 100
            )
            show("Lock cycle on ZooKeeper: acquire and release", "µs", found, notes=trips)
            _renewals(ours, quick=quick)
        finally:
            ours.close()
            client.stop()
            client.close()


def _cases(ours: ZooKeeperLocks, client: KazooClient) -> dict[str, Callable[[], object]]:
    client.ensure_path("/by-hand")

    def cycle(*, with_fence: bool) -> None:
        owner = new_owner("message")
        ours.acquire(("order:42",), owner, ttl_s=30, with_fence=with_fence, wait_s=0)
        ours.release(("order:42",), owner)

    def hand_cycle() -> None:
        client.create("/by-hand/order:42", os.urandom(12), ephemeral=True)
        client.delete("/by-hand/order:42")

    def peer_cycle() -> None:
        with client.Lock("/kazoo/order:42", "message"):
            pass

    return {
        "taskguard": lambda: cycle(with_fence=False),
        "taskguard, with a token": lambda: cycle(with_fence=True),
        "by hand: create and delete a node": hand_cycle,
        PEER: peer_cycle,
    }


def _requests(case: Callable[[], object]) -> int:
    """How many requests it takes, once it is warm."""
    sent = []
    submit = ConnectionHandler._submit  # noqa: SLF001  # kazoo does not count them

    def counted(self: Any, request: Any, *rest: Any) -> None:
        if not isinstance(request, Ping):
            sent.append(request)
        submit(self, request, *rest)

    case()
    ConnectionHandler._submit = counted  # noqa: SLF001
    try:
        case()
    finally:
        ConnectionHandler._submit = submit  # noqa: SLF001
    return len(sent)


def _renewals(locks: ZooKeeperLocks, *, quick: bool) -> None:
    holds = [Hold((f"order:{number}",), new_owner("message"), 60.0) for number in range(LEASES)]
    for hold in holds:
        locks.acquire(hold.keys, hold.owner, ttl_s=60.0, with_fence=False, wait_s=0)
    asked = _requests(lambda: locks.renew(holds))
    took_s = []
    for _ in range(3 if quick else 20):
        began_s = time.perf_counter()
        locks.renew(holds)
        took_s.append(time.perf_counter() - began_s)
    CONSOLE.print(
        f"renewing {LEASES:,} leases on ZooKeeper: 1 session, {asked} requests, "
        f"{statistics.median(took_s) * 1000:,.0f} ms"
    )
    CONSOLE.print()
