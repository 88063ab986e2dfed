"""Processes that share a key, or wait for a share, are killed or frozen, or the server loses its
data.

Their shares are free when their leases end, other shares remain valid, and a holder that lost its
share learns of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import redis
import sqlalchemy as sa

from support.waiting import wait_until
from support.waiting_process import KEY, WaitingProcess
from taskguard.lock_table import TableLocks
from taskguard.locks.base import Granted, Held, SharingLocks
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import Valkey

# No machine pauses for so long, and the tests wait for the ends of leases.
TTL_S = 8.0
Start = Callable[..., WaitingProcess]


class Server:
    """A lock server under test."""

    def __init__(self, url: str, locks: SharingLocks, forget: Callable[[], object]) -> None:
        self.url, self.locks, self.forget = url, locks, forget

    def has_room(self, limit: int) -> bool:
        """Whether one more would come in."""
        owner = new_owner("probe")
        wish = {"ttl_s": 30.0, "with_fence": False, "wait_s": 0.0}
        answer = self.locks.acquire((KEY,), owner, limit=limit, **wish)  # type: ignore[arg-type]
        if isinstance(answer, Held):
            return False
        self.locks.release((KEY,), owner, limit=limit)
        return isinstance(answer, Granted)


@pytest.fixture(params=["valkey", "table"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Fair, and not."""
    if request.param == "valkey":
        valkey: Valkey = request.getfixturevalue("valkey")
        with redis.Redis(port=valkey.port) as client:
            client.flushall()
            yield Server(valkey.url, RedisLocks(valkey.url), client.flushall)
        return
    url: str = request.getfixturevalue("pg_url")
    with closing(TableLocks(url)) as locks:
        locks.create_table()
        engine = sa.create_engine(url, poolclass=sa.NullPool)

        def forget() -> None:
            with engine.begin() as db:
                db.exec_driver_sql("delete from taskguard_locks")

        yield Server(url, locks, forget)


@pytest.fixture
def start(server: Server) -> Iterator[Start]:
    """Starts processes that ask for the key at once."""
    with ExitStack() as stack:

        def make(**options: object) -> WaitingProcess:
            process = WaitingProcess.start(server.url, ttl_s=TTL_S, **options)
            stack.callback(process.end)
            process.tell()
            return process

        yield make


def test_a_holder_is_killed(server: Server, start: Start) -> None:
    """After a holder of a share was killed, a waiter gets the share when the lease ends. The other
    holder keeps its own."""
    first, second = start(limit=2), start(limit=2)
    taken_s = max(first.got_it_s(), second.got_it_s())
    third = start(limit=2)
    second.end()
    assert third.got_it_s() >= taken_s
    assert not server.has_room(2)
    for each in (first, third):
        each.tell()
        assert each.ended() == "kept"
    assert server.has_room(1)


def test_a_holder_is_frozen(server: Server, start: Start) -> None:
    """If a holder is frozen for longer than its lease, another one gets the share. When it goes on,
    it learns of the loss, and does not release the other's share."""
    first, second = start(limit=2), start(limit=2)
    for each in (first, second):
        each.got_it_s()
    third = start(limit=2)
    os.kill(second.process.pid, signal.SIGSTOP)
    third.got_it_s()
    os.kill(second.process.pid, signal.SIGCONT)
    second.tell()
    assert second.ended() == "lost"
    assert not server.has_room(2)
    for each in (first, third):
        each.tell()
        assert each.ended() == "kept"


def test_the_last_reader_is_killed(server: Server, start: Start) -> None:
    """After the last reader was killed, a writer gets the key when the lease ends."""
    first, second = start(mode="read"), start(mode="read")
    for each in (first, second):
        each.got_it_s()
    writer = start()
    first.tell()
    assert first.ended() == "kept"
    second.end()
    writer.got_it_s()
    writer.tell()
    assert writer.ended() == "kept"


def test_a_writer_that_waits_is_killed(server: Server, start: Start) -> None:
    """A killed writer that waited stops readers for some seconds at most."""
    reader = start(mode="read")
    reader.got_it_s()
    writer = start()
    if server.locks.traits.fair:
        wait_until(lambda: not server.has_room(3), message="that it waits")
    writer.end()
    late = start(mode="read")
    late.got_it_s()
    for each in (reader, late):
        each.tell()
        assert each.ended() == "kept"


def test_the_server_forgets(server: Server, start: Start) -> None:
    """After the server lost its data, no more holders than the limit are granted, and earlier
    holders learn of the loss."""
    before = [start(limit=2) for _ in range(2)]
    for each in before:
        each.got_it_s()
    waiting = [start(limit=2) for _ in range(3)]
    server.forget()
    for each in before:
        each.tell()
        assert each.ended() == "lost"
    wait_until(lambda: not server.has_room(2), message="two of them")
    for each in waiting:
        each.tell()
    for each in waiting:
        each.got_it_s()
        assert each.ended() == "kept"
    assert server.has_room(1)
