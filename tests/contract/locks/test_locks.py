"""What every lock provider does, on its real server: the sentences of `taskguard.locks.base`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from support.lock_servers import LockServer
from support.waiting import wait_until
from taskguard.errors import LockServerUnavailableError
from taskguard.lease import Owner, new_owner
from taskguard.locks.base import Granted, Held, Hold, LockProvider, Renewal

KEY = ("order:42",)
TWO = ("order:1", "order:2")


def take(
    locks: LockProvider,
    keys: tuple[str, ...],
    owner: Owner,
    *,
    ttl_s: float = 30.0,
    with_fence: bool = False,
    wait_s: float = 0.0,
) -> Granted | Held:
    return locks.acquire(keys, owner, ttl_s=ttl_s, with_fence=with_fence, wait_s=wait_s)


def token(locks: LockProvider, keys: tuple[str, ...], owner: Owner, *, ttl_s: float = 30.0) -> int:
    answer = take(locks, keys, owner, ttl_s=ttl_s, with_fence=True)
    assert isinstance(answer, Granted)
    return answer.fence


def renewed(
    locks: LockProvider, keys: tuple[str, ...], owner: Owner, *, ttl_s: float = 30.0
) -> str:
    (answer,) = locks.renew([Hold(keys, owner, ttl_s)])
    return answer


class TestAcquire:
    def test_free(self, locks: LockProvider) -> None:
        """A free key is granted; without the wish for a token, the fence is 0."""
        assert take(locks, KEY, new_owner("m1"), ttl_s=20.0) == Granted(0, 20.0)

    def test_taken(self, locks: LockProvider, server: LockServer) -> None:
        """A taken key is refused with its holder, nonce and message, and the time it has left."""
        holder = new_owner("message/with/slashes ü")
        take(locks, KEY, holder, ttl_s=20.0)
        answer = take(server.connect(), KEY, new_owner("m2"))
        assert isinstance(answer, Held)
        assert (answer.key, answer.owner) == (KEY[0], holder)
        assert 15.0 < answer.remaining_s <= 20.0

    def test_same_message_is_no_owner(self, locks: LockProvider) -> None:
        """Two deliveries of one message are two owners: the nonce decides."""
        assert isinstance(take(locks, KEY, new_owner("m")), Granted)
        assert isinstance(take(locks, KEY, new_owner("m")), Held)

    def test_asked_twice(self, locks: LockProvider, server: LockServer) -> None:
        """The same owner gets the same grant again, token included, over another connection."""
        owner = new_owner("m")
        first = token(locks, TWO, owner)
        assert token(server.connect(), TWO, owner) == first
        assert token(locks, TWO, owner) == first

    def test_asked_twice_extends(self, locks: LockProvider) -> None:
        """A grant given again lasts as long as was asked the second time."""
        owner = new_owner("m")
        take(locks, KEY, owner, ttl_s=5.0)
        take(locks, KEY, owner, ttl_s=60.0)
        answer = take(locks, KEY, new_owner("n"))
        assert isinstance(answer, Held)
        assert answer.remaining_s > 50.0

    def test_all_or_none(self, locks: LockProvider) -> None:
        """Of several keys none is taken where one is another's, and that one is named."""
        holder = new_owner("m1")
        take(locks, ("b",), holder)
        answer = take(locks, ("a", "b", "c"), new_owner("m2"))
        assert isinstance(answer, Held)
        assert (answer.key, answer.owner) == ("b", holder)
        assert isinstance(take(locks, ("a",), new_owner("m3")), Granted)
        assert isinstance(take(locks, ("c",), new_owner("m4")), Granted)

    def test_partly_ours(self, locks: LockProvider) -> None:
        """An owner that holds some of the keys is granted the rest."""
        owner = new_owner("m")
        take(locks, ("a",), owner)
        assert isinstance(take(locks, ("a", "b"), owner), Granted)
        assert isinstance(take(locks, ("b",), new_owner("n")), Held)

    def test_runs_out(self, locks: LockProvider) -> None:
        """A lease that nobody renews ends by itself."""
        take(locks, KEY, new_owner("dead"), ttl_s=0.1)
        wait_until(lambda: isinstance(take(locks, KEY, new_owner("next")), Granted), timeout_s=5.0)

    @pytest.mark.parametrize(
        "key", ["a b", "{x}", "}{", "a}b", "*", "ü:ß", "x" * 200, "a:fence", "%0A", "[a]"]
    )
    def test_any_key(self, locks: LockProvider, key: str) -> None:
        """A key is only text: no character of it means anything to the server."""
        owner = new_owner("m")
        assert token(locks, (key,), owner) > 0
        answer = take(locks, (key,), new_owner("n"))
        assert isinstance(answer, Held)
        assert answer.key == key
        assert isinstance(take(locks, (key + "x",), new_owner("o")), Granted)
        assert locks.release((key,), owner)


