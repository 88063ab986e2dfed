"""Values as key text: what an argument says, and the form in which that may stand in a key.

Guarantees: the text is the same before and after kombu's JSON and pickle, because the type that
JSON keeps decides: an `IntEnum` member is its number, a text subclass its text, whatever their own
`__str__` says. `escape` never makes one text of two, and its result is of `VALUE_ALPHABET` and `%`
alone. Work is bounded by the limits below, before anything is copied, whatever comes in.
Does not guarantee: that a class of the user's has a `__str__` that tells its objects apart. Hence
such objects are refused unless the template says `|str`: a password type that prints as asterisks,
or a customer's name, would else quietly put different work under one key.

| value | text |
| --- | --- |
| str, int, Decimal, UUID | `str()` |
| bool | `True`, `False` |
| float | `repr()`: `1.0`, `1e+16` |
| datetime, date, time | ISO 8601, as JSON carries it: `2024-05-01T12:00:00+00:00` |
| Enum | its value's text |
| another library's integer | its digits |

Read next: `formats.py` for `<when:%Y-%m-%d>`, `template.py` for how values are found.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal
from enum import Enum
from math import isfinite
from numbers import Integral
from operator import itemgetter
from typing import Any, cast
from uuid import UUID

from taskguard.errors import KeyArgumentError

__all__ = [
    "BYTES",
    "MAX_KEY_BYTES",
    "MAX_TEXT_CHARS",
    "SHORT_CHARS",
    "VALUE_ALPHABET",
    "RefusedValueError",
    "digest",
    "encode_value",
    "escape",
    "is_short_name",
    "is_structure",
    "shorten",
    "structure_digest",
    "text_of",
    "unwrap",
]

MAX_KEY_BYTES = 200
# So many characters fit into a key whatever they are: each has at most four bytes.
SHORT_CHARS = MAX_KEY_BYTES // 4
# Longer texts are documents rather than names of something.
MAX_TEXT_CHARS = 65_536
# Below Python's lowest limit on int-to-text conversion (640 digits): that never raises, therefore.
_MAX_INT_BITS = 2048
_DIGEST_HEX_CHARS = 32
_MAX_DEPTH = 20
_MAX_VALUES = 65_536  # values in a list or dict that becomes a digest; it may contain itself
# No text in UTF-8 begins with it, so that a list's digest is not also a text's.
_STRUCTURE = b"\xff"
# Two hex digits follow each `%` of an escape, and literal text has none: shortened keys only.
_SHORTENED = "%~"

# These have lengths and items, but are neither texts nor lists of texts.
BYTES = (bytes, bytearray, memoryview)
# Fixed, for a process may have a decimal context of its own that rounds or prints otherwise.
_PLAIN_DECIMALS = Context(
    prec=MAX_PREC, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX, capitals=1, traps=[]
)

VALUE_ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~@+")
_is_plain = re.compile(r"[A-Za-z0-9\-_.~@+]+").fullmatch
# Of a plain str: it is its own text, and needs no escape.
is_short_name = re.compile(rf"[A-Za-z0-9\-_.~@+]{{1,{SHORT_CHARS}}}").fullmatch
_half_an_escape = re.compile(r"%[0-9A-F]?\Z")
_ESCAPES = tuple(chr(b) if chr(b) in VALUE_ALPHABET else f"%{b:02X}" for b in range(256))


class RefusedValueError(Exception):
    """Why a value cannot be part of a key; a sentence without its subject and without the value.

    It stays in this package: `named` makes the error that users see.
    """

    def named(self, source: str, *, task: str | None) -> KeyArgumentError:
        """The public error, with the placeholder as written and the task."""
        where = f"task {task}: " if task else ""
        return KeyArgumentError(f"{where}{source} {self}", task=task, placeholder=source)


def encode_value(value: object, *, task: str | None = None, placeholder: str = "value") -> str:
    """The text of `value` as it stands in a key.

    Raises:
        KeyArgumentError: `value` cannot be part of a key; `placeholder` is what the error calls it.
    """
    try:
        return escape(text_of(value))
    except RefusedValueError as refusal:
        raise refusal.named(placeholder, task=task) from None


def text_of(value: object, *, by_str: bool = False) -> str:
    """What `value` says. With `by_str`, an object of any class that has a `__str__` may say it."""
    convert = _TEXTS.get(type(value))
    if convert is None:
        value = unwrap(value)
        convert = _converter(type(value))
    return convert(value) if convert is not None else _text_of_other(value, by_str=by_str)


def unwrap(value: object) -> object:
    """The scalar that an enum member or another library's integer stands for, else `value`."""
    # By type, not isinstance: a lazy proxy's `__class__` runs code of its own and claims a type
    # that JSON and pickle do not see.
    kind = type(value)
    if issubclass(kind, _SCALARS):
        return value
    if issubclass(kind, Enum):
        return unwrap(cast("Enum", value).value)
    if issubclass(kind, Integral):
        return int(cast("Integral", value))
    return value


