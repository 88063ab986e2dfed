"""Write the lists of docs/reference/findings.md: one for each module `findings.py`.

PYTHONPATH=tests python tests/support/findings_page.py
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Iterator
from string import Formatter

from support.pages import ROOT
from taskguard.integration import FindingTemplate

__all__ = ["PAGE", "fields_of", "modules", "page_as_generated", "templates"]

PAGE = ROOT / "docs" / "reference" / "findings.md"
_TYPES = "taskguard.findings"
_WIDTH = 120
_BEGIN = "<!-- From here on this page is generated: tests/support/findings_page.py -->\n"
_PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)[^{}]*\}")
_HEADINGS = {
    "taskguard.doctor.findings": "Settings, servers and clocks",
    "taskguard.ledger.health.findings": "The ledger",
    "taskguard.locks.findings": "Locks of any kind",
    "taskguard.locks.redis.findings": "Redis and Valkey",
    "taskguard.locks.redis.cluster.findings": "Redis Cluster",
    "taskguard.locks.redlock.findings": "Redlock",
    "taskguard.lock_table.findings": "Locks in a table",
    "taskguard.advisory_locks.findings": "Advisory locks",
    "taskguard_etcd.findings": "etcd",
    "taskguard_consul.findings": "Consul",
    "taskguard_zookeeper.findings": "ZooKeeper",
    "taskguard_celery.findings": "Celery",
    "taskguard_rq.findings": "RQ",
    "taskguard_django.findings": "Django",
}


def modules() -> dict[str, list[FindingTemplate]]:
    """Return the templates of each module `findings.py`, in the order of the page."""
    found: dict[str, list[FindingTemplate]] = {}
    for folder in (ROOT / "taskguard", ROOT / "integrations"):
        for file in folder.glob("**/findings.py"):
            base = ROOT if folder.name == "taskguard" else folder
            name = ".".join(file.relative_to(base).with_suffix("").parts)
            if name != _TYPES:
                members = vars(importlib.import_module(name)).values()
                found[name] = [each for each in members if isinstance(each, FindingTemplate)]
    order = list(_HEADINGS)
    return dict(sorted(found.items(), key=lambda each: order.index(each[0])))


def templates() -> Iterator[FindingTemplate]:
    """Return all templates."""
    for each in modules().values():
        yield from each


def fields_of(template: FindingTemplate) -> set[str]:
    """Return the names of its placeholders."""
    texts = f"{template.what} {template.why} {template.fix}"
    return {name for _, name, _, _ in Formatter().parse(texts) if name}


def page_as_generated() -> str:
    """Return the page as it has to be: its own beginning, and one list for each module."""
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    lists = (
        f"\n## {_HEADINGS[name]}\n" + "".join(map(_entry, found))
        for name, found in modules().items()
    )
    return head + _BEGIN + "".join(lists)


def _entry(template: FindingTemplate) -> str:
    page, _, anchor = template.link.removeprefix("docs/").partition("#")
    folder, _, file = page.rpartition("/")
    path = file if folder == "reference" else f"../{page}"
    link = f"[`{template.name}`]({path}{'#' if anchor else ''}{anchor})"
    what = _wrapped(": ", f"{template.what} {template.why}")
    return f"\n{link} ({template.level})\n{what}\n\n{_wrapped('  **Fix:** ', template.fix)}\n"


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(
        start + _shown(text),
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shown(text: str) -> str:
    parts = text.split("`")
    for number, part in enumerate(parts):
        parts[number] = _PLACEHOLDER.sub(_in_code if number % 2 else r"*\1*", part)
    return "`".join(parts).replace("{{", "{").replace("}}", "}")


def _in_code(found: re.Match[str]) -> str:
    return found[1].upper()


if __name__ == "__main__":
    PAGE.write_text(page_as_generated(), encoding="utf-8")
