"""A ledger whose user may not do all that is needed, or whose tables lack a column.

No message can be at fault, so none pays for it: nothing runs, and deliveries are put off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.claims import request
from support.guarded_shop import GuardedShop, NotingQueue
from taskguard.errors import LedgerSchemaError
from taskguard.ledger.schema.privileges import check_privileges
from taskguard.ledger.sql import SqlLedger
from taskguard.model.claims import MessageRef
from taskguard.model.delivery import Deferred
from taskguard.run.guard import Guard

TABLES = (
    "taskguard_keys",
    "taskguard_work",
    "taskguard_messages",
    "taskguard_runs",
    "taskguard_workers",
    "taskguard_happenings",
    "taskguard_actions",
    "taskguard_counts",
    "taskguard_snapshot",
)
PRIVILEGES = ("select", "insert", "update")


class Office:
    """A shop of the owner's, and the ledger of a user whose privileges the owner gives."""

    def __init__(self, shop: GuardedShop, url: str) -> None:
        self.shop = shop
        self._is_mariadb = "mariadb" in url
        made = sa.make_url(url)
        self._database = made.database
        self._user = f"clerk_{str(made.database)[-12:]}"
        self._who = f"{self._user}@'127.0.0.1'" if self._is_mariadb else self._user
        self._say(f"create {'user' if self._is_mariadb else 'role'} {self._who}")
        if self._is_mariadb:
            self._say(f"grant create temporary tables on {self._database}.* to {self._who}")
        else:
            self._say(f"alter role {self._who} login")
        for table in (*TABLES, "taskguard_schema", "effects"):
            self._say(f"grant select, insert, update on {table} to {self._who}")
        host = "127.0.0.1" if self._is_mariadb else made.host
        self.ledger = SqlLedger(made.set(username=self._user, password=None, host=host))

    def _say(self, *statements: str) -> None:
        with self.shop.engine.begin() as db:
            for statement in statements:
                db.exec_driver_sql(statement)

    def revoke(self, privilege: str, table: str) -> None:
        self._say(f"revoke {privilege} on {table} from {self._who}")

    def close(self) -> None:
        self.ledger.close()
        self.shop.ledger.close()  # the runner has had another one since
        if self._is_mariadb:
            self._say(f"drop user {self._who}")
        else:
            self._say(f"drop owned by {self._user}", f"drop role {self._user}")


@pytest.fixture(params=["pg_url", "mariadb_url"])
def office(
    request: pytest.FixtureRequest, make_shop: Callable[..., GuardedShop]
) -> Iterator[Office]:
    url = request.getfixturevalue(request.param)
    made = Office(make_shop(url), url)
    yield made
    made.close()


def deliver(ledger: SqlLedger, shop: GuardedShop, body: Any) -> tuple[Any, list[int]]:
    shop.tg = taskguard.connect(locks=shop.tg.runner.locks, ledger=ledger)
    queue = NotingQueue()
    return shop.deliver(body, queue), queue.deferrals


@pytest.mark.parametrize("privilege", PRIVILEGES)
@pytest.mark.parametrize("table", TABLES)
def test_what_may_not_be_done_is_found_at_the_start(
    office: Office, table: str, privilege: str
) -> None:
    """The check at a start names the missing privilege and its table."""
    office.ledger.check_schema()
    office.revoke(privilege, table)
    with pytest.raises(LedgerSchemaError, match=f"{privilege.upper()}.*{table}"):
        office.ledger.check_schema()


def test_all_are_tried_in_one_transaction(office: Office) -> None:
    """Each worker tries them when it starts. One refusal suffices to try each by itself."""
    begun: list[object] = []
    note = begun.append
    sa.event.listen(sa.Engine, "begin", note)
    try:
        check_privileges(office.ledger.database)
        assert len(begun) == 1
        office.revoke("update", TABLES[-1])
        begun.clear()
        with pytest.raises(LedgerSchemaError):
            check_privileges(office.ledger.database)
        assert len(begun) == 1 + len(TABLES) * len(PRIVILEGES)
    finally:
        sa.event.remove(sa.Engine, "begin", note)


@pytest.mark.parametrize("privilege", PRIVILEGES)
@pytest.mark.parametrize("table", TABLES[:2])
def test_a_forgotten_grant_puts_deliveries_off(office: Office, table: str, privilege: str) -> None:
    """If a privilege is missing, a delivery is deferred, and not failed."""
    office.revoke(privilege, table)
    outcome, deferrals = deliver(office.ledger, office.shop, lambda guard: None)
    assert isinstance(outcome, Deferred)
    assert deferrals == [1]
    assert office.shop.states in ([], ["PROCESSING"])


def test_a_deferral_that_cannot_be_noted_is_published_all_the_same(office: Office) -> None:
    """A delivery is deferred even if the table of messages cannot be written."""
    office.revoke("insert", "taskguard_messages")
    office.ledger.claim(request(work="ship order:1", message=MessageRef("another")))
    outcome, deferrals = deliver(office.ledger, office.shop, lambda guard: None)
    assert isinstance(outcome, Deferred)
    assert deferrals == [1]


@pytest.mark.parametrize("column", ["crashed_owner", "lease_until"])
def test_a_missing_column_puts_deliveries_off(shop: GuardedShop, column: str) -> None:
    """If a column is missing, the check names it, and a delivery is deferred."""
    with shop.engine.begin() as db:
        db.exec_driver_sql(f"alter table taskguard_work drop column {column}")
    runs: list[int] = []
    queue = NotingQueue()
    with pytest.raises(LedgerSchemaError, match=column):
        shop.ledger.check_schema()
    assert isinstance(shop.deliver(lambda guard: runs.append(1), queue), Deferred)
    assert (runs, queue.deferrals) == ([], [1])


def test_a_grant_that_is_taken_while_the_body_runs(office: Office) -> None:
    """If a privilege is revoked while a body runs, nothing is written, and the delivery is
    deferred."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            db.exec_driver_sql("insert into effects values ('x')")
            office.revoke("update", "taskguard_work")

    outcome, deferrals = deliver(office.ledger, office.shop, body)
    assert isinstance(outcome, Deferred)
    assert (deferrals, office.shop.effects) == ([1], [])


def test_what_the_body_may_not_do_is_its_own_failure(office: Office) -> None:
    """If a body lacks a privilege on its own table, its work is FAILED."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            db.exec_driver_sql("delete from effects")

    with pytest.raises(sa.exc.DBAPIError, match="denied"):
        deliver(office.ledger, office.shop, body)
    assert office.shop.states == ["FAILED"]
