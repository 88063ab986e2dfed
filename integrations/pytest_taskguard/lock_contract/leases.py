"""Leases as they are taken, renewed, handed over and released: one after the other, by one thread.

Guarantees: each sentence of `taskguard.locks.LockProvider` about one call has its test. Does not
guarantee what calls at the same moment do to each other: see `waits.py` and `contention.py`.
"""

from __future__ import annotations

import time

import pytest

from pytest_taskguard.lock_contract.server import (
    KEY,
    TWO,
    LockServer,
    abandoned,
    granted,
    kept_s,
    known,
    renewed,
    take,
    taken_over,
)
from pytest_taskguard.lock_contract.waits import fresh, tried, unless_late
from taskguard.locks import Granted, Held, Hold, LockProvider, Owner, Renewal, new_owner

__all__ = ["TestAcquire", "TestHandOver", "TestHolders", "TestRelease", "TestRenew", "TestTokens"]

# Above any count of grants and any clock in seconds or ms, below any clock in µs: the year 2020.
_LEAST_TOKEN = 1_577_836_800_000_000


class TestAcquire:
    def test_free(self, locks: LockProvider) -> None:
        """A free key is granted. If no token was requested, the fence is 0."""
        assert granted(locks, KEY, new_owner("m1"), ttl_s=20.0).fence == 0

    def test_taken(self, locks: LockProvider, server: LockServer) -> None:
        """A taken key is refused, with the holder's nonce and message and the rest of its lease."""
        holder = new_owner("message/with/slashes ü")
        began_s = time.monotonic()
        ttl_s = granted(locks, KEY, holder, ttl_s=20.0).ttl_s
        answer = take(server.connect(), KEY, new_owner("m2"))
        went_by_s = time.monotonic() - began_s
        assert isinstance(answer, Held)
        assert answer.key == KEY[0]
        assert answer.owner in known(locks, holder)
        if locks.traits.owners:
            assert ttl_s - 5.0 - went_by_s < answer.remaining_s <= ttl_s

    def test_same_message_is_no_owner(self, locks: LockProvider) -> None:
        """Two deliveries of one message are two owners: the nonce decides."""
        assert isinstance(take(locks, KEY, new_owner("m")), Granted)
        assert isinstance(take(locks, KEY, new_owner("m")), Held)

    def test_asked_twice(self, locks: LockProvider, server: LockServer) -> None:
        """The same owner gets the same grant and token again, also over another connection. If the
        server does not know owners, only the same provider can repeat the request."""
        owner = new_owner("m")
        first = granted(locks, TWO, owner, with_fence=True)
        other = server.connect()
        if locks.traits.owners or other is locks:
            assert granted(other, TWO, owner, with_fence=True).fence == first.fence
        else:
            assert isinstance(take(other, TWO, owner), Held)
        assert granted(locks, TWO, owner, with_fence=True).fence == first.fence

    def test_asked_twice_extends(self, locks: LockProvider) -> None:
        """A repeated grant lasts as long as the second request says."""
        owner = new_owner("m")
        take(locks, KEY, owner, ttl_s=5.0)
        again = granted(locks, KEY, owner, ttl_s=60.0)
        answer = take(locks, KEY, new_owner("n"))
        assert isinstance(answer, Held)
        assert answer.remaining_s > again.ttl_s - 10.0

    def test_all_or_none(self, locks: LockProvider) -> None:
        """If another owner has one of several keys, none is taken, and that key is named."""
        holder = new_owner("m1")
        take(locks, ("b",), holder)
        answer = take(locks, ("a", "b", "c"), new_owner("m2"))
        assert isinstance(answer, Held)
        assert answer.key == "b"
        assert answer.owner in known(locks, holder)
        assert isinstance(take(locks, ("a",), new_owner("m3")), Granted)
        assert isinstance(take(locks, ("c",), new_owner("m4")), Granted)

    def test_all_or_none_elsewhere(self, locks: LockProvider, server: LockServer) -> None:
        """If another process has one of several keys, none is taken, and that key is named."""
        take(server.connect(), ("c",), new_owner("m1"))
        answer = take(locks, ("a", "b", "c", "d"), new_owner("m2"))
        assert isinstance(answer, Held)
        assert answer.key == "c"
        free = ("a", "b", "d")
        assert isinstance(take(server.connect(), free, new_owner("m3")), Granted)

    def test_refused_keeps_what_it_had(self, locks: LockProvider) -> None:
        """An owner that is refused more keys still holds those that it held before."""
        owner, other = new_owner("m"), new_owner("n")
        take(locks, ("a",), owner)
        take(locks, ("b",), other)
        assert isinstance(take(locks, ("a", "b"), owner), Held)
        assert renewed(locks, ("a",), owner) == Renewal.RENEWED

    def test_partly_ours(self, locks: LockProvider) -> None:
        """An owner that holds some of the keys is granted the rest."""
        owner = new_owner("m")
        take(locks, ("a",), owner)
        assert isinstance(take(locks, ("a", "b"), owner), Granted)
        assert isinstance(take(locks, ("b",), new_owner("n")), Held)

    def test_runs_out(self, locks: LockProvider, server: LockServer) -> None:
        """A lease without renewal ends."""
        abandoned(server, KEY, new_owner("dead"))
        taken_over(locks, KEY, new_owner("next"))

    @pytest.mark.parametrize(
        "key", ["a b", "{x}", "}{", "a}b", "*", "ü:ß", "x" * 200, "a:fence", "%0A", "[a]"]
    )
    def test_any_key(self, locks: LockProvider, key: str) -> None:
        """A key is only text: no character of it means anything to the server."""
        owner = new_owner("m")
        granted(locks, (key,), owner, with_fence=True)
        answer = take(locks, (key,), new_owner("n"))
        assert isinstance(answer, Held)
        assert answer.key == key
        assert isinstance(take(locks, (key + "x",), new_owner("o")), Granted)
        assert [each.owner for each in locks.holders(key)] == [owner]
        assert locks.release((key,), owner)


