"""`taskguard completions`: print a script that completes commands and options in a shell.

Guarantees: the script is made of the parser, so that it has each command and option. It starts no
process and asks no server.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from taskguard.drivers import extras_named

__all__ = ["add_completions"]

_SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_completions(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Add `completions`, for all commands of the parser."""
    completions = commands.add_parser(
        "completions",
        help="print a script that completes commands and options in your shell",
        description='Prints a script. For bash, add eval "$(taskguard completions bash)" to '
        "~/.bashrc.",
    )
    completions.add_argument("shell", choices=_SHELLS)
    completions.set_defaults(run_alone=functools.partial(_print, parser))


def _print(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    with extras_named("The script"):
        import shtab
    print(shtab.complete(parser, shell=arguments.shell))
