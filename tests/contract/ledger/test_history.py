"""The history of work, its flag, and the last works of a key.

Each strategy of a database writes the same. The simulation's ledger keeps no histories.
"""

from __future__ import annotations

from typing import Any

import pytest

from taskguard.locks.base import Renewal
from taskguard.model.claims import Answer
from taskguard.model.history import HISTORY_CHARS, WORKS_CHARS, Flag, Happened, read, works_of
from taskguard.model.states import Decision, State


@pytest.fixture
def book(book: Any) -> Any:
    """Return a ledger that keeps histories."""
    if book.kind == "memory":
        pytest.skip("the simulation's ledger keeps no histories")
    return book


def happened(book: Any, number: int = 1) -> list[tuple[Happened, str, int, str]]:
    """Return the history of a work without its times, which have to ascend."""
    found = read(book.work(number).history)
    times = [each.at_us for each in found]
    assert times == sorted(times)
    assert all(book.work(number).created <= at for at in times)
    return [each[1:] for each in found]


def of(claimed: Any) -> tuple[str, int]:
    return str(claimed.claim.owner), claimed.claim.fence


def flag(book: Any) -> int | None:
    """Return the flag of the work, which has a time if and only if it has a flag."""
    row = book.work()
    assert (row.since or 0) >= (0 if row.flag is None else row.started)
    assert (row.since is None) is (row.flag is None)
    return row.flag


def test_ordinary_work_has_no_history(book: Any) -> None:
    """The columns stay NULL from the claim to DONE, and the key has the work."""
    for number in (1, 2):
        claimed = book.claim(number, keys=("order:1",))
        book.ledger.complete_alone(claimed.claim, None)
        row = book.work(number)
        assert (row.history, row.flag, row.since) == (None, None, None)
    assert works_of(book.key().works) == ["ship order:2", "ship order:1"]


def test_a_key_has_its_last_works_with_the_newest_first(book: Any) -> None:
    """A work that runs again is not repeated. Old ones are cut, but the newest is always whole."""
    ids = [f"work {number:02}" + "x" * 40 for number in range(12)]
    for work in ids:
        for redelivered in (False, True):
            claimed = book.claim(work=work, redelivered=redelivered)
            book.ledger.give_back(claimed.claim)
    works = book.key().works
    assert len(works) == WORKS_CHARS
    assert works_of(works) == ids[:3:-1]
    long = "ship " + "y" * 450
    book.claim(work=long)
    assert works_of(book.key().works) == [long]


def test_a_plain_lock_does_not_change_the_works_of_a_key(book: Any) -> None:
    claimed = book.claim()
    book.ledger.give_back(claimed.claim)
    lock = book.claim(work=None)
    assert works_of(book.key().works) == ["ship order:1"]
    book.ledger.give_back(lock.claim)


def test_everything_that_happened_to_a_work_stays(book: Any) -> None:
    """Takeovers, errors of all attempts, a crash, a lost transaction and the death stay, also after
    a requeue."""
    first = book.claim()
    assert flag(book) is None
    assert book.ledger.fail(first.claim, "ValueError: no\nsecret")
    expected = [(Happened.FAILED, *of(first), "ValueError: no")]
    assert flag(book) == Flag.FAILED

    second = book.claim(retries=1)
    assert flag(book) is None
    assert book.ledger.end_round(second.claim, "it was idle", most=2) is State.NEW
    expected.append((Happened.ROUND, *of(second), "it was idle"))
    assert flag(book) is None

    third = book.claim(retries=1)
    assert book.ledger.end_round(third.claim, "it was idle", most=2) is State.FAILED
    expected.append((Happened.FAILED, *of(third), "it was idle"))
    assert flag(book) == Flag.FAILED

    fourth = book.claim(retries=2)
    book.expire()
    fifth = book.claim(retries=2)
    expected.append((Happened.TAKEOVER, *of(fourth), of(fifth)[0]))
    assert flag(book) is None

    assert book.ledger.crash(fifth.claim, "SystemExit: 3")
    expected.append((Happened.CRASHED, *of(fifth), "SystemExit: 3"))
    assert flag(book) == Flag.LEFT
    assert happened(book) == expected

    buried = book.ledger.claim(book.request(retries=2, max_crashes=2))
    assert isinstance(buried, Answer)
    assert buried.decision is Decision.BURY
    expected.append((Happened.DEAD, *of(fifth), "SystemExit: 3"))
    assert happened(book) == expected
    assert flag(book) == Flag.DEAD
    assert book.work().crashed_owner == of(fifth)[0]

    assert book.ledger.requeue("ship order:1", reason="mended")
    [*before, (what, _, _, text)] = happened(book)
    assert before == expected
    assert (what, "mended" in text) == (Happened.OPERATOR, True)
    assert flag(book) is None
    last = book.claim(message="again")
    book.ledger.complete_alone(last.claim, None)
    assert happened(book)[:-1] == expected
    assert book.work().attempts == 6


