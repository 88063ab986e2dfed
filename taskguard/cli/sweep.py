"""`taskguard sweep` and `taskguard relay`: send the messages of overdue work again.

Guarantees: at most one of them sends overdue messages at a time, over all machines, because the
others wait for its lease. They send to the queues whose integrations are installed (entry points
`taskguard.queues`). A relay also promotes messages, in addition to the relays of workers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from taskguard.cli.lists import count
from taskguard.cli.printing import indented
from taskguard.cli.targets import CommandError, add_queue, metavar_of
from taskguard.errors import KeyBusyError, LeaseLostError, LedgerUnavailableError, TaskguardError

if TYPE_CHECKING:
    from taskguard.outbox.relay import Relay
    from taskguard.outbox.sweep import Sweeper, Swept

__all__ = ["add_sweep"]

_GROUP = "taskguard.queues"


def add_sweep(commands: Any, duration_s: Any) -> None:
    """Add `sweep` and `relay`."""
    sweep = commands.add_parser(
        "sweep",
        help="send the messages of overdue work again",
        description="Sends the messages of overdue work whose call is stored (recoverable=True, or "
        "enqueue()). Work is overdue if it is PROCESSING and its lease has expired, or if it is "
        "NEW and was never claimed.",
    )
    sweep.set_defaults(every=None)
    relay = commands.add_parser(
        "relay",
        help="sweep and promote every second, until stopped",
        description="Sends messages that enqueue() stored and nothing published, within seconds. "
        'Promotes the first messages of lines that no holder promoted (busy="park"). Does what '
        "`taskguard sweep` does. Several relays may run.",
    )
    relay.add_argument(
        "--every", type=duration_s, default="1s", metavar="TIME", help="the interval; by default 1s"
    )
    for command in (sweep, relay):
        for name in _queues():
            add_queue(command, name, text=f"send to {name}")
        command.add_argument(
            "--again-after",
            type=duration_s,
            default="1h",
            metavar="TIME",
            help="after which time a message that was sent and not claimed counts as lost; by "
            "default 1h",
        )
        command.add_argument(
            "--batch", type=count, default=500, help="work items at a time; by default 500"
        )
        command.set_defaults(run_alone=_run)


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
        options = " or ".join(f"--{name} {metavar_of(name)}" for name in _queues())
        raise CommandError(
            f"No queue is given. Pass {options}."
            if options
            else "No integration is installed. Install one: pip install 'celery-taskguard[celery]'."
        )
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
    """Return the queue's own function to send a promoted message, if it has one."""
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
            pass  # another relay or sweep is sweeping; this one sweeps after it
        except LedgerUnavailableError as error:
            print(f"taskguard: {indented(error, by=11)}", file=sys.stderr, flush=True)
        stopped.wait(every_s)


def _tell(swept: Swept, *, quiet: bool = False) -> None:
    if quiet and swept == type(swept)():
        return
    print(f"sent: {swept.sent:,}, refused: {swept.refused:,}", flush=True)
    if swept.failed:
        print(f"failed: {swept.failed:,}; see `taskguard work list --state FAILED`", flush=True)
    if swept.strange:
        print(f"not sent, of other queues or applications: {swept.strange:,}", flush=True)
    if swept.refused and not quiet:
        raise TaskguardError("Some messages could not be sent. A later sweep tries them again.")
