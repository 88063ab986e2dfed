"""Pauses of keys: an operator's lease, which every claim of the key finds."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from contract.ledger.conftest import Book

from support.claims import request
from taskguard.errors import LedgerUnavailableError, LineFullError, StaleTokenError
from taskguard.ledger.operations import pausing
from taskguard.ledger.tables import ACTIONS, KEYS
from taskguard.locks.base import Renewal
from taskguard.model.bounds import Bounds, slots_of
from taskguard.model.changes import PauseTried, Said
from taskguard.model.claims import Busy, Claimed, ClaimRequest, MessageRef
from taskguard.model.delivery import stored_call
from taskguard.model.lease import Owner, new_owner
from taskguard.model.pauses import Pause, pause_names

# The statements are the portable ones on all kinds. Those that refuse a claim are not.
pytestmark = pytest.mark.parametrize(
    "make_book",
    [
        "postgresql",
        pytest.param("mariadb", marks=pytest.mark.debian),
        "sqlite",
        pytest.param("memory", marks=pytest.mark.once),
    ],
    indirect=True,
)

ANN, BOB = Said("ann", "manual correction"), Said("bob", "it was a mistake")
KEY = "order:1"


def pause_by(actor: str, since_s: float = 1_795_695_247.0) -> Owner:
    return Owner(*pause_names(Pause(actor, "manual correction", since_s)))


OURS, THEIRS = pause_by("ann"), pause_by("bob: at night", 1_795_695_248.0)
EARLIER, LATER = pause_by("bob: before", 1_795_695_246.0), pause_by("bob: later", 4e9)


def pause(book: Any, owner: Owner = OURS, **options: Any) -> PauseTried:
    tried: PauseTried = book.ledger.try_pause(KEY, owner=owner, by=ANN, **options)
    return tried


def slot(number: int, limit: int = 2) -> ClaimRequest:
    """Return a request for work of its own, which may have any slot of the key."""
    slots = slots_of(KEY, limit)
    bounds = Bounds(KEY, limit, None, slots)
    return request(number, message=MessageRef(f"m{number}"), keys=slots[:1], bounds=bounds)


def claim(book: Any, asked: ClaimRequest) -> Claimed:
    found = book.ledger.claim(asked)
    assert isinstance(found, Claimed), found
    return found


def refused(book: Any, asked: ClaimRequest) -> Busy:
    """Return the refusal of a claim by the pause."""
    found = book.ledger.claim(asked)
    assert isinstance(found, Busy), found
    assert found.owner is not None
    assert found.owner.pause is not None
    assert found.retry_after_s is None
    return found


def test_no_delivery_gets_a_paused_key(book: Book) -> None:
    """A claim of new work, of work that has begun, and of a plain lock finds out who paused it.
    After the pause all go on, with a higher fence."""
    first = book.claim().claim
    book.ledger.give_back(first)
    assert pause(book) == PauseTried(True)
    for asked in (book.request(), request(2, keys=(KEY,)), request(3, keys=(KEY,), work=None)):
        owner = refused(book, asked).owner
        assert owner is not None
        text = "paused by ann since 2026-11-26 12:14:07Z: manual correction"
        assert str(owner.pause) == text
    assert book.ledger.pause_of(("other", KEY)) == OURS
    assert [each.owner for each in holders(book)] == [OURS]
    assert book.ledger.resume(KEY, owner=OURS, by=ANN)
    assert claim(book, book.request()).claim.fence > first.fence
    assert book.ledger.pause_of((KEY,)) is None


def holders(book: Any) -> list[Any]:
    """Return the holders that an operator sees."""
    if book.kind != "memory":
        return list(book.ledger.holders(KEY))
    return [type("", (), {"owner": Owner.parse(row.owner)}) for row in book.ledger.holders(KEY)]


def test_a_holder_is_not_disturbed(book: Book) -> None:
    """Nothing is written while a delivery holds the key. Then it is paused."""
    holder = book.claim().claim
    before = book.key()
    tried = pause(book)
    assert (tried.paused, tried.holders) == (False, (holder.owner,))
    assert book.key() == before
    book.ledger.complete_alone(holder, "1")
    assert pause(book).paused


def test_it_waits_for_a_transaction_that_has_the_row(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as a holder. On SQLite it is that of any holder: see `test_operators.py`."""
    if book.kind in ("memory", "sqlite"):
        pytest.skip("it locks no single row")
    book.ledger.complete_alone(book.claim().claim, "1")
    monkeypatch.setattr(pausing, "WRITE_LOCK_S", 0.2)
    with book.engine.begin() as db:
        db.execute(sa.update(KEYS).values(fence=KEYS.c.fence))
        assert pause(book) == PauseTried(False)
        with pytest.raises(LedgerUnavailableError):
            pause(book, now=True)
    assert pause(book).paused