def escape(text: str) -> str:
    """`text` with everything outside `VALUE_ALPHABET` percent-encoded from UTF-8."""
    if _is_plain(text):
        return text
    return "".join(map(_ESCAPES.__getitem__, _utf8(text)))


def digest(text: str) -> str:
    """A digest in place of a text that must not be seen: SHA-256, its first 128 bits in hex."""
    return _sha256(_utf8(text))


def is_structure(value: object) -> bool:
    """Whether JSON writes the value as an array or an object."""
    return issubclass(type(value), list | tuple | dict)


def structure_digest(value: object) -> str:
    """A digest of a list or dict, nested or not: equal if and only if their contents in JSON are.

    A dict's order does not count; a list's does.
    """
    pieces: list[str] = []
    _write(value, pieces, 0)
    return _sha256(_STRUCTURE + "".join(pieces).encode())


def _write(value: object, pieces: list[str], depth: int) -> None:
    """Append escaped texts and signs that no escaped text has, so that no two values read alike."""
    if depth > _MAX_DEPTH:
        raise RefusedValueError(f"is nested more than {_MAX_DEPTH} deep: pass an id, or a hash")
    size = len(cast("Sequence[object]", value)) if is_structure(value) else 0
    if len(pieces) + size > _MAX_VALUES:  # before any work on it
        raise RefusedValueError(f"holds more than {_MAX_VALUES:,} values: pass an id, or a hash")
    kind = type(value)
    if issubclass(kind, dict):
        pieces.append("{")
        entries = [(_entry_name(key), item) for key, item in dict.items(cast("Any", value))]
        for name, item in sorted(entries, key=itemgetter(0)):
            pieces.append(f"{name}:")
            _write(item, pieces, depth + 1)
        pieces.append("}")
    elif is_structure(value):
        pieces.append("[")
        for item in cast("Sequence[object]", value):
            _write(item, pieces, depth + 1)
        pieces.append("]")
    elif value is None:
        pieces.append("!")
    elif issubclass(kind, str) and not str.__len__(cast("str", value)):
        pass  # the comma alone
    else:
        pieces.append(escape(text_of(value)))
    pieces.append(",")


def _entry_name(key: object) -> str:
    if not issubclass(type(key), str | int) or issubclass(type(key), bool):
        raise RefusedValueError(
            f"has a key of class {type(key).__name__}, which JSON does not carry: use text"
        )
    return "" if key == "" else escape(text_of(key))


def shorten(key: str, *, limit_bytes: int = MAX_KEY_BYTES) -> str:
    """`key` itself up to the limit; beyond, its beginning, `%~` and a digest of all of it.

    Where `key` is made of escaped values and literal text, or ends in such, no short key reads the
    same. Asked again it changes nothing.
    """
    if len(key) <= limit_bytes and key.isascii():
        return key
    whole = key.encode(errors="surrogatepass")
    if len(whole) <= limit_bytes:
        return key
    room = limit_bytes - len(_SHORTENED) - _DIGEST_HEX_CHARS
    head = whole[:room].decode(errors="ignore")
    return _half_an_escape.sub("", head) + _SHORTENED + _sha256(whole)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data, usedforsecurity=False).hexdigest()[:_DIGEST_HEX_CHARS]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        pass
    # Raised outside of the except block: the codec's exception would be its context, with the text.
    raise RefusedValueError(
        "holds a lone surrogate, half of a character that UTF-8 cannot store: clean the text first"
    )


