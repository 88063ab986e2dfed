"""A plugin for a foreign suite's pytest: write each test's outcome to FOREIGN_OUTCOMES as it ends.

A test is `passed`, `skipped` or `failed`, by the worst of its parts and subtests. Collected and
begun tests are noted as well, because a test may end the whole run by a signal. Then the notes show
which test that was, and which did not run. `read` evaluates a file of such notes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

UNSEEN, BEGUN = "unseen", "ended the run"
_RANKS = ("passed", "skipped", "failed")


def read(path: Path) -> dict[str, str]:
    """Return each collected test's outcome. UNSEEN and BEGUN are those of a run that was ended."""
    # The last line may be incomplete.
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def is_over(found: dict[str, str]) -> bool:
    """Return whether every test has ended."""
    return bool(found) and not {UNSEEN, BEGUN} & set(found.values())


def _note(*lines: tuple[str, str]) -> None:
    # Write all lines with one system call, so that a killed process leaves no partial line.
    with Path(os.environ["FOREIGN_OUTCOMES"]).open("a") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))


_worst: dict[str, str] = {}


def pytest_collection_finish(session: Any) -> None:
    """Note the tests that will run."""
    _note(*((item.nodeid, UNSEEN) for item in session.items))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins."""
    _note((nodeid, BEGUN))


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome of one part of a test."""
    before = _worst.get(report.nodeid, _RANKS[0])
    _worst[report.nodeid] = max(before, report.outcome, key=_RANKS.index)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Note that all parts of a test have ended."""
    _note((nodeid, _worst.get(nodeid, "failed")))
