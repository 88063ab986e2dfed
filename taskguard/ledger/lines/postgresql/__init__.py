"""PostgreSQL's statements of lines, each of which is one message.

Guarantees the same answers as the portable statements; the contract suite compares the two.
"""

from __future__ import annotations

from taskguard.ledger.stored import statement

__all__ = ["IN_LINE", "PARK", "PROMOTE_NEXT"]

IN_LINE = statement(__package__, "in_line")
"""A condition of the statements that claim."""

PARK = statement(__package__, "park")
PROMOTE_NEXT = statement(__package__, "promote_next")
