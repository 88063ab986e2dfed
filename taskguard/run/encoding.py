"""Results and progress as JSON texts for the ledger.

Guarantees: a text is ASCII, has at most `MAX_RESULT_BYTES`, and is readable JSON. For a value
without such a text ResultError is raised.
"""

from __future__ import annotations

import json
from typing import Any

from taskguard.errors import ResultError
from taskguard.model.delivery import Codec

__all__ = ["JSON", "MAX_RESULT_BYTES", "encode"]

MAX_RESULT_BYTES = 1_000_000


def _dumps(value: Any) -> str:
    # In ASCII, which is text in a database of any encoding; so is half of a surrogate pair.
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


JSON = Codec(dumps=_dumps, loads=json.loads)


def _size(text: str) -> int:
    """Return the bytes of a JSON text in UTF-8. If they are too many, count without escapes."""
    size = len(text.encode("utf-8"))
    if size <= MAX_RESULT_BYTES:
        return size
    plain = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    return len(plain.encode("utf-8", "surrogatepass"))


def encode(value: Any, codec: Codec, *, what: str, key: str) -> str:
    """Return `value` as JSON text for the ledger. Raise ResultError if that is not possible."""
    try:
        text = codec.dumps(value)
        size = _size(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultError(
            f"The {what} of {key} is not JSON ({type(error).__name__}: {error}). Return plain "
            "dicts, lists, texts and numbers, or store it elsewhere and return its id.",
            key=key,
        ) from error
    # PostgreSQL's text cannot hold NUL; JSON writes it as an escape, so only raw ones matter.
    if size > MAX_RESULT_BYTES:
        raise ResultError(
            f"The {what} of {key} is {size:,} bytes of JSON; at most {MAX_RESULT_BYTES:,} are "
            "stored. Store it elsewhere and return its id.",
            key=key,
        )
    return text
