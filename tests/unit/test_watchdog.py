"""The watchdog, one round at a time, on a clock that the test moves."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest

from support.clock import FakeClock
from support.waiting import patience_s, wait_until
from taskguard import native
from taskguard.errors import LeaseLostError, LedgerUnavailableError, LockServerUnavailableError
from taskguard.events import Event, Events
from taskguard.locks.base import Hold, Renewal
from taskguard.locks.memory import MemoryLocks
from taskguard.model.claims import Claim, ClaimRequest
from taskguard.model.lease import Lease, new_owner, trusted_until_s
from taskguard.run.parking import Line
from taskguard.run.tracked import TrackedLease
from taskguard.run.watchdog import Watchdog

if TYPE_CHECKING:
    from taskguard.ledger.ports import LineLedger

TTL_S = 9.0


class RenewingLedger:
    """The part of a ledger that the watchdog uses."""

    def __init__(self) -> None:
        self.answer = Renewal.RENEWED
        self.away = False
        self.batches: list[int] = []

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        if self.away:
            raise LedgerUnavailableError("away")
        self.batches.append(len(claims))
        return [self.answer] * len(claims)


class FlakyLocks(MemoryLocks):
    """A lock server that can be away."""

    away = False
    silent: tuple[str, ...] = ()  # keys of a part that does not answer
    skips = 0

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        if self.away:
            raise LockServerUnavailableError("away")
        if self.skips:
            self.skips -= 1
            return [Renewal.SKIPPED] * len(holds)
        heard = [hold for hold in holds if hold.keys[0] not in self.silent]
        answers = dict(zip(heard, super().renew(heard), strict=True))
        return [answers.get(hold, Renewal.UNANSWERED) for hold in holds]


class WatchdogRig:
    """A watchdog with its parts in reach."""

    def __init__(self, *, with_ledger: bool) -> None:
        self.clock = FakeClock()
        self.locks = FlakyLocks(clock=self.clock)
        self.ledger = RenewingLedger()
        self.events: list[Event] = []
        self.with_ledger = with_ledger
        self.watchdog = Watchdog(
            locks=self.locks,
            ledger=self.ledger if with_ledger else None,  # type: ignore[arg-type]
            events=Events(self.events.append),
            clock=self.clock,
            threaded=False,
        )

    def keep(self, key: str = "k", *, max_hold_s: float | None = None) -> TrackedLease:
        owner = new_owner("m1")
        now_s = self.clock.monotonic_s()
        self.locks.acquire((key,), owner, ttl_s=TTL_S, with_fence=False, wait_s=0)
        lease = Lease(
            keys=(key,),
            owner=owner,
            ttl_s=TTL_S,
            clock=self.clock,
            taken_at_s=now_s,
            trusted_until_s=trusted_until_s(requested_at_s=now_s, ttl_s=TTL_S),
            max_hold_until_s=None if max_hold_s is None else now_s + max_hold_s,
        )
        request = ClaimRequest((key,), owner, TTL_S, work="w")
        claim = Claim(request, fence=1) if self.with_ledger else None
        tracked = TrackedLease(lease, claim=claim, at_lock_server=True, requested_at_s=now_s)
        self.watchdog.track(tracked)
        return tracked

    def after(self, seconds: float, *, step_s: float = 0.5) -> None:
        """Let time go on with a round every half second."""
        until_s = self.clock.monotonic_s() + seconds
        while self.clock.monotonic_s() < until_s:
            self.clock.advance(step_s)
            self.watchdog.tick()

    def names(self) -> list[str]:
        return [event.name for event in self.events]


@pytest.mark.parametrize("with_ledger", [True, False])
def test_a_lease_is_kept_for_as_long_as_its_body_runs(with_ledger: bool) -> None:
    """Ten times its ttl, and it is never lost; the lock server keeps it too."""
    rig = WatchdogRig(with_ledger=with_ledger)
    tracked = rig.keep()
    rig.after(10 * TTL_S)
    tracked.lease.check()
    other = rig.locks.acquire(("k",), new_owner("m2"), ttl_s=1, with_fence=False, wait_s=0)
    assert type(other).__name__ == "Held"
    assert "lost" not in rig.names()


def test_a_part_of_the_lock_server_is_silent() -> None:
    """Leases of the others are kept; those of that part keep their deadlines, are asked for again
    soon, and are lost only when that has passed."""
    rig = WatchdogRig(with_ledger=False)
    heard, unheard, back = (rig.keep(key) for key in ("heard", "unheard", "back"))
    rig.locks.silent = ("unheard", "back")
    rig.after(TTL_S * 0.6)
    assert not unheard.lease.is_lost
    failed = [event for event in rig.events if event.name == "renewal_failed"]
    assert len(failed) >= 3
    assert {(event.key, event.count) for event in failed} == {("unheard", 2)}  # type: ignore[attr-defined]
    rig.locks.silent = ("unheard",)
    rig.after(TTL_S)
    heard.lease.check()
    back.lease.check()
    assert unheard.lease.is_lost
    assert rig.names().count("lost") == 1


def test_a_silent_part_costs_nothing_where_a_ledger_decides() -> None:
    """The ledger's answer counts, and the lease is not taken again by the way."""
    rig = WatchdogRig(with_ledger=True)
    tracked = rig.keep()
    rig.locks.silent = ("k",)
    rig.after(5 * TTL_S)
    tracked.lease.check()
    assert rig.locks.held() == {}


