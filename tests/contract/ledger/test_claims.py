"""Claims: which are granted, and that SQL decides as states.decide() does."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from typing import Any, Self

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.waiting import wait_until
from taskguard.guarded import work_id
from taskguard.ledger import tables
from taskguard.ledger.decisions import CLAIMABLE, decide_row
from taskguard.ledger.statements import postgresql
from taskguard.model.claims import Answer, Busy, Claimed, MessageRef
from taskguard.model.lease import Owner, new_owner
from taskguard.model.states import Decision, State

ME = new_owner("m")
OTHER = new_owner("x")
OWNERS = st.sampled_from(["", str(ME), str(OTHER)])
FAR = 2**62
LEASES = st.sampled_from([0, 1, FAR])
FENCES = st.sampled_from([1, 10**6, 2**60])

WORK = st.fixed_dictionaries(
    {
        "state": st.sampled_from([state.value for state in State]),
        "final": st.sampled_from([0, 0, 1]),
        "fence": FENCES,
        "owner": OWNERS,
        "lease_until": LEASES,
        "message": st.sampled_from(["m", "x"]),
        "retries": st.integers(0, 2),
        "attempts": st.integers(0, 3),
        "crashes": st.integers(0, 3),
        "crashed_owner": OWNERS,
        "fingerprint": st.sampled_from([None, "f", "g"]),
        "progress": st.sampled_from([None, "[1]"]),
        "result": st.sampled_from([None, "2"]),
        "trace": st.sampled_from([None, "00-aa-bb-01"]),
    }
)
KEY = st.fixed_dictionaries({"fence": FENCES, "owner": OWNERS, "lease_until": LEASES})


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    work=st.none() | WORK,
    key=st.none() | KEY,
    recorded=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    deferrals=st.integers(0, 2),
    retries=st.integers(0, 2),
    may_create=st.booleans(),
    max_crashes=st.integers(1, 4),
    fingerprint=st.sampled_from([None, "f"]),
    trace=st.sampled_from([None, "00-cc-dd-01"]),
    by_first=st.booleans(),
)
def test_sql_decides_as_the_table_of_states_does(book: Any, **case: Any) -> None:
    """For all rows that a claim may meet, its answer and its writes are those of decide().

    On PostgreSQL this holds without the statement for first claims, too.
    """
    work, key = case["work"], case["key"]
    book.put(work=work, key=key, recorded=case["recorded"])
    request = book.request(
        owner=ME,
        retries=case["retries"],
        deferrals=case["deferrals"],
        may_create=case["may_create"],
        max_crashes=case["max_crashes"],
        fingerprint=case["fingerprint"],
        trace=case["trace"],
    )
    before = book.work()
    decision = decide_row(request, before, case["recorded"], now_us=1000)
    foreign = key is not None and key["owner"] not in {"", str(ME)} and key["lease_until"] == FAR
    # Nothing writes a lease without an owner; such a key counts as taken.
    foreign = foreign or (key is not None and key["owner"] == "" and key["lease_until"] == FAR)

    with pytest.MonkeyPatch.context() as patch:
        if not case["by_first"]:
            patch.setattr(postgresql, "_is_first", lambda request: False)
        answer = book.ledger.claim(request)

    if decision in CLAIMABLE and not foreign:
        _expect_grant(book, request, answer, decision, before, key)
    elif decision is Decision.BURY:
        why = f"{Owner.parse(before.owner).described} vanished"
        assert answer == Answer(Decision.BURY, crashes=before.crashes + 1, error=why)
        assert book.work().error == why
        assert (book.work().state, book.work().crashes) == ("DEAD", before.crashes + 1)
        assert book.work().owner == ""
    else:
        _expect_refusal(book, answer, decision, before, key)


def _expect_grant(
    book: Any, request: Any, answer: Any, decision: Decision, before: Any, key: Any
) -> None:
    assert isinstance(answer, Claimed)
    fence = answer.claim.fence
    after, after_key = book.work(), book.key()
    assert (after.state, after.owner, after.fence) == ("PROCESSING", str(ME), fence) or (
        decision is Decision.SAME
    )
    assert (after_key.owner, after_key.fence) == (str(ME), fence)
    if key is not None:
        mine = key["owner"] == str(ME)
        assert fence >= key["fence"] + (not mine)
    if before is None:
        assert (answer.attempt, answer.crashes, answer.progress_json) == (1, 0, None)
        assert (after.fingerprint, after.trace) == (request.fingerprint, request.trace)
        return
    again = decision is Decision.SAME
    takeover = decision is Decision.TAKEOVER
    assert answer.takeover is takeover
    assert answer.vanished == (Owner.parse(before.owner) if takeover else None)
    assert answer.trace == (before.trace if takeover else None)
    assert again or after.trace == request.trace
    assert after.attempts == before.attempts + (not again) == answer.attempt
    assert after.crashes == before.crashes + takeover == answer.crashes
    assert after.crashed_owner == (before.owner if takeover else before.crashed_owner)
    assert answer.progress_json == before.progress == after.progress
    assert again or after.fingerprint == (request.fingerprint or before.fingerprint)


def _expect_refusal(book: Any, answer: Any, decision: Decision, before: Any, key: Any) -> None:
    after_key = book.key()
    if key is not None and key["owner"] != str(ME):
        assert (after_key.owner, after_key.fence) == (key["owner"], key["fence"])
    if key is None and after_key is not None:
        assert after_key.owner == ""
    assert book.work() == before
    if decision in CLAIMABLE:
        assert isinstance(answer, Busy)
        assert not answer.same_work
        assert answer.owner == Owner.parse(key["owner"])
    elif decision is Decision.BUSY:
        assert isinstance(answer, Busy)
        assert answer.same_work
        assert (answer.owner, answer.trace) == (Owner.parse(before.owner), before.trace)
    else:
        assert isinstance(answer, Answer)
        assert answer.decision is decision
        if decision is Decision.DONE:
            assert (answer.result_json, answer.trace) == (before.result, before.trace)


def test_asked_twice_by_one_owner_it_is_one_grant(book: Any) -> None:
    """A repeated claim whose reply was lost gets the same fence and attempt, and counts no
    crash."""
    request = book.request()
    first = book.ledger.claim(request)
    again = book.ledger.claim(request)
    assert isinstance(again, Claimed), again
    assert (again.claim, again.attempt, again.crashes) == (first.claim, 1, 0)


def test_each_claim_of_a_key_gets_a_higher_fence(book: Any) -> None:
    """The next holder's fence is higher after a key was given back, failed or completed."""
    fences = []
    for number in range(6):
        claimed = book.claim(work=f"work {number}")
        fences.append(claimed.claim.fence)
        if number % 3 == 0:
            book.ledger.complete_alone(claimed.claim, None)
        elif number % 3 == 1:
            book.ledger.give_back(claimed.claim)
        else:
            book.ledger.fail(claimed.claim, "x")
    assert fences == sorted(set(fences))


