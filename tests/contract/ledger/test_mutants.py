"""Ledgers with a check left out: the contract suite finds each of them, on every database.

A suite that passes shows something only if it fails where it has to.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from contract.ledger import test_claims as claims
from contract.ledger import test_endings as endings

from taskguard.ledger import answers, mariadb, postgresql, sql, steps, transaction
from taskguard.ledger.base import Claimed
from taskguard.ledger.database import Database
from taskguard.ledger.tables import KEYS, WORKS
from taskguard.states import Decision

Patch = pytest.MonkeyPatch


def edit(patch: Patch, name: str, *changes: tuple[str, str], hot_path: Any = postgresql) -> None:
    """Change a statement of a hot path; each part has to be in it."""
    text = getattr(hot_path, name)
    for old, new in changes:
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    patch.setattr(hot_path, name, text)


def without_fence_checks(patch: Patch) -> None:
    """Completions and checkpoints go by the names of key and work alone."""
    for module in (transaction, sql, steps):
        patch.setattr(module, "standing", lambda claim: WORKS.c.id == claim.work)
    for module in (transaction, sql):
        patch.setattr(module, "holding", lambda claim: KEYS.c.key.in_(claim.keys))
    patch.setattr(transaction, "processed", lambda work, fence, owner: WORKS.c.id == work)
    patch.setattr(transaction, "of_claim", lambda: WORKS.c.id == sa.bindparam("work"))
    patch.setattr(transaction, "held", lambda keys, fence, owner: KEYS.c.key.in_(keys))
    check = "fence = %(fence)s::bigint and {0}owner = %(owner)s::text"
    edit(
        patch,
        "_COMPLETE",
        (" and " + check.format(""), ""),
        (" and w.state = 'PROCESSING'\n    and w." + check.format("w."), ""),
    )
    check = "and fence = %(fence)s and owner = %(owner)s"
    work = f"and state = 'PROCESSING'\n            {check}"
    edit(patch, "_COMPLETE", (work, ""), (check, ""), hot_path=mariadb)


def without_leases(patch: Patch) -> None:
    """Whoever claims gets the key: every lease seems to have run out."""
    now_us = Database.now_us
    ahead_us = itertools.count(10**15, 10**15)
    patch.setattr(Database, "now_us", lambda self, db: now_us(self, db) + next(ahead_us))
    read = steps._read

    def ahead(*args: Any, **options: Any) -> Any:
        row, recorded, clock_us = read(*args, **options)
        return row, recorded, clock_us + next(ahead_us)

    patch.setattr(steps, "_read", ahead)
    key = ("or k.lease_until <= excluded.fence", "or true")
    work = [(f"w.lease_until <= {now} and", "") for now in ("asked.now_us", "excluded.created")]
    edit(patch, "_CLAIM", key, *work)
    edit(patch, "_CLAIM_KEY", key)
    edit(patch, "_CLAIM", ("held_until <= now_us", "true"), hot_path=mariadb)


def without_growing_fences(patch: Patch) -> None:
    """A key's next holder gets the fence of the one before."""

    def first(*values: Any, **options: Any) -> Any:
        return builtins.max(*values, **options) if options else 1

    patch.setattr(steps, "max", first, raising=False)
    edit(patch, "_CLAIM", ("greatest(k.fence + 1, excluded.fence)", "k.fence"))
    edit(patch, "_CLAIM", ("greatest(now_us, last_fence + 1)", "1"), hot_path=mariadb)


def without_nonces(patch: Patch) -> None:
    """A claim whose answer got lost and that is asked again is somebody else's."""
    decide = answers.decide

    def other(row: Any, **values: Any) -> Decision:
        return decide(row, **{**values, "owner": "somebody else"})

    patch.setattr(answers, "decide", other)
    mine = "when w.state = 'PROCESSING' and w.owner = {} then true"
    edit(
        patch,
        "_CLAIM",
        (mine.format("%(owner)s::text"), "when false then true"),
        (mine.format("excluded.owner"), "when false then true"),
    )


def without_an_end(patch: Patch) -> None:
    """DONE is claimed again."""
    decide = answers.decide

    def again(row: Any, **values: Any) -> Decision:
        decision = decide(row, **values)
        return Decision.CLAIM if decision is Decision.DONE else decision

    patch.setattr(answers, "decide", again)
    edit(patch, "_CLAIM", ("w.state in ('DONE', 'DEAD')", "w.state in ('DEAD')"))


def without_numbers(patch: Patch) -> None:
    """A copy that a newer one has superseded runs all the same."""
    decide = answers.decide

    def newest(row: Any, **values: Any) -> Decision:
        return decide(row, **{**values, "recorded": (0, 0)})

    patch.setattr(answers, "decide", newest)
    recorded = "(coalesce(m.retries, 0), coalesce(m.copy, 0))"
    edit(patch, "_CLAIM", (f"< {recorded} then false", "< (0, 0) then false"))
    lower = "(%(retries)s, %(copy)s) < (recorded_retries, recorded_copy)"
    edit(patch, "_CLAIM", (lower, "false"), hot_path=mariadb)


def claim_what_is_done(book: Any) -> None:
    """DONE is answered to whoever comes."""
    book.ledger.complete(book.claim().claim, None)
    assert not isinstance(book.ledger.claim(book.request(message="x")), Claimed)


def claim_what_is_superseded(book: Any) -> None:
    """A copy below the recorded one is not run."""
    assert book.ledger.defer(book.request(), lambda copy: None)
    assert not isinstance(book.ledger.claim(book.request()), Claimed)


def commit_late(book: Any) -> None:
    """Nobody else is there, but the work was given back meanwhile."""
    endings.test_a_stale_holder_cannot_commit(book, "nobody")


MUTANTS: list[tuple[Callable[[Patch], None], Callable[[Any], None]]] = [
    (without_fence_checks, commit_late),
    (without_fence_checks, endings.test_progress_is_fenced_and_met_by_the_next_holder),
    (without_leases, claims.test_a_taken_key_is_busy_until_its_lease_ends),
    (without_growing_fences, claims.test_each_claim_of_a_key_gets_a_higher_fence),
    (without_nonces, claims.test_asked_twice_by_one_owner_it_is_one_grant),
    (without_an_end, claim_what_is_done),
    (without_numbers, claim_what_is_superseded),
]


@pytest.mark.parametrize(("mutate", "test"), MUTANTS)
def test_a_ledger_without_a_check_does_not_pass(
    book: Any,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Patch], None],
    test: Callable[[Any], None],
) -> None:
    """The test of the suite that is about it fails."""
    if book.kind == "memory":
        pytest.skip("the simulation has mutants of its own")
    mutate(monkeypatch)
    try:
        test(book)
    except NameError:
        raise  # the mutant's own mistake
    except (Exception, pytest.fail.Exception):
        return
    pytest.fail(f"{test.__name__} passes on a ledger {mutate.__name__}")
