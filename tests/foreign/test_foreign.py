"""The list of what is expected to differ has the form that `make foreign` reads."""

from __future__ import annotations

import re

from foreign.__main__ import differing, expected
from foreign.running import SUITES


def test_each_difference_that_is_expected_has_its_reason() -> None:
    """For each suite, even if it has none: ids of single tests, and one sentence each."""
    listed = expected()
    assert set(listed) == set(SUITES)
    for reasons in listed.values():
        for test, reason in reasons.items():
            assert re.match(r"(t/integration|tests)/test_\w+\.py::\w+", test)
            assert re.fullmatch(r"[A-Z][^\n]+\.", reason)


def test_a_test_differs_that_passes_without_guards_alone() -> None:
    """What fails or is skipped without them says nothing; what is missing with them does."""
    plain = {"a": "passed", "b": "failed", "c": "skipped", "d": "passed", "e": "passed"}
    guarded = {"a": "passed", "b": "passed", "c": "failed", "d": "skipped"}
    assert differing(plain, guarded) == {"d", "e"}
