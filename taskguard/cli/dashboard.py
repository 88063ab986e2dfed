"""`taskguard dashboard`: the web page, on this machine.

The package `taskguard_dashboard` has the page and its server. The core imports no integration, so
the module is imported by its name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskguard.cli.targets import CommandError, add_application, opened, port_of

__all__ = ["add_dashboard"]

_PORT = 8642


def add_dashboard(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "dashboard",
        help="show the web page on this machine",
        description="Serves the page on the loopback interface, and prints its address. The "
        "address works once, in one browser.",
    )
    add_application(parser)
    parser.add_argument("--host", default="127.0.0.1", help="by default 127.0.0.1")
    parser.add_argument("--port", type=port_of, default=_PORT, help=f"by default {_PORT}; 0: any")
    parser.add_argument(
        "--authorize",
        metavar="MODULE:FUNCTION",
        help='returns None, "viewer" or "operator" for a request; required for any other --host',
    )
    parser.add_argument("--read-only", action="store_true", help="nothing can be changed")
    parser.add_argument(
        "--show-arguments", action="store_true", help="show stored arguments, results and progress"
    )
    parser.set_defaults(run_alone=_serve)


def _serve(arguments: argparse.Namespace) -> None:
    try:
        serving = importlib.import_module("taskguard_dashboard.serving")
    except ModuleNotFoundError as error:
        raise CommandError(
            f"The dashboard needs the package {error.name}, which is not installed: pip install "
            "'celery-taskguard[dashboard]'."
        ) from error
    authorize = _function(arguments.authorize) if arguments.authorize else None
    if authorize is None and not serving.is_loopback(arguments.host):
        raise CommandError(
            f"--host {arguments.host}: other machines reach this address. Pass --authorize "
            "MODULE:FUNCTION, which decides about each request."
        )
    with contextlib.closing(opened(arguments)) as runtime:
        if runtime.ledger is None:
            raise CommandError(
                "The dashboard shows what the ledger has on record. Pass --url, or set "
                "TASKGUARD_LEDGER_URL."
            )
        try:
            serving.serve(
                runtime,
                host=arguments.host,
                port=arguments.port,
                authorize=authorize,
                role="viewer" if arguments.read_only else "operator",
                show_arguments=arguments.show_arguments,
                say=lambda address: print(f"{address}\nCtrl-C ends it.", flush=True),
            )
        except OSError as error:
            raise CommandError(
                f"Cannot listen on {arguments.host} port {arguments.port}: {error.strerror}. "
                "Choose another --port."
            ) from error


def _function(name: str) -> Callable[[Any], Any]:
    """Return the function that "module:function" names. Raises CommandError if there is none."""
    module, _, path = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # as `celery -A` does
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"--authorize {name}: {error}.") from error
    if not callable(found):
        raise CommandError(f"--authorize {name}: that is no function.")
    given: Callable[[Any], Any] = found
    return given
