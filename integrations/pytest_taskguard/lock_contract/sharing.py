"""Several owners hold one key at once: tests for providers whose `traits.shares` is true.

Guarantees: which owners may hold a key together, for how long, with which token, and, if the
provider is fair, in which order. If the provider is not fair, an owner may wait for ever.
"""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from pytest_taskguard.lock_contract import server
from pytest_taskguard.lock_contract.server import KEY, TURN_S, WAITS_S, LockServer, slack_s
from pytest_taskguard.lock_contract.waits import fresh, took_s, tried, unless_late, within
from pytest_taskguard.waiting import wait_until
from taskguard.locks import (
    NO_LIMIT,
    Granted,
    Held,
    Hold,
    LockProvider,
    Owner,
    Renewal,
    SharingLocks,
    new_owner,
)

__all__ = ["TestSharing", "TestSharingInOrder"]

ALONE = 1


class TestSharing:
    @pytest.fixture(autouse=True)
    def _shares(self, locks: LockProvider) -> None:
        if not locks.traits.shares:
            pytest.skip("it shares no keys")

    def test_limit(self, locks: LockProvider, server: LockServer) -> None:
        """As many owners as the limit hold a key at once. One more is refused, with the name of a
        holder. After a share is released, one more is granted."""
        owners = [new_owner(f"m{number}") for number in range(3)]
        for owner in owners:
            assert comes_in(server.connect(), KEY, owner, 3)
        extra = new_owner("extra")
        held = ask(locks, KEY, extra, 3)
        assert isinstance(held, Held)
        assert (held.key, held.owner in owners, held.shared) == (KEY[0], True, True)
        assert 0.0 < held.remaining_s <= 30.0
        assert free(locks, KEY, owners[1], 3) is True
        assert comes_in(locks, KEY, extra, 3)
        assert not comes_in(locks, KEY, owners[1], 3)

    def test_holders(self, locks: LockProvider, server: LockServer) -> None:
        """`holders()` lists all holders of a shared key, with one token. A release removes one."""
        owners = [new_owner(f"m{number}") for number in range(3)]
        grants = [ask(locks, KEY, owner, NO_LIMIT) for owner in owners]
        found = server.connect().holders(KEY[0])
        assert {each.owner for each in found} == set(owners)
        assert {each.shared for each in found} == {True}
        tokens = {each.fence for each in grants if isinstance(each, Granted)}
        assert {each.fence for each in found} == tokens
        assert all(0.0 < each.remaining_s <= 30.0 for each in found)
        assert free(locks, KEY, owners[1], NO_LIMIT) is True
        assert {each.owner for each in locks.holders(KEY[0])} == {owners[0], owners[2]}

    def test_readers(self, locks: LockProvider) -> None:
        """Readers hold the key together. A writer waits for the last of them, and is then the only
        holder."""
        readers = [new_owner("r") for _ in range(5)]
        for reader in readers:
            assert comes_in(locks, KEY, reader, NO_LIMIT)
        writer = new_owner("writer")
        for reader in readers:
            held = ask(locks, KEY, writer, ALONE)
            assert isinstance(held, Held)
            assert (held.owner in readers, held.shared) == (True, True)
            assert free(locks, KEY, reader, NO_LIMIT) is True
        assert comes_in(locks, KEY, writer, ALONE)
        for limit in (2, NO_LIMIT, ALONE):
            held = ask(locks, KEY, new_owner("late"), limit)
            assert isinstance(held, Held)
            assert (held.owner, held.shared) == (writer, False)
        assert free(locks, KEY, writer, ALONE) is True
        assert comes_in(locks, KEY, readers[0], NO_LIMIT)

    def test_own_limit(self, locks: LockProvider) -> None:
        """Each owner is granted or refused by its own limit, whatever limit the holders have."""
        for _ in range(2):
            assert comes_in(locks, KEY, new_owner("m"), 2)
        assert not comes_in(locks, KEY, new_owner("m"), 2)
        assert comes_in(locks, KEY, new_owner("m"), 3)
        assert not comes_in(locks, KEY, new_owner("m"), 3)
        assert comes_in(locks, KEY, new_owner("reader"), NO_LIMIT)
        assert not comes_in(locks, KEY, new_owner("m"), 4)
        assert comes_in(locks, KEY, new_owner("m"), 5)
        assert not comes_in(locks, KEY, new_owner("m"), ALONE)

    def test_other_keys(self, locks: LockProvider) -> None:
        """An owner that shares a key does not block other keys."""
        assert comes_in(locks, ("a",), new_owner("m"), 2)
        assert comes_in(locks, ("b",), new_owner("m"), ALONE)
        assert not comes_in(locks, ("a", "b"), new_owner("m"), ALONE)
        assert not comes_in(locks, ("a", "c"), new_owner("m"), ALONE)
        assert comes_in(locks, ("c",), new_owner("m"), ALONE)

    def test_asked_twice(self, locks: LockProvider, server: LockServer) -> None:
        """If an acquire is repeated because its reply was lost, the owner gets the same share and
        token, and no second share."""
        owner, other = new_owner("m"), new_owner("n")
        first = ask(locks, KEY, owner, 2)
        assert first == ask(server.connect(), KEY, owner, 2)
        assert comes_in(locks, KEY, other, 2)
        assert first == ask(server.connect(), KEY, owner, 2)
        assert free(locks, KEY, owner, 2) is True
        assert comes_in(locks, KEY, new_owner("next"), 2)

    def test_asked_twice_extends(self, locks: LockProvider) -> None:
        """A repeated acquire gets a whole lease again."""
        owner = new_owner("m")
        assert comes_in(locks, KEY, owner, 2, ttl_s=0.3)
        assert comes_in(locks, KEY, owner, 2)
        time.sleep(0.4)
        assert renewed(locks, KEY, owner, 2) == Renewal.RENEWED

    def test_runs_out(self, locks: LockProvider) -> None:
        """The share of a vanished holder is free when its lease ends. The other shares remain."""
        gone, other, following = new_owner("gone"), new_owner("other"), new_owner("next")
        assert comes_in(locks, KEY, gone, 2, ttl_s=0.05)
        assert comes_in(locks, KEY, other, 2)
        wait_until(lambda: comes_in(locks, KEY, following, 2), timeout_s=slack_s(locks))
        assert renewed(locks, KEY, gone, 2) != Renewal.RENEWED
        assert not comes_in(locks, KEY, new_owner("m"), 2)
        assert renewed(locks, KEY, other, 2) == Renewal.RENEWED

    def test_shorter_leases(self, locks: LockProvider) -> None:
        """The key stays taken for the longest lease of the sharers, in any order of requests."""
        patient, hasty = new_owner("patient"), two()
        assert comes_in(locks, KEY, patient, 3)
        assert comes_in(locks, KEY, hasty[0], 3, ttl_s=0.05)
        time.sleep(0.2)
        assert not comes_in(locks, KEY, new_owner("writer"), ALONE)
        assert comes_in(locks, KEY, hasty[1], 3)
        assert renewed(locks, KEY, hasty[1], 3, ttl_s=0.05) == Renewal.RENEWED
        time.sleep(0.2)
        assert not comes_in(locks, KEY, new_owner("writer"), ALONE)
        assert renewed(locks, KEY, patient, 3) == Renewal.RENEWED

    def test_all_run_out(self, locks: LockProvider) -> None:
        """After the leases of all sharers have ended, any owner can take the key."""
        for _ in range(2):
            assert comes_in(locks, KEY, new_owner("gone"), 2, ttl_s=0.05)
        writer = new_owner("writer")
        wait_until(lambda: comes_in(locks, KEY, writer, ALONE), timeout_s=slack_s(locks))
        assert not comes_in(locks, KEY, new_owner("m"), 2)

    def test_released(self, locks: LockProvider, server: LockServer) -> None:
        """Only its owner can release a share, and only once. Nothing of it stays in the server."""
        owner, other = new_owner("m"), new_owner("n")
        assert comes_in(locks, KEY, owner, 2)
        assert free(locks, KEY, other, 2) is False
        assert comes_in(locks, KEY, other, 2)
        assert free(locks, KEY, owner, 2) is True
        assert free(locks, KEY, owner, 2) is False
        assert renewed(locks, KEY, other, 2) == Renewal.RENEWED
        assert free(locks, KEY, other, 2) is True
        assert server.leftovers() == []

    def test_released_in_vain(self, locks: LockProvider) -> None:
        """A former holder's release, alone or shared, takes nothing from the present holder."""
        gone, holder = new_owner("gone"), new_owner("m")
        assert comes_in(locks, KEY, holder, 2)
        assert free(locks, KEY, gone, ALONE) is False
        assert renewed(locks, KEY, gone, ALONE) == Renewal.TAKEN
        assert free(locks, KEY, holder, 2) is True
        assert comes_in(locks, KEY, holder, ALONE)
        assert free(locks, KEY, gone, 2) is False
        assert renewed(locks, KEY, gone, 2) == Renewal.TAKEN
        assert renewed(locks, KEY, holder, ALONE) == Renewal.RENEWED

    def test_renewed(self, locks: LockProvider) -> None:
        """A renewal keeps a share. Of several leases in one request, each has its own answer."""

        def in_time() -> bool:
            first, second, alone, gone = (new_owner(name) for name in "fsag")
            key, other, none = fresh("a"), fresh("alone"), fresh("none")
            began_s = time.monotonic()
            assert comes_in(locks, key, first, 2, ttl_s=0.5)
            assert comes_in(locks, key, second, 2, ttl_s=30.0)
            assert comes_in(locks, other, alone, ALONE)
            holds = [
                Hold(key, first, 30.0, 2),
                Hold(other, alone, 30.0),
                Hold(none, gone, 30.0, 2),
                Hold(key, gone, 30.0, 2),
                Hold(key, second, 30.0, 2),
                Hold(other, gone, 30.0, 2),
            ]
            answers = locks.renew(holds)
            if time.monotonic() - began_s > 0.4:
                return False  # the first one's share may have run out by then
            assert answers == [
                Renewal.RENEWED,
                Renewal.RENEWED,
                Renewal.GONE,
                Renewal.TAKEN,
                Renewal.RENEWED,
                Renewal.TAKEN,
            ]
            time.sleep(0.6)
            assert not comes_in(locks, key, new_owner("m"), 2)
            assert not comes_in(locks, key, new_owner("m"), ALONE)
            assert comes_in(locks, none, new_owner("m"), ALONE)
            return True

        assert tried(in_time)

    def test_renewal_creates_nothing(self, locks: LockProvider) -> None:
        """A share whose lease has ended is not renewed, even if the limit allows one more."""
        owner, other = new_owner("m"), new_owner("n")
        assert comes_in(locks, KEY, other, 3)
        assert comes_in(locks, KEY, owner, 3, ttl_s=0.05)
        time.sleep(0.1)
        assert renewed(locks, KEY, owner, 3) != Renewal.RENEWED
        assert free(locks, KEY, other, 3) is True
        assert comes_in(locks, KEY, new_owner("writer"), ALONE)

    def test_tokens(self, locks: LockProvider) -> None:
        """Sharers of a key have one token. It is above that of the exclusive holder before them,
        and below that of the exclusive holder after them."""
        tokens: list[int] = []

        def alone() -> None:
            owner = new_owner("writer")
            tokens.append(token(locks, owner, ALONE))
            free(locks, KEY, owner, ALONE)

        alone()
        first, second, third = new_owner("r"), new_owner("r"), new_owner("r")
        tokens.append(token(locks, first, NO_LIMIT))
        assert token(locks, second, NO_LIMIT) == tokens[-1]
        free(locks, KEY, first, NO_LIMIT)
        assert token(locks, third, 2) == tokens[-1]
        free(locks, KEY, second, NO_LIMIT)
        free(locks, KEY, third, 2)
        tokens.append(token(locks, first, NO_LIMIT))
        free(locks, KEY, first, NO_LIMIT)
        alone()
        assert sorted(set(tokens)) == tokens

    def test_memory_loss(self, locks: LockProvider, server: LockServer) -> None:
        """A server that lost its data grants no more than the limit again, with a higher token.
        Former holders learn of it at their next renewal."""
        before = [new_owner("before") for _ in range(2)]
        old = [token(locks, owner, 2) for owner in before]
        server.forget()
        assert renewed(locks, KEY, before[0], 2) == Renewal.GONE
        after = [new_owner("after") for _ in range(2)]
        assert min(token(locks, owner, 2) for owner in after) > max(old)
        assert not comes_in(locks, KEY, new_owner("m"), 2)
        assert [renewed(locks, KEY, owner, 2) for owner in before] == [Renewal.TAKEN] * 2

    def test_woken(self, locks: LockProvider, server: LockServer) -> None:
        """A waiter is woken at once by a free share, by the last reader's release, and by a
        writer's release."""
        waiter = sharing_of(server.connect())

        def wait(holders: int, held_by: int, limit: int) -> float:
            key, me = fresh("a"), new_owner("me")
            owners = [new_owner("m") for _ in range(holders)]
            for owner in owners:
                assert comes_in(locks, key, owner, held_by)
            assert isinstance(ask(waiter, key, me, limit, wait_s=30.0), Held)
            got: list[float] = []
            thread = threading.Thread(target=lambda: got.append(turn_s(waiter, key, me, limit)))
            thread.start()
            time.sleep(0.1)  # until it blocks
            started = time.monotonic()
            leave = owners if limit == ALONE else owners[:1]
            for owner in leave:
                free(locks, key, owner, held_by)
            thread.join(60.0)
            return time.monotonic() - started

        for case in [(2, 2, 2), (2, NO_LIMIT, ALONE), (1, ALONE, NO_LIMIT)]:
            assert within(0.6, lambda case=case: wait(*case))  # type: ignore[misc]

    def test_given_up(self, locks: LockProvider, server: LockServer) -> None:
        """A waiter for a share that gives up has held nothing, and leaves nothing behind."""
        holder, gone = new_owner("m"), new_owner("gone")
        assert comes_in(locks, KEY, holder, ALONE)
        for limit in (2, NO_LIMIT):
            assert isinstance(ask(locks, KEY, gone, limit, wait_s=30.0), Held)
            assert free(locks, KEY, gone, limit) is False
        assert free(locks, KEY, holder, ALONE) is True
        wait_until(lambda: server.leftovers() == [], message="nothing left of the waiters")

    def test_crowd(self, server: LockServer) -> None:
        """Among many owners, never more than the limit hold the key, and none together with an
        exclusive holder. Each owner gets the key in the end."""
        mutex = threading.Lock()
        inside: list[int] = []
        together = threading.Event()
        most, wrong, turns = 0, 0, 0

        def run(limit: int) -> None:
            nonlocal most, wrong, turns
            mine = sharing_of(server.connect())
            for _ in range(4):
                owner = new_owner("m")
                turn_s(mine, KEY, owner, limit)
                with mutex:
                    inside.append(limit)  # once granted, until it is freed
                    wrong += inside.count(3) > 3 or (ALONE in inside and len(inside) > 1)
                    most, turns = max(most, len(inside)), turns + 1
                if most > 1:
                    together.set()
                if limit != ALONE:
                    together.wait(1.0)  # two owners hold the key together
                time.sleep(0.01)
                with mutex:
                    inside.remove(limit)
                free(mine, KEY, owner, limit)

        threads = [
            threading.Thread(target=run, args=(limit,)) for limit in [3] * 6 + [ALONE, NO_LIMIT]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert (wrong, turns) == (0, 4 * len(threads))
        assert most > 1


class TestSharingInOrder:
    @pytest.fixture(autouse=True)
    def _fair(self, locks: LockProvider) -> None:
        if not (locks.traits.shares and locks.traits.fair):
            pytest.skip("it shares no keys, or promises no order")

    def test_first_come(self, locks: LockProvider, server: LockServer) -> None:
        """A free share is reserved for the first waiter: no other waiter or newcomer gets it
        before, with any kind of request."""

        def is_kept() -> bool:
            key, holders, waiters = fresh("a"), two(), [new_owner(name) for name in "xyz"]
            for owner in holders:
                assert comes_in(locks, key, owner, 2)
            for owner in waiters:
                assert isinstance(ask(locks, key, owner, 2, wait_s=30.0), Held)
            free(locks, key, holders[0], 2)
            others = [
                ask(locks, key, waiters[1], 2, wait_s=30.0),
                ask(sharing_of(server.connect()), key, new_owner("hasty"), 2),
                ask(sharing_of(server.connect()), key, new_owner("reader"), NO_LIMIT),
                ask(sharing_of(server.connect()), key, new_owner("writer"), ALONE),
            ]
            return all(isinstance(each, Held) for each in others) and comes_in(
                locks, key, waiters[0], 2
            )

        assert tried(is_kept)

    def test_whole_line(self, locks: LockProvider, server: LockServer) -> None:
        """Waiters of a limit are served in the order in which they came."""

        def in_order() -> bool:
            key, holder, got = fresh("a"), new_owner("m"), list[Owner]()
            assert comes_in(locks, key, holder, ALONE)
            owners = [new_owner(f"w{number}") for number in range(6)]
            for owner in owners:
                assert isinstance(ask(locks, key, owner, 2, wait_s=30.0), Held)

            def wait(owner: Owner) -> None:
                mine = sharing_of(server.connect())
                turn_s(mine, key, owner, 2)
                got.append(owner)
                time.sleep(0.05)
                free(mine, key, owner, 2)

            threads = [threading.Thread(target=wait, args=(each,)) for each in reversed(owners)]
            for thread in threads:
                thread.start()
            free(locks, key, holder, ALONE)
            for thread in threads:
                thread.join(60.0)
            # Two are called at once, and come in the order in which they wake.
            return [set(got[at : at + 2]) for at in (0, 2, 4)] == [
                set(owners[at : at + 2]) for at in (0, 2, 4)
            ]

        assert tried(in_order)

    def test_writer_is_not_starved(self, locks: LockProvider) -> None:
        """A writer that waits stops readers that come later, and is next."""

        def is_next() -> bool:
            key, readers, writer, late = fresh("a"), two(), new_owner("w"), new_owner("late")
            for reader in readers:
                assert comes_in(locks, key, reader, NO_LIMIT)
            since_s = time.monotonic()
            assert isinstance(ask(locks, key, writer, ALONE, wait_s=30.0), Held)
            stopped = not comes_in(locks, key, new_owner("hasty"), NO_LIMIT)
            waits = stopped and not comes_in(locks, key, late, NO_LIMIT, wait_s=30.0)
            if not unless_late(waits, since_s, WAITS_S):
                return False
            since_s = time.monotonic()
            for reader in readers:
                free(locks, key, reader, NO_LIMIT)
            early = comes_in(locks, key, late, NO_LIMIT, wait_s=30.0)
            has_turn = not early and comes_in(locks, key, writer, ALONE, wait_s=30.0)
            if not unless_late(has_turn, since_s, TURN_S):
                return False
            assert free(locks, key, writer, ALONE)
            return comes_in(locks, key, late, NO_LIMIT, wait_s=30.0)

        assert tried(is_next, most=20)  # a turn is short, and each failed try was late

    def test_readers_together(self, locks: LockProvider) -> None:
        """Consecutive readers get the key together, without those behind the next writer. Their
        token is above that of the writer before them, in any order of their arrival."""

        def come_together() -> bool:
            key, first, second = fresh("a"), new_owner("v"), new_owner("w")
            before = token(locks, first, ALONE, key)
            readers = sorted((new_owner("r") for _ in range(3)), key=str)
            behind = new_owner("behind")
            for owner in reversed(readers):
                assert isinstance(ask(locks, key, owner, NO_LIMIT, wait_s=30.0), Held)
            assert isinstance(ask(locks, key, second, ALONE, wait_s=30.0), Held)
            assert isinstance(ask(locks, key, behind, NO_LIMIT, wait_s=30.0), Held)
            free(locks, key, first, ALONE)
            answers = [ask(locks, key, owner, NO_LIMIT, wait_s=30.0) for owner in readers]
            refused = [
                ask(locks, key, behind, NO_LIMIT, wait_s=30.0),
                ask(locks, key, second, ALONE, wait_s=30.0),
            ]
            tokens = {each.fence for each in answers if isinstance(each, Granted)}
            assert all(each > before for each in tokens)
            return (
                all(isinstance(each, Granted) for each in answers)
                and len(tokens) == 1
                and all(isinstance(each, Held) for each in refused)
            )

        assert tried(come_together)

    def test_writer_gives_up(self, locks: LockProvider) -> None:
        """Readers that a writer had stopped get the key as soon as the writer stops waiting."""

        def come_in() -> bool:
            key, reader, writer, late = fresh("a"), new_owner("r"), new_owner("w"), new_owner("l")
            assert comes_in(locks, key, reader, NO_LIMIT)
            since_s = time.monotonic()
            assert isinstance(ask(locks, key, writer, ALONE, wait_s=30.0), Held)
            waits = not comes_in(locks, key, late, NO_LIMIT, wait_s=30.0)
            if not unless_late(waits, since_s, WAITS_S):
                return False
            assert free(locks, key, writer, ALONE) is False
            took = took_s(lambda: sharing_of(locks).wait(key[0], late, timeout_s=30.0))
            return took < 0.5 and comes_in(locks, key, late, NO_LIMIT)

        assert tried(come_in)

    def test_given_up_when_called(self, locks: LockProvider) -> None:
        """If a waiter gives up just when a share is free for it, the next waiter gets the share."""

        def is_passed_on() -> bool:
            key, holders, gone, second = fresh("a"), two(), new_owner("g"), new_owner("s")
            for owner in holders:
                assert comes_in(locks, key, owner, 2)
            assert isinstance(ask(locks, key, gone, 2, wait_s=30.0), Held)
            free(locks, key, holders[0], 2)
            if comes_in(locks, key, second, 2, wait_s=30.0):
                return False  # by then it was its turn
            assert free(locks, key, gone, 2) is False
            took = took_s(lambda: sharing_of(locks).wait(key[0], second, timeout_s=30.0))
            return took < 0.5 and comes_in(locks, key, second, 2)

        assert tried(is_passed_on)

    def test_dead_waiter(self, locks: LockProvider, server: LockServer) -> None:
        """If a share is free, a dead waiter hardly delays those behind it. If it only stops them
        from sharing the key, it is skipped after some seconds."""

        def called_in_vain() -> float:
            key, holder, second = fresh("a"), new_owner("m"), new_owner("second")
            assert comes_in(locks, key, holder, ALONE)
            assert isinstance(ask(locks, key, new_owner("gone"), 2, wait_s=30.0), Held)
            assert isinstance(ask(locks, key, new_owner("gone"), 2, wait_s=30.0), Held)
            assert isinstance(ask(locks, key, second, 2, wait_s=30.0), Held)
            waiter = sharing_of(server.connect())
            took: list[float] = []
            thread = threading.Thread(target=lambda: took.append(turn_s(waiter, key, second, 2)))
            thread.start()
            time.sleep(0.1)  # until it blocks
            started = time.monotonic()
            free(locks, key, holder, ALONE)
            thread.join(60.0)
            return time.monotonic() - started

        assert within(0.7, called_in_vain)

        def stopped_by_the_dead() -> float:
            key, late = fresh("a"), new_owner("late")
            assert comes_in(locks, key, new_owner("reader"), NO_LIMIT)
            assert isinstance(ask(locks, key, new_owner("gone"), ALONE, wait_s=30.0), Held)
            return turn_s(sharing_of(server.connect()), key, late, NO_LIMIT)

        assert within(4.0, stopped_by_the_dead)

    def test_nothing_left(self, locks: LockProvider, server: LockServer) -> None:
        """After all owners and waiters are gone, nothing stays in the server."""
        holder, sharing = new_owner("m"), two()
        others = [(new_owner("w"), limit) for limit in (2, ALONE, NO_LIMIT)]
        assert comes_in(locks, KEY, holder, ALONE)
        for owner, limit in [*((owner, 2) for owner in sharing), *others]:
            assert isinstance(ask(locks, KEY, owner, limit, wait_s=30.0), Held)
        free(locks, KEY, holder, ALONE)
        for owner in sharing:
            turn_s(sharing_of(server.connect()), KEY, owner, 2)
        for owner in sharing:
            assert free(locks, KEY, owner, 2) is True
        for owner, limit in others:
            turn_s(sharing_of(server.connect()), KEY, owner, limit)
            assert free(locks, KEY, owner, limit) is True
        wait_until(lambda: server.leftovers() == [], message="nothing left of the waiters")


def sharing_of(locks: LockProvider) -> SharingLocks:
    """Return the provider, as one whose keys can be shared."""
    return cast("SharingLocks", locks)


def ask(
    locks: LockProvider,
    key: tuple[str, ...],
    owner: Owner,
    limit: int,
    *,
    ttl_s: float = 30.0,
    wait_s: float = 0.0,
) -> Granted | Held:
    """Return the answer. An owner that wants the key alone uses the methods of any provider."""
    wish = {"ttl_s": ttl_s, "with_fence": True, "wait_s": wait_s}
    if limit == ALONE:
        return locks.acquire(key, owner, **wish)  # type: ignore[arg-type]
    return sharing_of(locks).acquire(key, owner, limit=limit, **wish)  # type: ignore[arg-type]


def comes_in(
    locks: LockProvider, key: tuple[str, ...], owner: Owner, limit: int, **wish: float
) -> bool:
    """Return True if the request is granted."""
    return isinstance(ask(locks, key, owner, limit, **wish), Granted)


def token(locks: LockProvider, owner: Owner, limit: int, key: tuple[str, ...] = KEY) -> int:
    """Return the token of the grant."""
    answer = ask(locks, key, owner, limit)
    assert isinstance(answer, Granted)
    return answer.fence


def free(locks: LockProvider, key: tuple[str, ...], owner: Owner, limit: int) -> bool:
    """The answer."""
    if limit == ALONE:
        return locks.release(key, owner)
    return sharing_of(locks).release(key, owner, limit=limit)


def renewed(
    locks: LockProvider, key: tuple[str, ...], owner: Owner, limit: int, *, ttl_s: float = 30.0
) -> str:
    """The answer for one lease."""
    (answer,) = locks.renew([Hold(key, owner, ttl_s, limit)])
    return answer


def turn_s(locks: SharingLocks, key: tuple[str, ...], owner: Owner, limit: int) -> float:
    """Wait as a future holder does. Return how long it took."""
    started = time.monotonic()
    until = started + 3 * server.PATIENCE_S
    while (left_s := until - time.monotonic()) > 0:
        answer = ask(locks, key, owner, limit, wait_s=left_s)
        if isinstance(answer, Granted):
            return time.monotonic() - started
        pause_s = min(left_s, answer.remaining_s + 0.01)
        if limit == ALONE:
            locks.wait(answer.key, owner, timeout_s=pause_s)
        else:
            locks.wait(answer.key, owner, timeout_s=pause_s, limit=limit)
    raise AssertionError("its turn never came")


def two() -> list[Owner]:
    """Two holders."""
    return [new_owner("m"), new_owner("n")]
