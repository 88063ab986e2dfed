"""The demo's RQ job: charges invoices. Its URLs come from the environment.

TASKGUARD_LOCKS_URL, TASKGUARD_LEDGER_URL
"""

from __future__ import annotations

import time

from taskguard import Guard
from taskguard_rq import configure, guarded_job
from taskguard_sandbox.demo import journal
from taskguard_sandbox.demo.effects import duration_s, write_effect

__all__ = ["LEASE_S", "QUEUE", "charge"]

QUEUE = "RQ"
LEASE_S = 2.0

configure(listeners=[journal.listener(QUEUE)])


@guarded_job(key="invoice:<invoice_id>", ttl_s=LEASE_S)
def charge(invoice_id: str, guard: Guard) -> str:
    """Takes some time, then charges: one row."""
    journal.write(journal.Line(QUEUE, journal.BEGAN, guard.key, attempt=guard.attempt))
    time.sleep(duration_s(guard.attempt))
    journal.write(journal.Line(QUEUE, journal.WRITES, guard.key))
    with guard.transaction() as db:
        write_effect(db, QUEUE, invoice_id, guard)
        guard.result = f"{invoice_id} charged"
    return f"{invoice_id} charged"
