"""Entries of `rq cron` in tests: a guarded job and an unguarded one, twice a second.

Seconds are RQ's least interval, so a cron string with seconds gives the times.
"""

from __future__ import annotations

from rq import cron

from support.invoices import each, tick

for function in (tick, each):
    cron.register(function, queue_name="invoices", interval=1)