class TestHolders:
    def test_of_a_free_key(self, locks: LockProvider, server: LockServer) -> None:
        """A key that was never taken, or was released, has no holder. `holders()` leaves nothing in
        the server."""
        owner = new_owner("m")
        assert locks.holders(KEY[0]) == []
        assert list(server.leftovers()) == []
        take(locks, KEY, owner)
        locks.release(KEY, owner)
        assert server.connect().holders(KEY[0]) == []

    def test_of_a_taken_key(self, locks: LockProvider, server: LockServer) -> None:
        """`holders()` lists the one holder of a taken key, with its nonce, message, token and the
        rest of its lease, also over another connection."""
        owner = new_owner("message/with/slashes ü")
        grant = granted(locks, TWO, owner, ttl_s=20.0, with_fence=locks.traits.tokens)
        for asked in (locks, server.connect()):
            for key in TWO:
                [holder] = asked.holders(key)
                assert (holder.key, holder.shared) == (key, False)
                assert holder.owner in known(locks, owner)
                assert holder.fence == grant.fence
                if locks.traits.owners:
                    assert 0.0 < holder.remaining_s <= grant.ttl_s

    def test_changes_nothing(self, locks: LockProvider, server: LockServer) -> None:
        """A lease that `holders()` has listed still ends at its time, and frees its key."""
        abandoned(server, KEY, new_owner("dead"))
        locks.holders(KEY[0])
        taken_over(locks, KEY, owner := new_owner("next"))
        assert [each.owner for each in locks.holders(KEY[0])] == [owner]

    def test_names_what_can_be_released(self, locks: LockProvider, server: LockServer) -> None:
        """Another process can release the key for the holder that `holders()` names."""
        if not locks.traits.owners:
            pytest.skip("it does not know the holder of a key")
        take(server.connect(), KEY, new_owner("m"))
        [holder] = locks.holders(KEY[0])
        assert locks.release(KEY, holder.owner) is True
        assert locks.holders(KEY[0]) == []
        assert isinstance(take(locks, KEY, new_owner("next")), Granted)


