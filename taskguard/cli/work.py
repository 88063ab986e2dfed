"""`taskguard work`: list, show, requeue, drop and finish work.

Guarantees: each change is one statement that names the state which was listed. So work that changed
meanwhile is refused, and the command reports that. A change by a filter needs `--yes`, and shows
with `--dry-run` what it would change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from taskguard.cli.explain import print_work
from taskguard.cli.keys import add_change
from taskguard.cli.lists import add_page, count
from taskguard.cli.output import (
    add_json,
    duration_s,
    note,
    paint,
    print_json,
    print_table,
    when,
)
from taskguard.cli.printing import printable
from taskguard.cli.targets import CommandError, NotFoundError, add_application
from taskguard.errors import CommandTargetError
from taskguard.model.changes import Changed, Expected
from taskguard.model.states import State
from taskguard.model.views import WorkFilter, WorkItem
from taskguard.operations import Operations

__all__ = ["add_work"]

_MOST_CHANGED = 1_000
_SHOWN = 20
_STATES = [state.value for state in State]
_DONE_BY = {
    "requeue": "requeued",
    "drop": "dropped",
    "done": "marked as done",
    "call": "called",
}
_NOW = {
    "requeue": "is NEW: its next delivery runs it.",
    "drop": "is FAILED for good: it never runs.",
    "done": "is DONE.",
    "call": "is due now.",
}


def add_work(commands: Any) -> None:
    """Add `work` with its actions."""
    actions = commands.add_parser("work", help="list, show and change work").add_subparsers(
        dest="action", required=True
    )
    several = actions.add_parser(
        "list",
        help="list work",
        description="FAILED and DEAD work is listed with the latest first, and overdue work with "
        "the longest overdue first. Other work is found by --key, --task or --prefix.",
    )
    add_application(several)
    _add_filter(several)
    add_page(several)
    several.set_defaults(ask=_list)
    show = actions.add_parser("show", help="print the record of work, with its history")
    show.add_argument("work", help='its id, a key, or the beginning of one: "shop.ship order:42"')
    show.add_argument(
        "--arguments", action="store_true", help="also print the stored call, result and progress"
    )
    add_application(show)
    add_json(show)
    show.set_defaults(ask=_show)
    for name, text in (
        ("requeue", "DEAD, FAILED or left work -> NEW: its next delivery runs it"),
        ("drop", "NEW, FAILED or DEAD -> FAILED for good: it never runs"),
        ("done", "NEW, FAILED or DEAD -> DONE: its effect was made in another way"),
        ("call", "send the message of NEW work now"),
    ):
        change = actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. By ids, or by a filter with --yes. Work "
            "that a live worker runs is refused.",
        )
        change.add_argument("work", nargs="*", help="ids, as `list` prints them")
        add_application(change)
        _add_filter(change)
        add_change(change)
        change.add_argument("--yes", action="store_true", help="change all that the filter finds")
        change.add_argument("--dry-run", action="store_true", help="print what would be changed")
        change.add_argument(
            "--limit",
            type=count,
            default=_MOST_CHANGED,
            help=f"maximum number; by default {_MOST_CHANGED:,}",
        )
        add_json(change)
        change.set_defaults(ask=_change, gone=30.0)
        if name == "requeue":
            change.add_argument(
                "--gone",
                type=duration_s,
                default="30s",
                metavar="TIME",
                help="for how long the lease of left work must have expired: the ttl_s of its "
                "task; by default 30s",
            )


def _add_filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", choices=_STATES, help="work in this state")
    parser.add_argument("--task", help="work of this task")
    parser.add_argument("--key", help="work of this key")
    parser.add_argument("--prefix", help="work whose id begins with this text")
    parser.add_argument(
        "--since", type=duration_s, metavar="AGE", help="only work that changed in this time: 1h"
    )
    parser.add_argument("--overdue", action="store_true", help="work that no worker is at")


def _filter(ops: Operations, arguments: argparse.Namespace) -> WorkFilter:
    return WorkFilter(
        state=None if arguments.state is None else State(arguments.state),
        task=arguments.task,
        key=arguments.key,
        prefix=arguments.prefix,
        since_s=None if arguments.since is None else ops.now_s() - arguments.since,
        overdue=arguments.overdue,
    )


def _filters(arguments: argparse.Namespace) -> bool:
    names = ("state", "task", "key", "prefix", "since", "overdue")
    return any(getattr(arguments, name) for name in names)


def _list(ops: Operations, arguments: argparse.Namespace) -> int:
    if not _filters(arguments):
        arguments.state = State.DEAD.value
    found = ops.list_work(_filter(ops, arguments), limit=arguments.limit, after=arguments.after)
    if arguments.json:
        print_json(found.items)
    else:
        print_table(
            ("CHANGED", "STATE", "ATTEMPTS", "CRASHES", "WORK", "ERROR"),
            (_row(ops, each) for each in found.items),
        )
    note(found.note)
    if found.after:
        note(f"there are more: --after {found.after}")
    if not found.items:
        note(f"no work is {arguments.state or ('overdue' if arguments.overdue else 'found')}")
    return 0


def _row(ops: Operations, each: WorkItem) -> Sequence[object]:
    changed_s = each.finished_s or each.since_s or each.started_s or each.created_s
    state = f"{each.state.value}{' (left)' if each.left else ''}"
    error = ops.told(each.error.splitlines()[0]) if each.error else None
    return when(changed_s), state, each.attempts, each.crashes, each.id, error


def _show(ops: Operations, arguments: argparse.Namespace) -> int:
    work = ops.work(arguments.work, arguments=arguments.arguments)
    if work is None:
        found = ops.explain(arguments.work)
        named = [] if found.work is None else [found.work.id]
        if not named and found.key is not None:
            named = list(dict.fromkeys(each.id for each in found.key.works))[:1]
        if not named and found.others:
            return ambiguous(arguments.work, found.others)
        work = ops.work(named[0], arguments=arguments.arguments) if named else None
    if work is None:
        raise NotFoundError(
            f"There is no work {arguments.work!r}. List work with `taskguard work list`."
        )
    if arguments.json:
        print_json(work)
    else:
        print_work(ops, work)
    return 0


def ambiguous(asked: str, others: Sequence[str]) -> int:
    """Name the works and keys that begin with a text. Return the exit status for a wrong option."""
    print(f"taskguard: {printable(asked)} may be:", file=sys.stderr)
    for each in others:
        print(f"  {printable(each)}", file=sys.stderr)
    return 2


def _change(ops: Operations, arguments: argparse.Namespace) -> int:
    if bool(arguments.work) == _filters(arguments):
        raise CommandTargetError("Give either ids of work, or a filter: --state, --task, --key …")
    if arguments.work:
        known = {each: ops.work(each) for each in arguments.work}
        missing = sorted(each for each, work in known.items() if work is None)
        if missing:
            names = ", ".join(map(repr, missing))
            raise NotFoundError(f"There is no work {names}. Nothing changed.")
        found = list({work.id: work for work in known.values() if work is not None}.values())
    else:
        page = ops.list_work(_filter(ops, arguments), limit=arguments.limit)
        found = list(page.items)
        note(page.note)
        if page.after:
            note(f"only the first {arguments.limit:,} are changed: repeat the command, or --limit")
    if not found:
        raise NotFoundError("No work is found. Nothing changed.")
    bulk = not arguments.work
    if arguments.dry_run or (bulk and not arguments.yes):
        return _would(arguments, found)
    return _told(arguments, _changed(ops, arguments, found))


def _would(arguments: argparse.Namespace, found: list[WorkItem]) -> int:
    if arguments.json:
        print_json(found)
    else:
        for each in found[:_SHOWN]:
            print(f"{printable(each.id)}\t{each.state.value}")
        if len(found) > _SHOWN:
            print(f"… and {len(found) - _SHOWN:,} more")
    what = _DONE_BY[arguments.action]
    yes = "" if arguments.dry_run else " Pass --yes to do it."
    note(f"{_number(len(found))} would be {what}.{yes}")
    return 0 if arguments.dry_run else 2


def _number(works: int) -> str:
    return "1 work item" if works == 1 else f"{works:,} work items"


def _changed(
    ops: Operations, arguments: argparse.Namespace, found: list[WorkItem]
) -> Iterator[Changed]:
    """Change one work after the other, and yield the outcome of each."""
    options: dict[str, Any] = {"reason": arguments.reason, "actor": arguments.actor}
    changes = {"requeue": ops.requeue, "drop": ops.drop, "done": ops.done, "call": ops.call_now}
    for each in found:
        expected = Expected(state=each.state, fence=each.fence)
        if arguments.action == "requeue" and each.state is State.PROCESSING:
            yield from ops.requeue_left(
                each.id, gone_s=arguments.gone, expected=expected, **options
            )
        else:
            yield from changes[arguments.action](each.id, expected=expected, **options)


def _told(arguments: argparse.Namespace, changes: Iterable[Changed]) -> int:
    """Print each outcome as soon as it is known, even if a later change fails."""
    changed: list[Changed] = []
    closed: BrokenPipeError | None = None
    try:
        for each in changes:
            changed.append(each)
            try:
                _print_outcome(arguments, each)
            except BrokenPipeError as error:  # the other changes are made nevertheless
                closed = error
    finally:
        if arguments.json:
            print_json(changed)
    if closed is not None:
        raise closed
    refused = [each for each in changed if not each.changed]
    if refused:
        were = "was" if len(refused) == 1 else "were"
        raise CommandError(f"{len(refused):,} of {_number(len(changed))} {were} not changed.")
    return 0


def _print_outcome(arguments: argparse.Namespace, each: Changed) -> None:
    if not each.changed:
        said = f"{printable(each.work)}: {printable(each.why)}"
        print(f"{paint('refused', 'red')}: {said}", file=sys.stderr)
    elif not arguments.json:
        said = f"{_NOW[arguments.action]} {printable(each.then)}".rstrip()
        print(f"{printable(each.work)} {said}")
