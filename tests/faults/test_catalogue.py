"""The catalogue leaves no fault out, and what it names is there."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
COUNT = 34


def _load() -> Any:
    # These folders are no packages: a file beside this one is loaded by its path.
    spec = importlib.util.spec_from_file_location("catalogue", HERE / "catalogue.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


FAULTS = _load().FAULTS


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    """The tests of a file, and of what it takes over as a whole: `function`, `Class::function`."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*":
            suite = importlib.import_module(node.module)
            classes = {name: getattr(suite, name) for name in suite.__all__ if name[:4] == "Test"}
            found |= {f"{name}::{each}" for name, kind in classes.items() for each in vars(kind)}
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {before + each.name for each in inner if isinstance(each, ast.FunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_every_fault_has_its_row() -> None:
    """Numbered from 1 to 34, in order, each with tests or a reason."""
    assert [fault.number for fault in FAULTS] == list(range(1, COUNT + 1))
    assert len({fault.name for fault in FAULTS}) == COUNT
    assert [fault.name for fault in FAULTS if not fault.tests and fault.not_yet is None] == []
    assert all(fault.not_yet.text.endswith(".") for fault in FAULTS if fault.not_yet)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_tests_exist(fault: Any) -> None:
    """Each is a function in the file that is named."""
    for test in fault.tests:
        name, _, function = test.partition("::")
        path = TESTS / name
        assert path.is_file(), test
        assert function in functions_of(path), test


def test_every_test_of_faults_is_in_the_catalogue() -> None:
    """Each test of this folder belongs to a row of the catalogue."""
    named = {test for fault in FAULTS for test in fault.tests}
    here = {
        f"faults/{path.name}::{test}"
        for path in HERE.glob("test_*.py")
        if path.name != Path(__file__).name
        for test in functions_of(path)
    }
    assert here - named == set()