class TestTokens:
    def test_grow(self, locks: LockProvider) -> None:
        """Each grant of a key has a higher token than the one before, however fast they come."""
        tokens = []
        for _ in range(50):
            owner = new_owner("m")
            tokens.append(token(locks, KEY, owner))
            locks.release(KEY, owner)
        assert tokens == sorted(set(tokens))

    def test_are_microseconds(self, locks: LockProvider) -> None:
        """A token is an exact integer of about the server's clock in µs: nothing is rounded."""
        assert token(locks, KEY, new_owner("m")) == pytest.approx(time.time() * 1e6, abs=60e6)

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
        """A server that lost its memory issues higher tokens than before all the same."""
        before = token(locks, KEY, new_owner("m"))
        server.forget()
        assert token(locks, KEY, new_owner("n")) > before

    def test_after_expiry(self, locks: LockProvider) -> None:
        """Whoever takes over a lease that ran out has a higher token."""
        before = token(locks, KEY, new_owner("m"), ttl_s=0.05)
        next_owner = new_owner("n")

        def taken_over() -> Granted | None:
            answer = take(locks, KEY, next_owner, with_fence=True)
            return answer if isinstance(answer, Granted) else None

        assert wait_until(taken_over, timeout_s=5.0).fence > before

    def test_taken_again_after_another(self, locks: LockProvider) -> None:
        """An owner whose lease ran out and who asks again, another having held the key since,
        gets a new token, not its old one."""
        slow, other = new_owner("slow"), new_owner("other")
        old = token(locks, KEY, slow)
        locks.release(KEY, slow)
        between = token(locks, KEY, other)
        locks.release(KEY, other)
        assert token(locks, KEY, slow) > between > old


class TestRelease:
    def test_frees(self, locks: LockProvider, server: LockServer) -> None:
        """A released key is free, and nothing but the last token stays in the server."""
        owner = new_owner("m")
        token(locks, TWO, owner)
        assert locks.release(TWO, owner) is True
        assert server.leftovers() == []
        assert isinstance(take(locks, TWO, new_owner("n")), Granted)

    def test_by_another(self, locks: LockProvider) -> None:
        """Nobody frees another's key, also not with the same message."""
        holder = new_owner("m")
        take(locks, KEY, holder)
        assert locks.release(KEY, new_owner("m")) is False
        assert renewed(locks, KEY, holder) == Renewal.RENEWED

    def test_twice(self, locks: LockProvider) -> None:
        """Releasing again does nothing, also when somebody else has the key by then."""
        owner, next_owner = new_owner("m"), new_owner("n")
        take(locks, KEY, owner)
        assert locks.release(KEY, owner) is True
        assert locks.release(KEY, owner) is False
        take(locks, KEY, next_owner)
        assert locks.release(KEY, owner) is False
        assert renewed(locks, KEY, next_owner) == Renewal.RENEWED

    def test_partly(self, locks: LockProvider) -> None:
        """Of several keys, those that are still the owner's are freed, the others stay."""
        owner, other = new_owner("m"), new_owner("n")
        take(locks, ("a",), owner)
        take(locks, ("b",), other)
        assert locks.release(("a", "b"), owner) is True
        assert isinstance(take(locks, ("a",), new_owner("o")), Granted)
        assert renewed(locks, ("b",), other) == Renewal.RENEWED

    def test_late(self, locks: LockProvider) -> None:
        """A release after the lease ran out does not free the next holder's key."""
        late, holder = new_owner("late"), new_owner("n")
        take(locks, KEY, late, ttl_s=0.05)
        wait_until(lambda: isinstance(take(locks, KEY, holder), Granted), timeout_s=5.0)
        assert locks.release(KEY, late) is False
        assert renewed(locks, KEY, holder) == Renewal.RENEWED


