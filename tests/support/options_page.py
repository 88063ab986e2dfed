"""Write the table of docs/reference/options.md from the texts in `taskguard/options.py`.

PYTHONPATH=tests python tests/support/options_page.py
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from dataclasses import fields
from typing import Any

from support.pages import ROOT
from taskguard import TaskOptions, options
from taskguard.integration import GuardedFunction
from taskguard.keys import function
from taskguard.model.policy import Policy
from taskguard.options import GuardOptions

__all__ = ["PAGE", "defaults", "page_as_generated", "texts"]

PAGE = ROOT / "docs" / "reference" / "options.md"
_HEAD = "| option | default | meaning |\n| --- | --- | --- |\n"
_TABLE = re.compile(rf"{re.escape(_HEAD)}(?:\|.*\n)+")


def texts(module: Any) -> dict[str, dict[str, str]]:
    """Return the text under each name of a module and of its classes, by class ("": none)."""
    tree = ast.parse(inspect.getsource(module))
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    bodies = {"": tree.body, **{each.name: each.body for each in classes}}
    return {name: dict(_documented(body)) for name, body in bodies.items()}


def _documented(body: list[ast.stmt]) -> list[tuple[str, str]]:
    found = []
    for named, text in itertools.pairwise(body):
        match named, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(said))),
            ):
                found.append((name, " ".join(said.split())))
    return found


def defaults() -> dict[str, Any]:
    """Return the default of each option that is no option of `@tg.guarded()` alone."""
    declared = inspect.signature(GuardedFunction).parameters
    own = {
        name: each.default
        for name, each in declared.items()
        if name in GuardOptions.__annotations__
    }
    return own | {each.name: each.default for each in fields(Policy) if each.init}


def _default(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, bool):
        return f"`{value}`"
    return f"{value:,g}" if value < 86_400 else f"{value:,.0f} ({value / 86_400:g} days)"


def _rows() -> list[tuple[str, str, str]]:
    said, given = texts(options), defaults()
    rows = [("`key`", "", texts(function)[""]["KeySpec"])]
    for kind in (TaskOptions, GuardOptions):
        own = said[kind.__name__]
        rows += [(f"`{name}`", _default(given[name]), text) for name, text in own.items()]
        if kind is TaskOptions:
            rows.insert(2, ("`busy` of `@tg.guarded()`", '`"raise"`', said["CallOptions"]["busy"]))
    return rows


def page_as_generated() -> str:
    """Return the page with the table that the texts make."""
    table = _HEAD + "".join(f"| {' | '.join(each)} |\n" for each in _rows())
    page, count = _TABLE.subn(lambda _: table, PAGE.read_text(encoding="utf-8"), count=1)
    assert count == 1
    return page


if __name__ == "__main__":
    PAGE.write_text(page_as_generated(), encoding="utf-8")
