"""`taskguard keys`: release a key whose holder is gone, before its lease has expired.

Guarantees: the command prints each key that it releases, with the process of its holder. It does
not remove values that taskguard did not write. Keys are escaped by `printing.py`.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from taskguard.cli.printing import printable
from taskguard.cli.targets import CommandError, add_servers, connected

__all__ = ["add_keys"]


def add_keys(commands: Any) -> None:
    """Add `keys` with its actions."""
    actions = commands.add_parser("keys", help="keys and their holders").add_subparsers(
        dest="action", required=True
    )
    release = actions.add_parser(
        "release",
        help="take a key from a holder that is gone",
        description="Ends the lease in the ledger and at the lock server before it expires. If the "
        "holder is still alive, its next renewal tells it. With a ledger, its commit is refused "
        "once another process has claimed the key. If several holders share the key, or it has "
        "slots, all leases end, unless --owner or --fence names one.",
    )
    release.add_argument("key", help="the key, as errors and the log show it: order:42")
    add_servers(release)
    release.add_argument("--reason", help="why, for the log")
    release.add_argument("--owner", help="release only from this holder, as errors name it")
    release.add_argument("--fence", type=int, help="release only from the holder with this fence")
    release.set_defaults(run_alone=_release)


def _release(arguments: argparse.Namespace) -> None:
    with contextlib.closing(connected(arguments)) as tg:
        found = tg.released(
            arguments.key, reason=arguments.reason, owner=arguments.owner, fence=arguments.fence
        )
        for each in found:
            holder = printable(tg.runner.names.described(each.owner))
            print(f"{printable(each.key)}: released from {holder}")
    if not found:
        such = " with this owner and fence" if arguments.owner or arguments.fence else ""
        raise CommandError(f"{arguments.key} has no holder{such}: nothing was released.")