class TestTokens:
    @pytest.fixture(autouse=True)
    def _tokens(self, locks: LockProvider) -> None:
        if not locks.traits.tokens:
            pytest.skip("it issues no tokens")

    def test_grow(self, locks: LockProvider) -> None:
        """Each grant of a key has a higher token than the one before, however fast they come."""
        tokens = []
        for _ in range(50):
            owner = new_owner("m")
            tokens.append(token(locks, KEY, owner))
            locks.release(KEY, owner)
        assert tokens == sorted(set(tokens))

    def test_are_microseconds(self, locks: LockProvider) -> None:
        """A token is about a clock in µs. So it is above the tokens that another kind of server
        gave before, and that server's next token is above this one."""
        assert _LEAST_TOKEN < token(locks, KEY, new_owner("m")) < time.time() * 1e6 + 60e6

    def test_above_all_keys(self, locks: LockProvider) -> None:
        """The token of several keys is above the last of each, and each key remembers it."""
        owner = new_owner("m")
        singles = [token(locks, (key,), owner) for key in TWO]
        locks.release(TWO, owner)
        both = token(locks, TWO, new := new_owner("n"))
        assert both > max(singles)
        locks.release(TWO, new)
        assert all(token(locks, (key,), new_owner("o")) > both for key in TWO)

    def test_after_memory_loss(self, locks: LockProvider, server: LockServer) -> None:
        """A server that lost its data still issues higher tokens than before."""
        before = token(locks, KEY, new_owner("m"))
        server.forget()
        assert token(locks, KEY, new_owner("n")) > before

    def test_after_expiry(self, locks: LockProvider, server: LockServer) -> None:
        """After a lease ran out, the next holder has a higher token."""
        before = abandoned(server, KEY, new_owner("m"), with_fence=True).fence
        assert taken_over(locks, KEY, new_owner("n"), with_fence=True).fence > before

    def test_taken_again_after_another(self, locks: LockProvider) -> None:
        """If another owner held the key after a lease ran out, the first owner gets a new token."""
        slow, other = new_owner("slow"), new_owner("other")
        old = token(locks, KEY, slow)
        locks.release(KEY, slow)
        between = token(locks, KEY, other)
        locks.release(KEY, other)
        assert token(locks, KEY, slow) > between > old


class TestRelease:
    def test_frees(self, locks: LockProvider, server: LockServer) -> None:
        """A released key is free. Only its last token stays in the server."""
        owner = new_owner("m")
        granted(locks, TWO, owner, with_fence=True)
        assert locks.release(TWO, owner) is True
        assert server.leftovers() == []
        assert isinstance(take(locks, TWO, new_owner("n")), Granted)

    def test_by_another(self, locks: LockProvider) -> None:
        """No owner can release another owner's key, even with the same message."""
        holder = new_owner("m")
        take(locks, KEY, holder)
        assert locks.release(KEY, new_owner("m")) is False
        assert renewed(locks, KEY, holder) == Renewal.RENEWED

    def test_twice(self, locks: LockProvider) -> None:
        """A second release does nothing, even if another owner has the key by then."""
        owner, next_owner = new_owner("m"), new_owner("n")
        take(locks, KEY, owner)
        assert locks.release(KEY, owner) is True
        assert locks.release(KEY, owner) is False
        take(locks, KEY, next_owner)
        assert locks.release(KEY, owner) is False
        assert renewed(locks, KEY, next_owner) == Renewal.RENEWED

    def test_partly(self, locks: LockProvider) -> None:
        """A release of several keys frees only those that the owner still has."""
        owner, other = new_owner("m"), new_owner("n")
        take(locks, ("a",), owner)
        take(locks, ("b",), other)
        assert locks.release(("a", "b"), owner) is True
        assert isinstance(take(locks, ("a",), new_owner("o")), Granted)
        assert renewed(locks, ("b",), other) == Renewal.RENEWED

    def test_late(self, locks: LockProvider, server: LockServer) -> None:
        """A release after the lease ran out does not free the next holder's key."""
        late, holder = new_owner("late"), new_owner("n")
        abandoned(server, KEY, late)
        taken_over(locks, KEY, holder)
        assert locks.release(KEY, late) is False
        assert renewed(locks, KEY, holder) == Renewal.RENEWED


