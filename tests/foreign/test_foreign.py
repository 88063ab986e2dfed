"""`make foreign` uses a list of expected differences and notes of each run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from foreign.__main__ import differing, expected
from foreign.outcomes import BEGUN, UNSEEN, is_over, read
from foreign.running import SUITES, TESTS

SUITE = """
import os, signal, pytest

def test_passes(): pass
def test_fails(): assert not "this"
def test_skips(): pytest.skip("not here")
def test_kills(): os.kill(os.getpid(), signal.SIGKILL)
def test_comes_after(): pass
"""


def test_each_difference_that_is_expected_has_its_reason() -> None:
    """Each suite has a list of ids of single tests, and one sentence for each."""
    listed = expected()
    assert set(listed) == set(SUITES)
    for reasons in listed.values():
        assert set(reasons) == {"always", "sometimes"}
        for test, reason in [*reasons["always"].items(), *reasons["sometimes"].items()]:
            assert re.match(r"(t/integration|tests)/test_\w+\.py::\w+", test)
            assert re.fullmatch(r"[A-Z][^\n]+\.", reason)


def test_a_test_differs_that_passes_without_guards_alone() -> None:
    """Only a test that passes without guards can differ. A test that is missing with guards
    differs."""
    plain = {"a": "passed", "b": "failed", "c": "skipped", "d": "passed", "e": "passed"}
    guarded = {"a": "passed", "b": "passed", "c": "failed", "d": "skipped"}
    assert differing(plain, guarded) == {"d", "e"}


def test_a_run_that_a_test_ends_says_which_it_was(tmp_path: Path) -> None:
    """If a test ends the whole run, its notes show the ended tests, this test, and those that did
    not run."""
    suite, notes = tmp_path / "test_suite.py", tmp_path / "notes"
    suite.write_text(SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "foreign.outcomes",
        "-p",
        "no:cacheprovider",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(TESTS),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "FOREIGN_OUTCOMES": str(notes),
    }

    def run(*options: str) -> dict[str, str]:
        notes.unlink(missing_ok=True)
        whole = [*command, *options, suite.name]
        subprocess.run(whole, cwd=tmp_path, env=environment, check=False, capture_output=True)
        return {test.partition("::test_")[2]: how for test, how in read(notes).items()}

    found = run()
    ended = {"passes": "passed", "fails": "failed", "skips": "skipped"}
    assert found == {**ended, "kills": BEGUN, "comes_after": UNSEEN}
    assert not is_over(found)
    found = run("--deselect", f"{suite.name}::test_kills")
    assert found == {**ended, "comes_after": "passed"}
    assert is_over(found)
