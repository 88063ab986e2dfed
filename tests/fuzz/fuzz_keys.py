"""The fuzzed properties for as long as one likes: atheris, guided by coverage of taskguard.keys.

    make fuzz SECONDS=600
    make fuzz INPUT=.fuzz/crash-…      a finding once more; needs no atheris

Guarantees: a finding is printed with its input, which is kept as a file to be replayed, and ends
the run with an exit code other than zero. A run that ends says what it has tried in one line.
Inputs that reached something new stay in `.fuzz/corpus`, where the next run starts.
Does not guarantee: the same inputs in every run.

Read next: `properties.py`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOUND = ROOT / ".fuzz"
sys.path[:0] = [str(ROOT / "tests")]


def main() -> None:
    """Replay a file, or run for a while."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--input", type=Path, help="a file that an earlier run has left")
    options = parser.parse_args()
    if options.input is not None:
        replay(options.input)
    else:
        run(options.seconds)


def replay(path: Path) -> None:
    """One input again, with its finding, if it still is one."""
    from fuzz.inputs import FromBytes
    from fuzz.properties import FindingError, Record, check_input

    record = Record()
    try:
        check_input(FromBytes(path.read_bytes()), record)
    except FindingError:
        traceback.print_exc()
        sys.exit(1)
    print(record)


def run(seconds: float) -> None:
    """Try inputs until the time is up or something is found."""
    try:
        import atheris
    except ImportError:
        sys.exit(
            "make fuzz needs atheris, which has wheels for CPython 3.10 to 3.14 on Linux x86-64;"
            f" this is {platform.python_implementation()} {platform.python_version()} on"
            f" {platform.system()} {platform.machine()}. make test tries the same properties by"
            " Hypothesis, for a short time."
        )
    with atheris.instrument_imports(include=["taskguard.keys"]):
        import taskguard.keys  # noqa: F401 - instrumented as it is loaded
    from fuzz.inputs import FromBytes
    from fuzz.properties import FindingError, Record, check_input

    record = Record()
    ends_s = time.monotonic() + seconds

    def try_one(data: bytes) -> None:
        if time.monotonic() > ends_s:
            print(record, flush=True)
            os._exit(0)  # libFuzzer's own way out tells Python nothing
        try:
            check_input(FromBytes(data), record)
        except FindingError:
            print(record, flush=True)
            raise

    corpus = FOUND / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    # `properties` finds slow inputs; libFuzzer's time limit ends those that never return.
    flags = [
        "-timeout=30",
        "-max_len=1024",
        "-len_control=0",
        "-verbosity=0",
        f"-artifact_prefix={FOUND}/",
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
