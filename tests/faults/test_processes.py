"""The process that holds a lease is frozen, starved, or stuck in C: another does its work.

There is one effect each, the late commit is refused, and the holder learns of it as soon as it can.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from support import cgroups
from support.needs import allowed
from support.waiting import patience_s, wait_until
from taskguard import Guard
from taskguard.errors import LeaseLostError

HERE = Path(__file__).resolve().parent.parent


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Each process gets SIGSTOP, and SIGCONT in the end."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(_is_stopped(pid) for pid in pids))
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """All at once, by the kernel's freezer."""
    allowed(cgroups.unavailable("freezer"))
    with cgroups.Cgroup("freezer") as group:
        group.add(*pids)
        group.freeze()
        yield


@pytest.mark.parametrize("freeze", [stopped, frozen])
def test_a_whole_worker_is_frozen_beyond_its_lease(
    make_shop: Any, freeze: Callable[..., Any]
) -> None:
    """Fault 2: parent and children are frozen, and another worker ships. After they wake, they are
    refused, and answer."""
    shop = make_shop()
    first = shop.tasks.hold.delay(5, 1.0)
    with shop.worker(concurrency=1) as worker:
        shop.wait_for_steps("wrote")
        with freeze([worker.pid, *worker.children()]):
            second = shop.tasks.hold.delay(5, 0)
            with shop.worker(concurrency=1) as other:
                second.get(timeout=patience_s())
                assert "takes over order:5" in other.text()
        wait_until(lambda: "stale commit refused" in worker.text(), message="the refusal")
        first.get(timeout=patience_s())
        assert "raised unexpected" not in worker.text()
    assert shop.effects() == Counter({"5": 1})
    assert shop.work("shop.hold", 5).crashes == 0


class TestStuckInC:
    """Fault 5: a call that keeps the interpreter lock, as a long sort does, for three leases."""

    TTL_S = 0.7

    @staticmethod
    def keep_the_interpreter(seconds: float) -> None:
        # Unlike CDLL, PyDLL does not let go of it.
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def stuck(self, guard: Guard) -> None:
        """The lease is trusted before, and not after; no other thread has run meanwhile."""
        self.keep_the_interpreter(3 * self.TTL_S)
        with pytest.raises(LeaseLostError):
            guard.check()
        assert guard.lost.wait(patience_s())

    def test_the_holder_learns_at_once_and_commits_if_no_other_claimed(
        self, make_rivals: Any
    ) -> None:
        """`check()` raises right after the call. If no other delivery came, the commit succeeds."""
        rivals = make_rivals(locks=None)
        assert rivals.ship(self.stuck, ttl_s=self.TTL_S) == "first"
        assert rivals.shipped() == ["first"]
        assert rivals.first.happened.count("lost") == 1

    def test_if_another_claimed_its_commit_is_refused(self, make_rivals: Any) -> None:
        """If another delivery came after the lease, its effect is the only one, and both callers
        get its result."""
        rivals = make_rivals(locks=None)

        def during(guard: Guard) -> None:
            self.stuck(guard)
            assert rivals.ship_too() == "second"

        assert rivals.ship(during, ttl_s=self.TTL_S) == "second"
        assert rivals.shipped() == ["second"]
        assert "stale_refused" in rivals.first.happened


@pytest.fixture
def starved(pg_url: str) -> Iterator[Callable[[float], Any]]:
    """Starts a process that holds order 1 and computes; it gets 2% of a CPU once it holds it."""
    allowed(cgroups.unavailable("cpu"))
    with ExitStack() as stack:

        def start(ttl_s: float) -> tuple[subprocess.Popen[str], cgroups.Cgroup]:
            command = [sys.executable, "-m", "support.starved", pg_url, str(ttl_s)]
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(HERE)},
                )
            )
            stack.callback(process.kill)
            group = stack.enter_context(cgroups.Cgroup("cpu"))
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            group.starve(0.02)
            group.add(process.pid)
            return process, group

        yield start


@pytest.mark.alone
def test_a_starved_holder_learns_of_it_and_is_refused(
    starved: Callable[[float], Any], make_rivals: Any, record_property: Any
) -> None:
    """Fault 7. The watchdog of a process with 2% of a CPU, all of which the body uses, still runs.

    The holder learns in its body that another had its key, and commits nothing.
    """
    rivals = make_rivals(locks=None)
    process, group = starved(3.0)
    with rivals.first.engine.begin() as db:  # as after a holder that took it over, and vanished
        for table in ("taskguard_keys", "taskguard_work"):
            taken = f"update {table} set fence = fence + 1, owner = 'x/x', lease_until = 0"
            db.execute(sa.text(taken))
        began_s = time.monotonic()
    assert rivals.ship_too(busy="wait", wait_s=60.0) == "second"
    assert process.stdout.readline() == "lost\n"
    took_s = time.monotonic() - began_s
    record_property("noticed_s", round(took_s, 2))
    print(f"noticed {took_s:.2f} s after the takeover, with a renewal each second")
    group.starve(1.0)
    assert process.stdout.readline() == "answered second\n"
    assert process.wait(patience_s()) == 0
    assert rivals.shipped() == ["second"]
