"""Write docs/reference/combinations.md and taken-keys.md from `taskguard/combinations.py`.

PYTHONPATH=tests python tests/support/combinations_page.py
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from support.options_page import FOLDER
from taskguard.combinations import DELIVERIES, DIMENSIONS, ENQUEUES, REFUSALS, Rule, rule_for

__all__ = ["pages_as_generated"]

_COLUMNS = {
    "`retry`, `wait`, `skip`, `raise`": ("retry", "wait", "skip", "raise"),
    "`park`": ("park",),
    "`latest`, `supersede`": ("latest", "supersede"),
}
_NAMES = {
    ("keys", "several"): "several keys",
    ("once_per", "template"): "`once_per` with a template",
    ("formerly", "same key"): "`formerly` (same key)",
    ("formerly", "other key"): "`formerly` (another key)",
}
_COMMON = {"keys": "one", "order": "best_effort", "limit": "one", "duplicate": "answer"}
"""Values that go together with every other, so that the first table leaves them out."""

_GENERATED = re.compile(r"(<!-- (\w+) -->\n)(?:.*\n)*?(<!-- end -->)")
_CODE = re.compile(r"(`[^`]+`)|\b(\w+=(?:\"\w+\")?)")


def _name(option: str, value: str) -> str:
    if value in ("given", "several") and option != "keys":
        return f"`{option}`"
    return _NAMES.get((option, value), f'`{option}="{value}"`')


def _names(option: str, values: tuple[str, ...]) -> str:
    others = [each for each in DIMENSIONS[option] if each not in values]
    if others == ["none"]:
        return f"`{option}`"
    if len(values) > 2 and len(others) == 1:
        return f'`{option}` other than `"{others[0]}"`'
    first, *rest = values
    more = ["a template" if each == "template" else f'`"{each}"`' for each in rest]
    names = [_name(option, first), *more]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _term(fits: Mapping[str, tuple[str, ...]]) -> str:
    busy_first = sorted(fits.items(), key=lambda each: each[0] != "busy")
    first, *more = [_names(*each) for each in busy_first]
    return " with ".join(filter(None, (first, " and ".join(more))))


def _sentence(text: str) -> str:
    marked = _CODE.sub(lambda found: found[1] or f"`{found[2]}`", text)
    return marked[0].upper() + marked[1:]


def _definitions(rules: Iterable[Rule]) -> Iterator[str]:
    """Return an entry for each rule; one for rules that differ in the value of `busy` alone."""
    entries: dict[tuple[str, str], list[Rule]] = {}
    for rule in rules:
        others = {name: values for name, values in rule.fits.items() if name != "busy"}
        said = re.sub(r'^busy="\w+" ', "it ", rule.says)
        entries.setdefault((said, str(others)), []).append(rule)
    for (said, _), alike in entries.items():
        busy = tuple(value for rule in alike for value in rule.fits.get("busy", ()))
        fits = {**alike[0].fits, "busy": busy} if busy else alike[0].fits
        text = textwrap.fill(_sentence(said), 146, subsequent_indent="  ", break_on_hyphens=False)
        yield f"{_term(fits)}\n: {text}\n"


def _matrix() -> Iterator[str]:
    """Return whether each option goes together with each value of `busy`, and with `enqueue()`."""
    allowed = [
        chosen
        for values in itertools.product(*DIMENSIONS.values())
        if rule_for(REFUSALS, chosen := dict(zip(DIMENSIONS, values, strict=True))) is None
    ]
    yield f"| | {' | '.join(_COLUMNS)} |\n|{' --- |' * (len(_COLUMNS) + 1)}\n"
    for option, values in DIMENSIONS.items():
        for value in values:
            if option == "busy" or value == "none" or _COMMON.get(option) == value:
                continue
            found = {each["busy"] for each in allowed if each[option] == value}
            cells = ("yes" if found >= {*busy} else "**no**" for busy in _COLUMNS.values())
            yield f"| {_name(option, value)} | {' | '.join(cells)} |\n"


def pages_as_generated() -> dict[str, str]:
    """Return the pages, by name, as the tables make them."""
    parts = {"matrix": "".join(_matrix())}
    for name, rules in {"refused": REFUSALS, "busy": DELIVERIES, "enqueue": ENQUEUES}.items():
        parts[name] = "\n".join(_definitions(rules))
    return {
        name: _GENERATED.sub(
            lambda found: f"{found[1]}\n{parts[found[2]]}\n{found[3]}",
            (FOLDER / name).read_text(encoding="utf-8"),
        )
        for name in ("combinations.md", "taken-keys.md")
    }


if __name__ == "__main__":
    for name, page in pages_as_generated().items():
        (FOLDER / name).write_text(page, encoding="utf-8")
