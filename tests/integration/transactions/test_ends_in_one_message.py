"""A body's transaction on PostgreSQL ends in one message, without a change of behaviour."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from support.claims import overtake, request
from support.guarded_shop import GuardedShop, write
from taskguard.errors import StaleTokenError, TransactionUsageError
from taskguard.model.claims import Claim, Claimed
from taskguard.run.guard import Guard


def claim(shop: GuardedShop) -> Claim:
    found = shop.ledger.claim(request())
    assert isinstance(found, Claimed)
    return found.claim


@pytest.fixture(params=["»{}«", "„{}“", "«{}»", "« {} »", "“{}”"])
def translated(
    request: pytest.FixtureRequest, pg: GuardedShop, monkeypatch: pytest.MonkeyPatch
) -> GuardedShop:
    """A shop whose server speaks another language (`lc_messages`), which has other quotes."""
    libpq = pg.ledger._database._libpq
    error_of = libpq._error_of

    def translate(result: Any) -> psycopg.Error:
        error: psycopg.Error = error_of(result)
        _, quoted, *_ = str(error).split('"')
        error.args = ("ungültige Eingabesyntax für Typ integer: " + request.param.format(quoted),)
        return error

    monkeypatch.setattr(libpq, "_error_of", translate)
    return pg


def test_a_stale_claim_is_refused_in_any_language(translated: GuardedShop) -> None:
    """A stale claim is recognized by taskguard's part of the server's message, in any language."""
    held = claim(translated)
    with pytest.raises(StaleTokenError), translated.ledger.transaction(held) as tx:
        write(tx.db)
        overtake(translated)
        tx.complete_in_block(held, "1")
    assert translated.effects == []


def test_a_raw_end_of_the_transaction_is_noticed_in_any_language(translated: GuardedShop) -> None:
    """A raw end of the transaction is recognized in any language of the server."""
    held = claim(translated)
    with pytest.raises(TransactionUsageError), translated.ledger.transaction(held) as tx:
        tx.db.exec_driver_sql("commit and chain")
        write(tx.db)
        tx.complete_in_block(held, "1")
    assert translated.effects == []


def test_a_transaction_of_psycopgs_that_is_left_open_ends_nothing(pg: GuardedShop) -> None:
    """If a body leaves a transaction of psycopg open, nothing is written, and others get a usable
    connection."""
    left: list[Any] = []

    @pg.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, str(order))
            if order == 1:
                left.append(db.connection.dbapi_connection.transaction())
                left[0].__enter__()

    with pytest.raises(sa.exc.ProgrammingError, match="within a Transaction context"):
        ship(1)
    for order in range(2, 5):
        ship(order)
    assert pg.effects == ["2", "3", "4"]
    assert pg.states == ["DONE", "DONE", "DONE", "FAILED"]


def test_a_listener_may_refuse_a_commit(pg: GuardedShop) -> None:
    """A listener of all Engines is called before COMMIT. If it raises, nothing is written."""
    armed: list[str] = []

    @pg.tg.guarded(key="order:1")
    def ship(guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
            armed.append("now")

    def refuse(_: sa.Connection) -> None:
        if armed:
            raise ValueError(armed.pop())

    sa.event.listen(sa.Engine, "commit", refuse)
    try:
        with pytest.raises(ValueError, match="now"):
            ship()
    finally:
        sa.event.remove(sa.Engine, "commit", refuse)
    assert (pg.effects, pg.states) == ([], ["FAILED"])
