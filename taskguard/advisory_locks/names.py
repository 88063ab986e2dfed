"""From keys to what a database calls a lock.

Guarantees: the same for the same key, in each process and version. Keys with the same name exclude
each other: by chance that is as good as never, and by intent it needs 2^32 keys on PostgreSQL.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["name_of", "number_of"]

_PREFIX = "taskguard:"
_DIGEST_BYTES = 27  # 64 characters in all, which is the most that MySQL takes


def number_of(key: str) -> int:
    """A signed number of 64 bits."""
    digest = blake2b(_bytes(key), digest_size=8, person=b"taskguard").digest()
    return int.from_bytes(digest, "big", signed=True)


def name_of(key: str, *, database: str) -> str:
    """A text of 64 characters. Such a lock is the server's: its database is a part of it.

    Of that case does not count: whether it does in the database's name is a setting.
    """
    told_apart = f"{len(database)}:{database.lower()}:{key}"
    digest = blake2b(_bytes(told_apart), digest_size=_DIGEST_BYTES, person=b"taskguard").hexdigest()
    return _PREFIX + digest


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
