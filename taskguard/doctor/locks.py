"""The lock server: what its provider finds, and whether it suits the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from taskguard.doctor import findings
from taskguard.doctor.configuration import GuardedTask, named
from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.locks.base import LockProvider, Traits

__all__ = ["LEFT_AT_A_RENEWAL", "check_locks", "judge_leases", "names_of"]

# With a ledger these have no effect: it refuses the second holder.
_HARMLESS_WITH_A_LEDGER = frozenset({"no_persistence", "async_replicas", "locks_unlogged"})
# A lease is renewed after a third of its time, so at least this part of it is left.
LEFT_AT_A_RENEWAL = 2 / 3


def check_locks(
    locks: LockProvider, tasks: Sequence[GuardedTask], *, has_ledger: bool
) -> tuple[list[Finding], bool]:
    """Return what is wrong, and whether the server answers."""
    where = f"the lock server {named(locks)}"
    answers = True
    try:
        found = locks.check()
        if has_ledger:
            found = list(_with_a_ledger(found))
    except LockServerUnavailableError as error:
        found, answers = [findings.LOCK_SERVER_AWAY.at(where, error=error)], False
    # `check()` may have read the traits.
    found += judge_leases(locks.traits, tasks, has_ledger=has_ledger, where=where)
    return found, answers


def _with_a_ledger(found: Sequence[Finding]) -> Iterator[Finding]:
    for finding in found:
        if finding.name == "locks_in_memory":
            yield replace(finding, level=Level.NOTE)
        elif finding.name not in _HARMLESS_WITH_A_LEDGER:
            yield finding


def judge_leases(
    traits: Traits, tasks: Sequence[GuardedTask], *, has_ledger: bool, where: str
) -> Iterator[Finding]:
    """Judge whether the server can keep the tasks' leases."""
    least_s, failover_s = traits.min_ttl_s, traits.failover_s
    raised = [task for task in tasks if task.policy.ttl_s < least_s]
    if raised:
        yield findings.TTL_RAISED.at(names_of(raised), server=where, least_s=least_s)
    survives_s = failover_s / LEFT_AT_A_RENEWAL
    short = [task for task in tasks if least_s <= task.policy.ttl_s < survives_s]
    if short and not has_ledger:
        yield findings.TTL_BELOW_FAILOVER.at(
            names_of(short), server=where, failover_s=failover_s, least_s=survives_s
        )


def names_of(tasks: Sequence[GuardedTask]) -> str:
    """Return the names of three tasks, and how many more there are."""
    first = ", ".join(sorted(task.name for task in tasks)[:3])
    more = len(tasks) - 3
    return f"the tasks {first} and {more} more" if more > 0 else f"the tasks {first}"
