"""A part of the ledger asks once more if the connection was dead, and at no other error."""

from __future__ import annotations

from typing import Any

import pytest

from taskguard.errors import CommitUnknownError, LedgerUnavailableError, TransactionRetryError
from taskguard.ledger.connections.errors import LockTimeoutError, NoConnectionError
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.parts.base import Part
from taskguard.ledger.sql import SqlLedger


class Server:
    """Raises these errors, one at each call, and answers afterwards."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    @retried
    def ask(self, question: str, *, politely: bool = False) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return f"{question}, please" if politely else question


def test_a_dead_connection_is_asked_once_more() -> None:
    server = Server(LedgerUnavailableError("closed"))
    assert server.ask("the time", politely=True) == "the time, please"
    assert server.calls == 2


def test_no_more_often_than_that() -> None:
    server = Server(LedgerUnavailableError("closed"), LedgerUnavailableError("down"))
    with pytest.raises(LedgerUnavailableError, match="down"):
        server.ask("the time")
    assert server.calls == 2


@pytest.mark.parametrize(
    "error", [LockTimeoutError, NoConnectionError, CommitUnknownError, TransactionRetryError]
)
def test_another_error_is_not_retried(error: Any) -> None:
    server = Server(error("no"))
    with pytest.raises(error):
        server.ask("the time")
    assert server.calls == 1


def test_no_part_overrides_another_one() -> None:
    """The order in which `SqlLedger` names its parts has no meaning."""
    parts = [each for each in SqlLedger.__mro__ if issubclass(each, Part)]
    names = [name for each in parts for name in vars(each) if not name.startswith("__")]
    assert sorted(names) == sorted(set(names))
