"""Parts of the statements for strict work, which keeps its position in the line of its key.

Guarantees: other work has the same statements as without these parts.
"""

from __future__ import annotations

__all__ = ["COLUMNS", "KEPT", "NONE", "VALUES"]

NONE = "        line = null, parked = null, expires = null,"
"""In SET: the work is in no line, or leaves its line."""

COLUMNS = ", line, rank, parked, strict"
"""In INSERT, with `VALUES`: its position is by the time of sending."""

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
"""In SET of its UPDATE: the position that it has or gets, and keeps."""
