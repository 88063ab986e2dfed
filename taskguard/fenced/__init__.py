"""Writes outside the ledger's transaction that refuse an older fencing token.

`rows.py`: rows of another database or table, as `guard.fenced(update(…))`. `values.py`: values in
Redis or Valkey, as `taskguard.fenced.set_value()`.

Guarantees, for each such place by itself: a write with an older fence than the last one is refused
with StaleTokenError, and the same fence may write again. So a holder that was paused cannot write
over what a newer one wrote.
Does not guarantee that a write happens once, nor that it is committed together with DONE; nor is a
stale write refused where no newer holder has written yet. Fences of different keys say nothing
about each other: let one key's work write to a place.
"""

from __future__ import annotations

from taskguard.fenced.values import FencedValue, get_value, set_value

__all__ = ["FencedValue", "get_value", "set_value"]
