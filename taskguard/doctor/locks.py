"""The lock server: what its provider finds, and how it fits the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from taskguard.doctor.configuration import GuardedTask, named
from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.locks.base import LockProvider, Traits

__all__ = ["LEFT_AT_A_RENEWAL", "check_locks", "judge_leases", "names_of", "without_a_ledger"]

# Where a ledger refuses the second effect, these are good to know; without one nothing does.
_MADE_GOOD_BY_A_LEDGER = frozenset({"no_persistence", "async_replicas", "locks_in_memory"})
# A lease is renewed at a third: so much of it is left at the worst.
LEFT_AT_A_RENEWAL = 2 / 3


def check_locks(
    locks: LockProvider, tasks: Sequence[GuardedTask], *, has_ledger: bool
) -> tuple[list[Finding], bool]:
    """What is wrong, and whether the server answers."""
    where = f"the lock server {named(locks)}"
    answers = True
    try:
        found = locks.check()
        if not has_ledger:
            found = list(map(without_a_ledger, found))
    except LockServerUnavailableError as error:
        found, answers = [_away(error, where=where, has_ledger=has_ledger)], False
    # Traits may be what was just told.
    found += judge_leases(locks.traits, tasks, has_ledger=has_ledger, where=where)
    return found, answers


def without_a_ledger(finding: Finding) -> Finding:
    """As bad as it is with locks alone."""
    if finding.name in _MADE_GOOD_BY_A_LEDGER:
        return replace(finding, level=Level.WARNING)
    return finding


def judge_leases(
    traits: Traits, tasks: Sequence[GuardedTask], *, has_ledger: bool, where: str
) -> Iterator[Finding]:
    """Whether the tasks' leases can be kept there."""
    short = [task for task in tasks if task.policy.ttl_s < traits.min_ttl_s]
    if short:
        yield Finding(
            "ttl_raised",
            Level.NOTE,
            where=names_of(short),
            what=f"Their ttl_s is below {traits.min_ttl_s:g}, the least of {where}.",
            why=f"After a holder's death the key is taken over within {traits.min_ttl_s:g} s.",
            mend=f"ttl_s={traits.min_ttl_s:g} says what happens.",
        )
    hasty = [
        task
        for task in tasks
        if task.policy.ttl_s * LEFT_AT_A_RENEWAL < traits.failover_s
        and task.policy.ttl_s >= traits.min_ttl_s
    ]
    if hasty:
        least_s = traits.failover_s / LEFT_AT_A_RENEWAL
        yield Finding(
            "ttl_below_failover",
            Level.NOTE if has_ledger else Level.WARNING,
            where=names_of(hasty),
            what=f"Their leases may end before {where} has failed over, which takes about "
            f"{traits.failover_s:g} s.",
            why="With locks alone each fail-over loses all leases that are held; a ledger keeps "
            "its own.",
            mend=f"ttl_s={least_s:g} or more, or a shorter time-out of the servers.",
        )


def names_of(tasks: Sequence[GuardedTask]) -> str:
    """The tasks, for a finding."""
    first = ", ".join(sorted(task.name for task in tasks)[:3])
    more = len(tasks) - 3
    return f"the tasks {first} and {more} more" if more > 0 else f"the tasks {first}"


def _away(error: LockServerUnavailableError, *, where: str, has_ledger: bool) -> Finding:
    return Finding(
        "lock_server_away",
        Level.ERROR,
        where=where,
        what=str(error),
        why="The ledger alone decides, with more load on its database."
        if has_ledger
        else "Nothing guarded can run.",
        mend="Look whether it runs, and whether it can be reached from here by that address.",
    )
