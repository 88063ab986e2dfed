"""Texts of users (keys, names, errors) without characters that control a terminal.

Guarantees: `printable()` returns one line. It contains no character that controls a terminal
(escapes, C1 controls), changes the order of a text (bidirectional overrides), or is invisible. Such
characters are escaped as in Python and in `$'…'` of a shell: `\\x1b`, `\\u202e`.

Does not guarantee that two texts look different: letters of two scripts may look alike.

`shown_id()` returns the id of a message as its queue shows it.
"""

from __future__ import annotations

import unicodedata

__all__ = ["printable", "shown_id"]

# Categories of controls, invisible format characters, line and paragraph separators, and lone
# surrogates, which no terminal can encode.
_OBEYED = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs"})


def printable(text: object) -> str:
    """Return the text as one line, with special characters escaped."""
    plain = str(text)
    return plain if plain.isprintable() else "".join(map(_shown, plain))


def _shown(sign: str) -> str:
    if unicodedata.category(sign) not in _OBEYED:
        return sign
    return sign.encode("unicode_escape", "surrogatepass").decode("ascii")


def shown_id(message: str) -> str:
    """Return the id that Celery or RQ shows for a message, from its name in the ledger.

    A name also has the time of sending: "id@1795907437.266319" or "id~1@…" with Celery, and "id@…"
    or "id@…~3" with RQ.
    """
    named, _, sending = message.rpartition("@")
    seconds, _, fraction = sending.partition("~")[0].partition(".")
    if not (named and seconds.isdecimal() and fraction.isdecimal()):
        return message
    name, _, replacements = named.rpartition("~")
    return name if name and replacements.isdecimal() else named
