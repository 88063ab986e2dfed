"""`python -m taskguard_sandbox.demo`: the command line of the demo.

Exit status: 0 if each effect occurred once. 1 if an effect is doubled, lost or out of order, or if
a message has no answer. 2 if the demo cannot run with these options. 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from taskguard_sandbox.demo.data import DataError, read_orders
from taskguard_sandbox.process import ServerError

ORDERS = 200
INVOICES = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m taskguard_sandbox.demo",
        description="Orders by Celery and invoices by RQ, delivered three times each, while "
        "workers are killed and stopped. Needs no server.",
        epilog="Exit status: 1 if an effect is double or lost, 2 if it cannot run as asked.",
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="CSV with your order numbers")
    parser.add_argument("--orders", type=_count, default=ORDERS, metavar="N", help="how many")
    parser.add_argument("--invoices", type=_count, default=INVOICES, metavar="N", help="how many")
    parser.add_argument("--dashboard", action="store_true", help="serve the web page at the end")
    arguments = parser.parse_args(argv)
    try:
        if arguments.data is None:
            orders = [str(1 + number) for number in range(arguments.orders)]
        else:
            orders = read_orders(arguments.data)
        invoices = [str(1001 + number) for number in range(arguments.invoices)]
        return _run(orders, invoices, dashboard=arguments.dashboard)
    except (DataError, ServerError, _MissingError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted; servers and workers are stopped.", file=sys.stderr)
        return 130


class _MissingError(Exception):
    """A package that the demo needs is not installed."""


def _run(orders: list[str], invoices: list[str], *, dashboard: bool) -> int:
    try:
        from taskguard_sandbox.demo.display import Display
        from taskguard_sandbox.demo.page import show_page
        from taskguard_sandbox.demo.scenario import played
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise _MissingError(
            f"{package} is not installed: `make demo` installs all that it needs."
        ) from error
    display = Display()
    with played(orders, invoices, display) as (tallies, in_order):
        status = display.result(tallies) or int(not in_order)
        if dashboard:
            show_page(display.say)
    return status


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
