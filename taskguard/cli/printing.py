"""Safe texts for a terminal: names and errors from a ledger cannot control it.

Guarantees: `indented()` returns lines of which only the first begins at the margin. They are
escaped as by `printable()`, and so are log lines of the library during a command.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from taskguard.model.texts import printable

__all__ = ["indented", "logged_printably", "printable"]


def indented(text: object, *, by: int) -> str:
    """Return the lines of the text, escaped. Lines after the first begin with `by` blanks."""
    return ("\n" + " " * by).join(map(printable, str(text).split("\n")))


# Functions whose log lines say what the command itself prints.
_PRINTED = frozenset(
    {
        ("changes", "_change"),
        ("pausing", "pause"),
        ("pausing", "resume"),
        ("releasing", "release"),
        ("releasing", "released"),
    }
)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record), by=4)


@contextlib.contextmanager
def logged_printably() -> Iterator[None]:
    """Write escaped log lines of WARNING and above to stderr, unless another handler exists."""
    logger = logging.getLogger("taskguard")
    if logger.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Printable())
    handler.addFilter(lambda record: (record.module, record.funcName) not in _PRINTED)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
