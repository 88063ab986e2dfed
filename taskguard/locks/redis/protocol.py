"""Packed commands and scripts for a Redis server."""

from __future__ import annotations

import hashlib
from importlib import resources

__all__ = ["Script", "pack"]


def pack(*words: bytes) -> bytes:
    """Return a command as it goes over the wire. redis-py's own packer takes longer."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class Script:
    """A Lua file and its checksum, by which servers know it.

    `after`: another file, whose functions it uses; `package`: where the files are.
    """

    def __init__(
        self, name: str, *, after: str | None = None, package: str = "taskguard.locks.redis"
    ) -> None:
        files = resources.files(package) / "lua"
        names = (name,) if after is None else (after, name)
        self.name = name
        self.source = b"".join((files / f"{each}.lua").read_bytes() for each in names)
        # Not for security: it is how the protocol names scripts.
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()
