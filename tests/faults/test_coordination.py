"""A coordination service fails while a body runs: killed, frozen, emptied, leases ended.

With a ledger there is one effect, and a rival is refused. With locks only, a grant that the server
kept stays valid. If the server lost it, the holder learns that its lease has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import taskguard
from support.consul import ask
from support.etcd import forget as forget_etcd
from support.needs import need
from support.rivals import expect_one_effect, expect_work_beside_a_frozen_server
from support.waiting import wait_until
from support.zookeeper import client_of
from taskguard.errors import KeyBusyError, LeaseLostError
from taskguard.events import Event
from taskguard.locks.base import Granted, Held, LockProvider
from taskguard.model.lease import new_owner
from taskguard_consul import ConsulLocks
from taskguard_etcd import EtcdLocks
from taskguard_sandbox.servers import Consul, Etcd, ZooKeeper
from taskguard_zookeeper import ZooKeeperLocks

pytestmark = pytest.mark.debian
KEY = ("order:1",)


Kind = Etcd | Consul | ZooKeeper
PROVIDERS: dict[type[Kind], Any] = {
    Etcd: EtcdLocks,
    Consul: ConsulLocks,
    ZooKeeper: ZooKeeperLocks,
}
_made: list[LockProvider] = []


@pytest.fixture(params=PROVIDERS)
def server(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """A server that a test may stop."""
    need(request.param)
    options = {"maxSessionTimeout": 60_000} if request.param is ZooKeeper else {}
    with request.param(**options) as server:
        yield server
        while _made:
            _made.pop().close()


def locks_on(server: Kind, url: str | None = None, **options: float) -> LockProvider:
    # Long enough for a server that starts, and for one that is busy.
    options = {"socket_timeout_s": 10.0, "connect_timeout_s": 10.0, **options}
    _made.append(PROVIDERS[type(server)](url or server.url, **options))
    return _made[-1]


def brief(server: Kind) -> str:
    """The URL, with a short session if the session's length can be chosen."""
    return f"{server.url}?session_s=9" if isinstance(server, ZooKeeper) else server.url


def patient(server: Kind) -> LockProvider:
    """A provider whose session outlives a server's restart, even if the machine is busy."""
    if not isinstance(server, ZooKeeper):
        return locks_on(server)
    return locks_on(server, f"{server.url}?session_s=60", connect_timeout_s=60.0)


def impatient(server: Kind, timeout_s: float = 0.5) -> LockProvider:
    options = {"socket_timeout_s": timeout_s, "connect_timeout_s": timeout_s}
    return locks_on(server, brief(server), **options)


def forget(server: Kind) -> None:
    """End all grants, as an operator or another program could."""
    if isinstance(server, Etcd):
        forget_etcd(server.url)
    elif isinstance(server, ZooKeeper):
        with client_of(server) as client:
            client.delete("/taskguard", recursive=True)
    else:
        ask(server, "DELETE", "/v1/kv/?recurse")


def take(locks: LockProvider, owner: Any = None) -> Any:
    return locks.acquire(KEY, owner or new_owner("m"), ttl_s=30.0, with_fence=True, wait_s=0.0)


def emptied(server: Kind) -> None:
    server.kill()
    server.forget()
    server.start()


class TestLedger:
    """Faults 8, 10, 13 and 31, with a ledger: one effect, none lost."""

    def test_killed(self, server: Kind, make_rivals: Any) -> None:
        """If the server is killed and started in a body, a rival is refused."""

        def fault() -> None:
            server.kill()
            server.start()

        expect_one_effect(make_rivals(locks=server.url), fault)

    def test_killed_for_good(self, server: Kind, make_rivals: Any) -> None:
        """If the server stays down, the ledger decides alone, and work goes on."""
        rivals = make_rivals(locks=lambda: impatient(server))

        def fault() -> None:
            server.kill()
            assert rivals.ship_too(order=2) == "second"

        expect_one_effect(rivals, fault)
        assert "lock_unavailable" in rivals.second.happened

    def test_frozen(self, server: Kind, make_rivals: Any) -> None:
        """If the server freezes, a rival is refused, and other work is done."""
        rivals = make_rivals(locks=lambda: impatient(server))
        expect_work_beside_a_frozen_server(rivals, server)

    def test_emptied(self, server: Kind, make_rivals: Any) -> None:
        """If the server comes back with a new data directory, the ledger's lease keeps the key."""
        expect_one_effect(make_rivals(locks=server.url), lambda: emptied(server))

    def test_a_lease_that_is_ended(self, server: Kind, make_rivals: Any) -> None:
        """If the server's leases are ended, the ledger's lease keeps the key."""
        expect_one_effect(make_rivals(locks=server.url), lambda: forget(server))

    def test_a_ttl_between_two_seconds(self, server: Kind, make_rivals: Any) -> None:
        """The lock of a delivery that is about to claim keeps a rival out, although the server
        rounds its ttl to whole seconds."""
        rivals = make_rivals(locks=server.url)
        # A delivery has the lock, and is about to claim.
        locks_on(server).acquire(KEY, new_owner("m"), ttl_s=20.2, with_fence=False, wait_s=0.0)
        with pytest.raises(KeyBusyError):
            rivals.ship_too(ttl_s=20.2)
        assert rivals.shipped() == []


class TestLocksOnly:
    """The same faults, without a ledger."""

    def test_killed(self, server: Kind) -> None:
        """After the server was killed and started, the lease remains, and no other owner gets the
        key."""
        locks, owner = patient(server), new_owner("m")
        granted = take(locks, owner)
        server.kill()
        server.start()
        other = take(locks)
        assert isinstance(other, Held)
        assert other.owner == owner
        assert take(locks, owner) == granted
        assert locks.release(KEY, owner) is True

    def test_frozen(self, server: Kind) -> None:
        """If renewals get no answer, the lease is valid until its deadline, and then lost."""
        events: list[Event] = []
        locks = impatient(server, 1.5)
        tg = taskguard.connect(locks=locks, ledger=None, listeners=(events.append,))
        with (
            pytest.raises(LeaseLostError, match="before it was released"),
            tg.lock("order:1", ttl_s=9.0) as lease,
        ):
            server.pause()
            wait_until(lambda: "renewal_failed" in [event.name for event in events])
            wait_until(lease.lost.is_set)
            server.resume()
        assert [event.name for event in events].count("lost") == 1
        tg.close()  # a session would last for twice its ttl
        others = locks_on(server)
        wait_until(lambda: isinstance(take(others), Granted))

    @pytest.mark.parametrize("fault", [emptied, forget])
    def test_forgotten(self, server: Kind, fault: Any) -> None:
        """If the server lost its data, or ended the lease, the next renewal says so. The next
        holder has a higher token."""
        tg = taskguard.connect(locks=brief(server), ledger=None)
        with (
            pytest.raises(LeaseLostError, match="before it was released"),
            tg.lock("order:1", ttl_s=30.0) as lease,  # a server that starts may take some time
        ):
            fault(server)
            wait_until(lease.lost.is_set)
            # An emptied ZooKeeper refuses a client that has seen later transactions.
            refuses = isinstance(server, ZooKeeper) and fault is emptied
            said = "could not be renewed in time" if refuses else "lock server no longer knows it"
            assert lease.lost_reason is not None
            assert said in lease.lost_reason
            assert take(locks_on(server)).fence > lease.fence
        tg.close()