def test_a_fence_beyond_the_clock_still_grows(book: Any) -> None:
    """If the database's clock went back, the next fence is still higher than the last one."""
    claimed = book.claim()
    book.ledger.give_back(claimed.claim)
    book.set_fence(2**61)
    again = book.claim()
    assert again.claim.fence == 2**61 + 1
    book.ledger.give_back(again.claim)
    assert book.claim(work="another").claim.fence == 2**61 + 2


def test_a_taken_key_is_busy_until_its_lease_ends(book: Any) -> None:
    """A claim of a taken key learns its holder and the rest of its lease. After that it is
    granted."""
    held = book.claim(work="first")
    busy = book.ledger.claim(book.request(work="second"))
    assert isinstance(busy, Busy)
    assert busy.owner == held.claim.owner
    assert 0 < busy.retry_after_s <= 30
    assert (busy.same_work, busy.started) == (False, False)
    book.expire()
    assert book.claim(work="second").claim.fence > held.claim.fence


def test_who_holds_a_key(book: Any) -> None:
    """An owner holds its keys from its claim to its end, whichever of them is queried."""
    held = book.claim(work="first")
    owner, keys = held.claim.owner, held.claim.keys
    assert book.ledger.holds(keys, owner) is True
    assert book.ledger.holds(("another", *keys), owner) is True
    assert book.ledger.holds(("another",), owner) is False
    assert book.ledger.holds(keys, new_owner(owner.message)) is False
    book.ledger.complete_alone(held.claim, None)
    assert book.ledger.holds(keys, owner) is False


