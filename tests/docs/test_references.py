"""Tables of the pages agree with the code, and everything that tests cite exists."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import getdoc, signature
from typing import Any, get_args, get_type_hints

import pytest
from celery import Celery, Task
from kombu import Producer
from rq import Queue

import taskguard_celery
import taskguard_rq
from support import combinations_page, metrics_page, options_page
from support.findings_page import PAGE, fields_of, page_as_generated, templates
from support.pages import PAGES, ROOT
from taskguard import CallOptions, GuardedRow, TaskGuard, TaskOptions, errors, events, options
from taskguard.integration import Duplicate, GuardedFunction, Level
from taskguard.metrics import OUTCOMES
from taskguard.model.delivery import DROPPED
from taskguard.model.policy import Busy, OncePer, OnLost, Order, Policy
from taskguard.model.states import BY_ROW, TRANSITIONS, State
from taskguard_celery import guarded_task
from taskguard_celery.options import MessageOptions
from taskguard_rq import guarded_job
from taskguard_rq.options import JobOptions

pytestmark = pytest.mark.once

TESTS = ROOT / "tests"
OF_WORK = {"once_per", "work", "fingerprint", "row", "formerly"}
"""Options that name work. The others are how it is delivered, which `Policy` has."""
OF_ENQUEUE = ["args", "kwargs", "session", "duplicate", "delay_s"]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def first_columns(text: str) -> list[str]:
    """Return the first cells of all tables."""
    return re.findall(r"^\| *(.*?) *\|", text, re.MULTILINE)


def faults() -> list[tuple[int, str]]:
    """Numbers and names of the catalogue, whose folder is no package."""
    spec = importlib.util.spec_from_file_location("catalogue", TESTS / "faults" / "catalogue.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return [(fault.number, fault.name) for fault in module.FAULTS]


def test_architecture_has_each_invariant_that_a_test_cites() -> None:
    """The page on architecture has S1 to S17 and L1 to L6, each with its sentence."""
    texts = [file.read_text(encoding="utf-8") for file in TESTS.glob("**/*.py")]
    texts += [file.read_text(encoding="utf-8") for file in TESTS.glob("model/*.tla")]
    cited = set(re.findall(r"\b(?:S[1-9]\d?|L[1-9])\b", "\n".join(texts)))
    known = set(re.findall(r"^- \*\*([SL]\d+)\*\* ", page("architecture.md"), re.MULTILINE))
    assert cited <= known
    assert known == {*(f"S{n}" for n in range(1, 18)), *(f"L{n}" for n in range(1, 7))}


def test_architecture_has_each_fault_of_the_catalogue() -> None:
    """Architecture lists each fault of the catalogue by number and name."""
    rows = re.findall(r"^\| (\d+) \| (.*?) \| .+ \|$", page("architecture.md"), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == faults()


def test_the_table_of_states_has_each_transition() -> None:
    """The table has each transition of the code, and no other."""
    known = {str(state) for state in State}
    rows = re.findall(r"^\| (\S+) \| (\S+) \| .+ \|$", page("reference/states.md"), re.MULTILINE)
    listed = {(old, new) for old, new in rows if {old, new} <= known}
    assert listed == {(str(old), str(new)) for old, new in {**TRANSITIONS, **BY_ROW}}


def test_the_table_of_final_states_has_each_reason_to_drop_a_message() -> None:
    """The table has each reason to drop a message, with RQ's own words for it."""
    pattern = re.compile(r"^\| `(\w+)`: .*? \| (.*?) \| (.*?) \|$", re.MULTILINE)
    rows = pattern.findall(page("reference/states.md"))
    assert {reason for reason, _, _ in rows} == DROPPED.keys()
    for reason, celery, rq in rows:
        text = DROPPED[reason]
        word = None if text is None else text.partition(":")[0]
        assert (celery == "REVOKED", rq == f"CANCELED, `{word}`") == (text is not None,) * 2


def test_the_pages_of_options_have_each_option() -> None:
    """With its type, its default, what it does, and when to use it."""
    for name, text in options_page.pages_as_generated().items():
        assert page(f"reference/{name}") == text, (
            "run `PYTHONPATH=tests python tests/support/options_page.py`"
        )
    for own in options_page.texts(options).values():
        for option, text in own.items():
            assert len(text.split("\n\n")) == 2, option


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("busy", get_args(Busy)),
        ("order", get_args(Order)),
        ("once_per", get_args(OncePer)),
        ("on_lost", get_args(OnLost)),
        ("duplicate", get_args(Duplicate)),
    ],
)
def test_the_pages_of_options_have_each_value(name: str, values: tuple[str, ...]) -> None:
    """In a list, in the order of the type."""
    text = "\n".join(page(f"reference/{group}") for group in options_page.GROUPS)
    _, _, after = text.partition(f"\n## `{name}`\n")
    described, _, _ = after.partition("\n## ")
    assert tuple(re.findall(r"^`\"(\w+)\"`\n: ", described, re.MULTILINE)) == values


