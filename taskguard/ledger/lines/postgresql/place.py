"""Parts of the statements of strict work, which keeps its place in the line of its key.

Guarantees that what is not strict has the statements that it had: a part is there or is not.
"""

from __future__ import annotations

__all__ = ["COLUMNS", "KEPT", "NONE", "VALUES"]

NONE = "        line = null, parked = null, expires = null,"
"""In SET: it stands in no line, or not any more."""

COLUMNS = ", line, rank, parked, strict"
"""Of an INSERT, with `VALUES`: its place is that of when it was sent."""

VALUES = (
    ", 'kept', %(rank)s::integer, least(%(sent_us)s::bigint, "
    "(extract(epoch from clock_timestamp()) * 1000000)::bigint), 1"
)

KEPT = """
        key = excluded.key,
        line = excluded.line,
        rank = excluded.rank,
        parked = coalesce(w.parked, excluded.parked),
        strict = excluded.strict,
        expires = null,
"""
"""In SET of its UPDATE: the place that it has, or gets, and keeps."""
