"""`taskguard doctor`: what is wrong with locks, ledger, clocks and queue, for people and for CI.

Guarantees: the exit status is 0 where nothing is worse than a warning, 1 where there is an error
(with --strict a warning), 2 where the command itself was asked wrongly. The lines are plain text of
80 columns; `--json` prints one list, whose fields stay. What a server says obeys `printing.py`.

Where to look by an application (`--celery`, `--rq`) say the integrations that are installed (entry
points `taskguard.doctors`).
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
from taskguard.cli.targets import add_servers, connected
from taskguard.errors import CommandTargetError
from taskguard.findings import Finding, Level
from taskguard.settings import LEDGER_VARIABLE, LOCKS_VARIABLE, is_set

if TYPE_CHECKING:
    from taskguard.doctor import Configuration, Report

__all__ = ["add_doctor"]

_GROUP = "taskguard.doctors"
_METAVARS = {"celery": "MODULE:APP", "rq": "REDIS_URL"}
_ASKED_WRONGLY = 2
_COLUMNS = 80
_NAMED = 3
_KINDS = ("the task ", "the job ", "the queue ")
_SERVERS = ("the lock server ", "the ledger ", "the queues' server ")


def add_doctor(commands: Any) -> None:
    """`doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="say what is wrong with locks, ledger, clocks and queue",
        description="Asks each part that is configured, and says what is wrong with it, why that "
        "matters and what mends it. Writes nothing but a key of its own at the lock server, which "
        "is gone afterwards. Exit status: 0 nothing, notes, warnings; 1 errors; 2 asked wrongly.",
    )
    which = doctor.add_mutually_exclusive_group()
    for name in _integrations():
        target = _METAVARS.get(name, "TARGET")
        which.add_argument(f"--{name}", metavar=target, help=f"an application of {name}")
    add_servers(doctor)
    doctor.add_argument("--json", action="store_true", help="a list of findings, for CI")
    doctor.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")
    doctor.set_defaults(run_alone=_run)


def _integrations() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=_GROUP)}


def _run(arguments: argparse.Namespace) -> int:
    from taskguard.doctor import examine

    try:
        configuration = _configuration(arguments)
    except CommandTargetError as error:
        print(f"taskguard: {indented(error, by=11)}", file=sys.stderr)
        return _ASKED_WRONGLY
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
                    f"--{name} has locks and a ledger of its own: leave --locks and --ledger out."
                )
            made: Configuration = entry.load()(target)
            return made
    return _of_urls(arguments)


def _of_urls(arguments: argparse.Namespace) -> Configuration:
    """What is given; what is not is the environment's, and where that has none is left out."""
    from taskguard.doctor import Configuration

    given = arguments.locks or arguments.ledger
    if not given and not is_set(LOCKS_VARIABLE) and not is_set(LEDGER_VARIABLE):
        options = " or ".join(f"--{name} {_METAVARS.get(name, '…')}" for name in _integrations())
        raise CommandTargetError(
            f"say what to look at: {options or '--celery or --rq (none is installed)'}, or "
            f"--locks URL and --ledger URL ({LOCKS_VARIABLE}, {LEDGER_VARIABLE})."
        )
    return Configuration(lambda: connected(arguments))


def _as_json(reports: Sequence[Report]) -> list[dict[str, str]]:
    return [{"part": report.part, **asdict(each)} for report in reports for each in report.findings]


def _as_text(reports: Sequence[Report]) -> Iterator[str]:
    count: Counter[Level] = Counter()
    for report in reports:
        yield f"{report.part:9} {printable(report.subject)}".rstrip()
        if not report.findings:
            yield "  nothing found"
        before = ""
        for finding, places in _by_place(report.findings):
            where = _listed(places)
            told = where == before or _is_subject(where, report.subject)
            yield from _told(finding, where="" if told else where)
            before = where
            count[finding.level] += 1
        yield ""
    yield ", ".join(_counted(count[level], level) for level in Level) + "."


def _by_place(findings: Sequence[Finding]) -> Iterator[tuple[Finding, list[str]]]:
    """Each once, and where it is: a setting that a hundred tasks lack is one thing to mend."""
    places: dict[Finding, list[str]] = {}
    for each in findings:
        places.setdefault(replace(each, where=""), []).append(each.where)
    yield from places.items()


def _listed(places: Sequence[str]) -> str:
    """`the task ship`; `the tasks ship, bill, and 3 more`."""
    places = sorted(places)
    more = len(places) - _NAMED
    kind = next((each for each in _KINDS if places[0].startswith(each)), "")
    if len(places) > 1 and kind and all(each.startswith(kind) for each in places):
        names = [each.removeprefix(kind) for each in places[:_NAMED]]
        named = f"{kind.rstrip()}s {', '.join(names)}"
    else:
        named = ", ".join(places[:_NAMED])
    return f"{named}, and {more} more" if more > 0 else named


def _is_subject(where: str, subject: str) -> bool:
    """Whether the line above has said it: `locks     RedisLocks localhost:6379/1 …`."""
    name = next((where.removeprefix(each) for each in _SERVERS if where.startswith(each)), "")
    return bool(name) and f" {name} " in f" {subject} "


def _told(finding: Finding, *, where: str) -> Iterator[str]:
    """One finding; `where` is empty where it is that of the one before."""
    yield f"  {finding.level}: {finding.name}"
    for text, mark in (
        (where, "where  "),
        (finding.what, "what   "),
        (finding.why, "why    "),
        (finding.mend, "mend   "),
    ):
        yield from textwrap.wrap(
            printable(text),
            _COLUMNS,
            initial_indent=f"    {mark}",
            subsequent_indent=" " * 11,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _counted(number: int, level: Level) -> str:
    return f"{number} {level}" if number == 1 else f"{number} {level}s"