class TestHandOver:
    def test_hands_over(self, locks: LockProvider) -> None:
        """The true owner has the key, for the time given, and its renewals go on."""
        finder, true = new_owner("finder"), new_owner("true")
        take(locks, TWO, finder, ttl_s=60.0)
        assert locks.hand_over(TWO, finder, to=true, ttl_s=10.0) is True
        answer = take(locks, TWO, new_owner("n"))
        assert isinstance(answer, Held)
        assert answer.owner == true
        assert 5.0 < answer.remaining_s <= 10.0
        assert renewed(locks, TWO, true) == Renewal.RENEWED
        assert renewed(locks, TWO, finder) == Renewal.TAKEN

    def test_twice(self, locks: LockProvider) -> None:
        """Asked again it says the same and does not touch the true owner's lease."""
        finder, true = new_owner("finder"), new_owner("true")
        take(locks, KEY, finder)
        assert locks.hand_over(KEY, finder, to=true, ttl_s=10.0) is True
        assert renewed(locks, KEY, true, ttl_s=60.0) == Renewal.RENEWED
        assert locks.hand_over(KEY, finder, to=true, ttl_s=10.0) is True
        answer = take(locks, KEY, new_owner("n"))
        assert isinstance(answer, Held)
        assert answer.remaining_s > 50.0

    def test_by_another(self, locks: LockProvider) -> None:
        """Who does not hold the key gives nothing away."""
        holder = new_owner("m")
        take(locks, KEY, holder)
        assert locks.hand_over(KEY, new_owner("x"), to=new_owner("y"), ttl_s=10.0) is False
        assert renewed(locks, KEY, holder) == Renewal.RENEWED

    def test_free_key(self, locks: LockProvider, server: LockServer) -> None:
        """A key that nobody holds is given to nobody."""
        assert locks.hand_over(KEY, new_owner("x"), to=new_owner("y"), ttl_s=10.0) is False
        assert server.leftovers() == []


