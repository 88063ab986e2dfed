"""The text of a value, and its escaped form in a key.

Guarantees:

* The text is the same before and after kombu's JSON and pickle, because it depends on the type that
  JSON keeps. An `IntEnum` member is its number and a subclass of str its text, whatever its own
  `__str__` returns.
* `escape` makes different texts of different texts, from `VALUE_ALPHABET` and `%` only.
* The limits below are checked before anything is copied.

Does not guarantee that the `__str__` of a user's class is different for different objects. So such
objects are refused unless the template has `|str`. Otherwise a password type that prints asterisks
would silently give different work one key.

| value | text |
| --- | --- |
| str, int, Decimal, UUID | `str()` |
| bool | `True`, `False` |
| float | `repr()`: `1.0`, `1e+16` |
| datetime, date, time | ISO 8601, as JSON carries it: `2024-05-01T12:00:00+00:00` |
| Enum | its value's text |
| another library's integer | its digits |

Read next: `formats.py` for `<when:%Y-%m-%d>`, `template.py` for attributes and items.
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
# A text of this length fits into a key, because a character has at most four bytes.
SHORT_CHARS = MAX_KEY_BYTES // 4
# Longer texts are documents rather than names of something.
MAX_TEXT_CHARS = 65_536
# Below Python's lowest limit of int-to-text conversion (640 digits), so that it never raises.
_MAX_INT_BITS = 2048
_DIGEST_HEX_CHARS = 32
_MAX_DEPTH = 20
_MAX_VALUES = 65_536  # in a list or dict that becomes a digest, which may contain itself.
# No UTF-8 text begins with this byte, so that no list has the digest of a text.
_STRUCTURE = b"\xff"
# Only shortened keys contain this. In an escape two hex digits follow `%`; literals have no `%`.
_SHORTENED = "%~"

# These have lengths and items, but are neither texts nor lists of texts.
BYTES = (bytes, bytearray, memoryview)
# A fixed context: a process's own decimal context may round or print in another way.
_PLAIN_DECIMALS = Context(
    prec=MAX_PREC, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX, capitals=1, traps=[]
)

VALUE_ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~@+")
_is_plain = re.compile(r"[A-Za-z0-9\-_.~@+]+").fullmatch
# Matches a str that needs no escape and no shortening.
is_short_name = re.compile(rf"[A-Za-z0-9\-_.~@+]{{1,{SHORT_CHARS}}}").fullmatch
_half_an_escape = re.compile(r"%[0-9A-F]?\Z")
_ESCAPES = tuple(chr(b) if chr(b) in VALUE_ALPHABET else f"%{b:02X}" for b in range(256))


class RefusedValueError(Exception):
    """A reason why a value cannot be part of a key: a sentence without subject and value.

    It does not leave this package: `named` makes the error for users.
    """

    def named(self, source: str, *, task: str | None) -> KeyArgumentError:
        """Return the public error, with the placeholder as written and the task."""
        where = f"task {task}: " if task else ""
        return KeyArgumentError(f"{where}{source} {self}", task=task, placeholder=source)


def encode_value(value: object, *, task: str | None = None, placeholder: str = "value") -> str:
    """Return the escaped text of `value`, as in a key.

    Raises:
        KeyArgumentError: `value` cannot be part of a key. The error calls it `placeholder`.
    """
    try:
        return escape(text_of(value))
    except RefusedValueError as refusal:
        raise refusal.named(placeholder, task=task) from None


def text_of(value: object, *, by_str: bool = False) -> str:
    """Return the text of `value`. With `by_str`, use the `__str__` of a class that defines one."""
    convert = _TEXTS.get(type(value))
    if convert is None:
        value = unwrap(value)
        convert = _converter(type(value))
    return convert(value) if convert is not None else _text_of_other(value, by_str=by_str)


def unwrap(value: object) -> object:
    """Return the scalar of an enum member or of another library's integer; otherwise `value`."""
    # Use type(), not isinstance(): a lazy proxy's `__class__` runs code, and claims a type that
    # JSON and pickle do not see.
    kind = type(value)
    if issubclass(kind, _SCALARS):
        return value
    if issubclass(kind, Enum):
        return unwrap(cast("Enum", value).value)
    if issubclass(kind, Integral):
        return int(cast("Integral", value))
    return value


def escape(text: str) -> str:
    """Return the text with all characters outside `VALUE_ALPHABET` percent-encoded in UTF-8."""
    if _is_plain(text):
        return text
    return "".join(map(_ESCAPES.__getitem__, _utf8(text)))


def digest(text: str) -> str:
    """Return a digest of a secret text: the first 128 bits of its SHA-256 in hex."""
    return _sha256(_utf8(text))


def is_structure(value: object) -> bool:
    """Return whether JSON writes the value as an array or an object."""
    return issubclass(type(value), list | tuple | dict)


def structure_digest(value: object) -> str:
    """Return a digest of a list or dict, which may be nested.

    Two digests are equal if and only if the contents in JSON are equal. The order of a list counts,
    the order of a dict does not.
    """
    pieces: list[str] = []
    _write(value, pieces, 0)
    return _sha256(_STRUCTURE + "".join(pieces).encode())


def _write(value: object, pieces: list[str], depth: int) -> None:
    """Append escaped texts, and signs that no escaped text has, so that the result is unique."""
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
    """Return a key up to the limit as it is, and a longer one as its beginning, `%~` and a digest.

    If the key consists of escaped values and literal text, or ends with them, no short key is equal
    to the result. A second call changes nothing.
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
    # Raise it outside of the except block: the codec's error contains the text, and would be the
    # context.
    raise RefusedValueError(
        "holds a lone surrogate, half of a character that UTF-8 cannot store: clean the text first"
    )


def _text_of_str(value: str) -> str:
    # Use methods of str, because a worker may lack the subclass. Check the length before a copy.
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
    # A number with that many bytes has too many digits. Do not print it.
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
    said = cast("Any", kind).__str__(value)  # `str()` would raise TypeError for another type
    if not issubclass(type(said), str):
        raise RefusedValueError(
            f"is an object of class {kind.__name__}, whose __str__ returns {type(said).__name__}"
        )
    return _text_of_str(said)


# Subclasses come before their bases: a datetime is a date, too.
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
