"""`manage.py taskguard …`: the command `taskguard`, with the settings of the project.

Guarantees: options, output and exit statuses are those of the command `taskguard`.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

from django.core.management.base import BaseCommand

__all__ = ["Command"]


class Command(BaseCommand):
    """The command `taskguard`."""

    help = "taskguard's own commands: explain, top, keys, work, waiting, doctor, …"
    requires_system_checks: list[str] = []  # noqa: RUF012  # as Django declares it

    def run_from_argv(self, argv: list[str]) -> None:
        """Run `manage.py taskguard …`, and exit with its status."""
        sys.exit(_main()(argv[2:]))

    def add_arguments(self, parser: Any) -> None:
        """Take the command's words, for `call_command("taskguard", "work", "list")`."""
        parser.add_argument("words", nargs="*")

    def handle(self, *args: Any, words: tuple[str, ...] = (), **options: Any) -> None:
        """Run the command for `call_command()`. Raise SystemExit unless it succeeds."""
        del args, options
        status = _main()(list(words))
        if status:
            sys.exit(status)


def _main() -> Any:
    """Return the function of the command, which is no public name."""
    [entry] = entry_points(group="console_scripts", name="taskguard")
    return entry.load()
