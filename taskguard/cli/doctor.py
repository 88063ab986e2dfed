"""`taskguard doctor`: check locks, ledger, clocks and queue, for people and for CI.

Guarantees: the exit status is 1 if there is an error (with --strict also for a warning), 2 if the
command's options are wrong, otherwise 0. The output is plain text of 80 columns. `--json` prints
one list, whose fields are stable. Texts from a server are escaped by `printing.py`.

Installed integrations add options for an application (`--celery`, `--rq`) by the entry points
`taskguard.doctors`.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskguard.cli.printing import indented, printable
from taskguard.cli.targets import add_queue, add_servers, connected, metavar_of
from taskguard.errors import CommandTargetError
from taskguard.findings import Level
from taskguard.settings import LEDGER_VARIABLE, LOCKS_VARIABLE, is_set

if TYPE_CHECKING:
    from taskguard.doctor import Configuration, Report

__all__ = ["add_doctor"]

_GROUP = "taskguard.doctors"
_USAGE_ERROR = 2
_COLUMNS = 80
_INDENT = " " * 4
_SERVERS = ("the lock server ", "the locks in ", "the ledger ", "the queues' server ")


def add_doctor(commands: Any) -> None:
    """`doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="check locks, ledger, clocks and queue",
        description="Checks each part that is configured and reports what is wrong, why that "
        "matters and how to fix it. Writes only a key of its own at the lock server, which it "
        "releases. Exit status: 0 without errors; 1 with errors; 2 for wrong options.",
    )
    which = doctor.add_mutually_exclusive_group()
    for name in _integrations():
        add_queue(which, name, text=f"an application of {name}")
    add_servers(doctor)
    doctor.add_argument("--json", action="store_true", help="print a list of findings, for CI")
    doctor.add_argument("--strict", action="store_true", help="also exit with 1 for warnings")
    doctor.set_defaults(run_alone=_run)


def _integrations() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=_GROUP)}


def _run(arguments: argparse.Namespace) -> int:
    from taskguard.doctor import examine

    try:
        configuration = _configuration(arguments)
    except CommandTargetError as error:
        print(f"taskguard: {indented(error, by=11)}", file=sys.stderr)
        return _USAGE_ERROR
    reports = examine(replace(configuration, folder=Path.cwd()))
    if arguments.json:
        print(json.dumps(_as_json(reports), indent=2))
    else:
        print("\n".join(_as_text(reports)))
    bad = {Level.ERROR, Level.WARNING} if arguments.strict else {Level.ERROR}
    return int(any(each.level in bad for report in reports for each in report.findings))


def _configuration(arguments: argparse.Namespace) -> Configuration:
    for name, entry in _integrations().items():
        target = getattr(arguments, name)
        if target is not None:
            if arguments.locks or arguments.ledger:
                raise CommandTargetError(
                    f"--{name} has its own locks and ledger: remove --locks and --ledger."
                )
            made: Configuration = entry.load()(target)
            return made
    return _of_urls(arguments)


def _of_urls(arguments: argparse.Namespace) -> Configuration:
    """Use the given URLs, then those of the environment. A part without a URL is not checked."""
    from taskguard.doctor import Configuration

    given = arguments.locks or arguments.ledger
    if not given and not is_set(LOCKS_VARIABLE) and not is_set(LEDGER_VARIABLE):
        options = " or ".join(f"--{name} {metavar_of(name)}" for name in _integrations())
        raise CommandTargetError(
            f"nothing to check: pass {options or '--celery or --rq (none is installed)'}, or "
            f"--locks URL and --ledger URL, or set {LOCKS_VARIABLE} and {LEDGER_VARIABLE}."
        )
    return Configuration(lambda: connected(arguments))


def _as_json(reports: Sequence[Report]) -> list[dict[str, str]]:
    return [{"part": report.part, **asdict(each)} for report in reports for each in report.findings]


def _as_text(reports: Sequence[Report]) -> Iterator[str]:
    from taskguard.doctor.merging import merged

    count: Counter[Level] = Counter()
    for report in reports:
        yield f"{report.part:10} {printable(report.subject)}".rstrip()
        if not report.findings:
            yield "  nothing found"
        for finding in merged(report.findings):
            yield from ("", f"  {finding.level}: {finding.name}")
            where = "" if _is_subject(finding.where, report.subject) else f"{finding.where}: "
            yield from _wrapped(f"{where}{finding.what}")
            yield from _wrapped(finding.why)
            yield from _wrapped(finding.fix, label="Fix: ")
            yield from _wrapped(finding.link, label="See: ")
            count[finding.level] += 1
        yield ""
    yield ", ".join(_counted(count[level], level) for level in Level) + "."


def _wrapped(text: str, *, label: str = "") -> list[str]:
    return textwrap.wrap(
        printable(text),
        _COLUMNS,
        initial_indent=_INDENT + label,
        subsequent_indent=_INDENT + " " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _is_subject(where: str, subject: str) -> bool:
    """Return whether the heading names the place: `locks  RedisLocks localhost:6379/1 …`."""
    name = next((where.removeprefix(each) for each in _SERVERS if where.startswith(each)), "")
    return bool(name) and f" {name} " in f" {subject} "


def _counted(number: int, level: Level) -> str:
    return f"{number} {level}" if number == 1 else f"{number} {level}s"