@pytest.mark.parametrize("lost_to", ["nobody", "one holder", "two holders"])
def test_a_lost_lease_is_in_the_history(book: Any, lost_to: str) -> None:
    """It is, whether no other holder came, or one, or several."""
    late = book.claim()
    taken = []
    for _ in range(["nobody", "one holder", "two holders"].index(lost_to)):
        book.expire()
        taken.append(book.claim(max_crashes=9))
    kept = book.ledger.give_back(late.claim, happened=Happened.STALE)
    assert kept is (lost_to == "nobody")
    if not kept:
        book.ledger.uncount_crash(late.claim, happened=Happened.STALE)
    assert happened(book)[-1] == (Happened.STALE, *of(late), "")
    assert book.work().crashes == max(0, len(taken) - (lost_to == "one holder"))
    for claimed in taken[-1:]:
        book.ledger.complete_alone(claimed.claim, None)


def test_a_renewal_flags_work_that_runs_long(book: Any) -> None:
    """The flag has the time of the claim. It goes with the completion."""
    claimed = book.claim()
    for _ in range(2):
        assert book.ledger.renew([claimed.claim]) == [Renewal.RENEWED]
        assert (flag(book), book.work().since) == (Flag.RUNS_LONG, book.work().started)
    with book.ledger.transaction(claimed.claim) as tx:
        tx.complete_in_block(claimed.claim, None)
    assert (book.work().state, flag(book)) == ("DONE", None)


def test_a_history_keeps_its_last_happenings(book: Any) -> None:
    """Its length is bounded, and hostile texts neither break nor forge a line."""
    hostile = [
        'it\'s "quoted" \\ %s %(x)s :x',
        '", 1, ""]\n[1, "dead"',
        "\x1b[31m\0\x07\u202e",
        "é\N{SNOWMAN}\N{PILE OF POO}" * 99,
        "\\" * 999,
    ]
    for retries in range(20):
        claimed = book.claim(retries=retries)
        assert book.ledger.fail(claimed.claim, hostile[retries % 5])
    assert len(book.work().history) == HISTORY_CHARS
    cut, *found = happened(book)
    assert cut[0] is Happened.CUT
    assert len(found) > 5
    assert found[-1][1:3] == of(claimed)
    assert {each[0] for each in found} == {Happened.FAILED}
    assert all(each[3].isprintable() for each in found)


def test_a_new_id_takes_the_history_over(book: Any) -> None:
    """After a change of the guard, the record under the new id has the history of the former."""
    first = book.claim()
    assert book.ledger.fail(first.claim, "ValueError: no")
    second = book.claim(retries=1)
    book.expire()
    again = book.claim(work="mail order:1", formerly=("ship order:1",), retries=1, redelivered=True)
    expected = [
        (Happened.FAILED, *of(first), "ValueError: no"),
        (Happened.TAKEOVER, *of(second), of(again)[0]),
    ]
    assert happened(book) == expected
    with book.engine.connect() as db:
        text = "select history from taskguard_work where id = 'mail order:1'"
        assert [each[1:] for each in read(db.exec_driver_sql(text).scalar())] == expected


def test_work_whose_holder_vanished_is_found(book: Any) -> None:
    """`mark_left()` walks in pages. It flags work whose lease has expired, and no other. A renewal
    or a claim removes the flag."""
    claimed = {number: book.claim(number) for number in range(1, 6)}
    book.ledger.complete_alone(claimed[1].claim, None)
    book.ledger.fail(claimed[2].claim, "ValueError")
    book.ledger.renew([claimed[4].claim])
    for number in (4, 5):
        book.expire(number)
    pages, after = 0, ""
    while after is not None:
        after = book.ledger.mark_left(after=after, page=2)
        pages += 1
    assert pages == 3
    flags = {number: (book.work(number).flag, book.work(number).since) for number in (1, 3, 4, 5)}
    left = (Flag.LEFT, 1)  # when the lease expired
    assert flags == {1: (None, None), 3: (None, None), 4: left, 5: left}
    assert book.work(2).flag == Flag.FAILED
    assert book.states()["ship order:5"] == "PROCESSING"
    assert book.ledger.renew([claimed[4].claim]) == [Renewal.RENEWED]
    assert book.work(4).flag == Flag.RUNS_LONG
    book.claim(5)
    assert book.work(5).flag is None
