"""`taskguard waiting`, `workers` and `actions`: lists for operators."""

from __future__ import annotations

import argparse
from typing import Any

from taskguard.cli.output import (
    add_json,
    age,
    duration_s,
    note,
    print_json,
    print_table,
    when,
)
from taskguard.cli.targets import add_application
from taskguard.model.line_states import LineState
from taskguard.model.states import State
from taskguard.model.views import LineView, WaitingView
from taskguard.operations import Operations

__all__ = ["add_lists", "add_page", "count", "held_by", "in_line", "print_lines"]


_ROWS, _LINES = 100, 20  # shown by default


def count(text: str) -> int:
    """Parse a number of rows, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows")
    return int(text)


def add_page(parser: argparse.ArgumentParser, *, limit: int = _ROWS) -> None:
    """Add `--limit`, `--after` and `--json`."""
    parser.add_argument(
        "--limit", type=count, default=limit, help=f"maximum number of rows; by default {limit}"
    )
    parser.add_argument("--after", metavar="CURSOR", help="the next page, as a note names it")
    add_json(parser)


def add_lists(commands: Any) -> None:
    """Add `waiting`, `workers` and `actions`."""
    waiting = commands.add_parser("waiting", help="list the messages in line for their keys")
    add_application(waiting)
    waiting.add_argument("--by-line", action="store_true", help="list the longest lines instead")
    waiting.add_argument("--key", help="list the line of this key only, as the log shows the key")
    waiting.add_argument("--task", help="list messages of this task only")
    waiting.add_argument(
        "--older",
        type=duration_s,
        default=0.0,
        metavar="AGE",
        help="only messages that wait longer",
    )
    add_page(waiting)
    waiting.set_defaults(ask=_waiting)
    workers = commands.add_parser("workers", help="list workers, the last seen first")
    add_application(workers)
    workers.add_argument("--limit", type=count, default=1000, help="by default 1000")
    add_json(workers)
    workers.set_defaults(ask=_workers)
    actions = commands.add_parser("actions", help="list what operators changed, and why")
    add_application(actions)
    actions.add_argument("--key", help="only changes of this key")
    actions.add_argument("--work", help="only changes of this work")
    actions.add_argument("--since", type=duration_s, metavar="AGE", help="only of this time: 12h")
    add_page(actions)
    actions.set_defaults(ask=_actions)


def _waiting(ops: Operations, arguments: argparse.Namespace) -> int:
    if arguments.by_line:
        lines = ops.lines(limit=_LINES if arguments.limit == _ROWS else arguments.limit)
        if arguments.json:
            print_json(lines.items)
        else:
            print_lines(ops, lines.items)
        note(lines.note or ("" if lines.items else "no message waits"))
        return 0
    found = ops.waiting(
        key=arguments.key,
        task=arguments.task,
        older_s=arguments.older,
        limit=arguments.limit,
        after=arguments.after,
    )
    if arguments.json:
        print_json(found.items)
    else:
        print_table(
            ("SINCE", "KEY", "POSITION", "WORK", "MESSAGE", "STATE", "HELD BY"),
            (
                (
                    when(each.parked_s),
                    each.key,
                    each.position,
                    each.work,
                    each.message,
                    in_line(each),
                    held_by(each),
                )
                for each in found.items
            ),
        )
    if found.after:
        note(f"there are more: --after {found.after}")
    if not found.items:
        note("no message waits" + (f" for {arguments.key}" if arguments.key else ""))
    return 0


def in_line(each: WaitingView) -> str:
    """Return the state of a message in its line, for people."""
    state = str(each.line)
    if each.line is LineState.KEPT and each.state is State.FAILED:
        state += ", failed"
    return state + (f", sent again {each.sent_again} times" if each.sent_again else "")


def print_lines(ops: Operations, lines: tuple[LineView, ...]) -> None:
    """Print lines as a table."""
    now_s = ops.now_s()
    print_table(
        ("LINE", "WAIT", "OLDEST", "PROMOTED", "HELD BY", "FIRST"),
        (
            (
                each.key,
                f"{each.waiting}{'+' if each.more else ''}",
                age(now_s - each.oldest_s),
                each.promoted,
                held_by(each),
                each.first.work,
            )
            for each in lines
        ),
    )


def held_by(line: LineView | WaitingView) -> str:
    """Return the holder of a line's key, for people."""
    if line.holder is None:
        return "-"
    return str(line.holder.paused or line.holder.process.label or line.holder.process.owner)


def _workers(ops: Operations, arguments: argparse.Namespace) -> int:
    found = ops.workers(limit=arguments.limit)
    if arguments.json:
        print_json(found.items)
    else:
        print_table(
            ("NUMBER", "KIND", "NAME", "HOST", "PID", "VERSION", "QUEUES", "STARTED", "SEEN"),
            (
                (
                    each.number,
                    each.kind,
                    each.name,
                    each.host,
                    each.pid,
                    each.version,
                    each.queues,
                    when(each.started_s),
                    f"{age(each.age_s)} ago",
                )
                for each in found.items
            ),
        )
    note(found.note or ("" if found.items else "no worker is on record"))
    return 0


def _actions(ops: Operations, arguments: argparse.Namespace) -> int:
    since_s = None if arguments.since is None else ops.now_s() - arguments.since
    found = ops.actions(
        key=arguments.key,
        work=arguments.work,
        since_s=since_s,
        limit=arguments.limit,
        after=arguments.after,
    )
    if arguments.json:
        print_json(found.items)
    else:
        print_table(
            ("AT", "ACTION", "BY", "ON", "REASON", "DETAIL"),
            (
                (
                    when(each.at_s),
                    each.action,
                    each.actor,
                    each.work or each.key,
                    each.reason,
                    each.detail and ops.told(each.detail),
                )
                for each in found.items
            ),
        )
    if found.after:
        note(f"there are more: --after {found.after}")
    if not found.items:
        note("no operator has changed anything")
    return 0
