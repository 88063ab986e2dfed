"""Databases whose texts do not hold every character."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from support.guarded_shop import GuardedShop, write
from taskguard.model.states import State
from taskguard.run.encoding import MAX_RESULT_BYTES
from taskguard.run.guard import Guard
from taskguard_sandbox.servers import Postgres

TEXT = "5 €, 日本, \U0001f40d"


@pytest.fixture(params=["LATIN1", "UTF8", "LATIN1 for UTF8"])
def encoded(request: pytest.FixtureRequest, postgres: Postgres, make_shop: Any) -> Iterator[Any]:
    """A shop whose database has this encoding, or the default of its clients has."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    clients, _, server = request.param.rpartition(" for ")
    postgres.execute(
        f"create database {name} encoding '{server}' template template0 lc_collate 'C' lc_ctype 'C'"
    )
    if clients:
        postgres.execute(f"alter database {name} set client_encoding = '{clients}'")
    yield make_shop(postgres.url_of(name))
    postgres.drop_database(name)


def test_results_progress_and_steps_hold_every_character(encoded: GuardedShop) -> None:
    """Results, progress and steps keep every character, because JSON is written in ASCII."""

    def parts(guard: Guard) -> dict[str, str]:
        with guard.checkpoint({"at": TEXT}) as db:
            write(db, "part")
        return {"step": guard.step("ask", lambda: TEXT), "progress": guard.progress["at"]}

    answered = encoded.deliver(parts).value
    assert answered == {"step": TEXT, "progress": TEXT}
    assert encoded.deliver(parts).value == answered
    view = encoded.ledger.view("ship order:1")
    assert view is not None
    assert (view.result_json or "").isascii()
    assert (view.progress_json or "").isascii()


def test_a_result_in_the_transaction_holds_every_character(encoded: GuardedShop) -> None:
    """A result that is set in the transaction keeps every character, and the effects are
    committed."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
            guard.result = TEXT

    encoded.deliver(body)
    assert (encoded.effects, encoded.states) == (["x"], ["DONE"])
    assert encoded.deliver(body).value == TEXT


def test_escapes_do_not_count_as_length(encoded: GuardedShop) -> None:
    """A result of the greatest length is stored, whatever its characters are."""
    text = "\U0001f642" * ((MAX_RESULT_BYTES - 2) // 4)
    assert encoded.deliver(lambda guard: text).value == text
    assert encoded.deliver(lambda guard: text).value == text


def test_an_error_is_recorded_whatever_it_says(encoded: GuardedShop) -> None:
    """An error with characters that the database lacks is recorded, and counts no crash."""

    def body(guard: Guard) -> None:
        raise LookupError(TEXT)

    for _ in range(4):
        with pytest.raises(LookupError):
            encoded.deliver(body)
    [view] = encoded.ledger.list_work(State.FAILED)
    assert view.crashes == 0
    assert view.error in (
        f"LookupError: {TEXT}",
        r"LookupError: 5 \u20ac, \u65e5\u672c, \U0001f40d",
    )
    encoded.ledger.requeue("ship order:1", reason=TEXT)
    assert encoded.states == ["NEW"]


@pytest.mark.parametrize("charset", ["latin1", "utf8mb3", "utf8mb4"])
def test_an_error_is_recorded_by_a_driver_of_any_encoding(
    mariadb_url: str, make_shop: Any, charset: str
) -> None:
    """An error is recorded in whatever charset the URL sets for the connection."""
    shop = make_shop(mariadb_url, f"{mariadb_url}?charset={charset}")

    def body(guard: Guard) -> None:
        raise LookupError(TEXT)

    with pytest.raises(LookupError):
        shop.deliver(body)
    [view] = shop.ledger.list_work(State.FAILED)
    whole = charset == "utf8mb4"
    assert view.error == f"LookupError: {TEXT}" if whole else (view.error or "").isascii()