def test_a_pause_at_once_refuses_the_late_commit(book: Book) -> None:
    """The holder learns of it at its next renewal. The next delivery after the pause takes its work
    over, which counts as a crash."""
    late = book.claim().claim
    tried = pause(book, now=True)
    assert (tried.paused, tried.holders) == (True, (late.owner,))
    assert book.ledger.renew([late]) == [Renewal.TAKEN]
    with pytest.raises(StaleTokenError):
        book.ledger.complete_alone(late, None)
    refused(book, book.request())
    assert book.ledger.resume(KEY, owner=OURS, by=ANN)
    with pytest.raises(StaleTokenError):
        book.ledger.complete_alone(late, None)
    taken = claim(book, book.request())
    assert (taken.takeover, taken.crashes) == (True, 1)


class TestSlots:
    def test_all_are_paused_once_all_holders_have_ended(self, book: Book) -> None:
        """While a holder of one slot runs, the free slots are closed."""
        holder = claim(book, slot(1)).claim
        tried = pause(book)
        assert (tried.paused, tried.holders) == (False, (holder.owner,))
        refused(book, slot(2))
        book.ledger.complete_alone(holder, "1")
        assert pause(book).paused
        for number in (2, 3):
            refused(book, slot(number, limit=5))
        assert book.ledger.resume(KEY, owner=OURS, by=ANN)
        assert claim(book, slot(2))

    def test_late_commits_of_all_holders_are_refused(self, book: Book) -> None:
        late = [claim(book, slot(number)).claim for number in (1, 2)]
        assert set(pause(book, now=True).holders) == {each.owner for each in late}
        for each in late:
            with pytest.raises(StaleTokenError):
                book.ledger.complete_alone(each, None)
        refused(book, slot(3))

    def test_the_late_commit_of_a_suspended_holder_is_refused(self, book: Book) -> None:
        """No pause waits for a holder whose lease has expired. So it must not come back."""
        late = claim(book, slot(1)).claim
        book.expire_all()
        assert pause(book).paused
        assert book.ledger.renew([late]) == [Renewal.TAKEN]
        with pytest.raises(StaleTokenError):
            book.ledger.complete_alone(late, None)
        assert book.ledger.resume(KEY, owner=OURS, by=ANN)
        assert claim(book, slot(1)).takeover

    def test_a_wait_that_is_given_up_leaves_no_pause(self, book: Book) -> None:
        claim(book, slot(1))
        assert not pause(book).paused
        book.ledger.give_up_pause(KEY, owner=OURS)
        assert claim(book, slot(2))

    def test_a_wait_whose_process_died_leaves_no_pause(self, book: Book) -> None:
        claim(book, slot(1))
        assert not pause(book, lease_s=0.0).paused
        assert claim(book, slot(2))
        assert book.ledger.pause_of((KEY,)) is None

    def test_a_complete_pause_is_not_given_up(self, book: Book) -> None:
        assert pause(book).paused
        book.ledger.give_up_pause(KEY, owner=OURS)
        refused(book, slot(1))


def test_holders_that_only_the_lock_server_knows(book: Book) -> None:
    """The pause waits for them, and keeps others from the key."""
    share = new_owner("m")
    assert pause(book, also=(share,)) == PauseTried(False, (share,), closed=True)
    refused(book, book.request())
    assert pause(book) == PauseTried(True)
    assert book.ledger.resume(KEY, owner=OURS, by=ANN)
    holder = book.claim().claim
    assert pause(book, LATER, also=(share,)) == PauseTried(False, (holder.owner, share))


def test_one_pause_at_a_time(book: Book) -> None:
    """A second pause is refused with the first one, and does not end it."""
    pause(book)
    for now in (False, True):
        tried = pause(book, THEIRS, now=now)
        assert (tried.paused, tried.by) == (False, OURS.pause)
    assert not book.ledger.resume(KEY, owner=EARLIER, by=ANN)
    refused(book, book.request())
    book.ledger.resume(KEY, owner=OURS, by=ANN)
    assert pause(book, LATER).paused
    found = book.ledger.pause_of((KEY,))
    assert found.pause.actor == "bob: later"