class TestHandOver:
    def test_hands_over(self, locks: LockProvider) -> None:
        """The new owner has the key for the given time, and can renew it."""
        knows_owners(locks)
        finder, true = new_owner("finder"), new_owner("true")
        stands_s = kept_s(locks, granted(locks, TWO, finder, ttl_s=60.0), 10.0)
        began_s = time.monotonic()
        assert locks.hand_over(TWO, finder, to=true, ttl_s=10.0) is True
        answer = take(locks, TWO, new_owner("n"))
        went_by_s = time.monotonic() - began_s
        assert isinstance(answer, Held)
        assert answer.owner == true
        assert stands_s - 5.0 - went_by_s < answer.remaining_s <= stands_s
        assert renewed(locks, TWO, true) == Renewal.RENEWED
        assert renewed(locks, TWO, finder) == Renewal.TAKEN

    def test_twice(self, locks: LockProvider) -> None:
        """A repeated hand-over has the same answer, and does not change the new owner's lease."""
        knows_owners(locks)
        finder, true = new_owner("finder"), new_owner("true")
        stands_s = kept_s(locks, granted(locks, KEY, finder), 60.0)
        assert locks.hand_over(KEY, finder, to=true, ttl_s=10.0) is True
        assert renewed(locks, KEY, true, ttl_s=60.0) == Renewal.RENEWED
        assert locks.hand_over(KEY, finder, to=true, ttl_s=10.0) is True
        answer = take(locks, KEY, new_owner("n"))
        assert isinstance(answer, Held)
        assert answer.remaining_s > stands_s - 10.0

    def test_by_another(self, locks: LockProvider) -> None:
        """An owner that does not hold the key cannot hand it over."""
        holder = new_owner("m")
        take(locks, KEY, holder)
        assert locks.hand_over(KEY, new_owner("x"), to=new_owner("y"), ttl_s=10.0) is False
        assert renewed(locks, KEY, holder) == Renewal.RENEWED

    def test_frees(self, locks: LockProvider, server: LockServer) -> None:
        """If the server does not know owners, the keys become free, and the new owner takes
        them."""
        if locks.traits.owners:
            pytest.skip("it knows the holder of a key")
        finder, true = new_owner("finder"), new_owner("true")
        take(locks, TWO, finder)
        assert locks.hand_over(TWO, finder, to=true, ttl_s=10.0) is False
        assert server.leftovers() == []
        assert renewed(locks, TWO, finder) == Renewal.GONE
        assert isinstance(take(server.connect(), TWO, true), Granted)

    def test_free_key(self, locks: LockProvider, server: LockServer) -> None:
        """A free key cannot be handed over."""
        assert locks.hand_over(KEY, new_owner("x"), to=new_owner("y"), ttl_s=10.0) is False
        assert server.leftovers() == []


