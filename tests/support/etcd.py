"""An etcd under test: its keys, and how to empty it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from support.lock_servers import LockServer, connect_by_a_lock
from support.proxy import Mode, Proxy
from taskguard.locks import parse_url
from taskguard.locks.base import LockProvider
from taskguard_etcd import EtcdLocks
from taskguard_etcd.link import EtcdLink
from taskguard_sandbox.servers import Etcd, free_port

EVERYTHING = {"key": "AA==", "range_end": "AA=="}  # from the first possible key to the last


def ask(url: str, path: str, message: dict[str, Any]) -> dict[str, Any]:
    """Send one request, past everything that is tested."""
    server = parse_url(url, plain="etcd", tls="etcds", port=2379)
    link = EtcdLink(server, socket_timeout_s=10.0, connect_timeout_s=10.0)
    try:
        return link.call(path, message)
    finally:
        link.close()


def keys_in(url: str) -> list[str]:
    """Return all keys in etcd."""
    found = ask(url, "/v3/kv/range", EVERYTHING | {"keys_only": True}).get("kvs", [])
    return sorted(base64.b64decode(each["key"]).decode("utf-8", "replace") for each in found)


def write(url: str, key: str, value: str) -> None:
    """Write a key as another program would, without a lease."""
    packed = [base64.b64encode(text.encode()).decode() for text in (key, value)]
    ask(url, "/v3/kv/put", dict(zip(("key", "value"), packed, strict=True)))


def forget(url: str) -> None:
    """Delete every key and every lease."""
    ask(url, "/v3/kv/deleterange", EVERYTHING)
    for lease in ask(url, "/v3/lease/leases", {}).get("leases", []):
        ask(url, "/v3/lease/revoke", {"ID": lease["ID"]})


def etcd_kind(server: Etcd) -> LockServer:
    """Describe an empty etcd for the contract suite."""
    forget(server.url)

    def leftovers() -> list[str]:
        return [key for key in keys_in(server.url) if key != "taskguard/epoch"]

    return LockServer(
        lambda: EtcdLocks(server.url, socket_timeout_s=5.0),
        lambda: forget(server.url),
        leftovers,
        server.url,
        lambda: _deafened(server.port),
    )


@contextmanager
def _deafened(port: int) -> Iterator[LockProvider]:
    with Proxy(port) as proxy:
        locks = EtcdLocks(f"etcd://127.0.0.1:{proxy.port}", socket_timeout_s=0.3)
        connect_by_a_lock(locks)
        proxy.mode = Mode.SWALLOW
        yield locks
        locks.close()


@contextmanager
def cluster(count: int = 3) -> Iterator[list[Etcd]]:
    """Start the members of one cluster. It may have no leader for a second after it lost one."""
    names = [f"m{number}" for number in range(count)]
    peers = {name: f"http://127.0.0.1:{free_port()}" for name in names}
    members = [
        Etcd(
            name=name,
            listen_peer_urls=peer,
            initial_advertise_peer_urls=peer,
            initial_cluster=",".join(f"{each}={url}" for each, url in peers.items()),
        )
        for name, peer in peers.items()
    ]
    with ExitStack() as stack:
        for member in members:
            stack.callback(member.stop)
        with ThreadPoolExecutor(count) as pool:  # no member answers before most of them run
            list(pool.map(lambda member: member.start(), members))
        yield members


def url_of(members: list[Etcd]) -> str:
    """Return the URL of all members."""
    return "etcd://" + ",".join(f"127.0.0.1:{member.port}" for member in members)
