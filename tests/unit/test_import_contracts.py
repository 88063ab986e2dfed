"""The contracts of import-linter in pyproject.toml find an import of what is private."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.once


def test_an_integration_that_imports_a_private_name_is_found(tmp_path: Path) -> None:
    """Also where a public name of the same module would do, and in a function."""
    if importlib.util.find_spec("importlinter") is None:
        pytest.skip("import-linter is not installed: it is in the group dev")
    only_python = shutil.ignore_patterns("__pycache__", "*.sql", "*.lua")
    for folder in ("taskguard", "integrations", "sandbox"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=only_python)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    wrong = {
        "taskguard_rq/queue.py": "\nfrom taskguard.model.delivery import Queue as _Private\n",
        "taskguard_etcd/health.py": "\ndef f():\n    import taskguard.locks.base\n",
        "pytest_taskguard/waiting.py": "\nfrom taskguard.run import runner\n",
    }
    for name, text in wrong.items():
        with (tmp_path / "integrations" / name).open("a") as file:
            file.write(text)
    folders = (tmp_path, tmp_path / "integrations", tmp_path / "sandbox")
    path = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    broken = re.findall(r"^(.*) BROKEN", done.stdout, re.MULTILINE)
    assert broken == [
        "Integrations import public names only",
        "The pytest plugin imports public names, and what it takes the place of",
    ]
    found = set(re.findall(r"^- *([\w.]+ -> [\w.]+) \(l\.\d+\)", done.stdout, re.MULTILINE))
    assert found == {
        "taskguard_rq.queue -> taskguard.model.delivery",
        "taskguard_etcd.health -> taskguard.locks.base",
        "pytest_taskguard.waiting -> taskguard.run.runner",
    }
