"""Texts of a ledger on a terminal: what a task, a key or an error is called moves nothing there.

Guarantees: what `printable()` returns is one line, and `indented()` lines of which none but the
first begins at the margin; neither has a character that a terminal obeys (escapes, C1 controls) or
that shows a text in another order than it has (bidirectional overrides), or not at all. Those are
written as Python and `$'…'` of a shell write them: `\x1b`, `\u202e`.

What the library logs during a command is shown so as well.

Does not guarantee that two texts look different: letters of two scripts may look alike.
"""

from __future__ import annotations

import contextlib
import logging
import unicodedata
from collections.abc import Iterator

__all__ = ["indented", "logged_printably", "printable"]

# Controls, invisible signs that order or join what is around them, ends of lines and paragraphs,
# halves of surrogate pairs, which no terminal's encoding has.
_OBEYED = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs"})


def printable(text: object) -> str:
    """`text` in one line that shows all that it has."""
    return "".join(_shown(sign) for sign in str(text))


def indented(text: object, *, by: int) -> str:
    """The lines of `text`; those after the first begin with `by` blanks."""
    return ("\n" + " " * by).join(map(printable, str(text).split("\n")))


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record), by=4)


@contextlib.contextmanager
def logged_printably() -> Iterator[None]:
    """What is logged at WARNING and above goes to the terminal so, where nobody else has it."""
    logger = logging.getLogger("taskguard")
    if logger.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Printable())
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _shown(sign: str) -> str:
    if unicodedata.category(sign) not in _OBEYED:
        return sign
    return sign.encode("unicode_escape", "surrogatepass").decode("ascii")