class TestRenew:
    def test_extends(self, locks: LockProvider) -> None:
        """A renewed lease lasts for its ttl from now."""
        owner = new_owner("m")
        stands_s = kept_s(locks, granted(locks, KEY, owner, ttl_s=5.0), 60.0)
        assert renewed(locks, KEY, owner, ttl_s=60.0) == Renewal.RENEWED
        answer = take(locks, KEY, new_owner("n"))
        assert isinstance(answer, Held)
        assert answer.remaining_s > stands_s - 10.0

    def test_run_out(self, locks: LockProvider, server: LockServer) -> None:
        """A lease that ran out does not come back."""
        late, probe = new_owner("late"), new_owner("n")
        abandoned(server, KEY, late)
        taken_over(locks, KEY, probe)
        locks.release(KEY, probe)
        assert renewed(locks, KEY, late) == Renewal.GONE

    def test_keeps_alive(self, locks: LockProvider) -> None:
        """A short lease that is renewed in time never ends."""
        ttl_s = max(0.4, min(locks.traits.min_ttl_s, 2.0))

        def is_kept() -> bool:
            key, owner, since_s = fresh("a"), new_owner("m"), time.monotonic()
            until_s = since_s + 2 * ttl_s
            take(locks, key, owner, ttl_s=ttl_s)
            while (asked_s := time.monotonic()) < until_s:
                is_renewed = renewed(locks, key, owner, ttl_s=ttl_s) == Renewal.RENEWED
                if not unless_late(is_renewed, since_s, ttl_s):
                    return False
                since_s = asked_s
                if not unless_late(
                    isinstance(take(locks, key, new_owner("n")), Held), since_s, ttl_s
                ):
                    return False
                time.sleep(0.02)
            return True

        assert tried(is_kept)

    def test_answers(self, locks: LockProvider) -> None:
        """Each lease has one answer, in order. A lease of several keys is TAKEN if one key is
        taken by another owner, and otherwise GONE if one key is gone."""
        me, other = new_owner("m"), new_owner("n")
        take(locks, ("mine1", "mine2"), me)
        take(locks, ("theirs",), other)
        cases = {
            ("mine1", "mine2"): Renewal.RENEWED,
            ("theirs",): Renewal.TAKEN,
            ("nobody",): Renewal.GONE,
            ("mine1", "nobody"): Renewal.GONE,
            ("mine1", "theirs"): Renewal.TAKEN,
            ("nobody", "theirs"): Renewal.TAKEN,
            ("nobody", "theirs", "nobody2"): Renewal.TAKEN,
            ("mine2",): Renewal.RENEWED,
        }
        holds = [Hold(keys, me, 30.0) for keys in cases]
        assert locks.renew(holds) == list(cases.values())
        assert renewed(locks, ("theirs",), other) == Renewal.RENEWED

    def test_creates_nothing(self, locks: LockProvider, server: LockServer) -> None:
        """A renewal of a lease that the server forgot does not restore it."""
        owner = new_owner("m")
        take(locks, TWO, owner)
        server.forget()
        assert renewed(locks, TWO, owner) == Renewal.GONE
        assert server.leftovers() == []
        assert isinstance(take(locks, TWO, new_owner("n")), Granted)

    def test_none(self, locks: LockProvider) -> None:
        """No leases, no answers."""
        assert locks.renew([]) == []

    def test_many(self, locks: LockProvider) -> None:
        """Many leases of several keys and different times get their own answers."""
        me, other = new_owner("m"), new_owner("n")
        holds = [Hold((f"a{i}", f"b{i}"), me, 20.0 + i % 7) for i in range(700)]
        for i, hold in enumerate(holds):
            if i % 3:  # for longer than all of it may take
                take(locks, hold.keys, me if i % 3 == 1 else other, ttl_s=300.0)
        expected = [(Renewal.GONE, Renewal.RENEWED, Renewal.TAKEN)[i % 3] for i in range(700)]
        answers = locks.renew(holds)
        assert len(answers) == len(holds)
        # Not list by list: where CI is set, pytest shows the whole difference of two lists, which
        # takes it minutes for some that are as long as these.
        wrong = [i for i, answer in enumerate(answers) if answer != expected[i]]
        assert wrong[:5] == []


def knows_owners(locks: LockProvider) -> None:
    if not locks.traits.owners:
        pytest.skip("it does not know the holder of a key, so it cannot hand one over")


def token(locks: LockProvider, keys: tuple[str, ...], owner: Owner) -> int:
    """Return the token of a new grant."""
    return granted(locks, keys, owner, with_fence=True).fence
