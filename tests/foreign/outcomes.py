"""A plugin for a foreign suite's pytest: each test's outcome to FOREIGN_OUTCOMES, as it ends.

A test is `passed`, `skipped` or `failed`; of its parts, and of its subtests, the worst counts. What
was collected or has begun is noted as well, for a test may end the whole run by a signal: what it
had not come to is then known, and who it was. `read` says what a file of such notes comes to.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

UNSEEN, BEGUN = "unseen", "ended the run"
_RANKS = ("passed", "skipped", "failed")


def read(path: Path) -> dict[str, str]:
    """Each collected test's outcome; UNSEEN and BEGUN are those of a run that was ended."""
    # The last line may be half written.
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def is_over(found: dict[str, str]) -> bool:
    """Whether every test has ended."""
    return bool(found) and not {UNSEEN, BEGUN} & set(found.values())


def _note(*lines: tuple[str, str]) -> None:
    # With one call of the system for all of them: nothing half written stays of who is killed.
    with Path(os.environ["FOREIGN_OUTCOMES"]).open("a") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))


_worst: dict[str, str] = {}


def pytest_collection_finish(session: Any) -> None:
    """These are to be run."""
    _note(*((item.nodeid, UNSEEN) for item in session.items))


def pytest_runtest_logstart(nodeid: str) -> None:
    """One begins."""
    _note((nodeid, BEGUN))


def pytest_runtest_logreport(report: Any) -> None:
    """One part of a test has ended."""
    before = _worst.get(report.nodeid, _RANKS[0])
    _worst[report.nodeid] = max(before, report.outcome, key=_RANKS.index)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """All of its parts have."""
    _note((nodeid, _worst.get(nodeid, "failed")))
