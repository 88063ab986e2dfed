"""A plugin for a foreign suite's pytest: writes each test's outcome to FOREIGN_OUTCOMES.

A test is `passed`, `skipped` or `failed`; of its parts, and of its subtests, the worst counts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RANKS = ("passed", "skipped", "failed")
_found: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    """One part of a test has ended."""
    before = _found.get(report.nodeid, RANKS[0])
    _found[report.nodeid] = max(before, report.outcome, key=RANKS.index)


def pytest_sessionfinish() -> None:
    """All have ended."""
    Path(os.environ["FOREIGN_OUTCOMES"]).write_text(json.dumps(_found))
