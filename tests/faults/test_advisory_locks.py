"""The database whose session holds the locks fails while a body runs: frozen, killed, its session
ended, pooled.

With the ledger, which it always has: one effect, and a rival is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa

from support.advisory import advisory_url, kill, session_of
from support.needs import need
from support.pgbouncer import PgBouncer
from support.rivals import expect_one_effect, expect_work_beside_a_frozen_server
from support.waiting import wait_until
from taskguard import Guard
from taskguard.advisory_locks import AdvisoryLocks
from taskguard.locks.base import Held
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import MariaDB, Postgres


@pytest.fixture(params=[Postgres, pytest.param(MariaDB, marks=pytest.mark.debian)])
def server(request: pytest.FixtureRequest) -> Iterator[Postgres | MariaDB]:
    """A database for locks alone; the ledger is elsewhere."""
    need(request.param)
    with request.param() as server:
        yield server


@pytest.fixture
def connect(server: Postgres | MariaDB) -> Iterator[Callable[..., AdvisoryLocks]]:
    """Makes providers that do not wait for long."""
    url = advisory_url(server.create_database("locks"))
    with ExitStack() as stack:

        def make(answer_s: float = 5.0) -> AdvisoryLocks:
            locks = AdvisoryLocks(url, answer_s=answer_s)
            stack.callback(locks.close)
            return locks

        yield make


class TestServer:
    """Faults 8, 10 and 13."""

    def test_frozen(self, server: Postgres | MariaDB, make_rivals: Any, connect: Any) -> None:
        """If the server freezes, a rival is refused, and other work is done."""
        rivals = make_rivals(locks=lambda: connect(answer_s=0.5))
        expect_work_beside_a_frozen_server(rivals, server)

    def test_killed(self, server: Postgres | MariaDB, make_rivals: Any, connect: Any) -> None:
        """After the server was killed and started, every lock is free, and the ledger refuses a
        rival."""

        def fault() -> None:
            server.kill()
            server.start()

        expect_one_effect(make_rivals(locks=connect), fault)


class TestSessionEnds:
    """Fault 31."""

    def test_the_ledger_keeps_the_key(
        self, server: Postgres | MariaDB, make_rivals: Any, connect: Any
    ) -> None:
        """If an administrator ends the session in a body, the ledger refuses a rival."""
        rivals = make_rivals(locks=connect)
        locks = rivals.first.tg.runner.locks
        expect_one_effect(rivals, lambda: kill(server.url_of("locks"), session_of(locks)))

    def test_its_holder_takes_it_again(
        self, server: Postgres | MariaDB, make_rivals: Any, connect: Any
    ) -> None:
        """The holder's next renewal takes the lock again."""
        rivals = make_rivals(locks=connect)
        locks, other = rivals.first.tg.runner.locks, connect()

        def is_taken() -> bool:
            owner = new_owner()
            found = other.acquire(("order:1",), owner, ttl_s=30.0, with_fence=False, wait_s=0.0)
            other.release(("order:1",), owner)
            return isinstance(found, Held)

        def during(_: Guard) -> None:
            assert is_taken()
            ended = session_of(locks)
            kill(server.url_of("locks"), ended)  # and what it had is free
            wait_until(lambda: locks._current is not None and session_of(locks) != ended)
            wait_until(is_taken)

        assert rivals.ship(during, ttl_s=6.0) == "first"


def test_a_pooler_of_transactions(postgres: Postgres, pg_url: str, make_rivals: Any) -> None:
    """Fault 30: a pooler of transactions grants no lock, and the ledger decides alone."""
    need(PgBouncer)
    with PgBouncer(postgres.port) as pooler:
        pooled = pooler.url_of(str(sa.make_url(pg_url).database))
        rivals = make_rivals(locks=lambda: AdvisoryLocks(advisory_url(pooled)))
        expect_one_effect(rivals, lambda: None)
        assert "lock_unavailable" in rivals.second.happened
        rivals.close()
