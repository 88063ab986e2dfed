"""The wheel, and environments with nothing but the wheel and some of its extras."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what all processes of the run use."""
    own = tmp_path_factory.getbasetemp()
    divided = own.name.startswith("popen-")
    folder = (own.parent if divided else own) / "packaging"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def once(place: Path) -> Iterator[bool]:
    """Yield True to the first process, which makes `place`. The others wait, and get False."""
    made = place.with_name(f"{place.name}.made")
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not made.exists()
        made.touch()


def run(command: list[str | Path]) -> None:
    # A test that has put the machine's certificates aside needs them for this.
    environment = {k: v for k, v in os.environ.items() if (k, v) != ("SSL_CERT_FILE", os.devnull)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def wheel(shared: Path) -> Path:
    """The wheel: that of `make build`, or built from the tree without the network."""
    if given := os.environ.get("TASKGUARD_WHEEL"):
        return ROOT / given
    out = shared / "wheel"
    with once(out) as first:
        if first:
            how = ["-m", "build", "--wheel", "--no-isolation", "--outdir", out]
            run([sys.executable, *how, ROOT])
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture
def installed(wheel: Path, shared: Path) -> Callable[[str], Path]:
    """Makes an environment as a line of installation does, and gives the folder of its commands.

    The wheel of `make build` is installed by pip. Otherwise what its extras bring is linked from
    the environment of the tests, without the network.
    """

    def install(line: str) -> Path:
        extras = line.partition("[")[2].rstrip("]")
        place = shared / f"env-{extras.replace(',', '-')}"
        with once(place) as first:
            if first:
                run([sys.executable, "-m", "venv", "--without-pip", place])
                if "TASKGUARD_WHEEL" in os.environ:
                    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python"]
                    quiet = ["-qq", "--disable-pip-version-check", "--no-compile"]
                    run([*pip, "install", *quiet, f"{wheel}[{extras}]"])
                else:
                    link(wheel, set(extras.split(",")), place)
        return place / "bin"

    return install


def link(wheel: Path, extras: set[str], place: Path) -> None:
    """Unpack the wheel, and link all distributions that it requires with these extras."""
    (site,) = (place / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    command = place / "bin" / "taskguard"
    command.write_text(f"#!{place}/bin/python\nfrom taskguard.cli import main\nexit(main())\n")
    command.chmod(0o755)
    (ours,) = metadata.distributions(name="celery-taskguard", path=[str(site)])
    linked: set[tuple[str, frozenset[str]]] = set()
    wanted = [(ours, frozenset(extras))]
    while wanted:
        found, its_extras = wanted.pop()
        for requirement in map(Requirement, found.requires or ()):
            marker, of = requirement.marker, frozenset(requirement.extras)
            if marker and not any(marker.evaluate({"extra": each}) for each in {"", *its_extras}):
                continue
            named = requirement.name == "celery-taskguard"
            other = ours if named else metadata.distribution(requirement.name)
            assert requirement.specifier.contains(other.version, prereleases=True), requirement
            if (requirement.name, of) not in linked:
                linked.add((requirement.name, of))
                wanted.append((other, of))
                link_distribution(other, site)


def link_distribution(found: metadata.Distribution, site: Path) -> None:
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    for top in tops:
        if not (site / top).exists():
            (site / top).symlink_to(str(found.locate_file(top)))