def test_a_renewal_that_was_skipped_is_tried_again_soon() -> None:
    """If the lock's row was locked, the lease is not lost, and not trusted for longer."""
    rig = WatchdogRig(with_ledger=False)
    tracked = rig.keep()
    before_s = tracked.lease.trusted_until_s
    rig.locks.skips = 1_000
    rig.after(TTL_S / 3 + 0.5)
    assert rig.locks.skips < 1_000
    rig.locks.skips = 0
    assert tracked.lease.trusted_until_s == before_s
    rig.after(TTL_S)
    tracked.lease.check()
    assert "lost" not in rig.names()


def test_renewals_are_batched() -> None:
    """A thousand leases taken at different moments share a round trip or two each time."""
    rig = WatchdogRig(with_ledger=True)
    for number in range(1_000):
        rig.keep(f"k{number}")
        rig.clock.advance(0.0005)
    rig.after(5 * TTL_S)
    assert max(rig.ledger.batches) >= 500
    assert len(rig.ledger.batches) <= 2 * (5 * 3 + 3)


@pytest.mark.parametrize("with_ledger", [True, False])
def test_an_unanswered_renewal_leaves_the_deadline_and_is_tried_again(with_ledger: bool) -> None:
    """Away for less than the ttl: nothing is lost. An event says what happened."""
    rig = WatchdogRig(with_ledger=with_ledger)
    tracked = rig.keep()
    before_s = tracked.lease.trusted_until_s
    rig.ledger.away = rig.locks.away = True
    rig.after(6.0)
    assert tracked.lease.trusted_until_s == before_s
    assert "renewal_failed" in rig.names()
    rig.ledger.away = rig.locks.away = False
    rig.after(6.0)
    tracked.lease.check()
    assert "lost" not in rig.names()


@pytest.mark.parametrize("with_ledger", [True, False])
def test_a_lease_that_could_not_be_renewed_is_lost_at_its_deadline(with_ledger: bool) -> None:
    """At the deadline, and not before, `lease.lost` is set, and one event is emitted."""
    rig = WatchdogRig(with_ledger=with_ledger)
    tracked = rig.keep()
    rig.ledger.away = rig.locks.away = True
    rig.after(8.5)
    assert not tracked.lease.lost.is_set()
    rig.after(1.0)
    assert tracked.lease.lost.is_set()
    with pytest.raises(LeaseLostError):
        tracked.lease.check()
    rig.after(10.0)
    assert rig.names().count("lost") == 1


def test_with_a_ledger_the_lock_servers_word_ends_no_lease() -> None:
    """Emptied, it is given the lease again with the same nonce."""
    rig = WatchdogRig(with_ledger=True)
    tracked = rig.keep()
    rig.locks.flush()
    rig.after(4.0)
    tracked.lease.check()
    found = rig.locks.acquire(("k",), new_owner("m2"), ttl_s=1, with_fence=False, wait_s=0)
    assert getattr(found, "owner", None) == tracked.lease.owner


def test_with_locks_only_a_forgotten_lease_is_lost() -> None:
    """Another holder may have had the key in between, so the lease is not taken again."""
    rig = WatchdogRig(with_ledger=False)
    tracked = rig.keep()
    rig.locks.flush()
    rig.after(4.0)
    assert tracked.lease.lost.is_set()


