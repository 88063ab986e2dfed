"""What may be wrong with several servers, each by itself and together."""

from __future__ import annotations

from collections.abc import Sequence

from taskguard.findings import Finding
from taskguard.locks.redis.link import RedisLink

__all__ = ["look_at"]


def look_at(links: Sequence[RedisLink]) -> list[Finding]:
    del links
    return []
