"""Write the descriptions of options in docs/reference/options*.md from `taskguard/options.py`.

PYTHONPATH=tests python tests/support/options_page.py
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

from support.pages import ROOT
from taskguard import options
from taskguard.integration import GuardedFunction
from taskguard.keys import function
from taskguard.model.policy import Busy, OncePer, OnLost, Order, Policy
from taskguard.options import GuardOptions

__all__ = ["FOLDER", "GROUPS", "defaults", "pages_as_generated", "texts"]

FOLDER = ROOT / "docs" / "reference"
GROUPS = {
    "options-once.md": "Work that takes effect once",
    "options-order.md": "Order and limits",
    "options-leases.md": "Leases, crashes and lost messages",
    "options-rows.md": "Transactions and rows of yours",
    "options-enqueue.md": "Enqueue",
}
"""Titles of the pages that have a heading for each option. `options.md` lists the options."""

_HEADING = re.compile(r"^## (`\w+`.*)$", re.MULTILINE)
_PARAGRAPH = r"(?:[^\n#].*\n)+"
_OPTION = re.compile(
    rf"(?<=^## )(`\w+`.*)\n\n({_PARAGRAPH}\n{_PARAGRAPH}\n{_PARAGRAPH})", re.MULTILINE
)
_LIST = re.compile(r"(?<=<!-- options -->\n)(?:.*\n)*?(?=<!-- end -->)")
_LITERALS = {"Busy": Busy, "Order": Order, "OncePer": OncePer, "OnLost": OnLost}
_TYPES = {
    "KeySpec": "a template, a callable, or a list of these",
    "KeyCallable": "a callable",
    "Sequence[Former]": "a list of these",
    "None": "None",
}
_OF_CALLS = "`busy` of `@tg.guarded()`"


def texts(module: Any) -> dict[str, dict[str, str]]:
    """Return the text under each name of a module and of its classes, by class ("": none)."""
    found = _documented(module)
    return {kind: {name: text for name, (_, text) in own.items()} for kind, own in found.items()}


def _documented(module: Any) -> dict[str, dict[str, tuple[str, str]]]:
    tree = ast.parse(inspect.getsource(module))
    bodies = {each.name: each.body for each in tree.body if isinstance(each, ast.ClassDef)}
    return {name: dict(_named(body)) for name, body in {"": tree.body, **bodies}.items()}


def _named(body: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    for named, text in itertools.pairwise(body):
        match named, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name), annotation=kind)
                | ast.Assign(targets=[ast.Name(id=name)], value=kind),
                ast.Expr(value=ast.Constant(value=str(said))),
            ):
                yield name, (_type(kind), inspect.cleandoc(said))


def _type(annotation: ast.expr) -> str:
    found: list[str] = []
    for part in ast.unparse(annotation).split(" | "):
        values = get_args(_LITERALS.get(part))
        if part.startswith("Literal["):
            values = ast.literal_eval(part.removeprefix("Literal"))
        found += [f'`"{each}"`' for each in values] or [_TYPES.get(part, f"`{part}`")]
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))


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


def _descriptions() -> dict[str, str]:
    """Return a paragraph on type and default, one on the meaning and one on the use, by heading."""
    said, given = _documented(options), defaults()
    own = {**said["TaskOptions"], **said["GuardOptions"]}
    rows = {f"`{name}`": (*own[name], f" **Default:** {_default(given[name])}.") for name in own}
    rows[_OF_CALLS] = (*said["CallOptions"]["busy"], ' **Default:** `"raise"`.')
    rows["`key`"] = (_TYPES["KeySpec"], _documented(function)[""]["KeySpec"][1], "")
    return {
        heading: f"**Type:** {kind}.{default}\n\n{_filled(text)}"
        for heading, (kind, text, default) in rows.items()
    }


def _filled(text: str) -> str:
    each = (textwrap.fill(part, 148, break_on_hyphens=False) for part in text.split("\n\n"))
    return "\n\n".join(each) + "\n"


def pages_as_generated() -> dict[str, str]:
    """Return the pages, by name, with the descriptions that the texts make, and their list."""
    described = _descriptions()
    pages = {name: (FOLDER / name).read_text(encoding="utf-8") for name in GROUPS}
    headings = {name: _HEADING.findall(page) for name, page in pages.items()}
    placed = [each for name in GROUPS if name != "options-enqueue.md" for each in headings[name]]
    assert sorted(placed) == sorted(described), "an option has no heading, or several"
    made = {
        name: _OPTION.sub(lambda found: f"{found[1]}\n\n{described.get(found[1], found[2])}", page)
        for name, page in pages.items()
    }
    listed = "".join(
        f"\n[{title}]({name})\n: {_links(name, headings[name])}\n" for name, title in GROUPS.items()
    )
    index = (FOLDER / "options.md").read_text(encoding="utf-8")
    return {**made, "options.md": _LIST.sub(lambda _: f"{listed}\n", index)}


def _links(page: str, headings: list[str]) -> str:
    names = [each.strip("`") for each in headings if each != _OF_CALLS]
    return ",\n  ".join(f"[`{name}`]({page}#{name})" for name in names)


if __name__ == "__main__":
    for name, page in pages_as_generated().items():
        (FOLDER / name).write_text(page, encoding="utf-8")