def test_options_have_one_type_each() -> None:
    """Type checkers, `GuardedFunction` and `Policy` take the same names and types."""
    named = {"GuardedRow": GuardedRow}
    kinds = {kind: get_type_hints(kind, localns=named) for kind in (TaskOptions, CallOptions)}
    checked = get_type_hints(Policy)
    made = get_type_hints(GuardedFunction.__init__, localns=named)
    for kind, hints in kinds.items():
        texts = options_page.texts(options)
        assert hints.keys() == texts["GuardOptions"].keys() | texts[kind.__name__].keys()
        assert hints.keys() - checked.keys() == OF_WORK
        for name in hints.keys() & checked.keys() - {"busy"}:
            assert hints[name] == checked[name], name
        assert {name: made[name] for name in OF_WORK} == {name: hints[name] for name in OF_WORK}
    assert kinds[TaskOptions]["busy"] == checked["busy"]
    assert set(get_args(kinds[CallOptions]["busy"])) < set(get_args(Busy))
    own = {each.name for each in fields(Policy) if each.init}
    assert kinds[TaskOptions].keys() - OF_WORK == own
    assert kinds[TaskOptions].keys() - kinds[CallOptions].keys() == {"order", "max_waiting"}


@pytest.mark.parametrize(
    ("function", "kind", "own"),
    [
        (guarded_task, "TaskOptions", ["key"]),
        (guarded_job, "TaskOptions", ["key", "message_id"]),
        (TaskGuard.guarded, "CallOptions", ["key"]),
        (taskguard_celery.enqueue, "MessageOptions", ["task", *OF_ENQUEUE]),
        (taskguard_rq.enqueue, "JobOptions", ["queue", "function", *OF_ENQUEUE]),
    ],
)
def test_a_signature_shows_the_type_of_its_options(
    function: Callable[..., Any], kind: str, own: list[str]
) -> None:
    """A signature shows the type of its options, for Sphinx and editors. Its docstring does not
    describe them again."""
    *named, last = [p for p in signature(function).parameters.values() if p.name != "self"]
    assert [each.name for each in named] == own
    assert (last.name, last.annotation) == ("options", f"Unpack[{kind}]")
    described = re.findall(r"^ +(\w+): ", getdoc(function) or "", re.MULTILINE)
    assert [name for name in described if name[0].islower()] == [*own, "options"]


def test_options_of_messages_are_those_of_their_queues() -> None:
    """The options of a message are those of Celery's `apply_async()` and `Producer.publish()`, and
    of RQ."""
    celery = {*re.findall(r"^ +(\w+) \(", Task.apply_async.__doc__ or "", re.MULTILINE)}
    celery |= {*signature(Producer.publish).parameters, *signature(Celery.send_task).parameters}
    assert MessageOptions.__annotations__.keys() - celery == set()
    rq = signature(Queue.create_job).parameters.keys()
    given = {"self", "func", "args", "kwargs"}
    refused = {"depends_on", "status", "ttl"}
    of_rq_3 = {"rate_limit", "webhooks"}
    assert JobOptions.__annotations__.keys() | of_rq_3 == rq - given - refused | of_rq_3


def test_the_pages_of_combinations_have_each_rule() -> None:
    """In the order in which they decide."""
    for name, text in combinations_page.pages_as_generated().items():
        assert page(f"reference/{name}") == text, (
            "run `PYTHONPATH=tests python tests/support/combinations_page.py`"
        )


def test_the_table_of_events_has_each_event() -> None:
    """The table has each event with its level in the default log."""
    rows = re.findall(r"^\| (\w+) \| .*? \| (\w+)", page("reference/events.md"), re.MULTILINE)
    kinds = [
        kind
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, events.Event) and kind is not events.Event
    ]
    levels = {10: "debug", 20: "info", 30: "warning", 40: "error"}
    loudest = {
        kind.name: levels[kind.level] for kind in kinds if kind is not events.StillDead
    }  # it is a duplicate, and the table says so
    assert dict(rows[1:]) == loudest


def test_the_page_of_findings_has_each_finding() -> None:
    """The page has each finding with its level, its texts and a link."""
    assert PAGE.read_text(encoding="utf-8") == page_as_generated(), (
        "run `PYTHONPATH=tests python tests/support/findings_page.py`"
    )


