"""Writes outside the ledger's transaction that refuse an older fencing token.

`rows.py`: rows of another database or table, as `guard.fenced(update(…))`. `values.py`: values in
Redis or Valkey, as `taskguard.fenced.set_value()`.

Guarantees, for each row or value: a write with an older fence than the last one is refused with
StaleTokenError. A write with the same fence is accepted. So a paused holder cannot overwrite the
data of a newer one.

Does not guarantee that a write happens once, or commits together with DONE. A stale write is
accepted if no newer holder has written yet. Fences of different keys cannot be compared: let the
work of a single key write to a row or value.
"""

from __future__ import annotations

from taskguard.fenced.values import FencedValue, get_value, set_value

__all__ = ["FencedValue", "get_value", "set_value"]
