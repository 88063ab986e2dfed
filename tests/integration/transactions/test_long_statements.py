"""A statement that is too long for the server is the body's failure."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from support.guarded_shop import GuardedShop, NotingQueue
from taskguard.errors import TransactionUsageError
from taskguard.run.guard import Guard

LIMIT = "select @@max_allowed_packet"


@pytest.fixture(params=["mariadb_url", "mysql_url"])
def shop(request: pytest.FixtureRequest, make_shop: Any) -> GuardedShop:
    """Return a shop on servers that accept only short statements."""
    made: GuardedShop = make_shop(request.getfixturevalue(request.param))
    with made.engine.begin() as db:
        db.exec_driver_sql("create table papers (text longtext)")
    return made


@pytest.mark.parametrize("swallowed", [True, False])
def test_a_statement_beyond_the_servers_packet_is_the_bodys_failure(
    shop: GuardedShop, swallowed: bool
) -> None:
    """The server ends the connection, which looks like an outage. The work is FAILED, and does not
    run for ever."""
    runs, queue = [], NotingQueue()
    with shop.engine.connect() as db:
        limit = int(db.exec_driver_sql(LIMIT).scalar_one())

    def body(guard: Guard) -> None:
        runs.append(1)
        with guard.transaction() as db:
            try:
                db.execute(sa.text("insert into papers values (:text)"), {"text": "x" * limit})
            except sa.exc.DBAPIError:
                if not swallowed:
                    raise

    with pytest.raises(TransactionUsageError, match="max_allowed_packet"):
        shop.deliver(body, queue)
    assert (len(runs), shop.states, queue.deferrals) == (1, ["FAILED"], [])
