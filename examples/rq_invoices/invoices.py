"""Invoices that are charged once, however often their jobs run: `python invoices.py`.

The first part is the code of a project. The second part runs it here.
"""

from __future__ import annotations

import logging
import os
import time

from sqlalchemy import text

from taskguard import Guard
from taskguard_rq import guarded_job

# RQ sets logging up for itself alone; this shows what taskguard tells at INFO.
logging.basicConfig(level=logging.INFO, format="%(message)s")


# The URLs come from TASKGUARD_LOCKS_URL and TASKGUARD_LEDGER_URL.
@guarded_job(key="invoice:<invoice_id>", ttl_s=5)
def charge(invoice_id: int, guard: Guard) -> str:
    """Have the payment provider charge the customer, then write down that it did."""
    print(f"invoice:{invoice_id} is charged by process {os.getpid()}")
    # The body runs at least once. The provider is not part of our transaction. It charges once,
    # because the idempotency key is the same each time.
    payment = ask_provider(invoice_id, idempotency_key=guard.idempotency_key)

    with guard.transaction() as db:  # this row and "invoice:7 is DONE" are committed together
        db.execute(
            text("insert into payments (invoice_id, payment) values (:invoice_id, :payment)"),
            {"invoice_id": invoice_id, "payment": payment},
        )
        guard.result = f"invoice {invoice_id} paid by {payment}"
    return guard.result


def ask_provider(invoice_id: int, *, idempotency_key: str) -> str:
    """A provider that takes its time."""
    time.sleep(float(os.environ.get("PROVIDER_SECONDS", "0.3")))
    return f"payment-{invoice_id}-{idempotency_key[:8]}"


# -- From here on: private servers, workers, and jobs that run more than once. ---------------------

INVOICES = (7, 8)


def main() -> int:
    """Enqueue every invoice three times; 0 if each was charged once and every job answered."""
    import argparse
    from pathlib import Path

    import redis
    from rq import Queue

    from taskguard_sandbox.examples import example_servers, rq_answers, started
    from taskguard_sandbox.workers import RQWorker

    parser = argparse.ArgumentParser(description="Every invoice comes thrice and is charged once.")
    parser.add_argument("--seconds", default="0.3", help="how long the provider takes")
    os.environ["PROVIDER_SECONDS"] = parser.parse_args().seconds

    with example_servers("invoices") as (valkey, database):
        with database.begin() as db:  # no unique index: a second payment would be seen
            db.execute(text("create table payments (invoice_id int, payment text)"))

        broker = redis.Redis.from_url(valkey.url)
        here = Path(__file__).parent
        # `rq worker --worker-class taskguard_rq.GuardedWorker`, one more than there are invoices
        three = [RQWorker("invoices", url=valkey.url, python_path=here) for _ in range(3)]
        with started(three) as workers:
            print(f"the lock server is redis://127.0.0.1:{valkey.port}/2\n")
            jobs = enqueue(Queue("invoices", connection=broker))
            answered = rq_answers(jobs, workers, about="invoice:")
        broker.close()

        count = text("select invoice_id, count(*) from payments group by 1 order by 1")
        with database.connect() as db:
            payments = dict(db.execute(count).all())

    print("\nanswers:  ", *sorted(set(answered), key=str), sep="\n  ")
    print("payments:", payments)
    right = payments == dict.fromkeys(INVOICES, 1) and len(set(answered)) == len(INVOICES)
    return 0 if right else 1


def enqueue(queue) -> list:
    """Two jobs for each invoice, one of which is in the queue twice."""
    from rq import Retry

    jobs = []
    for invoice_id in INVOICES:
        # RQ runs the job of a killed work horse again only if it may be retried.
        again = {"retry": Retry(max=3)}
        jobs += [queue.enqueue("invoices.charge", invoice_id, **again) for _ in range(2)]
        queue.push_job_id(jobs[-1].id)
    return jobs


if __name__ == "__main__":
    raise SystemExit(main())
