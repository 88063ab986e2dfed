"""The demo's display: bars and a line for each notable event, then a table.

On a terminal, the bars move and the lines scroll above them. Elsewhere, only lines are printed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from taskguard.events import Completed, Duplicate
from taskguard_sandbox.demo.queues import DemoQueue
from taskguard_sandbox.demo.tally import Tally, verdict

__all__ = ["Display"]

_PLAIN_EVERY_S = 2.0
_ROWS = [
    ("sent", "published"),
    ("deliveries", "deliveries"),
    ("effects", "effects"),
    ("duplicates", "answered as duplicates"),
    ("deferred", "deferred"),
    ("killed", "children killed in a body"),
    ("paused", "children stopped in a body"),
    ("takeovers", "takeovers"),
    ("refused", "stale commits refused"),
    ("double", "double effects"),
    ("lost", "lost effects"),
]
_BAD = {"double", "lost"}
_STYLES = {"Celery": "green", "RQ": "magenta"}


class Display:
    """The demo's side of the terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._since_s = time.monotonic()
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}
        self._plain_at_s = 0.0

    def note(self, queue: str, text: str) -> None:
        """A notable event of `queue`."""
        after_s = time.monotonic() - self._since_s
        style = _STYLES.get(queue, "bold")
        self.say(f"[dim]{after_s:5.1f} s[/]  [{style}]{queue:<6}[/] {text}")

    def say(self, text: str = "") -> None:
        """A line of prose."""
        self.console.print(text, soft_wrap=not self.console.is_interactive)

    def quote(self, text: str) -> None:
        """Somebody else's text, as it is."""
        self.console.print(Text(text))

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Something that takes a moment."""
        if not self.console.is_interactive:
            self.say(f"{text} …")
            yield
            return
        with self.console.status(f"{text} …"):
            yield

    @contextmanager
    def bars(self, queues: Sequence[DemoQueue]) -> Iterator[None]:
        """A bar for each queue, as long as the block lasts."""
        self._progress = Progress(
            TextColumn("[bold]{task.description:<8}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("deliveries, {task.fields[items]} {task.fields[done]}"),
            TimeElapsedColumn(),
            console=self.console,
            expand=True,
            disable=not self.console.is_interactive,
        )
        self._bars = {
            queue.name: self._progress.add_task(
                queue.things, total=queue.sent, items=0, done=queue.done
            )
            for queue in queues
        }
        with self._progress:
            yield

    def update(self, queues: Sequence[DemoQueue], events: Mapping[str, Counter[str]]) -> None:
        """Move the bars, by the events of each queue."""
        assert self._progress is not None
        states = []
        for queue in queues:
            done = events[queue.name][Completed.name]
            answered = min(done + events[queue.name][Duplicate.name], queue.sent)
            self._progress.update(self._bars[queue.name], completed=answered, items=done)
            states.append(f"{done:,} of {len(queue.items):,} {queue.things} {queue.done}")
        if not self.console.is_interactive and time.monotonic() > self._plain_at_s:
            self._plain_at_s = time.monotonic() + _PLAIN_EVERY_S
            self.note("", ", ".join(states))

    def answered(self, queues: Sequence[DemoQueue]) -> None:
        """No message waits for an answer any more: two of one job can have become one delivery."""
        assert self._progress is not None
        for queue in queues:
            self._progress.update(self._bars[queue.name], completed=queue.sent)

    def table(self, tallies: Sequence[Tally]) -> None:
        """The counts, a column for each queue."""
        table = Table()
        table.add_column("")
        for each in tallies:
            table.add_column(each.queue, justify="right")
        for name, label in _ROWS:
            values = [getattr(each, name) for each in tallies]
            style = None
            if name in _BAD:
                style = "bold red" if any(values) else "bold green"
            table.add_row(label, *[f"{value:,}" for value in values], style=style)
        self.console.print(table)

    def result(self, tallies: Sequence[Tally]) -> int:
        """The table, the verdict and how to go on; returns the exit status."""
        self.say()
        self.table(tallies)
        everything = tallies[-1]
        style = "bold green" if everything.ok else "bold red"
        self.say(f"[{style}]{verdict(everything)}[/]")
        self.say()
        self.say("Your own order numbers:  make demo DATA=orders.csv")
        self.say('Your own tasks:          README.md, "Try it in four steps"; examples/billing')
        return 0 if everything.ok else 1
