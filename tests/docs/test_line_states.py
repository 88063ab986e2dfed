"""The states of a line on their page are those of the code."""

from __future__ import annotations

from collections import defaultdict

import pytest

from support.pages import ROOT
from taskguard.model.line_states import IN_STATE, IN_WORDS, TRANSITIONS, Event, LineState

pytestmark = pytest.mark.once

PAGE = ROOT / "docs" / "reference" / "states.md"


def name(line: LineState | None) -> str:
    return "–" if line is None else line.value


def of_states() -> str:
    """The table of states."""
    rows = ["| line | work | means |", "| --- | --- | --- |"]
    for line in LineState:
        work = ", ".join(sorted(state.value for state in IN_STATE[line]))
        rows.append(f"| {line.value} | {work} | {IN_WORDS[line]} |")
    return "\n".join(rows)


def of_transitions() -> str:
    """The table of transitions: one row for all old states that have event, new state and guard."""
    found: dict[tuple[Event, LineState | None, str], list[str]] = defaultdict(list)
    for (old, event, new), when in TRANSITIONS.items():
        found[event, new, when].append(name(old))
    rows = ["| event | from | to | when |", "| --- | --- | --- | --- |"]
    for (event, new, when), olds in found.items():
        rows.append(f"| {event.value} | {', '.join(olds)} | {name(new)} | {when} |")
    return "\n".join(rows)


def test_the_page_has_the_states_and_the_transitions() -> None:
    """`PYTHONPATH=tests python tests/docs/test_line_states.py` prints them."""
    page = PAGE.read_text("utf-8")
    assert of_states() in page
    assert of_transitions() in page


def test_each_state_is_entered_and_left() -> None:
    for line in LineState:
        assert any(new is line and old is not line for old, _, new in TRANSITIONS), line
        assert any(old is line and new is not line for old, _, new in TRANSITIONS), line


if __name__ == "__main__":
    print(f"{of_states()}\n\n{of_transitions()}")
