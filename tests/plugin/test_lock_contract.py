"""`pytest_taskguard.lock_contract` as users have it passes correct providers only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import support
import taskguard
from pytest_taskguard.lock_contract.server import take
from support.lock_mutants import MUTANTS
from support.pages import blocks_of
from taskguard.locks import Held
from taskguard.model.lease import new_owner

pytestmark = pytest.mark.once

TESTS = Path(support.__path__[0]).parent
PAGE = "docs/how-to/lock-provider.md"
# Packages that the suite must not need: its users have other servers than these.
NOT_INSTALLED = ("fakeredis", "redis", "sqlalchemy", "celery", "rq")
SUITE_OF_MUTANTS = """
import pytest
from pytest_taskguard.lock_contract import *
from pytest_taskguard.lock_contract import server as waiting
from support import session_locks
from support.lock_mutants import MUTANTS

# What never comes need not be waited for.
waiting.PATIENCE_S, session_locks.SESSION_S = 1.0, 0.2

@pytest.fixture(params=MUTANTS)
def server(request):
    made, _ = MUTANTS[request.param]
    return made()
"""
# Changes of the page's provider, each with a test that has to fail for it.
WRONG = [
    ("and holder != str(owner)", "and False", "TestAcquire::test_taken"),
    ("max(token + 1, int(now * 1e6))", "int(now)", "TestTokens::test_grow"),
    ("and owner = ? and until > ?", "and ? <> '' and until > ?", "TestRelease::test_by_another"),
    ("return Renewal.GONE", "return Renewal.RENEWED", "TestRenew::test_creates_nothing"),
]


def outcomes(folder: Path, text: str, *options: str) -> dict[str, str]:
    """Run a module of tests in a process of its own. Return each outcome by `Class::test[…]`."""
    folder.joinpath("test_provider.py").write_text(text)
    absent = f"import sys\nsys.modules.update(dict.fromkeys({NOT_INSTALLED!r}))\n"
    folder.joinpath("conftest.py").write_text(absent)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    command += ["-p", "pytest_taskguard.plugin", "--junitxml=report.xml", *options]
    # A test that never ends reports where it hangs.
    command += ["-o", "faulthandler_timeout=90"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"") + (error.stderr or b"")
        raise AssertionError(said.decode("utf-8", "replace")) from error
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {}
    for case in ET.parse(folder / "report.xml").iter("testcase"):
        name = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}"
        (kind, message) = next(((c.tag, c.get("message", "")) for c in case), ("passed", ""))
        found[name] = f"{kind}: {message}" if message else kind
    return found


def files_of_the_page(folder: Path, *, old: str = "", new: str = "") -> str:
    """Write the page's provider to `lockfile.py`, with a change, and return its tests."""
    provider, factory, tests = (block.text for block in blocks_of(PAGE, "python"))
    module = f"{provider}\n{factory}"
    assert old in module
    folder.joinpath("lockfile.py").write_text(module.replace(old, new) if old else module)
    return tests


def is_caught(outcome: str) -> bool:
    """Return whether an assertion of the suite failed, not an accident."""
    return re.match(r"failure: (AssertionError|assert|Failed: DID NOT RAISE)", outcome) is not None


def test_the_provider_on_the_page_passes(tmp_path: Path) -> None:
    """The provider on the page passes with pytest alone, without packages of other servers."""
    found = outcomes(tmp_path, files_of_the_page(tmp_path))
    skipped = {name for name, outcome in found.items() if outcome.startswith("skipped")}
    unknown = "TestOrder::", "TestSharing", "TestHints::"
    lacking = {name for name in found if name.startswith(unknown)}
    assert lacking <= skipped  # it promises no order, shares no keys, and keeps no hints
    assert skipped - lacking == {
        "TestHandOver::test_frees",  # it knows owners
        "TestSwallowedReply::test_of_acquire",
        "TestSession::test_lost",
        "TestSession::test_lost_while_it_waits",
    }
    assert {found[name] for name in found.keys() - skipped} == {"passed"}
    assert len(found) > 50


@pytest.mark.parametrize(("old", "new", "test"), WRONG)
def test_a_wrong_copy_of_it_does_not(tmp_path: Path, old: str, new: str, test: str) -> None:
    """Each change of the provider fails a test."""
    tests = files_of_the_page(tmp_path, old=old, new=new)
    kind, _, name = test.partition("::")
    found = outcomes(tmp_path, tests, "-k", f"{kind} and {name}")
    assert any(is_caught(outcome) for outcome in found.values()), found


def test_the_provider_on_the_page_is_one_that_connect_takes(tmp_path: Path) -> None:
    """Locks of the page's provider exclude each other, and are freed."""
    names: dict[str, object] = {}
    exec(blocks_of(PAGE, "python")[0].text, names)
    made = names["SqliteLocks"]
    assert callable(made)
    locks = made(tmp_path / "locks.db")
    tg = taskguard.connect(locks=locks, ledger=None)
    with tg.lock("a") as first:
        assert isinstance(take(locks, ("a",), new_owner()), Held)
    with tg.lock("a") as second:
        assert second.fence > first.fence


def test_each_mutant_fails_where_it_has_to(tmp_path: Path) -> None:
    """Each wrong provider fails its test."""
    chosen = []
    for name, (_, test) in MUTANTS.items():
        kind, _, function = test.partition("::")
        chosen.append(f"({kind} and {function} and {name})")
    found = outcomes(tmp_path, SUITE_OF_MUTANTS, "-k", " or ".join(chosen))
    missed = {
        name: (test, outcome)
        for name, (_, test) in MUTANTS.items()
        for outcome in [[o for case, o in found.items() if _is_of(case, test, name)]]
        if not any(map(is_caught, outcome))
    }
    assert missed == {}


def _is_of(case: str, test: str, mutant: str) -> bool:
    return case.startswith(f"{test}[") and mutant in re.split(r"[\[\]-]", case)
