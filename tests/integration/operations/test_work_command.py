"""`taskguard work`: find DEAD work, show it, and requeue it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support import claims
from support.guarded_shop import GuardedShop, NotingQueue, write
from taskguard import Guard
from taskguard.cli import main
from taskguard.errors import LedgerUnavailableError, StaleTokenError, WorkDeadError
from taskguard.model.claims import Claimed, ClaimRequest, MessageRef
from taskguard.model.delivery import Completed, Dropped

WORK = "ship order:1"


@pytest.fixture(params=["pg_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def request(*, deferrals: int = 0) -> ClaimRequest:
    return claims.request(message=MessageRef("m", deferrals=deferrals), max_crashes=1)


def die(shop: GuardedShop) -> Claimed:
    """Let a holder vanish, so that the work is DEAD. Return its late claim."""
    claimed = shop.ledger.claim(request())
    assert isinstance(claimed, Claimed)
    shop.ledger.defer(request(), lambda _: None)
    claims.end_leases(shop.engine)
    shop.ledger.claim(request(deferrals=1))
    assert shop.states == ["DEAD"]
    return claimed


def ship(guard: Guard) -> str:
    with guard.transaction() as db:
        write(db)
    return "shipped"


def test_dead_work_runs_again_after_a_requeue(
    shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a requeue, even a message that had been deferred before runs. The late holder is
    refused."""
    late = die(shop)
    with pytest.raises(WorkDeadError):
        shop.deliver(ship)
    assert main(["work", "list", "--url", url]) == 0
    assert WORK in capsys.readouterr().out
    assert main(["work", "requeue", WORK, "--reason", "more memory", "--url", url]) == 0
    assert capsys.readouterr().out.startswith(f"{WORK} is NEW: its next delivery runs it. ")
    with pytest.raises(StaleTokenError):
        shop.ledger.complete_alone(late.claim, None)
    queue = NotingQueue()
    assert shop.deliver(ship, queue) == Completed("shipped")
    assert (shop.effects, shop.states, queue.deferrals) == (["x"], ["DONE"], [])
    view = shop.ledger.view(WORK)
    assert view is not None
    assert (view.crashes, view.error) == (0, None)
    assert view.fence > late.claim.fence


# A line end, an escape that clears the screen, a C1 control, a bidirectional override, a line
# separator, a surrogate: what a terminal obeys, or shows as something else.
HOSTILE = "\r\x1b[2J\x9b31m\u202e\u2066\u2028\u200b"