class TestResumeWhileAPauseWaits:
    """A pause that began before the resume does not complete after it. A later one does."""

    @pytest.mark.parametrize("now", [False, True])
    def test_for_a_holder_of_the_key(self, book: Book, now: bool) -> None:
        """Nothing says yet that the key will be paused."""
        holder = book.claim().claim
        assert not pause(book).paused
        assert not book.ledger.resume(KEY, owner=THEIRS, by=BOB)
        if not now:
            book.ledger.complete_alone(holder, None)
        tried = pause(book, now=now)
        assert (tried.paused, tried.resumed) == (False, BOB)
        if now:
            book.ledger.complete_alone(holder, None)
        assert pause(book, LATER).paused

    def test_for_a_holder_of_a_slot(self, book: Book) -> None:
        """The other slots are free after the resume."""
        claim(book, slot(1))
        assert not pause(book).paused
        assert book.ledger.resume(KEY, owner=OURS, by=BOB)
        assert pause(book).resumed == BOB
        assert claim(book, slot(2))

    def test_that_completes_meanwhile(self, book: Book) -> None:
        """The operator who resumes has read that the key is not paused. A later pause stays."""
        assert pause(book).paused
        assert book.ledger.resume(KEY, owner=THEIRS, by=BOB)
        assert book.ledger.pause_of((KEY,)) is None
        assert pause(book, LATER).paused
        assert not book.ledger.resume(KEY, owner=THEIRS, by=BOB)
        assert book.ledger.pause_of((KEY,)) == LATER


def test_a_release_does_not_end_a_pause(book: Book) -> None:
    pause(book)
    assert not book.ledger.release(KEY, fence=book.key().fence, owner=str(OURS), by=ANN)
    refused(book, book.request())


class TestLine:
    @staticmethod
    def park(book: Any, number: int, **values: Any) -> None:
        message = MessageRef(f"m{number}")
        call = stored_call({"queue": "test"}, message, app="")
        asked = request(number, message=message, keys=(KEY,), in_line=True, call=call, **values)
        assert book.ledger.park(asked)

    def test_it_waits(self, book: Book) -> None:
        """Neither the end of a holder nor a relay promotes a message until the pause ends."""
        pause(book)
        self.park(book, 1)
        assert book.ledger.promote_next(KEY, expected_s=5.0) is None
        assert book.ledger.look().keys == ()
        book.ledger.resume(KEY, owner=OURS, by=ANN)
        assert book.ledger.look().keys == (KEY,)
        assert book.ledger.promote_next(KEY, expected_s=5.0) is not None

    def test_it_is_never_full(self, book: Book) -> None:
        """`max_waiting` fails no message while the line cannot drain."""
        pause(book)
        for number in (1, 2, 3):
            self.park(book, number, max_waiting=1)
        book.ledger.resume(KEY, owner=OURS, by=ANN)
        with pytest.raises(LineFullError):
            self.park(book, 4, max_waiting=1)


class TestRecord:
    @pytest.fixture(autouse=True)
    def _in_a_database(self, book: Book) -> None:
        if book.kind == "memory":
            pytest.skip("it has no table of actions")

    @staticmethod
    def actions(book: Book) -> list[str]:
        with book.engine.connect() as db:
            return list(db.execute(sa.select(ACTIONS.c.action).order_by(ACTIONS.c.id)).scalars())

    def test_repeated_calls_record_one_action(self, book: Book) -> None:
        """A COMMIT may get no answer, and then the call is repeated."""
        late = book.claim().claim
        assert not pause(book).paused
        assert [pause(book, now=True).paused for _ in range(2)] == [True, True]
        assert [book.ledger.resume(KEY, owner=OURS, by=ANN) for _ in range(2)] == [True, True]
        assert self.actions(book) == ["pause", "resume"]
        with pytest.raises(StaleTokenError):
            book.ledger.complete_alone(late, None)

    def test_paused_keys_are_listed_and_never_purged(self, book: Book) -> None:
        """Not even if they are paused for longer than records of actions are kept."""
        pause(book)
        with book.engine.begin() as db:
            db.execute(sa.update(ACTIONS).values(at=1))
        book.purge()
        assert book.ledger.paused() == [(KEY, OURS.pause)]
        book.ledger.resume(KEY, owner=OURS, by=ANN)
        assert book.ledger.paused() == []
        book.purge()
        assert self.actions(book) == ["resume"]