def test_a_takeover_counts_a_crash_until_the_holder_reports_in(book: Any) -> None:
    """A holder that reports after a takeover is no crash. A second report, or one by another owner,
    changes nothing."""
    paused = book.claim()
    book.expire()
    second = book.claim(message="n")
    assert (second.takeover, second.attempt, second.crashes) == (True, 2, 1)
    book.ledger.uncount_crash(
        dataclasses.replace(
            paused.claim, request=dataclasses.replace(paused.claim.request, owner=new_owner())
        )
    )
    assert book.work().crashes == 1
    book.ledger.uncount_crash(paused.claim)
    book.ledger.uncount_crash(paused.claim)
    assert book.work().crashes == 0


def test_several_keys_are_claimed_all_or_none_under_one_fence(book: Any) -> None:
    """Several keys get one fence above all of theirs. If one key is taken, the others stay free."""
    first = book.claim(keys=("order:1",), work="a")
    both = ("order:1", "order:2")
    assert isinstance(book.ledger.claim(book.request(keys=both, work="b")), Busy)
    assert book.key(2) is None or book.key(2).owner == ""
    book.ledger.give_back(first.claim)
    claimed = book.claim(keys=both, work="b")
    assert {book.key(1).fence, book.key(2).fence} == {claimed.claim.fence}
    assert claimed.claim.fence > first.claim.fence
    book.ledger.complete_alone(claimed.claim, None)
    assert (book.key(1).owner, book.key(2).owner) == ("", "")


def test_the_plain_lock_claims_a_key_without_a_work(book: Any) -> None:
    """A plain lock claims a key without work: a repeated claim is the same grant, others wait, and
    a release frees it."""
    request = book.request(work=None)
    held = book.ledger.claim(request)
    assert book.ledger.claim(request).claim.fence == held.claim.fence
    busy = book.ledger.claim(book.request(work=None))
    assert isinstance(busy, Busy)
    assert busy.owner == held.claim.owner
    assert book.ledger.give_back(held.claim)
    assert book.ledger.claim(book.request(work=None)).claim.fence > held.claim.fence
    assert book.work() is None


def test_looking_claims_nothing(book: Any) -> None:
    """look() returns ended work, and busy for all other work. It writes nothing."""
    assert isinstance(book.ledger.peek(book.request()), Busy)
    assert book.key() is None
    claimed = book.claim()
    seen = book.ledger.peek(book.request())
    assert isinstance(seen, Busy)
    assert (seen.owner, seen.same_work) == (claimed.claim.owner, True)
    book.ledger.complete_alone(claimed.claim, "7")
    seen = book.ledger.peek(book.request())
    assert (seen.decision, seen.result_json) == (Decision.DONE, "7")


def test_a_locked_row_is_busy_and_not_waited_for(make_book: Any) -> None:
    """If an open transaction has locked the key's row, a claim is busy within its lock timeout."""
    book = make_book(lock_timeout_s=0.1)
    if not book.locks_rows:
        pytest.skip("SQLite has no row locks")
    book.ledger.give_back(book.claim().claim)
    with book.locked("keys"):
        busy = book.ledger.claim(book.request())
        assert busy == Busy(None, None, same_work=False, started=True)
    book.claim()


def test_a_claim_takes_one_round_trip_on_postgresql(book: Any, postgres: Any) -> None:
    """A claim, a lock, and a completion alone take one round trip each. A claim of work that has a
    record takes two or three, unless the queue says that the message was delivered before."""
    from support.proxy import Proxy

    if book.kind != "postgresql":
        pytest.skip("only PostgreSQL's one statement")
    with Proxy(postgres.port) as proxy:
        ledger = book.again(book.url.replace(f":{postgres.port}/", f":{proxy.port}/"))

        def trips(ask: Any) -> tuple[int, Any]:
            before = proxy.requests
            found = ask()
            return proxy.requests - before, found

        for number in range(8):  # connected and prepared
            ledger.complete_alone(ledger.claim(book.request(number)).claim, None)
            for redelivered in (False, True):
                ledger.claim(book.request(number, redelivered=redelivered))
            ledger.give_back(ledger.claim(book.request(number, work=None)).claim)
        count, claimed = trips(lambda: ledger.claim(book.request(50)))
        assert (count, claimed.attempt) == (1, 1)
        assert trips(lambda: ledger.claim(book.request(50, redelivered=True)))[0] == 1
        assert trips(lambda: ledger.complete_alone(claimed.claim, None))[0] == 1
        assert trips(lambda: ledger.claim(book.request(50)))[0] == 2
        assert trips(lambda: ledger.claim(book.request(60, work=None)))[0] == 1