def test_what_a_work_is_called_moves_nothing_on_a_terminal(
    shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escapes in a work's id or error have no effect on a terminal, and forge no line."""
    forged = "2026-01-01 00:00:00+00:00  attempts 1  ship order:2"
    names = {
        "work": f"ship{HOSTILE}\n{forged} order:1",
        "task": f"ship{HOSTILE}",
        "keys": (f"order:1\nstate           DONE{HOSTILE}",),
    }
    claimed = shop.ledger.claim(claims.request(**names))
    assert isinstance(claimed, Claimed)
    error = f"{HOSTILE}ValueError\nstate           DONE\n{forged}"
    assert shop.ledger.fail(claimed.claim, error)
    assert main(["work", "list", "--state", "FAILED", "--url", url]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.count("ship\\r\\x1b[2J\\x9b31m\\u202e\\u2066\\u2028\\u200b\\n2026") == 1
    assert main(["work", "show", names["work"], "--url", url]) == 0
    shown = capsys.readouterr().out
    assert len([each for each in shown.splitlines() if not each.startswith(" ")]) == 1
    assert main(["work", "requeue", names["work"], "--reason", "?", "--url", url]) == 0
    (requeued,) = capsys.readouterr().out.splitlines()
    assert shop.ledger.revoke(names["work"], message="m")
    assert shop.ledger.claim(claims.request(**names))
    assert main(["work", "requeue", f"{names['work']}?", "--reason", "?", "--url", url]) == 3
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    for said in line, shown, requeued, refused:
        assert all(sign.isprintable() for sign in re.sub("[\\n\\t]", "", said)), ascii(said)


def test_who_waits_is_listed(
    shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is listed in order with positions and promoted messages. Escapes in names have no
    effect."""
    assert main(["waiting", "--url", url]) == 0
    assert capsys.readouterr().err == "taskguard: no message waits\n"
    key = f"account:1{HOSTILE}"
    for number in (1, 2):
        parked = claims.request(number, keys=(key,), call='{"queue": "test", "message": "m"}')
        assert shop.ledger.park(parked)
    assert shop.ledger.promote_next(key, expected_s=30.0) is not None
    assert main(["waiting", "--url", url]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("\t1\tship order:1\tm\tpromoted\t-")
    assert second.endswith("\t2\tship order:2\tm\twaiting\t-")
    assert "account:1\\r\\x1b[2J" in first
    assert (first + second).replace("\t", "").isprintable()
    assert main(["waiting", "--key", "account:2", "--url", url]) == 0
    assert capsys.readouterr().err == "taskguard: no message waits for account:2\n"


def test_what_is_done_or_in_progress_stays_so(
    shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A requeue changes neither done work nor running work."""
    claimed = shop.ledger.claim(request())
    assert isinstance(claimed, Claimed)
    assert main(["work", "requeue", WORK, "--reason", "?", "--url", url]) == 1
    assert f"refused: {WORK}: " in capsys.readouterr().err
    shop.ledger.complete_alone(claimed.claim, None)
    assert main(["work", "requeue", WORK, "--reason", "?", "--url", url]) == 1
    assert f"refused: {WORK}: it is DONE" in capsys.readouterr().err
    assert shop.states == ["DONE"]


def test_a_revoked_work_may_be_let_run_again(shop: GuardedShop, url: str) -> None:
    """Revoked work can be requeued."""
    claimed = shop.ledger.claim(request())
    assert isinstance(claimed, Claimed)
    assert shop.ledger.revoke(WORK, message="m")
    assert shop.deliver(ship) == Dropped("revoked")
    assert main(["work", "requeue", WORK, "--reason", "wanted after all", "--url", url]) == 0
    claims.end_leases(shop.engine)  # what the revoked holder left
    assert shop.deliver(ship) == Completed("shipped")
    assert shop.effects == ["x"]


def test_all_that_is_known_is_shown(
    shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show` prints the record with readable times, its history, and what to do."""
    die(shop)
    assert main(["work", "show", WORK, "--url", url]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{WORK}  DEAD since 20")
    assert "attempts 1, crashes 1, retries 0, call not stored" in shown
    assert " dead at " in shown
    assert f"taskguard work requeue '{WORK}' --reason" in shown


@pytest.mark.parametrize("action", [["show"], ["requeue", "--reason", "?"]])
def test_a_work_that_does_not_exist_is_said(
    shop: GuardedShop, url: str, action: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """If the work does not exist, the error names the command that lists work."""
    assert main(["work", *action, "nothing", "--url", url]) == 3
    assert "There is no work 'nothing'" in capsys.readouterr().err
    assert main(["work", "list", "--url", url]) == 0
    assert capsys.readouterr().err == "taskguard: no work is DEAD\n"


def test_the_list_is_of_the_state_that_was_asked_for(
    shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list has work of the given state, with its error, up to the limit."""

    def fail(guard: Guard) -> Any:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        shop.deliver(fail)
    assert main(["work", "list", "--state", "FAILED", "--url", url]) == 0
    assert capsys.readouterr().out.endswith(f"\tFAILED\t1\t0\t{WORK}\tZeroDivisionError: by zero\n")
    assert main(["work", "list", "--state", "FAILED", "--limit", "1", "--url", url]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_a_requeue_whose_commit_got_no_answer_is_one(
    shop: GuardedShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeue whose COMMIT got no answer is repeated, and finds its own result. Its reason may
    have any characters."""
    die(shop)
    transaction = shop.ledger._database.transaction
    answers = iter([False])

    @contextmanager
    def unanswered(**options: Any) -> Iterator[Any]:
        with transaction(**options) as db:
            yield db
        if "lock_timeout_s" in options and not next(answers, True):
            raise LedgerUnavailableError("COMMIT got no answer")

    monkeypatch.setattr(shop.ledger._database, "transaction", unanswered)
    assert shop.ledger.requeue(WORK, reason="half a pair: \udcff")
    assert shop.states == ["NEW"]


def test_an_error_of_several_lines_is_one_in_the_list(
    shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list shows the first line of an error, and `show` the rest."""
    claimed = shop.ledger.claim(request())
    assert isinstance(claimed, Claimed)
    shop.ledger.fail(claimed.claim, "first\nsecond")
    assert main(["work", "list", "--state", "FAILED", "--url", url]) == 0
    assert capsys.readouterr().out.endswith(f"{WORK}\tfirst\n")
    with pytest.raises(SystemExit):
        main(["work", "list", "--limit", "-1", "--url", url])


def test_a_requeued_work_whose_call_is_stored_is_sent_by_the_sweep(
    shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requeued work with a stored message is overdue, and the command says that a sweep sends
    it."""
    claimed = shop.ledger.claim(dataclasses.replace(request(), call='{"queue": "test"}'))
    assert isinstance(claimed, Claimed)
    shop.ledger.fail(claimed.claim, "boom")
    assert main(["work", "requeue", WORK, "--reason", "mended", "--url", url]) == 0
    assert f"{WORK} is NEW: its next delivery runs it. " in capsys.readouterr().out
    assert [each.work for each in shop.ledger.overdue()] == [WORK]
