"""A user gets one wheel with every package, its types, Lua and SQL, and a light import."""

from __future__ import annotations

import configparser
import email
import json
import re
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LOCK_SERVERS = ("etcd", "consul", "zookeeper")
MONITORS = ("otel", "prometheus", "dashboard")
INTEGRATIONS = [
    f"taskguard_{name}" for name in ("celery", "rq", "django", *LOCK_SERVERS, *MONITORS)
]
PACKAGES = {"taskguard": ROOT / "taskguard"} | {
    package: ROOT / "integrations" / package for package in [*INTEGRATIONS, "pytest_taskguard"]
}
HEAVY = ["sqlalchemy", "redis", "celery", "kombu", "rq", "django", "psycopg", "rich", "asyncio"]


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_every_file_of_every_package_and_no_other(wheel: Path) -> None:
    """Lua, SQL and py.typed too; the integrations without their prefix. No embedded servers, no
    demo, no benchmarks: those are the sandbox's, which stays with the developers.
    """
    expected = {
        f"{package}/{file.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= held
    assert not [name for name in held if re.search("sandbox|demo|benchmark", name)]


def test_the_wheel_works_without_the_sources(wheel: Path, tmp_path: Path) -> None:
    """Installed elsewhere, every package comes from there, and the command is declared."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")]
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(name).decode())
    assert dict(entries["console_scripts"]) == {"taskguard": "taskguard.cli:main"}
    code = f"import sys, json; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "".join(f"import {package}\n" for package in PACKAGES)
    code += f"print(json.dumps([sys.modules[p].__file__ for p in {list(PACKAGES)!r}]))"
    for file in json.loads(run(code, cwd=tmp_path)):
        assert Path(file).is_relative_to(tmp_path)


def test_the_core_depends_on_nothing(metadata: Message) -> None:
    """Every requirement belongs to an extra, and every extra that errors name exists."""
    requirements = metadata.get_all("Requires-Dist") or []
    assert requirements
    assert [r for r in requirements if "extra ==" not in r] == []
    extras = set(metadata.get_all("Provides-Extra") or [])
    queues = {"celery", "rq", "django"}
    servers = {"redis", "postgresql", "mysql", "sqlite", *LOCK_SERVERS}
    # Packages for development only are a group of pyproject.toml, and no extra.
    assert extras == queues | servers | {*MONITORS, "cli", "pytest", "all"}
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"


def test_import_loads_no_driver_and_no_queue() -> None:
    """Drivers are imported when a URL names them, queues by their integrations."""
    code = "import sys, json, taskguard; print(json.dumps(sorted(sys.modules)))"
    assert [m for m in HEAVY if m in json.loads(run(code))] == []


def run(code: str, *, cwd: Path = ROOT) -> str:
    """Return the output of a fresh interpreter."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
