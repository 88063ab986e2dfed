"""Rules that keep the core's files readable: their sizes, and names that say their purpose."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "taskguard"
MOST_LINES = 450


def modules(under: Path = PACKAGE) -> Iterator[tuple[str, str]]:
    """The path of each module, and its text."""
    for file in sorted(under.rglob("*.py")):
        yield str(file.relative_to(PACKAGE)), file.read_text()


def test_few_files_are_long_and_each_says_why() -> None:
    """Only two modules may have more lines than the maximum, and each says why. Others have to be
    split."""
    long = {name: text for name, text in modules() if len(text.splitlines()) > MOST_LINES}
    assert set(long) <= {"ledger/ports.py", "ledger/transactions/core.py"}
    for name, text in long.items():
        said = ast.get_docstring(ast.parse(text)) or ""
        assert f"One module of more than {MOST_LINES} lines: " in said, name


def test_a_completion_says_how_it_is_committed() -> None:
    """In the holder's block, in one message with its COMMIT, or alone."""
    named = {
        each.name.lstrip("_")
        for _, text in modules(PACKAGE / "ledger")
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.FunctionDef) and "complete" in each.name.split("_")
    }
    assert named == {"complete_in_block", "complete_with_commit", "complete_alone"}
