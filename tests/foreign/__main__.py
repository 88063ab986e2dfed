"""`make foreign`: check that every test that passes without guards passes with them.

The tests of other locks pass on their own locks, and have to pass on `tg.lock()`.

Each suite runs twice, side by side. Tests that differ run again, up to three times each way. A test
differs if it passed without guards in some run, and with guards in none. Exit status: 0 if the
tests in `expected.toml` differ and no others. 1 if another test differs, or one passes that should
always differ.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from foreign.running import SUITES, Outcomes, Suite, end_all, run
from foreign.sources import CACHE, download

EXPECTED = Path(__file__).with_name("expected.toml")
_TRIES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named suites, by default all. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m foreign", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*SUITES, []], help="by default all of them")
    names = parser.parse_args(argv).names or list(SUITES)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    wrong = [line for name in names for line in _compare(SUITES[name], **expected()[name])]
    for line in wrong:
        print(f"WRONG  {line}")
    return 1 if wrong else 0


def expected() -> dict[str, dict[str, dict[str, str]]]:
    """Return for each suite the tests that differ, `always` or `sometimes`, and why."""
    return tomllib.loads(EXPECTED.read_text())


def _compare(suite: Suite, *, always: dict[str, str], sometimes: dict[str, str]) -> list[str]:
    """Return the differences that are not expected."""
    reasons = always | sometimes
    print(f"{suite.package} {version(suite.package)}: its own suite, twice …", flush=True)
    began_s = time.monotonic()
    download(suite.package)
    for log in (_log(suite, False), _log(suite, True)):
        log.unlink(missing_ok=True)
    plain, guarded = _run_both(suite)
    for _ in range(_TRIES - 1):
        if not (doubtful := sorted(differing(plain, guarded))):
            break
        print(f"  {len(doubtful)} differ, and run again", flush=True)
        for known, again in zip((plain, guarded), _run_both(suite, doubtful), strict=True):
            known.update({test: how for test, how in again.items() if how == "passed"})
    for title, outcomes in (("without guards", plain), ("guarded", guarded)):
        counts = ", ".join(f"{n} {how}" for how, n in sorted(Counter(outcomes.values()).items()))
        print(f"  {title}: {counts}")
    found = differing(plain, guarded)
    for test in sorted(found & set(reasons)):
        print(f"  as expected, {test} is {guarded.get(test)}: {reasons[test]}")
    print(f"  {len(found)} differ; {time.monotonic() - began_s:.0f} s", flush=True)
    logs = f"see {_log(suite, True)}"
    return [
        *(
            f"{test} passes without guards, and not with them: {logs}"
            for test in found - {*reasons}
        ),
        *(f"{test} is expected to differ, and does not" for test in {*always} - found),
    ]


def differing(plain: Outcomes, guarded: Outcomes) -> set[str]:
    """Return the tests that pass without guards, but not with them."""
    return {test for test, how in plain.items() if how == "passed" and guarded.get(test) != how}


def _run_both(suite: Suite, only: Sequence[str] = ()) -> tuple[Outcomes, Outcomes]:
    with ThreadPoolExecutor(2) as threads:
        runs = [
            threads.submit(run, suite, guarded=guarded, log=_log(suite, guarded), only=only)
            for guarded in (False, True)
        ]
        try:
            return runs[0].result(), runs[1].result()
        except BaseException:
            end_all()
            raise


def _log(suite: Suite, guarded: bool) -> Path:
    return CACHE / f"{suite.package}-{'guarded' if guarded else 'plain'}.log"


if __name__ == "__main__":
    sys.exit(main())
