"""Each line that the library logs at WARNING or above is explained in the runbook."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

from support.pages import ROOT
from taskguard import events

pytestmark = pytest.mark.once

RUNBOOK = ROOT / "docs" / "how-to" / "log-lines.md"
LEVELS = {"warning", "error", "critical", "exception"}


def logged() -> Iterator[tuple[str, str]]:
    """Yield the place of each logged text, and the text with its placeholders."""
    for folder in ("taskguard", "integrations"):
        for file in sorted((ROOT / folder).glob("**/*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                of_logger = isinstance(node.func.value, ast.Name) and node.func.value.id == "logger"
                if of_logger and node.func.attr in LEVELS:
                    assert isinstance(node.args[0], ast.Constant), f"{file}:{node.lineno}"
                    yield f"{file.name}:{node.lineno}", str(node.args[0].value)


def loud_events() -> list[type[events.Event]]:
    """Return the events that the default log shows at WARNING or above."""
    kinds = [kind for _, kind in inspect.getmembers(events, inspect.isclass)]
    return [kind for kind in kinds if issubclass(kind, events.Event) and kind.level >= 30]


def entries() -> dict[str, str]:
    """Log lines of the page, each with what happened and what to do."""
    found: dict[str, str] = {}
    term = ""
    for line in RUNBOOK.read_text(encoding="utf-8").splitlines():
        if line.startswith("*"):
            term = line
            found[term] = ""
        elif line.startswith((": ", "  ")):
            found[term] += line
    return found


def longest_part(text: str) -> str:
    """The longest part of the first sentence between placeholders: advice may be in other words."""
    parts = re.split(r"%\(\w+\)[.\d]*[a-z]|%[.\d]*[a-z]", text.partition(". ")[0])
    return max((part.strip(" ;:,.()[]") for part in parts), key=len)


def explained(text: str) -> bool:
    return any(longest_part(text) in term for term in entries())


def test_what_is_logged_is_in_the_runbook() -> None:
    """In the words of the log, so that a search for them ends there."""
    # Not a test for each line: every process of a run would parse the package to collect them.
    lines = list(logged())
    assert lines
    lacking = [f"{where}: {longest_part(text)!r}" for where, text in lines if not explained(text)]
    assert not lacking, f"not in {RUNBOOK.name}: {lacking}"


@pytest.mark.parametrize("kind", loud_events())
def test_what_an_event_logs_is_in_the_runbook(kind: type[events.Event]) -> None:
    """The runbook has each event by its name and by its text."""
    assert explained(kind.text)
    assert any(f"(`{kind.name}`" in term for term in entries())


@pytest.mark.parametrize("term", list(entries()))
def test_each_log_line_has_an_explanation_and_advice(term: str) -> None:
    """An entry says what happened, and what to do."""
    happened, _, advice = entries()[term].partition("**Action:**")
    assert happened.startswith(": ")
    assert advice.strip()
