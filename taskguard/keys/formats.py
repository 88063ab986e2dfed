"""Formats in placeholders: `<when:%Y-%m-%d>` for a date or time.

Guarantees: a format gives the same text on every machine, so that producer and worker agree. Years
have four digits. Directives that depend on the locale, the platform or a time zone's name are
refused at decoration. Text is never parsed: a format for a text is an error.
Does not guarantee different texts for different values: `%Y-%m-%d` gives a whole day one key, which
is the purpose of a format.
"""

from __future__ import annotations

import re
from datetime import date, time
from typing import Any, cast

from taskguard.keys.values import RefusedValueError, text_of, unwrap

__all__ = ["explain_format", "format_value"]

_directives = re.compile(r"%(.?)", re.DOTALL).findall
_each_directive = re.compile(r"%(.)", re.DOTALL).sub
_SAME_EVERYWHERE = "YmdHIMSfjyzGVuUWwFTR"
# Some platforms and versions of Python print years before 1000 without leading zeros.
_WIDTHS = {"Y": 4, "G": 4, "F": 10}


def explain_format(spec: str) -> str | None:
    """Return the problem of a placeholder's format, or None."""
    if not spec:
        return "has an empty format: leave the colon out"
    directives = _directives(spec)
    if not any(directive.isalpha() for directive in directives):
        return f"has the format {spec!r}, which is not one of a date or time, such as %Y-%m-%d"
    bad = next((each for each in directives if each not in [*_SAME_EVERYWHERE, "%"]), None)
    if bad is None:
        return None
    return (
        f"has the directive %{bad}, whose text depends on locale, platform or time zone name;"
        f" the same everywhere are %{' %'.join(_SAME_EVERYWHERE)}"
    )


def format_value(value: object, spec: str) -> str:
    """Return the text of `value` in a format that `explain_format` accepted."""
    value = unwrap(value)
    text_of(value)  # refuses None, NaN, containers and long texts
    kind = type(value)
    # A datetime is a date, too.
    base = next((each for each in (date, time) if issubclass(kind, each)), None)
    if base is None:
        name = "text" if issubclass(kind, str) else f"of class {kind.__name__}"
        raise RefusedValueError(
            f"is {name}, while its format {spec} is one of a date or datetime: parse it before the"
            " call, or leave the format out"
        )

    def text(directive: re.Match[str]) -> str:
        made: str = cast("Any", base).strftime(value, directive[0])
        return made.zfill(_WIDTHS.get(directive[1], 0))

    # Format each directive alone: strftime() would convert the text between them to the platform's
    # encoding.
    return text_of(_each_directive(text, spec))
