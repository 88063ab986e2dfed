"""Safe texts for a terminal: names and errors from a ledger cannot control it.

Guarantees: `printable()` returns one line. `indented()` returns lines of which only the first
begins at the margin. Neither contains a character that controls a terminal (escapes, C1 controls),
changes the order of a text (bidirectional overrides), or is invisible. Such characters are escaped
as in Python and in `$'…'` of a shell: `\x1b`, `\u202e`.

Log lines of the library during a command are escaped, too.

Does not guarantee that two texts look different: letters of two scripts may look alike.
"""

from __future__ import annotations

import contextlib
import logging
import unicodedata
from collections.abc import Iterator

__all__ = ["indented", "logged_printably", "printable"]

# Categories of controls, invisible format characters, line and paragraph separators, and lone
# surrogates, which no terminal can encode.
_OBEYED = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs"})


def printable(text: object) -> str:
    """Return the text as one line, with special characters escaped."""
    return "".join(_shown(sign) for sign in str(text))


def indented(text: object, *, by: int) -> str:
    """Return the lines of the text, escaped. Lines after the first begin with `by` blanks."""
    return ("\n" + " " * by).join(map(printable, str(text).split("\n")))


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
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _shown(sign: str) -> str:
    if unicodedata.category(sign) not in _OBEYED:
        return sign
    return sign.encode("unicode_escape", "surrogatepass").decode("ascii")
