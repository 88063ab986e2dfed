"""Connections of etcd's and Consul's locks: kept, silent, interrupted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from support.consul import consul_kind
from support.etcd import forget
from support.needs import need
from support.proxy import Mode, Proxy
from support.threads import at_once
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.base import Granted, LockProvider
from taskguard.model.lease import new_owner
from taskguard_consul import ConsulLocks
from taskguard_etcd import EtcdLocks
from taskguard_sandbox.servers import Consul, Etcd, free_port

pytestmark = pytest.mark.debian
PROVIDERS = {"etcd": EtcdLocks, "consul": ConsulLocks}


@pytest.fixture(params=PROVIDERS)
def server(request: pytest.FixtureRequest) -> Etcd | Consul:
    """An empty server."""
    need(Etcd if request.param == "etcd" else Consul)
    server: Etcd | Consul = request.getfixturevalue(request.param)
    if isinstance(server, Etcd):
        forget(server.url)
    else:
        consul_kind(server)
    return server


@pytest.fixture
def proxy(server: Etcd | Consul) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


def locks_on(server: Etcd | Consul, *ports: int, timeout_s: float) -> LockProvider:
    scheme = server.url.partition("://")[0]
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return PROVIDERS[scheme](
        f"{scheme}://{hosts}", socket_timeout_s=timeout_s, connect_timeout_s=timeout_s
    )


def take(locks: LockProvider, key: str) -> None:
    owner = new_owner("m")
    answer = locks.acquire((key,), owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
    assert isinstance(answer, Granted)
    assert locks.release((key,), owner)


def take_at_once(locks: LockProvider, count: int) -> None:
    """Take a key in each of several threads, on a connection each."""
    at_once(count, lambda number: take(locks, f"order:{number}"))


def test_idle_connections_that_fell_silent(server: Etcd | Consul, proxy: Proxy) -> None:
    """If idle connections have become silent, the second try of a call uses a new connection."""
    with closing(locks_on(server, proxy.port, timeout_s=2.0)) as locks:
        take_at_once(locks, 6)
        for pair in proxy._pairs:
            pair.loses = True
        take_at_once(locks, 6)


def test_connections_are_kept(server: Etcd | Consul, proxy: Proxy) -> None:
    """One thread uses one connection for all its locks."""
    with closing(locks_on(server, proxy.port, timeout_s=10.0)) as locks:
        for number in range(20):
            take(locks, f"order:{number}")
        assert proxy.connections == 1


def test_a_silent_endpoint_is_passed_over(server: Etcd | Consul, proxy: Proxy) -> None:
    """A silent endpoint costs one time-out. After that, the endpoint that answered is called
    first."""
    proxy.mode = Mode.BLACK_HOLE
    with closing(locks_on(server, proxy.port, server.port, timeout_s=1.0)) as locks:
        take(locks, "order:1")
        tried = proxy.connections
        take(locks, "order:2")
        assert proxy.connections == tried == 1


def test_a_call_without_an_answer_ends(server: Etcd | Consul, proxy: Proxy) -> None:
    """A call without an answer ends after its tries, each within the time-out. The error names each
    endpoint."""
    proxy.mode = Mode.BLACK_HOLE
    dead = free_port()
    with closing(locks_on(server, proxy.port, dead, timeout_s=0.5)) as locks:
        began_s = time.monotonic()
        with pytest.raises(LockServerUnavailableError, match=f"{proxy.port},127.0.0.1:{dead} gave"):
            locks.holders("order:1")
        assert time.monotonic() - began_s < 5.0


def test_an_interrupted_call_leaves_no_reply_behind(server: Etcd | Consul) -> None:
    """If a time limit interrupts a call, the next call does not get its reply."""
    owner = new_owner("m")
    with closing(locks_on(server, server.port, timeout_s=30.0)) as locks:
        locks.acquire(("held",), owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
        before = signal.signal(signal.SIGALRM, _raise_time_limit)
        server.pause()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(_TimeLimitError):
                locks.holders("free")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            server.resume()
        (holder,) = locks.holders("held")
        assert holder.owner == owner
        assert locks.release(("held",), owner)


def test_an_interrupted_call_leaves_nothing_locked(
    server: Etcd | Consul, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call enters a Condition, as Python's queues do: a signal just after that would leave it
    locked."""

    def interrupted(condition: Any) -> None:
        condition.acquire()
        raise _TimeLimitError

    with closing(locks_on(server, server.port, timeout_s=30.0)) as locks:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Condition, "__enter__", interrupted)
            take(locks, "k")
        take(locks, "k")


class _TimeLimitError(BaseException):
    """An error like Celery's soft time limit, which is no connection error."""


def _raise_time_limit(*_: object) -> None:
    raise _TimeLimitError
