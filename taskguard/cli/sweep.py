"""`taskguard sweep` and `taskguard relay`: send the messages of overdue work again.

Guarantees: at most one of them sends what is overdue at a time, over all machines: a lease keeps
the others waiting. What it sends to are the queues whose integrations are installed (entry points
`taskguard.queues`). A relay calls those in line for a key, too, beside the relays of workers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from taskguard.cli.printing import indented
from taskguard.cli.targets import CommandError
from taskguard.cli.work import count
from taskguard.errors import KeyBusyError, LeaseLostError, LedgerUnavailableError, TaskguardError

if TYPE_CHECKING:
    from taskguard.outbox.relay import Relay
    from taskguard.outbox.sweep import Sweeper, Swept

__all__ = ["add_sweep"]

_GROUP = "taskguard.queues"


def add_sweep(commands: Any, duration_s: Any) -> None:
    """`sweep`, and `relay`, which is a sweep every second."""
    sweep = commands.add_parser(
        "sweep",
        help="send the messages of overdue work again",
        description="Work whose call is stored (recoverable=True, or enqueued in a transaction) "
        "and which is overdue: PROCESSING, and its lease has run out, or NEW and never claimed.",
    )
    sweep.set_defaults(every=None)
    relay = commands.add_parser(
        "relay",
        help="the same, every second, until it is stopped",
        description="Sends what was enqueued in a transaction and not sent after it, within "
        "seconds; calls whose turn has come in the line of a key, where nobody did "
        '(busy="park"); and whatever `taskguard sweep` would. Several may run.',
    )
    relay.add_argument("--every", type=duration_s, default="1s", metavar="TIME", help="1s")
    for command in (sweep, relay):
        for name in _queues():
            target = _METAVARS.get(name, "TARGET")
            command.add_argument(f"--{name}", metavar=target, help=f"send to {name}")
        command.add_argument(
            "--again-after",
            type=duration_s,
            default="1h",
            metavar="TIME",
            help="when a message that nobody took counts as lost again; 1h",
        )
        command.add_argument("--batch", type=count, default=500, help="work items at a time; 500")
        command.set_defaults(run_alone=_run)


_METAVARS = {"celery": "MODULE:APP", "rq": "REDIS_URL"}


def _queues() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=_GROUP)}


def _run(arguments: argparse.Namespace) -> None:
    from taskguard.outbox.sweep import Sweeper

    runtime, senders = None, {}
    for name, entry in _queues().items():
        target = getattr(arguments, name)
        if target is not None:
            opened, senders[name] = entry.load()(target)
            runtime = runtime or opened
    if runtime is None:
        options = " or ".join(f"--{name} {_METAVARS.get(name, 'TARGET')}" for name in _queues())
        raise CommandError(f"say where to send to: {options or 'install an integration first'}.")
    sweeper = Sweeper(runtime, senders, again_after_s=arguments.again_after, batch=arguments.batch)
    if arguments.every is not None:
        from taskguard.outbox.relay import Relay

        lines = Relay(runtime, senders, {name: _caller(send) for name, send in senders.items()})
        _relay(sweeper, lines, arguments.every)
        return
    try:
        _tell(sweeper.sweep())
    except KeyBusyError:
        print("another sweep is running")


def _caller(send: Any) -> Any:
    """How to send to who is called for the first time, where a queue has a way of its own."""
    return getattr(send, "hand_off", send)


def _relay(sweeper: Sweeper, lines: Relay, every_s: float) -> None:
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.is_set():
        try:
            lines.look()
            _tell(sweeper.sweep(), quiet=True)
        except (KeyBusyError, LeaseLostError):
            pass  # another relay is running; this one takes over when that ends
        except LedgerUnavailableError as error:
            print(f"taskguard: {indented(error, by=11)}", file=sys.stderr, flush=True)
        stopped.wait(every_s)


def _tell(swept: Swept, *, quiet: bool = False) -> None:
    if quiet and swept == type(swept)():
        return
    print(f"sent: {swept.sent:,}, refused: {swept.refused:,}", flush=True)
    if swept.failed:
        print(
            f"failed: {swept.failed:,}; `taskguard work list --state FAILED` says why", flush=True
        )
    if swept.strange:
        print(f"of other queues or applications, left: {swept.strange:,}", flush=True)
    if swept.refused and not quiet:
        raise TaskguardError("some could not be sent; a later sweep tries them again.")