def test_a_takeover_in_the_ledger_loses_the_lease_and_frees_the_lock_server() -> None:
    """If the ledger says that it was taken over, the lock server's lease is released for the next
    holder."""
    rig = WatchdogRig(with_ledger=True)
    tracked = rig.keep()
    rig.ledger.answer = Renewal.TAKEN
    rig.after(4.0)
    assert tracked.lease.lost.is_set()
    found = rig.locks.acquire(("k",), new_owner("m2"), ttl_s=1, with_fence=False, wait_s=0)
    assert type(found).__name__ == "Granted"


def test_a_skipped_row_is_not_lost() -> None:
    """If the body's own transaction holds its row for a moment, the old deadline stays."""
    rig = WatchdogRig(with_ledger=True)
    tracked = rig.keep()
    rig.ledger.answer = Renewal.SKIPPED
    rig.after(4.0)
    assert not tracked.lease.lost.is_set()
    rig.ledger.answer = Renewal.RENEWED
    rig.after(2 * TTL_S)
    tracked.lease.check()


def test_nothing_is_held_for_longer_than_max_hold() -> None:
    """After `max_hold_s` the lease is lost."""
    rig = WatchdogRig(with_ledger=True)
    tracked = rig.keep(max_hold_s=20.0)
    rig.after(19.0)
    tracked.lease.check()
    rig.after(1.5)
    with pytest.raises(LeaseLostError, match="max_hold_s"):
        tracked.lease.check()


def test_a_dropped_lease_is_renewed_no_more() -> None:
    """And it is not reported as lost when its time runs out."""
    rig = WatchdogRig(with_ledger=True)
    tracked = rig.keep()
    rig.watchdog.untrack(tracked)
    rig.watchdog.release_lock(tracked)
    rig.after(3 * TTL_S)
    assert rig.ledger.batches == []
    assert "lost" not in rig.names()


def _by_watchdog(rig: WatchdogRig, tracked: TrackedLease) -> None:
    rig.watchdog.release_lock(tracked)


def _with_its_hint(rig: WatchdogRig, tracked: TrackedLease) -> None:
    line = Line(rig.locks, cast("LineLedger", None), Events())
    assert line.release(tracked) == (True, False)


@pytest.mark.parametrize("release", [_by_watchdog, _with_its_hint])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_lease_that_was_let_go_is_never_taken_again(
    monkeypatch: pytest.MonkeyPatch,
    release: Callable[[WatchdogRig, TrackedLease], None],
    in_flight: bool,
) -> None:
    """A round that began before the release finds the lock server empty and leaves it so."""
    rig = WatchdogRig(with_ledger=True)
    tracked = rig.keep()
    renew = rig.locks.renew

    def renew_late(holds: Sequence[Hold]) -> list[str]:
        if not tracked.ended:
            release(rig, tracked)
        return renew(holds)

    if in_flight:
        monkeypatch.setattr(rig.locks, "renew", renew_late)
    else:
        release(rig, tracked)
    rig.after(4.0)
    assert tracked.ended
    found = rig.locks.acquire(("k",), new_owner("m2"), ttl_s=1, with_fence=False, wait_s=0)
    assert type(found).__name__ == "Granted"