class TestRenew:
    def test_extends(self, locks: LockProvider) -> None:
        """A renewed lease lasts for its ttl from now."""
        owner = new_owner("m")
        take(locks, KEY, owner, ttl_s=5.0)
        assert renewed(locks, KEY, owner, ttl_s=60.0) == Renewal.RENEWED
        answer = take(locks, KEY, new_owner("n"))
        assert isinstance(answer, Held)
        assert answer.remaining_s > 50.0

    def test_keeps_alive(self, locks: LockProvider) -> None:
        """Renewed in time, a short lease never runs out."""
        owner, until = new_owner("m"), time.monotonic() + 0.8
        take(locks, KEY, owner, ttl_s=0.4)
        while time.monotonic() < until:
            assert renewed(locks, KEY, owner, ttl_s=0.4) == Renewal.RENEWED
            assert isinstance(take(locks, KEY, new_owner("n")), Held)
            time.sleep(0.02)

    def test_answers(self, locks: LockProvider, server: LockServer) -> None:
        """One answer for each lease, in order; of several keys, one taken makes TAKEN, else one
        gone makes GONE."""
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
        """Renewing what the server forgot brings nothing back."""
        owner = new_owner("m")
        take(locks, TWO, owner)
        server.forget()
        assert renewed(locks, TWO, owner) == Renewal.GONE
        assert server.leftovers() == []
        assert isinstance(take(locks, TWO, new_owner("n")), Granted)

    def test_after_its_end(self, locks: LockProvider) -> None:
        """A lease that ran out is gone, also where nobody has taken the key since."""
        owner = new_owner("m")
        take(locks, KEY, owner, ttl_s=0.05)
        time.sleep(0.1)
        assert renewed(locks, KEY, owner) == Renewal.GONE

    def test_none(self, locks: LockProvider) -> None:
        """No leases, no answers."""
        assert locks.renew([]) == []

    def test_many(self, locks: LockProvider) -> None:
        """Many leases of several keys and different times get their own answers."""
        me, other = new_owner("m"), new_owner("n")
        holds = [Hold((f"a{i}", f"b{i}"), me, 20.0 + i % 7) for i in range(700)]
        for i, hold in enumerate(holds):
            if i % 3:
                take(locks, hold.keys, me if i % 3 == 1 else other)
        expected = [(Renewal.GONE, Renewal.RENEWED, Renewal.TAKEN)[i % 3] for i in range(700)]
        assert locks.renew(holds) == expected


