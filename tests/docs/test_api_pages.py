"""Every public name of Python has its place on a page, and the pages name no others."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from typing import Any

import pytest

from support.pages import PAGES, ROOT, blocks_of

pytestmark = pytest.mark.once

MODULES = ("taskguard", "taskguard.integration", "taskguard.locks")
OTHERS = ("taskguard.errors", "taskguard.events", "taskguard.fenced", "taskguard.logs")
PUBLIC = {*MODULES, *OTHERS}
QUEUES = ("taskguard_celery", "taskguard_rq", "taskguard_django")
SERVERS = ("taskguard_etcd", "taskguard_consul", "taskguard_zookeeper")
MONITORS = ("taskguard_otel", "taskguard_prometheus", "taskguard_dashboard")
INTEGRATIONS = (*QUEUES, *SERVERS, *MONITORS, "pytest_taskguard")
# Groups of entry points, and a check of Django's, whose names look like modules.
NO_MODULES = {"taskguard.doctors", "taskguard.queues", "taskguard.eviction"}
# Names of spans.
NO_MODULES |= {f"taskguard.{name}" for name in ("claim", "park", "body", "complete")}
# These pages are for the developers of taskguard.
INSIDE = re.compile(r"docs/(decisions/.*|architecture\.md)")
_DOTTED = re.compile(r"(?<![\w./<>:@-])taskguard(?:\.[a-zA-Z_]\w*)+")
_DIRECTIVE = re.compile(r"^\.\. (?:py:data|auto\w+):: (taskguard\.[\w.]+)$", re.MULTILINE)
# Some members of these classes are for integrations, and are described on their page.
_MEMBER = re.compile(r"taskguard\.(TaskGuard|SqlLedger)\.")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def found(name: str) -> Any:
    """Return the value of a dotted name. Raise LookupError unless each step is public."""
    module = max((each for each in PUBLIC if f"{name}.".startswith(f"{each}.")), key=len)
    value = importlib.import_module(module)
    for part in name[len(module) + 1 :].split(".") if name != module else ():
        if value is importlib.import_module(module) and part not in value.__all__:
            raise LookupError(f"{module} has no public name {part}")
        value = getattr(value, part)
    return value


def test_each_public_name_is_documented_once() -> None:
    """A directive for Sphinx names it. A name of two modules is documented in one of them."""
    documented = [
        name
        for page in PAGES
        for name in _DIRECTIVE.findall(text_of(page))
        if not _MEMBER.match(name)
    ]
    assert len(documented) == len(set(documented))
    public = {
        f"{each}.{name}" for each in MODULES for name in importlib.import_module(each).__all__
    }
    assert set(documented) <= public | set(OTHERS)
    assert set(OTHERS) <= set(documented)
    there = [found(name) for name in documented]
    missing = {name for name in public - set(documented) if found(name) not in there}
    assert missing == set()


@pytest.mark.parametrize("package", INTEGRATIONS)
def test_each_public_name_of_an_integration_is_documented(package: str) -> None:
    """A directive for Sphinx names it, on a page of options or on that of the integrations."""
    pages = ("options", "options-enqueue", "queues")
    text = "".join(text_of(f"docs/reference/{each}.md") for each in pages)
    documented = re.findall(rf"^\.\. auto\w+:: {package}\.(\w+)(?:\(\))?$", text, re.MULTILINE)
    assert sorted(documented) == sorted(importlib.import_module(package).__all__)


@pytest.mark.parametrize("page", [each for each in PAGES if not INSIDE.fullmatch(each)])
def test_a_page_names_public_names_only(page: str) -> None:
    """In its text and in its code."""
    for name in set(_DOTTED.findall(text_of(page))) - NO_MODULES:
        assert found(name) is not None, f"{page}: {name}"
    for block in blocks_of(page, "python"):
        for each in ast.walk(ast.parse(textwrap.dedent(block.text))):
            if isinstance(each, ast.ImportFrom) and f"{each.module}.".startswith("taskguard."):
                for name in each.names:
                    assert found(f"{each.module}.{name.name}") is not None, f"{block}: {name.name}"


def test_sphinx_shows_the_whole_text_of_a_property() -> None:
    """Napoleon takes the text before a colon in the first line for the property's type."""
    packages = (*MODULES, *INTEGRATIONS)
    public = [
        getattr(module, name)
        for module in map(importlib.import_module, packages)
        for name in module.__all__
    ]
    cut = [
        f"{kind.__qualname__}.{name}"
        for kind in {each for each in public if isinstance(each, type)}
        for name, member in vars(kind).items()
        if isinstance(member, property) and not name.startswith("_")
        if re.search(r": *\S", re.sub(r"`[^`]*`", "", (member.__doc__ or "").partition("\n")[0]))
    ]
    assert cut == []
