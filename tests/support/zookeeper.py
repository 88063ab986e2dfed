"""A ZooKeeper under test: its nodes, how to empty it, and how sessions end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from support.lock_servers import LockServer, connect_by_a_lock
from support.proxy import Mode, Proxy
from support.waiting import wait_until
from taskguard.locks.base import LockProvider
from taskguard_sandbox.servers import ZooKeeper
from taskguard_zookeeper import ZooKeeperLocks

# The shortest session that the server under test allows.
SESSION_S = 2.0


@contextmanager
def client_of(server: ZooKeeper, **options: object) -> Iterator[KazooClient]:
    """Yield a client without taskguard's code."""
    client = KazooClient(f"127.0.0.1:{server.port}", **options)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def locks_in(client: KazooClient) -> list[str]:
    """Return the nodes of locks: keys, and their owners."""
    found = []
    for folder in ("lock", "owner"):
        with contextlib.suppress(NoNodeError):
            found += [unquote(each) for each in client.get_children(f"/taskguard/{folder}")]
    return sorted(found)


def end_session(locks: LockProvider, server: ZooKeeper) -> None:
    """End a session as the server does if it is silent. That needs only the session's name."""
    assert isinstance(locks, ZooKeeperLocks)
    session = locks._current
    assert session is not None
    identity = wait_until(lambda: session.wire.client_id)

    def is_over() -> bool:
        # Its owner reconnects at once, and may be quicker: then this begins again.
        if not session.ended:
            with client_of(server, client_id=identity):
                pass
        return session.ended

    wait_until(is_over, interval_s=0.3)


@contextmanager
def zookeeper_kind(server: ZooKeeper) -> Iterator[LockServer]:
    """Describe an empty ZooKeeper for the contract suite. Its providers are closed at the end."""
    made: list[ZooKeeperLocks] = []

    def connect() -> ZooKeeperLocks:
        made.append(ZooKeeperLocks(server.url, socket_timeout_s=5.0, connect_timeout_s=5.0))
        return made[-1]

    with client_of(server) as client:

        def forget() -> None:
            client.delete("/taskguard", recursive=True)

        forget()
        try:
            yield LockServer(
                connect,
                forget,
                lambda: locks_in(client),
                server.url,
                lambda: _deafened(server.port),
                lambda locks: end_session(locks, server),
            )
        finally:
            for each in made:
                each.close()


@contextmanager
def _deafened(port: int) -> Iterator[LockProvider]:
    with Proxy(port) as proxy:
        url = f"zookeeper://127.0.0.1:{proxy.port}?session_s={SESSION_S}"
        locks = ZooKeeperLocks(url, socket_timeout_s=1.0, connect_timeout_s=5.0)
        connect_by_a_lock(locks)  # and its folders are there
        proxy.mode = Mode.SWALLOW
        yield locks
        locks.close()
