"""The object that users complete in their editors has what a body needs, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from taskguard import Guard

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "guard.md"
MEMBERS = {
    "after_commit",
    "attempt",
    "check",
    "checkpoint",
    "completed",
    "db",
    "fence",
    "fenced",
    "idempotency_key",
    "idempotency_key_for",
    "key",
    "keys",
    "lost",
    "progress",
    "remaining_s",
    "result",
    "step",
    "transaction",
}


def public(names: object) -> set[str]:
    return {name for name in dir(names) if not name.startswith("_")}


def test_the_guard_has_these_members() -> None:
    """A guard has at most 25 members. The runner and integrations use its `Attempt`."""
    assert public(Guard) == MEMBERS
    assert len(MEMBERS) <= 25


def test_the_reference_shows_each_of_them() -> None:
    page = REFERENCE.read_text()
    shown = re.search(r"autoclass:: taskguard\.Guard\n +:members: (.+)\n", page)
    assert shown is not None
    assert set(shown[1].split(", ")) == MEMBERS
    assert {name for name in MEMBERS if f"`guard.{name}" not in page} == set()
