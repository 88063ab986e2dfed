"""Requests to etcd as values: conditions, operations, and their results.

Nothing here sends a request. Names are those of etcd's JSON, in which numbers are texts, and keys
and values are base64.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from taskguard.locks import Owner

__all__ = [
    "Entry",
    "delete",
    "entries",
    "has_lease",
    "has_value",
    "is_absent",
    "is_at",
    "is_less",
    "is_never",
    "lease_of",
    "nested",
    "put",
    "read",
    "several",
    "spread",
    "to_bytes",
]

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of a key."""

    value: bytes
    lease: str
    created: int
    changed: int

    @property
    def owner(self) -> Owner:
        return Owner.parse(self.value.decode("utf-8", "replace"))

    def is_of(self, owner: Owner) -> bool:
        return self.value == to_bytes(str(owner))


def lease_of(owner: Owner, keys: Sequence[str], *extra: object) -> str:
    """Return the id of an owner's lease for these keys, which is the same at each call."""
    words = "\0".join([str(owner), *keys, *map(str, extra)])
    digest = hashlib.blake2b(to_bytes(words), digest_size=8).digest()
    return str((int.from_bytes(digest) >> 1) or 1)  # with 0, etcd would choose an id


def is_absent(name: str) -> Message:
    return {"key": _pack(name), "target": "CREATE", "createRevision": "0"}


def is_at(name: str, entry: Entry | None) -> Message:
    """Return the condition that an entry has not changed."""
    if entry is None:
        return is_absent(name)
    return {"key": _pack(name), "target": "MOD", "modRevision": str(entry.changed)}


def has_value(name: str, value: str) -> Message:
    return {"key": _pack(name), "target": "VALUE", "value": _pack(value)}


def has_lease(name: str, lease: str) -> Message:
    return {"key": _pack(name), "target": "LEASE", "lease": lease}


def is_less(name: str, value: str) -> Message:
    return {"key": _pack(name), "target": "VALUE", "result": "LESS", "value": _pack(value)}


def is_never(name: str) -> Message:
    return {"key": _pack(name), "target": "VERSION", "result": "LESS", "version": "0"}


def put(name: str, value: str, lease: str = "0") -> Message:
    return {"requestPut": {"key": _pack(name), "value": _pack(value), "lease": lease}}


def read(name: str) -> Message:
    return {"requestRange": {"key": _pack(name)}}


def delete(name: str) -> Message:
    return {"requestDeleteRange": {"key": _pack(name)}}


def several(
    *,
    when: Iterable[Message] = (),
    then: Iterable[Message] = (),
    otherwise: Iterable[Message] = (),
) -> Message:
    """Return one transaction."""
    return {"compare": list(when), "success": list(then), "failure": list(otherwise)}


def nested(
    *,
    when: Iterable[Message] = (),
    then: Iterable[Message] = (),
    otherwise: Iterable[Message] = (),
) -> Message:
    """Return a transaction as an operation of another one."""
    return {"requestTxn": several(when=when, then=then, otherwise=otherwise)}


def spread(operations: Sequence[Message], *, width: int) -> Message:
    """Return a transaction of up to `width` squared operations, in two levels.

    etcd accepts at most 128 operations side by side, including those one level below.
    """
    rows = [operations[at : at + width] for at in range(0, len(operations), width)]
    return several(then=[nested(then=row) for row in rows])


def entries(responses: Sequence[Message]) -> list[Entry | None]:
    """Return the entries that each read found."""
    found = []
    for response in responses:
        kvs = response["response_range"].get("kvs")
        found.append(_entry(kvs[0]) if kvs else None)
    return found


def _entry(kv: Message) -> Entry:
    return Entry(
        value=base64.b64decode(kv.get("value", "")),
        lease=kv.get("lease", "0"),
        created=int(kv["create_revision"]),
        changed=int(kv["mod_revision"]),
    )


def to_bytes(text: str) -> bytes:
    # Accept lone surrogates, which have no UTF-8, so that a strange message id loses no message.
    return text.encode("utf-8", "surrogatepass")


def _pack(text: str) -> str:
    return base64.b64encode(to_bytes(text)).decode()
