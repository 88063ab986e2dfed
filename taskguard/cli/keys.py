"""`taskguard keys`: list held and paused keys; release, pause and resume a key.

Guarantees: each change needs a reason, and is recorded with its actor. A release prints each holder
that it takes the key from. It does not remove values that taskguard did not write.
"""

from __future__ import annotations

import argparse
from typing import Any

from taskguard.cli.lists import add_page
from taskguard.cli.output import (
    add_json,
    age,
    as_data,
    duration_s,
    note,
    print_json,
    print_table,
    when,
)
from taskguard.cli.printing import printable
from taskguard.cli.targets import CommandError, add_application
from taskguard.locks.base import Holder
from taskguard.model.views import Held
from taskguard.operations import Operations

__all__ = ["add_change", "add_keys", "print_held"]


def add_change(parser: argparse.ArgumentParser) -> None:
    """Add what each change needs: `--reason` and `--as`."""
    parser.add_argument("--reason", required=True, help="why; it is recorded")
    parser.add_argument(
        "--as", dest="actor", metavar="NAME", help="the operator; by default USER@HOST"
    )


def add_keys(commands: Any) -> None:
    """Add `keys` with its actions."""
    keys = commands.add_parser(
        "keys",
        help="list held and paused keys; release, pause or resume a key",
        description="Without an action: lists the keys of bodies that run long, the longest held "
        "first. A key is listed once its lease was renewed: after a third of ttl_s.",
    )
    add_application(keys)
    keys.add_argument("--held", action="store_true", help="list held keys: the default")
    keys.add_argument(
        "--longer", type=duration_s, default=0.0, metavar="AGE", help="only held for longer: 10s"
    )
    keys.add_argument("--paused", action="store_true", help="list paused keys")
    add_page(keys)
    keys.set_defaults(ask=_list)
    actions = keys.add_subparsers(dest="action")
    release = actions.add_parser(
        "release",
        help="take a key from a holder that is gone",
        description="Ends the lease in the ledger and at the lock server before it expires. If the "
        "holder is still alive, its next renewal tells it. With a ledger, its late commit is "
        "refused. If several holders share the key, or it has "
        "slots, all leases end, unless --owner or --fence names one.",
    )
    release.add_argument("--owner", help="release only from this holder, as errors name it")
    release.add_argument("--fence", type=int, help="release only from the holder with this fence")
    release.set_defaults(ask=_release)
    pause = actions.add_parser(
        "pause",
        help="let no delivery have a key until it is resumed",
        description="Waits until no delivery holds the key. Then messages wait in its line, or "
        "are deferred. Ctrl-C while it waits leaves no pause behind.",
    )
    pause.add_argument(
        "--now", action="store_true", help="do not wait: refuse late commits of the holders"
    )
    pause.add_argument(
        "--timeout", type=duration_s, default="60s", metavar="TIME", help="by default 60s"
    )
    pause.set_defaults(ask=_pause)
    resume = actions.add_parser("resume", help="end a pause, and let the line go on")
    resume.set_defaults(ask=_resume)
    for action in (release, pause, resume):
        action.add_argument("key", help="the key, as errors and the log show it: order:42")
        add_application(action)
        add_change(action)
        add_json(action)


def _list(ops: Operations, arguments: argparse.Namespace) -> int:
    found = ops.keys(
        paused=arguments.paused,
        longer_s=arguments.longer,
        limit=arguments.limit,
        after=arguments.after,
    )
    if arguments.json:
        print_json(found.items)
    elif arguments.paused:
        print_table(
            ("KEY", "SINCE", "BY", "REASON"),
            (
                (each.key, when(each.paused.since_s), each.paused.actor, each.paused.reason)
                for each in found.items
                if each.paused is not None
            ),
        )
    else:
        print_held(ops, found.items)
    note(found.note)
    if found.after:
        note(f"there are more: --after {found.after}")
    if not found.items:
        note(f"no key is {'paused' if arguments.paused else 'held for long'}")
    return 0


def print_held(ops: Operations, held: tuple[Held, ...]) -> None:
    """Print holders as a table."""
    now_s = ops.now_s()
    print_table(
        ("KEY", "HELD", "BY", "TASK", "ATTEMPT", "LEASE LEFT"),
        (
            (
                each.key,
                age(now_s - each.since_s),
                each.process.label,
                each.task,
                each.attempt,
                age(each.lease_until_s - now_s),
            )
            for each in held
        ),
    )


def _release(ops: Operations, arguments: argparse.Namespace) -> int:
    found = ops.release(
        arguments.key,
        reason=arguments.reason,
        actor=arguments.actor,
        owner=arguments.owner,
        fence=arguments.fence,
    )
    if arguments.json:
        print_json([_released(ops, each) for each in found])
    for each in () if arguments.json else found:
        print(f"{printable(each.key)}: released from {printable(ops.described(each.owner))}")
    if not found:
        such = " with this owner and fence" if arguments.owner or arguments.fence else ""
        raise CommandError(f"{arguments.key} has no holder{such}: nothing was released.")
    return 0


def _pause(ops: Operations, arguments: argparse.Namespace) -> int:
    known = ops.key(arguments.key)
    pause = ops.pause(
        arguments.key,
        reason=arguments.reason,
        actor=arguments.actor,
        now=arguments.now,
        timeout_s=arguments.timeout,
    )
    if arguments.json:
        print_json({"key": arguments.key, **as_data(pause)})
    else:
        print(f"{printable(arguments.key)}: {printable(pause)}")
    if known is None:
        note("Nothing is on record of this key: no delivery has had it. Is its name complete?")
    return 0


def _resume(ops: Operations, arguments: argparse.Namespace) -> int:
    pause = ops.resume(arguments.key, reason=arguments.reason, actor=arguments.actor)
    if pause is None:
        raise CommandError(
            f"{arguments.key} is not paused. If a pause was waiting for its holder, it is given up."
        )
    if arguments.json:
        print_json({"key": arguments.key, **as_data(pause)})
    else:
        print(f"{printable(arguments.key)}: resumed; it was {printable(pause)}")
    return 0


def _released(ops: Operations, holder: Holder) -> dict[str, Any]:
    """Return a former holder as JSON has it."""
    names = {"owner": str(holder.owner), "holder": ops.described(holder.owner)}
    return {"key": holder.key, **names, "fence": holder.fence}
