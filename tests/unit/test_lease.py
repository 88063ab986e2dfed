"""A lease is trusted for less time than the server keeps it, and never after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.clock import FakeClock
from support.scripts import run_script
from taskguard.errors import LeaseLostError
from taskguard.locks.base import NOBODY, PROMOTED
from taskguard.model import lease, workers
from taskguard.model.lease import Lease, Owner, new_owner, trusted_until_s


def make_lease(clock: FakeClock, *, ttl_s: float = 10.0) -> Lease:
    now_s = clock.monotonic_s()
    return Lease(
        keys=("order:42",),
        owner=new_owner("m1"),
        ttl_s=ttl_s,
        clock=clock,
        taken_at_s=now_s,
        trusted_until_s=trusted_until_s(requested_at_s=now_s, ttl_s=ttl_s),
        fence=7,
    )


def test_trust_is_counted_from_before_the_call_less_a_margin() -> None:
    """One hundredth of the ttl and two milliseconds go off."""
    assert trusted_until_s(requested_at_s=100.0, ttl_s=10.0) == pytest.approx(109.898)


def test_a_lease_is_trusted_until_its_deadline_and_not_after() -> None:
    """check() passes before the deadline and raises from it on."""
    clock = FakeClock()
    lease = make_lease(clock)
    clock.advance(9.8)
    lease.check()
    clock.advance(0.1)
    with pytest.raises(LeaseLostError, match="order:42") as caught:
        lease.check()
    assert (caught.value.key, caught.value.fence) == ("order:42", 7)
    assert lease.remaining_s == 0.0


def test_a_renewal_extends_and_never_shortens() -> None:
    """A late answer to an early renewal takes nothing away."""
    clock = FakeClock()
    lease = make_lease(clock)
    lease.extend(clock.monotonic_s() + 30)
    lease.extend(clock.monotonic_s() + 5)
    assert lease.remaining_s == pytest.approx(30)


def test_a_lost_lease_stays_lost() -> None:
    """A renewal that arrives after the loss does not restore the lease. The first reason stays."""
    clock = FakeClock()
    lease = make_lease(clock)
    assert lease.mark_lost("taken over")
    assert not lease.mark_lost("something else")
    lease.extend(clock.monotonic_s() + 30)
    with pytest.raises(LeaseLostError, match="taken over"):
        lease.check()


def test_a_forked_child_holds_nothing() -> None:
    """The child of a fork finds its parent's lease lost; the parent goes on."""
    lease = make_lease(FakeClock())
    pid = os.fork()
    if pid == 0:
        os._exit(0 if lease.remaining_s == 0.0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lease.check()


def test_owners_differ_and_read_back() -> None:
    """Every attempt has a nonce of its own; a message's id may hold anything."""
    one, two = new_owner("a/b c"), new_owner("a/b c")
    assert one != two
    assert Owner.parse(str(one)) == one


def nonces(count: int) -> list[str]:
    return [new_owner("m").nonce for _ in range(count)]


def worker_of(nonce: str) -> str:
    return nonce[:8]


def pid_of(nonce: str) -> int:
    return int(nonce[8:14], 16)


def in_a_fork(make: Callable[[], list[str]]) -> list[str]:
    """Run `make` in a forked child, and return its result."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(sender, " ".join(make()).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as found:
        texts = found.read().split()
    os.waitpid(pid, 0)
    return texts


class TestNonces:
    """A nonce is the worker's number, the process's id and a counter."""

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    def test_a_worker_and_its_forks_share_a_number_and_no_nonce(self, counts: list[int]) -> None:
        """Each process says its own pid; the nonces of a family are all different."""
        found = [(os.getpid(), nonces(3))]
        for count in counts:
            first, *rest = in_a_fork(lambda count=count: [str(os.getpid()), *nonces(count)])  # type: ignore[misc]
            found.append((int(first), rest))
        found.append((os.getpid(), nonces(3)))
        everything = [nonce for _, texts in found for nonce in texts]
        assert len(set(everything)) == len(everything)
        assert {worker_of(nonce) for nonce in everything} == {worker_of(everything[0])}
        assert all(pid_of(nonce) == pid for pid, texts in found for nonce in texts)

    def test_a_grandchild_and_a_fork_among_threads_have_nonces_of_their_own(self) -> None:
        """Also where other threads draw nonces at the moment of the fork."""
        with ThreadPoolExecutor(4) as pool:
            drawn = [pool.submit(nonces, 2_000) for _ in range(4)]
            child = in_a_fork(lambda: nonces(50) + in_a_fork(lambda: nonces(50)))
            everything = [nonce for each in drawn for nonce in each.result()] + child
        assert len(set(everything)) == len(everything) == 4 * 2_000 + 100
        assert len({pid_of(nonce) for nonce in everything}) == 3

    def test_a_pid_that_is_used_again_brings_no_nonce_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The counter of each forked process starts at random."""
        monkeypatch.setattr(lease, "nonces", workers.Nonces())
        monkeypatch.setattr(os, "getpid", lambda: 4711)
        everything: list[str] = []
        for _ in range(500):
            lease.nonces.begin()  # as after a fork
            everything += nonces(20)
        assert len(set(everything)) == len(everything)
        assert {nonce[:14] for nonce in everything} == {f"{worker_of(everything[0])}{4711:06x}"}

    def test_processes_that_were_not_forked_are_workers_of_their_own(self) -> None:
        """A spawned process and a new interpreter draw numbers of their own."""
        code = (
            "import multiprocessing\n"
            "from taskguard.model.lease import new_owner\n"
            "with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
            "    print(new_owner().nonce, pool.apply(new_owner).nonce)"
        )
        started = run_script(code).split()
        assert len({worker_of(nonce) for nonce in (*nonces(1), *started)}) == 3

    def test_an_exec_in_the_same_process_is_another_worker(self) -> None:
        """A program that a process becomes keeps its pid, and draws a number of its own."""
        code = (
            "import os, sys\n"
            "from taskguard.model.lease import new_owner\n"
            "print(new_owner().nonce, flush=True)\n"
            "if len(sys.argv) == 1:\n"
            "    os.execv(sys.executable, [*sys.orig_argv, 'again'])"
        )
        one, two = run_script(code).split()
        assert pid_of(one) == pid_of(two)
        assert worker_of(one) != worker_of(two)

    def test_two_hosts_that_draw_one_number_have_different_counters(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Containers often have the same pids. Then the beginnings of the counters differ."""
        monkeypatch.setattr(os, "getpid", lambda: 7)
        hosts = [workers.Nonces() for _ in range(50)]
        for each in hosts:
            each.draw("1f2e3d4c")
        everything = [each() for each in hosts for _ in range(1000)]
        assert len(set(everything)) == len(everything)
        assert {nonce[:14] for nonce in everything} == {"1f2e3d4c000007"}

    def test_the_counter_begins_anew_at_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A nonce keeps its length."""
        monkeypatch.setattr(lease, "nonces", workers.Nonces())
        lease.nonces.begin(at=2**40 - 1)
        assert [nonce[14:] for nonce in nonces(2)] == ["ffffffffff", "0000000000"]
        assert all(Owner(nonce, "").is_ours for nonce in nonces(2))


def test_an_owner_names_its_process_and_its_message() -> None:
    """Only for what is a nonce of taskguard's, and no placeholder."""
    owner = Owner(f"1f2e3d4c{4711:06x}0123456789", "m-1")
    assert owner.process == "worker 1f2e3d4c, pid 4711"
    assert owner.described == "worker 1f2e3d4c, pid 4711, message m-1"
    assert Owner(owner.nonce, "").described == "worker 1f2e3d4c, pid 4711"
    for unknown in (NOBODY, PROMOTED, Owner("some other application's", ""), Owner("ABC", "m")):
        assert (unknown.process, unknown.described) == ("", "an unknown holder")
