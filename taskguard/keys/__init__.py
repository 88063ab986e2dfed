"""Keys: from a call's arguments to the texts that locks and ledger rows are named by.

Guarantees, for one template:

* Arguments whose texts differ never make one key; arguments whose texts agree always do, so that
  `42`, `"42"` and a UUID sent as text meet. A producer and a worker compute the same key, whether
  the message went as JSON (kombu's) or as pickle.
* A key has at most 200 bytes and holds no whitespace, control character or brace: it can be stored
  and logged as it is.
* Work is bounded whatever comes: a template has at most 1,000 characters, the texts of one call
  65,536 together, and it makes at most 100 keys. More is refused, uncopied.
* A value marked `|hash` is in no key, no error message and no repr. No error message holds any
  other value either: it says what the argument is, not what it holds.
* A template that does not fit is refused when the task is decorated, with `KeyTemplateError`; an
  argument that cannot be a key when the task is called, with `KeyArgumentError`.

Does not guarantee:

* Unicode normalisation: look-alikes, `é` in its two spellings, `a` and `A` are different keys.
* Equality by value. `1` and `1.0`, `Decimal("1.0")` and `Decimal("1.00")`, `True` and `"true"`
  (its text is `True`), one instant in two time zones, have different texts and so different keys.
* Secrecy of what can be guessed: `|hash` is a plain SHA-256, so that it is the same everywhere.
  Somebody with the key and a list of e-mail addresses can find which one it was.
* Anything about exceptions that a property, an item, a `__str__` or a callable of the user's raises
  by itself: they go on unchanged, so that a database that is away looks as it does anywhere else.

Read next: `function.py` (from arguments to keys), `template.py` (the syntax), `values.py` (what
counts as a text).
"""

from __future__ import annotations

from taskguard.keys.callables import MAX_KEYS, finish_key
from taskguard.keys.function import (
    KeyCallable,
    KeyFunction,
    KeySpec,
    TextFunction,
    compile_key,
    compile_texts,
    key,
)
from taskguard.keys.values import (
    MAX_KEY_BYTES,
    MAX_TEXT_CHARS,
    SHORT_CHARS,
    encode_value,
    shorten,
)

__all__ = [
    "MAX_KEYS",
    "MAX_KEY_BYTES",
    "MAX_TEXT_CHARS",
    "SHORT_CHARS",
    "KeyCallable",
    "KeyFunction",
    "KeySpec",
    "TextFunction",
    "compile_key",
    "compile_texts",
    "encode_value",
    "finish_key",
    "key",
    "shorten",
]
