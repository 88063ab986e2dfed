"""The servers that a command uses: URLs from its options or from the environment.

Guarantees: an error about a URL names the option or the variable that the URL came from.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from taskguard.errors import CommandTargetError
from taskguard.settings import (
    LEDGER_VARIABLE,
    LOCKS_VARIABLE,
    UNSET,
    is_set,
    make_ledger,
    make_locks,
    named_source,
)

if TYPE_CHECKING:
    from taskguard.api import TaskGuard

__all__ = [
    "CommandError",
    "NotFoundError",
    "add_application",
    "add_queue",
    "add_servers",
    "add_url",
    "connected",
    "metavar_of",
    "opened",
    "opened_ledger",
    "port_of",
]

_QUEUES, _CONFIGURATIONS = "taskguard.queues", "taskguard.configurations"
_DJANGO_VARIABLE = "DJANGO_SETTINGS_MODULE"
_LAST_PORT = 65_535


class CommandError(Exception):
    """A command cannot do what its options say; its message gives the reason."""


class NotFoundError(CommandError):
    """There is nothing of what the command was asked about."""


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, the ledger's."""
    parser.add_argument("--url", help=f"SQLAlchemy URL; by default ${LEDGER_VARIABLE}")


def add_servers(parser: argparse.ArgumentParser) -> None:
    """Add `--locks` and `--ledger`."""
    parser.add_argument("--locks", metavar="URL", help=f"by default ${LOCKS_VARIABLE}")
    parser.add_argument("--ledger", metavar="URL", help=f"by default ${LEDGER_VARIABLE}")


def add_application(parser: argparse.ArgumentParser) -> None:
    """Add the options that name an application, or its servers."""
    parser.add_argument(
        "--app", "--celery", metavar="MODULE:APP", help="a Celery app, as for `celery -A`"
    )
    parser.add_argument("--rq", metavar="REDIS_URL", help="the Redis of RQ's queues")
    parser.add_argument(
        "--url", "--ledger", dest="ledger", metavar="URL", help=f"by default ${LEDGER_VARIABLE}"
    )
    parser.add_argument("--locks", metavar="URL", help=f"by default ${LOCKS_VARIABLE}")


def add_queue(parser: Any, name: str, *, text: str) -> None:
    """Add the option that names an application of one integration: `--celery` or `--rq`."""
    options = [f"--{name}", *(["--app"] if name == "celery" else [])]
    parser.add_argument(*options, metavar=metavar_of(name), help=text)


def metavar_of(name: str) -> str:
    """Return what names an application of one integration, for help texts and errors."""
    return {"celery": "MODULE:APP", "rq": "REDIS_URL"}.get(name, "TARGET")


def port_of(text: str) -> int:
    """Return the port that an option names. 0: any free one."""
    if not text.isdecimal() or int(text) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def opened(arguments: argparse.Namespace) -> TaskGuard:
    """Return the application that the options name, or Django's, or that of the environment."""
    for name, target in (("celery", arguments.app), ("rq", arguments.rq)):
        if target is not None:
            if arguments.ledger or arguments.locks:
                raise CommandTargetError(
                    "With --app or --rq, the application or the environment names the servers. "
                    "Remove --url and --locks."
                )
            [entry] = entry_points(group=_QUEUES, name=name) or [None]
            if entry is None:
                raise CommandTargetError(
                    f"{name} is not installed. Run: pip install 'celery-taskguard[{name}]'"
                )
            found: TaskGuard = entry.load()(target)[0]
            return found
    if not (arguments.ledger or arguments.locks) and os.environ.get(_DJANGO_VARIABLE):
        for entry in entry_points(group=_CONFIGURATIONS):
            made: TaskGuard = entry.load()()
            return made
    return connected(arguments, option="--url")


def opened_ledger(url: str | None) -> Any:
    """Return the ledger of `--url`, or of the environment."""
    if not url and not is_set(LEDGER_VARIABLE):
        raise CommandError(
            f"No ledger is given. Pass --url, or set {LEDGER_VARIABLE}, for example to "
            '"postgresql+psycopg://shop@localhost/shop".'
        )
    return _made(make_ledger, url, "--url")


def connected(arguments: argparse.Namespace, *, option: str = "--ledger") -> TaskGuard:
    """Connect to what `--locks` and `--ledger`, or the environment, name.

    `option` is the name of the ledger's option, for errors.
    """
    from taskguard.api import connect

    of_locks = arguments.locks or is_set(LOCKS_VARIABLE)
    of_ledger = arguments.ledger or is_set(LEDGER_VARIABLE)
    if not of_locks and not of_ledger:
        raise CommandError(
            f"No server is given. Pass --app, --locks or {option}, or set {LOCKS_VARIABLE} or "
            f"{LEDGER_VARIABLE}."
        )
    ledger = _made(make_ledger, arguments.ledger, option) if of_ledger else None
    make = functools.partial(make_locks, ledger=ledger)
    locks = _made(make, arguments.locks, "--locks") if of_locks else None
    return connect(locks=locks, ledger=ledger)


def _made(make: Callable[[Any], Any], url: str | None, option: str) -> Any:
    """Make a provider or a ledger. Errors name the option, or the environment's variable."""
    with named_source(option) if url else contextlib.nullcontext():
        return make(url or UNSET)
