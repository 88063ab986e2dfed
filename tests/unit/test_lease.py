"""A lease is trusted for less time than the server keeps it, and never after a fork."""

from __future__ import annotations

import os

import pytest

from support.clock import FakeClock
from taskguard.errors import LeaseLostError
from taskguard.lease import Lease, Owner, new_owner, trusted_until_s


def make_lease(clock: FakeClock, *, ttl_s: float = 10.0) -> Lease:
    now_s = clock.monotonic_s()
    return Lease(
        keys=("order:42",),
        owner=new_owner("m1"),
        ttl_s=ttl_s,
        clock=clock,
        taken_at_s=now_s,
        trusted_until_s=trusted_until_s(asked_at_s=now_s, ttl_s=ttl_s),
        fence=7,
    )


def test_trust_is_counted_from_before_the_call_less_a_margin() -> None:
    """One hundredth of the ttl and two milliseconds go off."""
    assert trusted_until_s(asked_at_s=100.0, ttl_s=10.0) == pytest.approx(109.898)


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
    """A renewal that arrives after the loss brings nothing back, and the first reason stands."""
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