class TestWait:
    def test_woken(self, locks: LockProvider, server: LockServer) -> None:
        """A release wakes who was refused and waits, at once."""
        waiter = server.connect()

        def wait() -> float:
            holder = new_owner("m")
            take(locks, KEY, holder)
            assert isinstance(take(waiter, KEY, new_owner("n"), wait_s=30.0), Held)
            woken = Ended(lambda: waiter.wait(KEY[0], timeout_s=30.0))
            time.sleep(0.1)  # until it blocks
            locks.release(KEY, holder)
            woken.join()
            return woken.took_s

        assert within(0.6, wait)

    def test_release_before_the_wait(self, locks: LockProvider) -> None:
        """A release between the refusal and the wait is not missed."""

        def wait() -> float:
            holder = new_owner("m")
            take(locks, KEY, holder)
            assert isinstance(take(locks, KEY, new_owner("n"), wait_s=30.0), Held)
            locks.release(KEY, holder)
            return took_s(lambda: locks.wait(KEY[0], timeout_s=30.0))

        assert within(0.5, wait)

    def test_bounded(self, locks: LockProvider) -> None:
        """A wait ends after its time-out, and soon after a second in any case: then ask again."""
        take(locks, KEY, new_owner("m"))

        def wait(timeout_s: float) -> float:
            return took_s(lambda: locks.wait(KEY[0], timeout_s=timeout_s))

        for timeout_s, least_s, most_s in [(0.0, 0.0, 0.1), (-1.0, 0.0, 0.1), (0.2, 0.15, 0.7)]:
            assert within(most_s, lambda t=timeout_s: wait(t), least_s=least_s)
        assert within(1.9, lambda: wait(30.0))

    def test_one_after_the_other(self, locks: LockProvider, server: LockServer) -> None:
        """Many who wait for one key all get it, each woken by the one before."""
        # By polling once a second, eight in a row would take several seconds.
        assert within(2.0, lambda: self._all_in_a_row(locks, server, 8))

    def _all_in_a_row(self, locks: LockProvider, server: LockServer, count: int) -> float:
        holder, got = new_owner("m"), []
        take(locks, KEY, holder)

        def worker() -> None:
            mine, me = server.connect(), new_owner("w")
            until = time.monotonic() + 30.0
            while time.monotonic() < until:
                answer = take(mine, KEY, me, wait_s=until - time.monotonic())
                if isinstance(answer, Granted):
                    got.append(me)
                    mine.release(KEY, me)
                    return
                mine.wait(answer.key, timeout_s=until - time.monotonic())

        threads = [threading.Thread(target=worker) for _ in range(count)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        released_at = time.monotonic()
        locks.release(KEY, holder)
        for thread in threads:
            thread.join(30.0)
        assert len(set(got)) == count
        return time.monotonic() - released_at

    def test_several_keys(self, locks: LockProvider, server: LockServer) -> None:
        """Woken for one of its keys while another is taken, a waiter for several passes it on."""
        assert within(0.5, lambda: self._passed_on(locks, server))

    def _passed_on(self, locks: LockProvider, server: LockServer) -> float:
        first, second = new_owner("m"), new_owner("n")
        take(locks, ("a",), first)
        take(locks, ("b",), second)
        both, single = server.connect(), server.connect()
        assert isinstance(take(both, ("a", "b"), new_owner("both"), wait_s=30.0), Held)
        assert isinstance(take(single, ("a",), new_owner("single"), wait_s=30.0), Held)
        greedy = Ended(lambda: both.wait("a", timeout_s=30.0))
        time.sleep(0.1)  # it is first in the queue
        locks.release(("a",), first)
        greedy.join()
        assert isinstance(take(both, ("a", "b"), new_owner("both"), wait_s=30.0), Held)
        waited_s = took_s(lambda: single.wait("a", timeout_s=30.0))
        mine = new_owner("single")
        assert isinstance(take(single, ("a",), mine), Granted)
        locks.release(("a",), mine)
        locks.release(("b",), second)
        return waited_s


class TestTraits:
    def test_ttl(self, locks: LockProvider) -> None:
        """What is granted lasts as long as was asked for, or as the least that the server keeps."""
        for ttl_s in (0.05, 20.0):
            answer = take(locks, (f"order:{ttl_s}",), new_owner("m"), ttl_s=ttl_s)
            assert isinstance(answer, Granted)
            assert answer.ttl_s >= max(ttl_s, locks.traits.min_ttl_s)

    def test_tokens(self, locks: LockProvider) -> None:
        """A provider without tokens gives 0 where one is asked for, never a number of its own."""
        assert (token(locks, KEY, new_owner("m")) > 0) is locks.traits.tokens


class TestSwallowedReply:
    def test_of_acquire(self, server: LockServer) -> None:
        """An acquire whose reply never came leaves nothing held beyond its ttl."""
        if server.deafened is None:
            pytest.skip("its replies cannot be lost")
        with server.deafened() as locks, pytest.raises(LockServerUnavailableError):
            take(locks, KEY, new_owner("m"), ttl_s=1.0)
        other = server.connect()
        wait_until(lambda: isinstance(take(other, KEY, new_owner("n")), Granted), timeout_s=30.0)


class TestSession:
    def test_close(self, server: LockServer) -> None:
        """Closing a provider frees what it held if its locks are a session's, and nothing if they
        are leases."""
        first, other = server.connect(), server.connect()
        if first is other:
            pytest.skip("there is one provider in all")
        owner = new_owner("m")
        take(first, KEY, owner)
        first.close()
        answer = take(other, KEY, new_owner("n"))
        assert isinstance(answer, Granted if first.traits.session else Held)


class TestClose:
    def test_used_again(self, locks: LockProvider) -> None:
        """A closed provider connects again, and closing released nothing."""
        owner = new_owner("m")
        take(locks, KEY, owner)
        locks.close()
        assert renewed(locks, KEY, owner) == Renewal.RENEWED
        locks.close()
        locks.close()


def took_s(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def within(most_s: float, seconds: Callable[[], float], *, least_s: float = 0.0) -> bool:
    """Whether it can be done in this time: a machine that is busy may take longer at times."""
    return any(least_s <= seconds() < most_s for _ in range(5))


class Ended:
    """A call in a thread, and how long it took."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.took_s = 0.0
        self.ended = False
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._started = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        self._call()
        self.took_s = time.monotonic() - self._started
        self.ended = True

    def join(self) -> None:
        self._thread.join(30.0)
        assert self.ended, "the call did not end"
