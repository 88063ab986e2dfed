"""`make storm SECONDS=60 SEED=7`: run taskguard and other libraries under the same faults.

Exit status: 0 if taskguard keeps every invariant, 1 otherwise. The results of other libraries are
only shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from storm.invariants import Findings, double_and_lost
from storm.scenario import OURS, Record, World, run

PEERS = {
    "bare": "no guard",
    "redis_lock": "redis-py Lock",
    "celery_once": "celery-once",
    "fencekit": "fencekit",
}
CONSOLE = Console(highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the storms. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m storm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each storm is")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", choices=[OURS, *PEERS], help="by default all, one by one")
    parser.add_argument("--faults", action="store_true", help="print each fault")
    arguments = parser.parse_args(argv)
    chosen = [arguments.only] if arguments.only else [OURS, *_installed()]
    records = []
    for who in chosen:
        CONSOLE.print(f"{arguments.seconds:g} s of storm for {PEERS.get(who, who)} …")
        say = CONSOLE.print if arguments.faults else lambda _: None
        until = _enough if who == OURS else lambda _: True
        records.append(
            run(who, seconds=arguments.seconds, seed=arguments.seed, say=say, until=until)
        )
    wrong: list[str] = []
    for record in records:
        if record.who == OURS:
            wrong = _show_ours(record)
    _compare(records)
    return 1 if wrong else 0


def _enough(world: World) -> bool:
    """Return whether there was a stale commit and a takeover: without them a storm proves
    nothing."""
    return all(world.said(name) for name in ("stale_refused", "takeover"))


def _installed() -> list[str]:
    packages = {"celery_once": "celery_once", "fencekit": "fencekit"}
    missing = [who for who, name in packages.items() if importlib.util.find_spec(name) is None]
    for who in missing:
        CONSOLE.print(f"{PEERS[who]} is not installed: not compared")
    return [who for who in PEERS if who not in missing]


def _show_ours(record: Record) -> list[str]:
    findings = Findings(record)
    table = Table(title="taskguard: what was seen", title_justify="left", show_header=False)
    for name, value in findings.seen().items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    for name, count in record.faults.most_common():
        table.add_row(f"  {name}", f"{count:,}")
    CONSOLE.print(table)
    for text in findings.wrong:
        CONSOLE.print(f"WRONG  {text}")
    if not findings.wrong:
        CONSOLE.print("S1 to S8, L1, L3 and L4 hold.")
    return findings.wrong


def _compare(records: list[Record]) -> None:
    table = Table(title="The same storm", title_justify="left")
    for name in ("", "items", "faults", "bodies begun", "double effects", "lost effects"):
        table.add_column(name, justify="right" if name else "left")
    for record in records:
        double, lost = double_and_lost(record)
        begun = sum(line["name"] == "began" for line in record.lines)
        numbers = (len(record.items), sum(record.faults.values()), begun, double, lost)
        cells = [PEERS.get(record.who, record.who), *(f"{number:,}" for number in numbers)]
        table.add_row(*cells, style="bold" if record.who == OURS else "")
    CONSOLE.print(table)


if __name__ == "__main__":
    sys.exit(main())