def test_the_page_of_metrics_has_each_metric() -> None:
    """The page has each metric with its labels and buckets, and the meaning of each outcome."""
    text = page("reference/metrics.md")
    assert text == metrics_page.page_as_generated(), (
        "run `PYTHONPATH=tests python tests/support/metrics_page.py`"
    )
    assert tuple(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == OUTCOMES


def test_each_name_of_a_finding_has_one_level() -> None:
    """A finding has one level, wherever it is found."""
    levels: dict[str, set[Level]] = {}
    for each in templates():
        levels.setdefault(each.name, set()).add(each.level)
    assert [name for name, found in levels.items() if len(found) > 1] == []


def test_each_finding_is_made_with_the_values_of_its_placeholders() -> None:
    """Each call such as `findings.READ_ONLY.at(where, state=…)` passes every placeholder."""
    made: set[str] = set()
    for module, tree in importing("findings"):
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Attribute) or call.func.attr != "at":
                continue
            *room, constant = ast.unparse(call.func.value).split(".")
            template = getattr(module.findings if room else module, constant, None)
            if template is not None:  # else it is a variable
                given = {each.arg for each in call.keywords}
                assert given == fields_of(template), f"{module.__name__}:{call.lineno}"
                made.add(template.name)
    variable = {"own_table", "tables_missing", "tables_version"}
    assert made >= {each.name for each in templates()} - variable


def importing(name: str) -> Iterator[tuple[Any, ast.Module]]:
    """Modules of taskguard's that import this name."""
    for folder in (ROOT / "taskguard", ROOT / "integrations"):
        for file in folder.glob("**/*.py"):
            text = file.read_text(encoding="utf-8")
            if re.search(rf"import .*\b{name}\b|from .*\b{name} import", text):
                path = file.relative_to(ROOT if folder.name == "taskguard" else folder)
                parts = path.with_suffix("").parts
                if parts[-1] not in (name, "__main__"):
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    yield importlib.import_module(".".join(parts)), ast.parse(text)


def test_each_finding_has_a_test() -> None:
    """A test names each finding."""
    texts = [file.read_text(encoding="utf-8") for file in TESTS.glob("**/test_*.py")]
    cited = set(re.findall(r"([\w-]+)[\"']", "\n".join(texts)))
    assert {each.name for each in templates()} <= cited


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_links_to_is_there(name: str) -> None:
    """Files and headings that a page links to exist, also those of the README."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.is_file(), f"{name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
            assert anchor in slugs, f"{name}: {target}"


def test_each_error_that_a_page_names_exists() -> None:
    """Each error that a page names exists, or is named with its package."""
    others = {
        "DuplicateJobError",
        "DuplicateTaskError",
        "CancelledError",
        "TaskRevokedError",
        *vars(builtins),
    }
    for name in PAGES:
        named = set(re.findall(r"`(\w+Error)`", (ROOT / name).read_text(encoding="utf-8")))
        assert named - others <= set(errors.__all__) | {"EffectsError"}, name


def test_the_page_of_errors_has_each_error() -> None:
    """The page has each error with its base classes, and with what to do."""
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", page("reference/errors.md"), re.MULTILINE)
    bases = {name: [each.__name__ for each in getattr(errors, name).__bases__] for name, _ in rows}
    assert {name: re.findall(r"`(\w+)`", cell) for name, cell in rows} == bases
    assert {name for name, _ in rows} == {*errors.__all__} - {"TaskguardError"}


def test_the_readme_is_short_and_defines_its_words() -> None:
    """The README has at most 12 KB, and defines its words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 12 * 1024
    for word in ("key", "Work", "lease", "fencing token"):
        assert f"**{word}**" in text


def test_quotes_in_code_stay_as_they_are() -> None:
    """Quotes in code stay straight, because curly ones are no Python."""
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    assert conf["smartquotes"] is False
    assert "smartquotes" not in conf["myst_enable_extensions"]


def test_the_changelog_is_a_short_list_of_features() -> None:
    """At most 80 lines. Each feature has one or two."""
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    features = re.split(r"^- ", "\n".join(lines), flags=re.MULTILINE)[1:]
    long = [each for each in features if len(each.partition("\n\n")[0].splitlines()) > 2]
    assert not long


def test_each_decision_is_a_short_page_of_the_index() -> None:
    """Context, decision and consequences, in at most 60 lines."""
    pages = {file.stem: file for file in (ROOT / "docs" / "decisions").glob("*.md")}
    index = pages.pop("index").read_text(encoding="utf-8")
    assert set(re.findall(r"^([a-z-]+)$", index, re.MULTILINE)) == set(pages)
    for file in pages.values():
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60, file.name
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings[:3] == ["Context", "Decision", "Consequences"], file.name
        assert headings[3:] in ([], ["Measured"]), file.name


def test_each_picture_is_drawn_by_the_script() -> None:
    """Each SVG file is what `docs/pictures/draw.py` writes, and a page shows it."""
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))["PICTURES"]
    files = {file.stem: file for file in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert files.keys() == drawn.keys()
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
    for name, draw in drawn.items():
        assert files[name].read_text(encoding="utf-8") == draw().svg(), (
            "run `python docs/pictures/draw.py`"
        )
        assert f"pictures/{name}.svg" in pages
