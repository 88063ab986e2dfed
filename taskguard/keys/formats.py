"""Formats in placeholders: `<when:%Y-%m-%d>` of a date or time, `<number:05d>` of a number.

Guarantees: a format gives the same text on every machine, so that producer and worker agree, and
whatever `decimal` context is set there; years have four digits. Directives that depend on the
locale, the platform or a time zone's name are refused at decoration.
Text is never parsed or padded: a format of text is an error that says so.
Does not guarantee: that different values stay different. That is what a format is for: `%Y-%m-%d`
puts a whole day under one key.
"""

from __future__ import annotations

import re
from datetime import date, time
from decimal import Decimal, localcontext
from typing import Any, cast

from taskguard.keys.values import PLAIN_DECIMALS, RefusedValueError, text_of, unwrap

__all__ = ["explain_format", "format_value"]

_directives = re.compile(r"%(.?)", re.DOTALL).findall
_each_directive = re.compile(r"%(.)", re.DOTALL).sub
_SAME_EVERYWHERE = "YmdHIMSfjyzGVuUWwFTR"
# Before the year 1000 some platforms and versions of Python leave the zeros out.
_WIDTHS = {"Y": 4, "G": 4, "F": 10}
_is_number_format = re.compile(r"\+?(0[1-9]\d?)?(\.\d\d?)?[bdeEfFgGoxX%]?").fullmatch
# Of a Decimal, `f` prints every place: one with an exponent of a billion would fill the memory.
_MAX_EXPONENT = 1000


def explain_format(spec: str) -> str | None:
    """What is wrong with a placeholder's format; None where nothing is."""
    if not spec:
        return "has an empty format: leave the colon out"
    if _is_date_format(spec):
        bad = next((d for d in _directives(spec) if d not in [*_SAME_EVERYWHERE, "%"]), None)
        if bad is None:
            return None
        return (
            f"has the directive %{bad}, whose text depends on locale, platform or time zone name;"
            f" the same everywhere are %{' %'.join(_SAME_EVERYWHERE)}"
        )
    if _is_number_format(spec) and (_fits(0, spec) or _fits(0.0, spec)):
        return None
    return (
        f"has the format {spec!r}, neither one of a date (%Y-%m-%d) nor one of a number (05d, .2f)"
    )


def format_value(value: object, spec: str) -> str:
    """The text of `value` in a format that `explain_format` found good."""
    value = unwrap(value)
    text_of(value)  # refuses None, NaN, containers and what is too long
    formatted = _format_date(value, spec) if _is_date_format(spec) else _format_number(value, spec)
    return text_of(formatted)


def _is_date_format(spec: str) -> bool:
    return any(directive.isalpha() for directive in _directives(spec))


def _fits(number: float, spec: str) -> bool:
    try:
        format(number, spec)
    except ValueError:
        return False
    return True


def _format_date(value: object, spec: str) -> str:
    base = next(
        (b for b in (date, time) if issubclass(type(value), b)), None
    )  # datetimes are dates
    if base is None:
        raise RefusedValueError(
            f"is {_name(value)}, while its format {spec} is one of a date or datetime: parse it"
            " before the call, or leave the format out"
        )

    def text(directive: re.Match[str]) -> str:
        made: str = cast("Any", base).strftime(value, directive[0])
        return made.zfill(_WIDTHS.get(directive[1], 0))

    # One by one: the text between them would pass through the platform's encoding.
    return _each_directive(text, spec)


def _format_number(value: object, spec: str) -> str:
    base = next((b for b in (int, float, Decimal) if issubclass(type(value), b)), None)
    if base is None:
        raise RefusedValueError(
            f"is {_name(value)}, while its format {spec} is one of a number: convert it before the"
            " call, or leave the format out"
        )
    if base is Decimal and abs(Decimal.adjusted(cast("Decimal", value))) > _MAX_EXPONENT:
        raise RefusedValueError(f"is a Decimal too large or too small for its format {spec}")
    try:
        # The base's own method, since JSON brings the worker the base's value.
        with localcontext(PLAIN_DECIMALS):
            return cast("Any", base).__format__(value, spec)  # type: ignore[no-any-return]
    except (ValueError, OverflowError):
        pass
    raise RefusedValueError(f"is {_name(value)}, which the format {spec} does not take")


def _name(value: object) -> str:
    kind = type(value)
    return "text" if issubclass(kind, str) else f"of class {kind.__name__}"
