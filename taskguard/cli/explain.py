"""`taskguard explain`: say what is going on with a key, work or a message, and what to do.

Guarantees: changes nothing. Exit status 3 if nothing is found, and 2 if the text may be several
keys or works, which it lists.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from taskguard.cli.output import add_json, age, note, paint, print_json, when
from taskguard.cli.printing import printable
from taskguard.cli.targets import NotFoundError, add_application
from taskguard.model.history import Happened
from taskguard.model.states import State
from taskguard.model.views import Explained, Held, KeyView, LineView, Past, WorkItem
from taskguard.operations import Operations
from taskguard.operations.advice import advice_on

__all__ = ["add_explain", "print_work"]

_WIDTH = 9
_PAST = 8
_COLOUR_OF = {State.DEAD: "red", State.FAILED: "red", State.DONE: "green"}


def add_explain(commands: Any) -> None:
    """Add `explain`."""
    explain = commands.add_parser(
        "explain",
        help="say what is going on with a key, work or a message, and what to do",
        description="Says which process holds the key, since when, what waits behind it and why, "
        "what happened before, how long it usually takes, and what to do.",
    )
    explain.add_argument(
        "asked", nargs="?", metavar="KEY|WORK", help="order:42, or shop.ship order:42"
    )
    explain.add_argument("--message", metavar="ID", help="a Celery message or an RQ job instead")
    add_application(explain)
    add_json(explain)
    explain.set_defaults(ask=_explain)


def _explain(ops: Operations, arguments: argparse.Namespace) -> int:
    if (arguments.asked is None) == (arguments.message is None):
        print("taskguard explain: give a key, the id of work, or --message ID", file=sys.stderr)
        return 2
    found = ops.explain(arguments.message or arguments.asked, message=arguments.message is not None)
    note(found.note)
    if found.key is None and found.work is None:
        if not found.others:
            what = "work has this message" if arguments.message else "key or work begins with it"
            raise NotFoundError(
                f"Nothing is on record of {found.asked!r}: no {what}. If the application has a "
                "namespace, keys and work begin with it."
            )
        if not arguments.json:
            print(f"taskguard: {printable(found.asked)} may be one of these:", file=sys.stderr)
            for each in found.others:
                print(f"  {printable(each)}", file=sys.stderr)
        else:
            print_json(found)
        return 2
    if arguments.json:
        print_json(found)
    else:
        print("\n".join(_lines(ops, found)))
    return 0


def _lines(ops: Operations, found: Explained) -> Iterator[str]:
    if found.work is not None:
        yield from _of_work(ops, found.work)
    if found.key is not None:
        yield from _of_key(
            ops,
            found.key,
            now_s=found.now_s,
            with_past=found.work is None or not found.work.history,
        )
    yield from _labelled("do", found.advice)


def print_work(ops: Operations, work: WorkItem) -> None:
    """Print the record of work with its history, and what to do."""
    now_s = ops.now_s()
    lines = [*_of_work(ops, work, full=True)]
    lines += _labelled("do", advice_on(None, work, now_s=now_s))
    print("\n".join(lines))


def _labelled(label: str, texts: Any) -> Iterator[str]:
    """Return lines, of which the first has the label. On a terminal they fit."""
    width = shutil.get_terminal_size().columns - _WIDTH if sys.stdout.isatty() else 0
    for number, text in enumerate(texts):
        shown = label if number == 0 else ""
        lines = [printable(line) for line in str(text).split("\n")]
        if width > _WIDTH:
            lines = [part for line in lines for part in _wrapped(line, width)]
        yield f"  {shown.ljust(_WIDTH - 2)}" + f"\n{' ' * (_WIDTH + 2)}".join(lines)


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width - 2, break_on_hyphens=False) or [""]


def _of_work(ops: Operations, work: WorkItem, *, full: bool = False) -> Iterator[str]:
    state = paint(work.state.value, _COLOUR_OF.get(work.state, "bold"))
    for_good = " for good" if work.final else ""
    since_s = work.finished_s or work.since_s or work.started_s or work.created_s
    left = ", and no worker runs it: its lease has expired" if work.left else ""
    yield f"{paint(printable(work.id), 'bold')}  {state}{for_good} since {when(since_s)}{left}"
    stored = "stored: a relay can send it" if work.stored else "not stored"
    numbers = f"attempts {work.attempts}, crashes {work.crashes}, retries {work.retries}"
    named = f"task {work.task}, key {work.key}, message {work.message}"
    yield from _labelled("work", [named, f"{numbers}, call {stored}"])
    if work.line is not None:
        yield from _labelled("line", [f"{work.line.value} since {when(work.parked_s)}"])
    if work.due_s:
        yield from _labelled("due", [when(work.due_s)])
    if full and work.process is not None:
        named = work.process.label or "a process that is not known"
        yield from _labelled("at", [f"{named}; owner {work.process.owner}, fence {work.fence}"])
    times = f"created {when(work.created_s)}, started {when(work.started_s)}"
    yield from _labelled("times", [f"{times}, finished {when(work.finished_s)}"])
    if work.error:
        yield from _labelled("error", [ops.told(work.error)])
    yield from _labelled("before", [_happened(ops, each) for each in work.history])
    if full:
        for label, text in (
            ("call", work.call),
            ("progress", work.progress_json),
            ("result", work.result_json),
        ):
            if text is not None:
                yield from _labelled(label + " " * (label == "progress"), [text])


def _happened(ops: Operations, each: Past) -> str:
    parts = [f"{when(each.at_s)} {each.what}"]
    if each.n != 1:
        parts.append(f"{each.n} times")
    if each.actor:
        parts.append(f"by {each.actor}")
    if each.process is not None and each.process.label:
        at = "of" if each.what == Happened.TAKEOVER.value else "at"
        parts.append(f"{at} {each.process.label}")
    said = " ".join(parts)
    text = ops.in_words(each)
    if each.what == Happened.TAKEOVER.value:
        return f"{said} {text}"
    return f"{said}: {text}" if text else said


def _of_key(ops: Operations, key: KeyView, *, now_s: float, with_past: bool) -> Iterator[str]:
    name = paint(printable(key.key), "bold")
    if not key.holders:
        yield f"{name}  free"
    for number, holder in enumerate(key.holders):
        shown = name if number == 0 else paint(printable(holder.key), "bold")
        if len(key.holders) > 1:
            shown = paint(printable(holder.key), "bold")
        yield from _of_holder(holder, shown, now_s=now_s)
    if key.slots:
        yield from _labelled("slots", [f"{len(key.holders)} of {key.slots} are held"])
    if key.next_start_s and key.next_start_s > now_s:
        yield from _labelled(
            "rate", [f"the next body may start in {age(key.next_start_s - now_s)}"]
        )
    if key.line is not None:
        yield from _labelled("line", [_line(key.line, key, now_s=now_s)])
    if with_past:
        yield from _labelled("before", [_happened(ops, each) for each in key.past[:_PAST]])
        yield from _labelled(
            "works", [f"{each.state.value} {each.id}" for each in key.works[:_PAST]]
        )
    if key.usual is not None:
        usual = key.usual
        p99 = "more than an hour" if usual.p99_s is None else f"at most {age(usual.p99_s)}"
        takes = f"{age(usual.mean_s)} on average, and 99 % take {p99}"
        yield from _labelled("usual", [f"{usual.task}: {takes} ({usual.n:,} counted)"])


def _of_holder(holder: Held, name: str, *, now_s: float) -> Iterator[str]:
    if holder.paused is not None:
        said = printable(holder.paused).removeprefix("paused ")
        yield f"{name}  {paint('PAUSED', 'yellow')} {said}"
        return
    held = f"since {when(holder.since_s)} ({age(now_s - holder.since_s)})"
    left = f"its lease ends in {age(holder.lease_until_s - now_s)}, unless it is renewed"
    yield f"{name}  {paint('HELD', 'yellow')} {held}; {left}"
    process = holder.process
    task = holder.task or "a lock, or a task whose work is not known"
    attempt = "" if holder.attempt is None else f", attempt {holder.attempt}"
    message = f", message {process.message}" if process.message else ""
    yield from _labelled("by", [f"{task}{message}{attempt}, fence {holder.fence}"])
    at = process.label or process.owner
    if process.started_s is not None:
        at += f" (up {age(now_s - process.started_s)}, taskguard {process.version})"
    yield from _labelled("at", [at])


def _line(line: LineView, key: KeyView, *, now_s: float) -> str:
    number = f"{line.waiting:,}{' or more' if line.more else ''}"
    oldest = f"the first one since {when(line.oldest_s)} ({age(now_s - line.oldest_s)}): "
    first = f"{line.first.task}, message {line.first.message}"
    why = "the key is paused" if any(each.paused for each in key.holders) else "the key is held"
    if not key.holders:
        why = (
            "the first message was sent" if line.promoted else "nothing has sent the first one yet"
        )
    return f"{number} wait, because {why}; {oldest}{first}"
