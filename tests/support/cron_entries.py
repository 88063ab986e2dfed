"""What `rq cron` enqueues in tests: a guarded job and one that nothing guards, twice a second.

Seconds are RQ's least interval, so a cron string with seconds says when.
"""

from __future__ import annotations

from rq import cron

from support.invoices import each, tick

for function in (tick, each):
    cron.register(function, queue_name="invoices", interval=1)
