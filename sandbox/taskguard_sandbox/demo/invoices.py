"""The demo's RQ job: charges invoices. Its URLs come from the environment.

TASKGUARD_LOCKS_URL, TASKGUARD_LEDGER_URL
"""

from __future__ import annotations

import random
import time

from taskguard import Guard
from taskguard_rq import configure, guarded_job
from taskguard_sandbox.demo import journal
from taskguard_sandbox.demo.effects import write_effect

__all__ = ["LEASE_S", "QUEUE", "charge"]

QUEUE = "RQ"
LEASE_S = 2.0

configure(listeners=[journal.listener(QUEUE)])


@guarded_job(key="invoice:<invoice_id>", ttl_s=LEASE_S)
def charge(invoice_id: str, guard: Guard) -> str:
    """Takes some time, then charges: one row."""
    journal.write(journal.Line(QUEUE, journal.BEGAN, guard.key, attempt=guard.attempt))
    # What was taken over may be all that is left to be stopped: `faults.py` has to meet it.
    time.sleep(random.uniform(0.1, 0.3) if guard.attempt == 1 else 0.6)
    journal.write(journal.Line(QUEUE, journal.WRITES, guard.key))
    with guard.transaction() as db:
        write_effect(db, QUEUE, invoice_id, guard)
        guard.result = f"{invoice_id} charged"
    return f"{invoice_id} charged"
