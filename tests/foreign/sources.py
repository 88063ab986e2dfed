"""The test suites, out of the source distributions of the versions that are installed.

Guaranteed: a suite is of the same version as the package that it tests, and does not bring another
copy of that package. It is downloaded by pip, once, into `.foreign` (`make clean` removes it).
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent.parent / ".foreign"


def unpack(package: str, wanted: tuple[str, ...], to: Path) -> None:
    """Put what `package` has of the `wanted` files and folders into the folder `to`."""
    name = _name(package)
    with tarfile.open(CACHE / f"{name}.tar.gz") as source:
        members = []
        for member in source.getmembers():
            path = member.name.removeprefix(f"{name}/")
            if path.split("/")[0] in wanted:
                member.name = path
                members.append(member)
        source.extractall(to, members, filter="data")


def download(package: str) -> None:
    """Get the source distribution of `package`, if it is not there."""
    CACHE.mkdir(exist_ok=True)
    if (CACHE / f"{_name(package)}.tar.gz").exists():
        return
    exact = f"{package}=={version(package)}"
    print(f"downloading the source distribution of {exact}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", package, "--dest", str(CACHE), exact]
    subprocess.run(command, check=True, timeout=600)


def _name(package: str) -> str:
    return f"{package.replace('-', '_')}-{version(package)}"
