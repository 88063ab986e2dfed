"""The three public modules: what type checkers read in them is what the program finds there."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

import taskguard

MODULES = ("taskguard", "taskguard.integration", "taskguard.locks")


def homes_for_type_checkers(name: str) -> dict[str, str]:
    """The module that each name is imported from, by the imports `import X as X`."""
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    return {
        each.name: found.module
        for found in ast.walk(tree)
        if isinstance(found, ast.ImportFrom) and found.module
        for each in found.names
        if each.name == each.asname
    }


@pytest.mark.parametrize("name", MODULES)
def test_type_checkers_and_the_program_find_the_same_names(name: str) -> None:
    """Each from the same module."""
    module, homes = importlib.import_module(name), homes_for_type_checkers(name)
    assert sorted(homes) == module.__all__
    assert set(homes) <= set(dir(module))
    for each, home in homes.items():
        at_home = getattr(importlib.import_module(home), each)
        assert getattr(module, each) is at_home, each


@pytest.mark.parametrize("name", MODULES)
def test_type_checkers_refuse_other_names(name: str) -> None:
    """A module's `__getattr__` that they see would allow any."""
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    (checking,) = [each for each in tree.body if isinstance(each, ast.If)]
    assert ast.unparse(checking.test) == "TYPE_CHECKING"
    hidden = {id(each) for part in checking.orelse for each in ast.walk(part)}
    setting = [
        each
        for each in ast.walk(tree)
        if getattr(each, "id", getattr(each, "name", "")) == "__getattr__"
    ]
    assert setting
    assert {id(each) for each in setting} <= hidden


@pytest.mark.parametrize("name", MODULES)
def test_a_name_that_is_not_there_is_an_attribute_error(name: str) -> None:
    """An unknown name is an AttributeError, as with any module."""
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = importlib.import_module(name).nothing


def test_users_have_few_names() -> None:
    """An editor completes these after `taskguard.`: 17 names and three modules."""
    assert len(taskguard.__all__) <= 20