def _text_of_str(value: str) -> str:
    # Methods of str itself: a worker may not have the subclass. And no copy before the limit.
    length = str.__len__(value)
    if length == 0:
        raise RefusedValueError(
            "is empty text: all such calls would share one key. Pass a value, or leave it out"
        )
    if length > MAX_TEXT_CHARS:
        raise RefusedValueError(
            f"is text of {length:,} characters, at most {MAX_TEXT_CHARS:,} can be part of a key:"
            " pass an id, or a hash of it"
        )
    return str.__str__(value)


def _text_of_int(value: int) -> str:
    if int.bit_length(value) > _MAX_INT_BITS:
        raise RefusedValueError(f"is a number of more than {_MAX_INT_BITS:,} bits: pass an id")
    return int.__repr__(value)


def _text_of_float(value: float) -> str:
    if not isfinite(value):
        raise RefusedValueError(
            "is not a finite number (NaN or infinity): check it before the call"
        )
    return float.__repr__(value)


def _text_of_decimal(value: Decimal) -> str:
    if not Decimal.is_finite(value):
        raise RefusedValueError(
            "is not a finite number (NaN or infinity): check it before the call"
        )
    # More bytes than characters are allowed is certainly more digits: no need to print them.
    if Decimal.__sizeof__(value) > MAX_TEXT_CHARS:
        raise RefusedValueError("is a number of too many digits: pass an id")
    return _text_of_str(_PLAIN_DECIMALS.to_sci_string(value))


def _text_of_other(value: object, *, by_str: bool) -> str:
    kind = type(value)
    if value is None:
        raise RefusedValueError(
            "is None: all such calls would share one key. Pass a value, or leave it out of the key"
        )
    if issubclass(kind, BYTES):
        raise RefusedValueError(
            f"is {kind.__name__}: decode it, or pass its hex(), before the call"
        )
    if issubclass(kind, (Mapping, AbstractSet, Sequence)):
        raise RefusedValueError(
            f"is a {kind.__name__}, not a single value: name one item, as in <payload[sku]>, let"
            " a callable return one key for each item, or write |hash into the placeholder of a"
            " list or dict"
        )
    if not by_str:
        raise RefusedValueError(
            f"is an object of class {kind.__name__}: name an attribute, as in <order.id>, or write"
            " |str into the placeholder if its str() identifies it"
        )
    if kind.__str__ is object.__str__:
        raise RefusedValueError(
            f"is an object of class {kind.__name__}, which has no __str__ of its own: name an"
            " attribute, as in <order.id>"
        )
    said = cast("Any", kind).__str__(value)  # `str()` would raise a TypeError of its own
    if not issubclass(type(said), str):
        raise RefusedValueError(
            f"is an object of class {kind.__name__}, whose __str__ returns {type(said).__name__}"
        )
    return _text_of_str(said)


# Subclasses stand before their bases: a datetime is a date, too.
_TEXTS: dict[type, Callable[[Any], str]] = {
    str: _text_of_str,
    int: _text_of_int,
    bool: bool.__repr__,
    float: _text_of_float,
    datetime: datetime.isoformat,
    date: date.isoformat,
    time: time.isoformat,
    Decimal: _text_of_decimal,
    UUID: UUID.__str__,
}
_SCALARS = tuple(_TEXTS)


def _converter(kind: type) -> Callable[[Any], str] | None:
    return _TEXTS.get(kind) or next(
        (convert for base, convert in _TEXTS.items() if issubclass(kind, base)), None
    )
