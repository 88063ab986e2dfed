"""Wrong lock providers, each with the test of the contract suite that has to fail.

Two correct providers in memory are broken in one part at a time. `MUTANTS` are named for their
mistake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pytest_taskguard.lock_contract import LockServer
from support.session_locks import SessionLocks, SessionServer, session_kind
from taskguard.errors import LockServerUnavailableError
from taskguard.locks import Granted, Held, Hold, Holder, MemoryLocks, Owner, Renewal, Traits
from taskguard.model.lease import new_owner

MUTANTS: dict[str, tuple[Callable[[], LockServer], str]] = {}


def caught_by(test: str) -> Callable[[type[MemoryLocks]], type[MemoryLocks]]:
    """Register a mutant of the provider in memory."""

    def register(kind: type[MemoryLocks]) -> type[MemoryLocks]:
        def server() -> LockServer:
            locks = kind()
            return LockServer(lambda: locks, locks.flush, lambda: list(locks.held()))

        MUTANTS[kind.__name__] = server, test
        return kind

    return register


def session_caught_by(test: str) -> Callable[[type[SessionLocks]], type[SessionLocks]]:
    """Register a mutant of the provider of sessions."""

    def register(kind: type[SessionLocks]) -> type[SessionLocks]:
        def made() -> LockServer:
            server = SessionServer()
            return session_kind(server, kind)

        MUTANTS[kind.__name__] = made, test
        return kind

    return register


class Locks(MemoryLocks):
    """Correct implementations, for use within a wrong one."""

    def ask(self, keys: tuple[str, ...], owner: Owner, ttl_s: float = 30.0) -> Granted | Held:
        return MemoryLocks.acquire(self, keys, owner, ttl_s=ttl_s, with_fence=True, wait_s=0.0)

    def holder(self, key: str) -> Owner | None:
        return self.held().get(key)


@caught_by("TestAcquire::test_all_or_none")
class TakesWhatIsFree(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        for key in keys:
            answer = super().acquire((key,), owner, **asked)
            if isinstance(answer, Held):
                return answer
        return answer


@caught_by("TestAcquire::test_same_message_is_no_owner")
class OwnersByMessage(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        return super().acquire(keys, Owner("", owner.message), **asked)


@caught_by("TestAcquire::test_taken")
class ForgetsTheMessage(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        answer = super().acquire(keys, owner, **asked)
        return replace(answer, owner=Owner(answer.owner.nonce, "")) if _held(answer) else answer


@caught_by("TestAcquire::test_asked_twice")
class NewGrantEachTime(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        super().release(keys, owner)
        return super().acquire(keys, owner, **asked)


@caught_by("TestAcquire::test_asked_twice")
class RefusesItsOwner(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        for key in keys:
            if self.holder(key) == owner:
                return Held(key, owner, 1.0)
        return super().acquire(keys, owner, **asked)


@caught_by("TestAcquire::test_asked_twice_extends")
class NeverExtendsAGrant(Locks):
    def acquire(self, keys, owner, *, ttl_s, **asked):  # type: ignore[no-untyped-def]
        again = any(self.holder(key) == owner for key in keys)
        super().acquire(keys, owner, ttl_s=5.0 if again else ttl_s, **asked)
        return Granted(1, ttl_s)


@caught_by("TestAcquire::test_runs_out")
class NeverEnds(Locks):
    def acquire(self, keys, owner, *, ttl_s, **asked):  # type: ignore[no-untyped-def]
        return super().acquire(keys, owner, ttl_s=3600.0, **asked)


@caught_by("TestAcquire::test_any_key")
class KeysWithPatterns(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        return super().acquire(tuple(key.strip("}{") or "x" for key in keys), owner, **asked)


@caught_by("TestTokens::test_grow")
class TokensOfMilliseconds(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        answer = super().acquire(keys, owner, **asked)
        return answer if _held(answer) else replace(answer, fence=answer.fence // 1000)


@caught_by("TestTokens::test_are_microseconds")
class TokensFromOne(Locks):
    first: int = 0

    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        answer = super().acquire(keys, owner, **asked)
        if _held(answer):
            return answer
        self.first = self.first or answer.fence - 1
        return replace(answer, fence=answer.fence - self.first)


@caught_by("TestTokens::test_after_memory_loss")
class TokensOfACounter(Locks):
    FIRST = 1_600_000_000_000_000
    count = FIRST

    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        answer = super().acquire(keys, owner, **asked)
        self.count += 1
        return answer if _held(answer) else replace(answer, fence=self.count)

    def flush(self) -> None:
        super().flush()
        self.count = self.FIRST


@caught_by("TestTraits::test_tokens")
class TokensThatItDoesNotHave(Locks):
    @property
    def traits(self) -> Traits:
        return Traits(tokens=False)


@caught_by("TestTraits::test_ttl")
class GrantsLessThanWasAskedFor(Locks):
    def acquire(self, keys, owner, *, ttl_s, **asked):  # type: ignore[no-untyped-def]
        return super().acquire(keys, owner, ttl_s=ttl_s / 2, **asked)


@caught_by("TestTraits::test_ttl")
class GrantsLessThanItsLeast(Locks):
    @property
    def traits(self) -> Traits:
        return Traits(min_ttl_s=5.0)


@caught_by("TestHolders::test_of_a_free_key")
class NamesTheLastHolder(Locks):
    last: Owner | None = None

    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        self.last = owner
        return super().acquire(keys, owner, **asked)

    def holders(self, key: str) -> list[Holder]:
        found = super().holders(key)
        return found or ([] if self.last is None else [Holder(key, self.last, 0, 1.0)])


@caught_by("TestHolders::test_of_a_taken_key")
class NamesNoToken(Locks):
    def holders(self, key: str) -> list[Holder]:
        return [replace(each, fence=0) for each in super().holders(key)]


@caught_by("TestHolders::test_of_a_free_key")
class AsksByTaking(Locks):
    def holders(self, key: str) -> list[Holder]:
        answer = self.ask((key,), new_owner("asks"), 60.0)
        return [Holder(key, answer.owner, 0, 1.0)] if isinstance(answer, Held) else []


@caught_by("TestHolders::test_changes_nothing")
class RenewsWhatItShows(Locks):
    def holders(self, key: str) -> list[Holder]:
        found = super().holders(key)
        self.renew([Hold((key,), each.owner, 60.0) for each in found])
        return found


@caught_by("TestHolders::test_names_what_can_be_released")
class NamesOnlyTheNonce(Locks):
    def holders(self, key: str) -> list[Holder]:
        return [replace(each, owner=Owner(each.owner.nonce, "")) for each in super().holders(key)]


@caught_by("TestSharing::test_holders")
class NamesOneSharer(Locks):
    def holders(self, key: str) -> list[Holder]:
        return super().holders(key)[:1]


@caught_by("TestRelease::test_by_another")
class FreesForAnybody(Locks):
    def release(self, keys, owner):  # type: ignore[no-untyped-def]
        holders = [self.holder(key) for key in keys]
        return bool([super(FreesForAnybody, self).release(keys, each) for each in holders if each])


@caught_by("TestRelease::test_twice")
class AlwaysHasReleased(Locks):
    def release(self, keys, owner):  # type: ignore[no-untyped-def]
        super().release(keys, owner)
        return True


@caught_by("TestRelease::test_partly")
class FreesAllOrNothing(Locks):
    def release(self, keys, owner):  # type: ignore[no-untyped-def]
        return all(self.holder(key) == owner for key in keys) and super().release(keys, owner)


@caught_by("TestHandOver::test_by_another")
class HandsOverForAnybody(Locks):
    def hand_over(self, keys, owner, *, to, ttl_s):  # type: ignore[no-untyped-def]
        holder = self.holder(keys[0])
        return holder is not None and super().hand_over(keys, holder, to=to, ttl_s=ttl_s)


@caught_by("TestHandOver::test_twice")
class HandsOverOnce(Locks):
    def hand_over(self, keys, owner, *, to, ttl_s):  # type: ignore[no-untyped-def]
        mine = any(self.holder(key) == owner for key in keys)
        return super().hand_over(keys, owner, to=to, ttl_s=ttl_s) and mine


@caught_by("TestHandOver::test_free_key")
class GivesWhatNobodyHas(Locks):
    def hand_over(self, keys, owner, *, to, ttl_s):  # type: ignore[no-untyped-def]
        return super().hand_over(keys, owner, to=to, ttl_s=ttl_s) or _granted(
            self.ask(keys, to, ttl_s)
        )


@caught_by("TestRenew::test_creates_nothing")
class TakesWhatIsGone(Locks):
    def renew(self, holds):  # type: ignore[no-untyped-def]
        return [
            Renewal.RENEWED if _granted(self.ask(h.keys, h.owner, h.ttl_s)) else Renewal.TAKEN
            for h in holds
        ]


@caught_by("TestRenew::test_answers")
class LooksAtTheFirstKey(Locks):
    def renew(self, holds):  # type: ignore[no-untyped-def]
        return super().renew([Hold(hold.keys[:1], hold.owner, hold.ttl_s) for hold in holds])


@caught_by("TestRenew::test_many")
class AnswersSorted(Locks):
    def renew(self, holds: Sequence[Hold]) -> list[str]:
        return sorted(super().renew(holds))


@caught_by("TestRenew::test_keeps_alive")
class OnlySaysThatItRenewed(Locks):
    def renew(self, holds: Sequence[Hold]) -> list[str]:
        held = self.held()
        mine = [all(held.get(key) == hold.owner for key in hold.keys) for hold in holds]
        return [Renewal.RENEWED if each else Renewal.GONE for each in mine]


@caught_by("TestWait::test_woken")
class NeverWakes(Locks):
    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        time.sleep(min(max(timeout_s, 0.0), 1.0))


@caught_by("TestWait::test_bounded")
class NeverWaits(Locks):
    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """A waiter polls without a pause."""


@caught_by("TestOrder::test_no_newcomer_overtakes")
class LetsAnybodyIn(Locks):
    def _keep_for_first(self, key, now_s):  # type: ignore[no-untyped-def]
        return None


@caught_by("TestOrder::test_no_newcomer_after_a_dead_holder")
class LooksAtTheLineOnlyWhenItReleases(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        with self._mutex:
            for key in keys:
                if self._unexpired(key, self._clock.monotonic_s()) is None:
                    self._lines.pop(key, None)
        return super().acquire(keys, owner, **asked)


@caught_by("TestOrder::test_no_newcomer_overtakes")
class ServesWhoWakesFirst(Locks):
    def _may_take(self, key, owner, lock):  # type: ignore[no-untyped-def]
        line = self._lines.get(key, ())
        return lock.owner == owner or (owner in line and lock.owner in line)

    def _is_turn(self, key, owner):  # type: ignore[no-untyped-def]
        holder = self.holder(key)
        return holder is None or holder in self._lines.get(key, ())


@caught_by("TestOrder::test_first_come")
class AskingAgainCostsThePlace(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        answer = super().acquire(keys, owner, **asked)
        line = self._lines.get(answer.key, {}) if _held(answer) else {}
        if owner in line:
            line[owner] = line.pop(owner)
        return answer


@caught_by("TestOrder::test_given_up")
class StaysInTheLine(Locks):
    def _step_back(self, key, owner, now_s):  # type: ignore[no-untyped-def]
        return False


@caught_by("TestOrder::test_given_up_when_called")
class GivesUpWhatItWasCalledFor(Locks):
    def _step_back(self, key, owner, now_s):  # type: ignore[no-untyped-def]
        return self._leave(key, owner)


@caught_by("TestOrder::test_dead_waiter")
class WaitsForTheDead(Locks):
    def _keep_for_first(self, key, now_s):  # type: ignore[no-untyped-def]
        for owner in self._lines.get(key, ()):
            self._hear(key, owner, now_s)
            return super()._keep_for_first(key, now_s)
        return None


@caught_by("TestOrder::test_late_waiter")
class ForgetsWhoWasLate(Locks):
    def _keep_for_first(self, key, now_s):  # type: ignore[no-untyped-def]
        for owner, waiter in list(self._lines.get(key, {}).items()):
            if waiter.late_at_s <= now_s:
                self._leave(key, owner)
        return super()._keep_for_first(key, now_s)


@caught_by("TestOrder::test_late_but_before_the_next")
class RefusesWhoIsLate(Locks):
    def _may_take(self, key, owner, lock):  # type: ignore[no-untyped-def]
        return lock.owner == owner


@caught_by("TestOrder::test_asked_twice")
class TakesWhatIsKeptForAGrant(Locks):
    def _token(self, keys, *, again):  # type: ignore[no-untyped-def]
        return super()._token(keys, again=all(key in self._fences for key in keys))


@caught_by("TestOrder::test_several_keys")
class HoldsAndWaits(Locks):
    def _refuse(self, keys, taken, *asked, **options):  # type: ignore[no-untyped-def]
        return super()._refuse((taken,), taken, *asked, **options)


@caught_by("TestSharing::test_limit")
class OneMoreThanTheLimit(Locks):
    def _share(self, key, owner, ttl_s, limit, *asked, **options):  # type: ignore[no-untyped-def]
        return super()._share(key, owner, ttl_s, limit + 1, *asked, **options)


@caught_by("TestSharing::test_own_limit")
class TheFirstLimitGoverns(Locks):
    def _share(self, key, owner, ttl_s, limit, *asked, **options):  # type: ignore[no-untyped-def]
        self.first = self.__dict__.setdefault("first", limit)
        return super()._share(key, owner, ttl_s, self.first, *asked, **options)


@caught_by("TestSharing::test_readers")
class WritersBesideReaders(Locks):
    def acquire(self, keys, owner, *, limit=1, **asked):  # type: ignore[no-untyped-def]
        if limit == 1:
            for key in keys:
                self._shares.pop(key, None)
        return super().acquire(keys, owner, limit=limit, **asked)


@caught_by("TestSharing::test_readers")
class DoesNotSayThatItIsShared(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        answer = super().acquire(keys, owner, **asked)
        return replace(answer, shared=False) if _held(answer) else answer


@caught_by("TestSharing::test_asked_twice")
class AShareForEachCall(Locks):
    def _share(self, key, owner, *asked, **options):  # type: ignore[no-untyped-def]
        held = self._shares.get(key, {})
        if owner in held:
            held[new_owner("again")] = held[owner]
        return super()._share(key, owner, *asked, **options)


@caught_by("TestSharing::test_runs_out")
class SharesThatNeverEnd(Locks):
    def _sharing(self, key, now_s):  # type: ignore[no-untyped-def]
        return super()._sharing(key, 0.0)


@caught_by("TestSharing::test_released")
class FreesAllShares(Locks):
    def release(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        freed = super().release(keys, owner, **asked)
        if freed:
            self._shares.pop(keys[0], None)
        return freed


@caught_by("TestSharing::test_renewal_creates_nothing")
class RenewsAShareThatIsGone(Locks):
    def renew(self, holds: Sequence[Hold]) -> list[str]:
        for hold in holds:
            if hold.limit != 1:
                self._shares.setdefault(hold.keys[0], {})[hold.owner] = float("inf")
        return super().renew(holds)


@caught_by("TestSharing::test_tokens")
class ATokenForEachShare(Locks):
    def _token(self, keys, *, again):  # type: ignore[no-untyped-def]
        return super()._token(keys, again=False)


@caught_by("TestSharing::test_tokens")
class TheTokenThatWasThereBefore(Locks):
    def _token(self, keys, *, again):  # type: ignore[no-untyped-def]
        return super()._token(keys, again=again or bool(self._shares))


@caught_by("TestSharingInOrder::test_first_come")
class SharesWithoutALine(Locks):
    def _share(self, key, *asked, **options):  # type: ignore[no-untyped-def]
        self._lines.pop(key, None)
        return super()._share(key, *asked, **options)


@caught_by("TestSharingInOrder::test_writer_is_not_starved")
class ReadersGoPastAWriter(Locks):
    def _share(self, key, *asked, **options):  # type: ignore[no-untyped-def]
        line = self._lines.get(key, {})
        for owner in [each for each, waiter in line.items() if waiter.limit == 1]:
            line[owner] = line.pop(owner)
            line[owner].late_at_s = 0.0
        return super()._share(key, *asked, **options)


@caught_by("TestSharingInOrder::test_readers_together")
class CallsOneAtATime(Locks):
    def _keep_for_first(self, key, now_s):  # type: ignore[no-untyped-def]
        late = {}
        for owner, waiter in list(self._lines.get(key, {}).items())[1:]:
            late[owner], waiter.late_at_s = waiter.late_at_s, 0.0
        lock = super()._keep_for_first(key, now_s)
        for owner, at_s in late.items():
            if owner in self._lines.get(key, {}):
                self._lines[key][owner].late_at_s = at_s
        return lock


@caught_by("TestSharingInOrder::test_writer_gives_up")
class StopsReadersForGood(Locks):
    def _step_back(self, key, owner, now_s):  # type: ignore[no-untyped-def]
        line = self._lines.get(key, {})
        waited = super()._step_back(key, owner, now_s)
        if waited and self._unexpired(key, now_s) is None:
            for each in line:
                self._shares.get(key, {}).pop(each, None)
        return waited

    def _is_turn(self, key, owner):  # type: ignore[no-untyped-def]
        return owner in self._shares.get(key, {})


@caught_by("TestContention::test_one_of_many")
class LooksAndThenTakes(Locks):
    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        probe = new_owner("probe")
        answer = super().acquire(keys, probe, **asked)
        if _held(answer):
            return answer
        super().release(keys, probe)
        time.sleep(0.05)
        for key in keys:
            self._locks.pop(key, None)
        return super().acquire(keys, owner, **asked)


@caught_by("TestClose::test_used_again")
class FreesWhatItClosed(Locks):
    def close(self) -> None:
        self.flush()


@session_caught_by("TestSession::test_close")
class KeepsWhatItClosed(SessionLocks):
    def close(self) -> None:
        """The session stays."""


@session_caught_by("TestSession::test_lost")
class NeverConnectsAgain(SessionLocks):
    @property
    def session(self) -> int:
        self._session = self._session or self.server.open()
        return self._session

    def acquire(self, keys, owner, **asked):  # type: ignore[no-untyped-def]
        answer = super().acquire(keys, owner, **asked)
        return answer if self.server.knows(self.session) else Held(keys[0], owner, 1.0)


@session_caught_by("TestSession::test_lost")
class TrustsItsMemory(SessionLocks):
    def renew(self, holds: Sequence[Hold]) -> list[str]:
        return [Renewal.RENEWED for _ in holds]


@session_caught_by("TestSwallowedReply::test_of_acquire")
class KeepsWhatItDoesNotKnow(SessionLocks):
    def _hear(self) -> None:
        if self.deaf:
            raise LockServerUnavailableError("No reply came.")


def _held(answer: Granted | Held) -> bool:
    return isinstance(answer, Held)


def _granted(answer: Granted | Held) -> bool:
    return isinstance(answer, Granted)
