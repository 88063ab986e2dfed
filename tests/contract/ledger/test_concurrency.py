"""Many at once: one winner, fences that grow, and stale holders that are refused."""

from __future__ import annotations

import random
import time
from typing import Any

from support.threads import at_once
from taskguard.errors import LedgerUnavailableError, StaleTokenError, TransactionRetryError
from taskguard.model.claims import Answer, Busy, Claimed
from taskguard.model.states import Decision


def test_thirty_claim_one_work_and_one_gets_it(book: Any) -> None:
    """The others get `Busy`, whether the rows existed before or not."""
    for number in range(5):
        answers: list[Any] = []
        at_once(30, lambda _, n=number, a=answers: a.append(book.ledger.claim(book.request(n))))
        assert sum(isinstance(answer, Claimed) for answer in answers) == 1
        assert sum(isinstance(answer, Busy) for answer in answers) == 29
        assert book.work(number).attempts == 1


def test_thirty_claim_one_work_under_keys_of_their_own_and_one_gets_it(book: Any) -> None:
    """Their keys are free, so the work's row decides. The others get `Busy`."""
    for number in range(3):
        answers: list[Any] = []

        def claim(thread: int, number: int = number, answers: list[Any] = answers) -> None:
            key = f"order:{1000 * number + thread}"
            answers.append(book.ledger.claim(book.request(number, keys=(key,))))

        at_once(30, claim)
        assert sum(isinstance(answer, Claimed) for answer in answers) == 1
        assert sum(isinstance(answer, Busy) for answer in answers) == 29
        assert book.work(number).attempts == 1


def test_thirty_take_over_one_expired_work_and_one_gets_it(book: Any) -> None:
    """One takeover, one crash counted."""
    book.claim()
    book.expire()
    answers: list[Any] = []
    at_once(30, lambda _: answers.append(book.ledger.claim(book.request())))
    (winner,) = [answer for answer in answers if isinstance(answer, Claimed)]
    assert (winner.takeover, winner.crashes) == (True, 1)
    assert book.work().crashes == 1


def test_works_that_share_a_key_never_overlap(book: Any) -> None:
    """Each holds it in turn, with a higher fence each time."""
    order: list[tuple[str, int]] = []

    def one(number: int) -> None:
        while True:
            found = book.ledger.claim(book.request(work=f"work {number}"))
            if isinstance(found, Claimed):
                order.append(("in", found.claim.fence))
                time.sleep(0.002)
                order.append(("out", found.claim.fence))
                book.ledger.complete_alone(found.claim, None)
                return
            time.sleep(0.001)

    at_once(12, one)
    fences = [fence for _, fence in order]
    assert [word for word, _ in order] == ["in", "out"] * 12
    assert fences[::2] == fences[1::2] == sorted(set(fences))


def test_keys_that_cross_do_not_deadlock(book: Any) -> None:
    """Twelve claims of two of three keys each, released and taken again."""
    pairs = [("order:1", "order:2"), ("order:2", "order:3"), ("order:1", "order:3")]

    def one(number: int) -> None:
        done = 0
        while done < 3:
            request = book.request(keys=pairs[(number + done) % 3], work=f"{number} {done}")
            found = book.ledger.claim(request)
            if isinstance(found, Claimed):
                book.ledger.complete_alone(found.claim, None)
                done += 1

    at_once(12 if book.locks_rows else 4, one)


def test_under_pauses_beyond_the_lease_each_work_has_one_effect(book: Any) -> None:
    """Holders that sleep beyond their lease, at any point; their commits are refused.

    Effects of one key carry fences that grow in the order of their commits.
    """
    items = 40 if book.locks_rows else 12
    refused: list[int] = []
    random_of = random.Random(7)
    late = {number: random_of.random() < 0.5 for number in range(items)}

    def worker(number: int) -> None:
        mine = random.Random(number)
        todo = list(range(items))
        mine.shuffle(todo)
        while todo:
            item = todo.pop()
            found = book.ledger.claim(
                book.request(item, message=f"m{number}", ttl_s=0.15, max_crashes=1000)
            )
            if isinstance(found, Answer) and found.decision is Decision.DONE:
                continue
            if isinstance(found, Claimed):
                if late[item] and found.attempt <= 2:
                    time.sleep(0.3)
                try:
                    with book.ledger.transaction(found.claim) as tx:
                        book.effect(tx.db, item, found.claim.fence)
                        tx.complete_in_block(found.claim, None)
                    continue
                except StaleTokenError:
                    refused.append(item)
                except (TransactionRetryError, LedgerUnavailableError):
                    pass  # SQLite's one writer was busy; the work comes again
            todo.insert(0, item)
            time.sleep(0.01)

    at_once(8 if book.locks_rows else 4, worker)
    assert book.effects() == {str(number): 1 for number in range(items)}
    assert refused
    assert {book.work(number).state for number in range(items)} == {"DONE"}
