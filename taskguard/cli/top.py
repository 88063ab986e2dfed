"""`taskguard top`: watch rates, held keys and lines.

Guarantees: changes nothing but the snapshot's row, if its user may. All viewers together cost the
database what one costs, because they share a snapshot that is up to 15 seconds old. q and Ctrl-C
quit.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from taskguard.cli.lists import held_by
from taskguard.cli.output import add_json, age, duration_s, print_json, table, terminal_width, when
from taskguard.cli.printing import printable
from taskguard.cli.targets import CommandError, add_application
from taskguard.drivers import extras_named
from taskguard.operations import Operations

__all__ = ["add_top"]

_ROWS = 10
_SHOWN = ("done", "failed", "duplicate", "deferred", "parked", "stale")


def add_top(commands: Any) -> None:
    """Add `top`."""
    top = commands.add_parser(
        "top",
        help="watch rates, held keys and lines; q quits",
        description="Shows deliveries, the keys that are held longest, and the longest lines.",
    )
    add_application(top)
    top.add_argument("--once", action="store_true", help="print it once, without a screen")
    top.add_argument("--every", type=duration_s, default="2s", metavar="TIME", help="by default 2s")
    top.add_argument(
        "--since", type=duration_s, default="5m", metavar="AGE", help="rates over this time; 5m"
    )
    add_json(top)
    top.set_defaults(ask=_top)


def _top(ops: Operations, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json(_data(ops, arguments.since))
        return 0
    if arguments.once or not sys.stdout.isatty():
        print("\n".join(_lines(_data(ops, arguments.since))))
        return 0
    _watch(ops, arguments)
    return 0


def _data(ops: Operations, last_s: float) -> dict[str, Any]:
    """Return what `top` shows. Its names stay."""
    now_s = ops.now_s()
    counts: Counter[str] = Counter()
    for each in ops.counts(since_s=now_s - last_s):
        counts[each.what] += each.n  # type: ignore[assignment]  # numbers, of which some are whole
    snapshot = ops.snapshot()
    return {
        "now_s": now_s,
        "last_s": last_s,
        "snapshot_age_s": snapshot.age_s,
        "counts": {name: n for name, n in sorted(counts.items()) if "/le/" not in name},
        "work": [list(row) for row in snapshot.values.get("work", ())],
        "figures": {
            name: rows[0][-1]
            for name, rows in snapshot.values.items()
            if len(rows) == 1 and len(rows[0]) == 1
        },
        "workers": [list(row) for row in snapshot.values.get("workers", ())],
        "held": ops.keys(limit=_ROWS).items,
        "lines": ops.lines(limit=_ROWS).items,
    }


def _lines(data: dict[str, Any]) -> Iterator[str]:
    now_s, last_s, figures = data["now_s"], data["last_s"], data["figures"]
    yield f"taskguard  {when(now_s)}  snapshot {age(data['snapshot_age_s'])} old"
    counts = data["counts"]
    every = sum(n for name, n in counts.items() if name.startswith("deliveries/"))
    shown = (f"{name} {counts.get(f'deliveries/{name}', 0):,.0f}" for name in _SHOWN)
    takeovers = counts.get("takeovers", 0)
    rate = f"{every:,.0f} in {age(last_s)}, {every / last_s:.1f}/s"
    yield f"deliveries {rate}; takeovers {takeovers:,.0f}"
    yield f"by outcome: {'  '.join(shown)}"
    by_state: Counter[str] = Counter()
    for _, state, number in data["work"]:
        by_state[state] += int(number)
    states = (f"{state} {by_state[state]:,}" for state in ("dead", "failed", "overdue", "running"))
    workers = sum(int(row[-1]) for row in data["workers"])
    yield f"work: {'  '.join(states)}; workers {workers}"
    waits = f"lines {figures.get('waiting_keys') or 0:,.0f}"
    oldest = f"oldest {age(figures.get('oldest_wait') or 0.0)}"
    yield f"{waits}, {oldest}; paused keys {figures.get('paused_keys') or 0:,.0f}"
    yield ""
    yield from _table(
        ("HELD KEY", "HELD", "BY", "TASK", "LEFT"),
        [
            (
                each.key,
                age(now_s - each.since_s),
                each.process.label,
                each.task,
                age(each.lease_until_s - now_s),
            )
            for each in data["held"]
        ],
    )
    yield ""
    yield from _table(
        ("LINE", "WAIT", "OLDEST", "HELD BY", "FIRST"),
        [
            (
                each.key,
                f"{each.waiting}{'+' if each.more else ''}",
                age(now_s - each.oldest_s),
                held_by(each),
                each.first.work,
            )
            for each in data["lines"]
        ],
    )


def _table(titles: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    cells = [[printable(each) if each not in (None, "") else "-" for each in row] for row in rows]
    return table(titles, cells, width=terminal_width()) if cells else [f"{titles[0]}  none"]


def _watch(ops: Operations, arguments: argparse.Namespace) -> None:
    """Show it until the user quits."""
    with extras_named("taskguard top", "cli"):
        from rich.live import Live
        from rich.text import Text
    with _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        while True:
            text = "\n".join(_lines(_data(ops, arguments.since)))
            live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            until_s = time.monotonic() + arguments.every
            while (left_s := until_s - time.monotonic()) > 0:
                if pressed(left_s) == "q":
                    return


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Let the terminal give each key at once. Yield a function that waits for one."""
    try:
        import termios
        import tty
    except ImportError as error:
        raise CommandError("This system has no termios: use taskguard top --once.") from error
    number = sys.stdin.fileno()
    if not sys.stdin.isatty():
        yield _sleep
        return
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield _pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _sleep(longest_s: float) -> str:
    time.sleep(longest_s)
    return ""


def _pressed(longest_s: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], longest_s)
    return sys.stdin.read(1) if ready else ""
