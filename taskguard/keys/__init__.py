"""Keys: makes the texts that name locks and ledger rows from a call's arguments.

Guarantees, for one template:

* Arguments with different texts make different keys. Arguments with equal texts make one key, for
  example `42` and `"42"`, or a UUID and its text.
* A producer and a worker compute the same key, from a message in kombu's JSON or in pickle.
* A key has at most 200 bytes, without whitespace, control characters or braces. It can be stored
  and logged as it is.
* A template has at most 1,000 characters. The texts of a call have at most 65,536 characters
  together. A call makes at most 100 keys. Anything larger is refused before it is copied.
* No key, error message or repr contains a value marked `|hash`. No error message contains any
  other value: it names the type of the argument.
* A template that does not fit its task is refused at decoration, with `KeyTemplateError`. An
  argument that cannot be a key is refused at the call, with `KeyArgumentError`.

Does not guarantee:

* Unicode normalisation: look-alikes, `é` in its two spellings, `a` and `A` are different keys.
* Equality by value. Different texts make different keys: `1` and `1.0`, `Decimal("1.0")` and
  `Decimal("1.00")`, `True` (its text is `True`) and `"true"`, one instant in two time zones.
* Secrecy of values that can be guessed: `|hash` is a plain SHA-256, which is the same everywhere.
  An attacker with the key and a list of e-mail addresses can find the address.
* Anything about exceptions that the user's own properties, items, `__str__` or callables raise.
  taskguard passes them on unchanged.

Read next: `function.py` (from arguments to keys), `template.py` (the syntax), `values.py` (the
text of a value).
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
