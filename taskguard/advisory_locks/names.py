"""Names of locks in the database, made from keys.

Guarantees: a key has the same name in each process and version. Keys with the same name exclude
each other. That is very unlikely by chance; an attacker needs about 2^32 keys on PostgreSQL.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["name_of", "number_of"]

_PREFIX = "taskguard:"
_DIGEST_BYTES = 27  # 64 characters in all, which is the most that MySQL takes


def number_of(key: str) -> int:
    """Return a signed 64-bit number for the key."""
    digest = blake2b(_bytes(key), digest_size=8, person=b"taskguard").digest()
    return int.from_bytes(digest, "big", signed=True)


def name_of(key: str, *, database: str) -> str:
    """Return a text of 64 characters for the key and its database.

    The name contains the database because such locks belong to the whole server. The case of the
    database's name is ignored, because a server's setting decides whether case matters.
    """
    text = f"{len(database)}:{database.lower()}:{key}"
    digest = blake2b(_bytes(text), digest_size=_DIGEST_BYTES, person=b"taskguard").hexdigest()
    return _PREFIX + digest


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