def test_the_thread_renews_by_itself_and_a_forked_child_keeps_nothing() -> None:
    """One native thread for all leases; the child of a fork starts with none."""
    locks = MemoryLocks()
    events: list[Event] = []
    watchdog = Watchdog(locks=locks, ledger=None, events=Events(events.append))
    threads = threading.active_count()
    clock = watchdog._clock
    for number in range(50):
        owner = new_owner("m")
        now_s = clock.monotonic_s()
        locks.acquire((f"k{number}",), owner, ttl_s=3.0, with_fence=False, wait_s=0)
        lease = Lease(
            keys=(f"k{number}",),
            owner=owner,
            ttl_s=3.0,
            clock=clock,
            taken_at_s=now_s,
            trusted_until_s=trusted_until_s(requested_at_s=now_s, ttl_s=3.0),
        )
        watchdog.track(TrackedLease(lease, claim=None, at_lock_server=True, requested_at_s=now_s))
    wait_until(
        lambda: sum(event.name == "renewed" for event in events) >= 3,
        message="three rounds",
    )
    assert threading.active_count() <= threads + 1
    pid = os.fork()
    if pid == 0:
        owner = new_owner("child")
        now_s = clock.monotonic_s()
        lease = Lease(
            keys=("child",),
            owner=owner,
            ttl_s=30,
            clock=clock,
            taken_at_s=now_s,
            trusted_until_s=now_s + 30,
        )
        watchdog.track(TrackedLease(lease, claim=None, at_lock_server=False, requested_at_s=now_s))
        os._exit(0 if len(watchdog) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_interrupt_reaches_the_body_and_never_what_comes_after_it() -> None:
    """on_lost="interrupt": LeaseLostError in the body's thread; once left, none arrives."""
    rig = WatchdogRig(with_ledger=True)
    tracked = rig.keep()
    tracked._interruptible = True
    caught: list[BaseException] = []
    inside = threading.Event()
    go = threading.Event()

    def body() -> None:
        try:
            tracked.enter_body()
            inside.set()
            while not go.wait(0.01):
                pass
            tracked.leave_body()
        except LeaseLostError as error:
            caught.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    inside.wait(patience_s())
    tracked.interrupt()
    thread.join(patience_s())
    assert len(caught) == 1

    left = rig.keep("k2")
    left._interruptible = True
    left.enter_body()
    left.leave_body()
    left.interrupt()
    assert sum(range(100_000)) == 4_999_950_000


def test_an_interrupt_spares_threads_that_the_body_is_starting() -> None:
    """On Python 3.11, a thread that has not begun has the number of the thread that starts it. It
    must not get the error."""
    rig = WatchdogRig(with_ledger=True)
    hit: list[object] = []
    affinity = os.sched_getaffinity(0)
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = threading.excepthook = hit.append  # type: ignore[assignment]
    os.sched_setaffinity(0, {min(affinity)})  # a new thread then waits for its starter
    try:
        for number in range(150):
            tracked = rig.keep(f"k{number}")
            tracked._interruptible = True
            inside, ended = threading.Event(), threading.Event()

            def body(tracked: Any = tracked, begun: Any = inside, end: Any = ended) -> None:
                tracked.enter_body()
                begun.set()
                # `Thread.start()` makes it a KeyError if the new thread has begun by then.
                with contextlib.suppress(LeaseLostError, KeyError):
                    for start in itertools.cycle((_start_by_threading, _start_by_native)):
                        start()
                tracked.leave_body()
                end.set()

            threading.Thread(target=body, daemon=True).start()
            assert inside.wait(patience_s())
            tracked.interrupt()
            assert ended.wait(patience_s()), (number, hit)
    finally:
        os.sched_setaffinity(0, affinity)
        sys.unraisablehook, threading.excepthook = hooks
    assert not hit


def test_a_withdrawn_interrupt_does_not_stop_a_traced_thread() -> None:
    """A debugger can trace a thread after an interrupt of its body was withdrawn. On Python 3.11
    the interpreter would otherwise look for the error forever."""
    program = (
        "import sys, threading\n"
        "from taskguard.native import raise_in_thread\n"
        "raise_in_thread(threading.get_ident(), None)\n"
        "sys.settrace(lambda *of_call: None)\n"
        "(lambda: None)()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patience_s())


@pytest.mark.parametrize("start", ["_start_by_threading", "_start_by_native"])
def test_an_interrupt_spares_a_thread_that_is_started_after_the_look(
    monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """On Python 3.11, the body starts no thread between the look at its stack and the error. If it
    did, the new thread would get the error, and the body would wait for it forever."""
    if not native._BEGINS_AS_ITS_STARTER:
        pytest.skip("a new thread has a number of its own")
    tracked = WatchdogRig(with_ledger=True).keep("k")
    tracked._interruptible = True
    inside, looked, ended = threading.Event(), native.Wakeup(), threading.Event()
    is_starting_another = native._is_starting_another
    early: list[bool] = []

    def body() -> None:
        tracked.enter_body()
        inside.set()
        looked.wait(None)
        with contextlib.suppress(LeaseLostError):
            while True:
                globals()[start]()
                early.append(looking)
        tracked.leave_body()
        ended.set()

    def look(number: int) -> bool:
        nonlocal looking
        found = is_starting_another(number)
        looking = True
        looked.set()
        time.sleep(0.05)  # in which the body would start a thread
        looking = False
        return found

    looking = False
    threading.Thread(target=body, daemon=True).start()
    assert inside.wait(patience_s())
    monkeypatch.setattr(native, "_is_starting_another", look)
    tracked.interrupt()
    assert ended.wait(patience_s())
    assert not any(early)


def test_a_forked_process_starts_threads_whatever_its_parent_held() -> None:
    """A fork while another thread has a lock of `start_thread()` does not block the child."""
    with native._before_start:
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # the end of a child that waits for the lock
            native.start_thread(int)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _start_by_threading() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def _start_by_native() -> None:
    done = native.Wakeup()
    native.start_thread(done.set)
    done.wait(None)
