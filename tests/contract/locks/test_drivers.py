"""A lock needs the driver of its own server, and no other."""

from __future__ import annotations

import pytest

from support.drivers import ALL, run_without
from support.lock_servers import LockServer

pytestmark = pytest.mark.once

NEEDS = {
    "memory": set[str](),
    "etcd": {"urllib3"},
    "consul": {"urllib3"},
    "zookeeper": {"kazoo"},
    "postgresql+psycopg": {"sqlalchemy", "psycopg"},
    "mariadb+pymysql": {"sqlalchemy", "pymysql"},
    "mysql+pymysql": {"sqlalchemy", "pymysql"},
    "postgresql+advisory": {"sqlalchemy", "psycopg"},
    "mariadb+advisory": {"sqlalchemy", "pymysql"},
    "mysql+advisory": {"sqlalchemy", "pymysql"},
}
# Without fencing tokens, taskguard refuses to lock without a ledger, so the script uses the
# provider.
LOCKS = """
import taskguard
from taskguard.model.lease import new_owner
from taskguard.settings import make_locks
locks = make_locks({url!r})
if locks.traits.tokens:
    with taskguard.connect(locks=locks, ledger=None).lock("order:42", wait_s=10.0) as lease:
        assert lease.fence > 0
else:
    owner = new_owner()
    locks.acquire(("order:42",), owner, ttl_s=30.0, with_fence=False, wait_s=10.0)
    assert locks.release(("order:42",), owner)
locks.close()
"""


# One for each scheme of a URL.
@pytest.mark.parametrize(
    "server",
    [
        *("memory", "valkey", "cluster", "redlock", "pg_table", "pg_advisory"),
        *(
            pytest.param(kind, marks=pytest.mark.debian)
            for kind in (
                *("sentinel", "mariadb_table", "mysql_table"),
                *("mariadb_get_lock", "mysql_get_lock"),
                *("etcd", "consul", "zookeeper"),
            )
        ),
    ],
    indirect=True,
)
def test_a_lock_needs_the_driver_of_its_server_alone(server: LockServer) -> None:
    """Locks outside a database need no SQLAlchemy. Locks in a database need no redis-py."""
    url = server.url or "memory://"
    needs = NEEDS.get(url.partition(":")[0], {"redis"})
    run_without(ALL - needs, LOCKS.format(url=url))
