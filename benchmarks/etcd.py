"""Acquire and release of one free lock on etcd, beside etcd3gw and the same three requests by hand;
and how 1,000 leases are renewed."""

from __future__ import annotations

import base64
import http.client
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from etcd3gw.client import Etcd3Client
from urllib3 import HTTPConnectionPool

from benchmarks.measure import CONSOLE, in_turns, show
from taskguard.locks.base import Hold
from taskguard.model.lease import new_owner
from taskguard_etcd import EtcdLocks
from taskguard_sandbox.servers import Etcd

BY_HAND = "by hand: grant, transaction, revoke"
LEASES = 1_000


def main(*, quick: bool) -> None:
    """Print the tables."""
    reason = Etcd.available()
    if reason is not None:
        CONSOLE.print(f"etcd: skipped: {reason}")
        return
    with Etcd() as server:
        cases = _cases(server)
        trips = {name: f"{_requests(case)} requests" for name, case in cases.items() if _ours(name)}
        found = in_turns(
            cases, reference=BY_HAND, rounds=5 if quick else 25, repeats=20 if quick else 100
        )
        show("Lock cycle on etcd: acquire and release", "µs", found, notes=trips)
        _renewals(server, quick=quick)


def _ours(name: str) -> bool:
    return name.startswith("taskguard")


def _cases(server: Etcd) -> dict[str, Callable[[], object]]:
    ours = EtcdLocks(server.url, socket_timeout_s=10.0)
    peer = Etcd3Client(host="127.0.0.1", port=server.port, api_path="/v3/")
    hand = http.client.HTTPConnection("127.0.0.1", server.port)
    key = base64.b64encode(b"by-hand").decode()

    def cycle(*, with_fence: bool) -> None:
        owner = new_owner("message")
        ours.acquire(("order:42",), owner, ttl_s=30, with_fence=with_fence, wait_s=0)
        ours.release(("order:42",), owner)

    def ask(path: str, message: Any) -> Any:
        hand.request("POST", path, json.dumps(message).encode())
        return json.loads(hand.getresponse().read())

    def hand_cycle() -> None:
        lease = ask("/v3/lease/grant", {"TTL": "30"})["ID"]
        value = base64.b64encode(os.urandom(12)).decode()
        free = {"key": key, "target": "CREATE", "createRevision": "0"}
        put = {"requestPut": {"key": key, "value": value, "lease": lease}}
        look = {"requestRange": {"key": key}}
        ask("/v3/kv/txn", {"compare": [free], "success": [put], "failure": [look]})
        ask("/v3/lease/revoke", {"ID": lease})

    def peer_cycle() -> None:
        lock = peer.lock("etcd3gw", ttl=30)
        lock.acquire()
        lock.release()

    return {
        "taskguard": lambda: cycle(with_fence=False),
        "taskguard, with a token": lambda: cycle(with_fence=True),
        BY_HAND: hand_cycle,
        "etcd3gw Lock, which leaves its lease": peer_cycle,
    }


def _requests(case: Callable[[], object]) -> int:
    """How many requests of ours it takes, once it is warm."""
    asked = []
    urlopen = HTTPConnectionPool.urlopen

    def counted(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return urlopen(*arguments, **options)

    case()
    HTTPConnectionPool.urlopen = counted  # type: ignore[method-assign]
    try:
        case()
    finally:
        HTTPConnectionPool.urlopen = urlopen  # type: ignore[method-assign]
    return len(asked)


def _renewals(server: Etcd, *, quick: bool) -> None:
    locks = EtcdLocks(server.url, socket_timeout_s=10.0)
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
        f"renewing {LEASES:,} leases on etcd: {asked} requests, "
        f"{statistics.median(took_s) * 1000:,.0f} ms"
    )
    CONSOLE.print()
