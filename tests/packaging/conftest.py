"""The wheel, and environments with nothing but the wheel and some of its extras."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
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


@pytest.fixture(scope="session")
def pycache(shared: Path) -> Path:
    """The folder of the environments' bytecode. They share it with the environment of the tests:
    otherwise each of them would compile its libraries."""
    folder = shared / "pycache"
    with once(folder) as first:
        if first:
            for sources in (Path(sysconfig.get_path("stdlib")), ROOT):
                link_bytecode(folder, sources, sources)
    return folder


def link_bytecode(pycache: Path, sources: Path, linked: Path) -> None:
    """Let `linked`, a link to these sources, have their bytecode."""
    ours = sources.is_relative_to(pycache.parent)  # and removed with it
    cache = Path(pycache if ours else sys.pycache_prefix or pycache / "tests")
    compiled, place = cache / sources.relative_to("/"), pycache / linked.relative_to("/")
    compiled.mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(compiled)


@pytest.fixture
def installed(wheel: Path, shared: Path, pycache: Path) -> Callable[[str], Path]:
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
                    link(wheel, set(extras.split(",")), place, pycache)
        return place / "bin"

    return install


def link(wheel: Path, extras: set[str], place: Path, pycache: Path) -> None:
    """Unpack the wheel, and link all distributions that it requires with these extras."""
    (site,) = (place / "lib").glob("python*/site-packages")
    unpacked = place.parent / "unpacked"
    with once(unpacked) as first:
        if first:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
    for sources in unpacked.iterdir():
        link_sources(sources, site, pycache)
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
                link_distribution(other, site, pycache)


def link_distribution(found: metadata.Distribution, site: Path, pycache: Path) -> None:
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    for top in tops:
        if not (site / top).exists():
            link_sources(Path(str(found.locate_file(top))), site, pycache)


def link_sources(sources: Path, site: Path, pycache: Path) -> None:
    linked = site / sources.name
    linked.symlink_to(sources)
    if sources.is_dir() and sources.suffix != ".dist-info":
        link_bytecode(pycache, sources, linked)