def test_texts_of_every_kind_go_in_and_come_out(book: Any) -> None:
    """Message ids, errors and results may contain quotes, percent signs, emoji and lone escapes."""
    odd = "a'b\"c%d%%s %(x)s \\ ü 🙂 :y"
    claimed = book.ledger.claim(
        book.request(work=odd, task=odd, owner=Owner("n", odd), message=odd)
    )
    assert isinstance(claimed, Claimed)
    assert claimed.claim.request.message == MessageRef(odd)
    book.ledger.complete_alone(claimed.claim, odd)
    view = book.ledger.view(odd)
    assert (view.task, view.message, view.result_json) == (odd, odd, odd)


def test_the_longest_ids_there_are_can_be_stored(book: Any) -> None:
    """Work of a hundred keys, and a message id as long as a document, can be claimed, deferred and
    answered."""
    keys = tuple(sorted(f"item:{uuid.uuid4()}-" + "ü" * 90 for _ in range(100)))
    work = work_id("shop.pick", "%,".join(keys))
    asked = book.request(keys=keys, work=work, message="ß" * 5_000)
    assert book.ledger.defer(asked, lambda deferrals: None)
    assert book.ledger.claim(asked) == Answer(Decision.SUPERSEDED)
    message = MessageRef("ß" * 5_000, deferrals=1)
    claimed = book.ledger.claim(dataclasses.replace(asked, message=message))
    assert isinstance(claimed, Claimed)
    book.ledger.complete_alone(claimed.claim, "7")
    found = book.ledger.claim(dataclasses.replace(asked, message=message))
    assert (found.decision, found.same_message) == (Decision.DONE, True)


def test_a_claim_that_waited_for_a_completion_answers_done(make_book: Any) -> None:
    """If a claim waited for a completion, it reads the newest row, answers DONE and leaves the key
    free."""
    book = make_book(lock_timeout_s=30.0)
    if book.database is None or not book.locks_rows:
        pytest.skip("asks the server which session waits")
    holder = book.claim()
    book.expire()
    with (
        ClaimByThread(book) as answers,
        book.engine.connect() as db,  # in the ledger's own, COMMIT may go with the completion
        book.ledger.transaction(holder.claim, on=db) as tx,
    ):
        tx.complete_in_block(holder.claim, "1")
        answers.begin()
    assert answers.found.decision is Decision.DONE
    assert book.key().owner == ""


def test_a_key_that_was_got_without_its_work_is_free_again(make_book: Any) -> None:
    """A claim that gets the key, but finds that another has just recorded the work, frees the key.

    Its answer is the recorded result, or busy.
    """
    book = make_book(lock_timeout_s=30.0)
    if book.database is None or not book.locks_rows:
        pytest.skip("asks the server which session waits")
    book.ledger.complete_alone(book.claim(2).claim, "1")
    with ClaimByThread(book) as answers, book.engine.begin() as db:
        db.execute(sa.insert(tables.WORK).values(book.work(2)._asdict() | {"id": "ship order:1"}))
        answers.begin()
    found = answers.found
    assert isinstance(found, Busy) or found.decision is Decision.DONE
    assert book.key() is None or book.key().owner == ""


class ClaimByThread:
    """A claim of order 1 that waits in a thread, from `begin()` until the block ends."""

    found: Any

    def __init__(self, book: Any) -> None:
        self._book = book
        self._thread = threading.Thread(target=self._claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._thread.join()

    def begin(self) -> None:
        waiting = {
            "mariadb": "select cast(variable_value as int) from information_schema.global_status "
            "where variable_name = 'innodb_row_lock_current_waits'",
            "mysql": "select count(*) from performance_schema.data_lock_waits",
        }.get(self._book.engine.dialect.name, "select count(*) from pg_locks where not granted")
        self._thread.start()
        with self._book.engine.connect() as db:
            count = sa.text(waiting)
            wait_until(lambda: db.execute(count).scalar() == 1, message="the claim waits")

    def _claim(self) -> None:
        self.found = self._book.ledger.claim(self._book.request())
