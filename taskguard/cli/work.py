"""`taskguard work` and `taskguard waiting`: list, show and requeue work.

Guarantees: one statement requeues work, and only if it is DEAD or FAILED. It does not send the
message again. A sweep sends it if the call is stored. Otherwise its sender or the queue must.
Output is escaped by `printing.py`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from taskguard.cli.printing import indented, printable
from taskguard.cli.targets import CommandError, add_url
from taskguard.model.lease import Owner
from taskguard.model.records import WorkView
from taskguard.model.states import State
from taskguard.run.names import Names

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger

__all__ = ["add_waiting", "add_work", "count"]


def count(text: str) -> int:
    """Parse a number of rows, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows")
    return int(text)


def add_work(commands: Any) -> None:
    """Add `work` with its actions."""
    actions = commands.add_parser("work", help="list, show and requeue work").add_subparsers(
        dest="action", required=True
    )
    several = actions.add_parser("list", help="list work in a state, the latest first")
    add_url(several)
    states = [state.value for state in State]
    several.add_argument("--state", choices=states, default="DEAD", help="DEAD is the default")
    several.add_argument("--limit", type=count, default=100, help="maximum number; by default 100")
    several.set_defaults(run=_list)
    show = actions.add_parser("show", help="print the record of work")
    requeue = actions.add_parser(
        "requeue",
        help="DEAD or FAILED -> NEW",
        description="The work's next delivery runs it. If its call is stored (recoverable=True, or "
        "enqueue()), the next sweep sends its message. Otherwise send its message again. With "
        'once_per="message" the message\'s id is part of the work: send it with the same id.',
    )
    for action, run in ((show, _show), (requeue, _requeue)):
        add_url(action)
        action.add_argument("work", help='its id, as `list` prints it: "shop.ship order:42"')
        action.set_defaults(run=run)
    requeue.add_argument("--reason", required=True, help="why it will succeed now")


def add_waiting(commands: Any) -> None:
    """Add `waiting`."""
    waiting = commands.add_parser("waiting", help="list the messages in line for their keys")
    add_url(waiting)
    waiting.add_argument("--key", help="list the line of this key only, as the log shows the key")
    waiting.add_argument("--limit", type=count, default=100, help="maximum number; by default 100")
    waiting.set_defaults(run=_waiting)


def _waiting(ledger: DatabaseLedger, arguments: argparse.Namespace) -> None:
    found = ledger.waiting(arguments.key, limit=arguments.limit)
    positions: Counter[str] = Counter()
    names = Names(ledger)
    for each in found:
        positions[each.key] += 1
        state = f"{each.line}, failed" if each.failed else str(each.line)
        state += f", sent again {each.sent_again} times" if each.sent_again else ""
        holder = names.process(Owner.parse(each.owner))
        state += f"  held by {printable(holder)}" if holder else ""
        since, key, work = _when(each.parked_s), printable(each.key), printable(each.work)
        print(f"{since}  {key}  {positions[each.key]}  {work}  {state}")
    if not found:
        print("no message waits" + (f" for {printable(arguments.key)}" if arguments.key else ""))


def _list(ledger: DatabaseLedger, arguments: argparse.Namespace) -> None:
    found = ledger.list_work(State(arguments.state), limit=arguments.limit)
    names = Names(ledger)
    for work in found:
        error = f"  {printable(names.told(work.error.splitlines()[0]))}" if work.error else ""
        print(f"{_when(work.started_s)}  attempts {work.attempts}  {printable(work.id)}{error}")
    if not found:
        print(f"no work is {arguments.state}")


def _show(ledger: DatabaseLedger, arguments: argparse.Namespace) -> None:
    work, names = _find(ledger, arguments.work), Names(ledger)
    for each in fields(work):
        value = getattr(work, each.name)
        if each.name.endswith("_s"):
            value = _when(value)
        elif isinstance(value, State):
            value = value.value
        if each.name == "owner" and (process := names.process(Owner.parse(work.owner))):
            value = f"{value} ({process})"
        if each.name == "error" and value is not None:
            value = names.told(value)
        text = "-" if value in (None, "") else indented(value, by=16)
        print(f"{each.name.removesuffix('_s'):15} {text}")


def _requeue(ledger: DatabaseLedger, arguments: argparse.Namespace) -> None:
    if not ledger.requeue(arguments.work, reason=arguments.reason):
        state = _find(ledger, arguments.work).state.value
        raise CommandError(f"{arguments.work} is {state}: only DEAD and FAILED work is requeued.")
    stored = _find(ledger, arguments.work).call is not None
    how = "The next sweep sends its message." if stored else "Send its message again."
    print(f"{printable(arguments.work)} is NEW: its next delivery runs it. {how}")


def _find(ledger: DatabaseLedger, work: str) -> WorkView:
    found: WorkView | None = ledger.view(work)
    if found is None:
        raise CommandError(f"There is no work {work!r}. List work with `taskguard work list`.")
    return found


def _when(at_s: float | None) -> str:
    if not at_s:
        return "-"
    return datetime.fromtimestamp(at_s, UTC).isoformat(" ", "seconds")
