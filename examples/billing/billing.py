"""Bills that are charged, mailed and booked once, in three steps: `python billing.py`.

The first part is the code of a project. The second part runs it here.
"""

from __future__ import annotations

import os

import provider  # beside this file: a payment provider and a mail server, which are elsewhere
from celery import Celery
from sqlalchemy import text

from taskguard import Guard
from taskguard_celery import guarded_task, safe_defaults

# Its URLs come from CELERY_BROKER_URL, TASKGUARD_LOCKS_URL and TASKGUARD_LEDGER_URL.
app = Celery("billing")
app.conf.worker_log_format = app.conf.worker_task_log_format = "%(message)s"
safe_defaults(app)  # acks_late and reject_on_worker_lost: no message is lost with its worker


@app.task(autoretry_for=(provider.MailServerDownError,), default_retry_delay=1)
@guarded_task(key="invoice:<invoice_id>", fingerprint="<cents>", ttl_s=5)
def bill(invoice_id: int, cents: int, guard: Guard) -> str:
    """Charge the card, mail the receipt, book the payment."""
    print(f"invoice:{invoice_id} is billed by process {os.getpid()}")
    # The ledger stores the result of `charge`: after a failure, the next attempt gets the result
    # and charges nothing. If it could not be stored, the provider recognises the key.
    key = guard.idempotency_key_for("charge")
    receipt = guard.step("charge", provider.charge, cents, idempotency_key=key)
    guard.step("mail", provider.mail, f"Invoice {invoice_id} is paid: {receipt}")

    with guard.transaction() as db:  # this row and "invoice:7 is DONE" are committed together
        db.execute(
            text("insert into payments (invoice_id, receipt) values (:invoice_id, :receipt)"),
            {"invoice_id": invoice_id, "receipt": receipt},
        )
        guard.result = receipt
    return receipt


# -- From here on: private servers, a worker, and messages that come more than once. ---------------

INVOICES = {7: 1999, 8: 4950}
ABOUT = "^[^:]*invoice:|is down"  # errors are shown by the answers


def main() -> int:
    """Send every invoice twice; 0 if each was charged, mailed and booked once."""
    import argparse
    from collections import Counter
    from pathlib import Path

    from taskguard.errors import FingerprintMismatchError
    from taskguard_sandbox.examples import celery_answers, example_servers
    from taskguard_sandbox.workers import CeleryWorker

    parser = argparse.ArgumentParser(description="Every invoice comes twice and is charged once.")
    parser.add_argument("--seconds", default="0.3", help="how long the provider takes")
    os.environ["PROVIDER_SECONDS"] = parser.parse_args().seconds

    with example_servers("billing") as (valkey, database):
        os.environ["PROVIDER_BOOK"] = str(valkey.folder / "provider.sqlite")
        with database.begin() as db:  # no unique index: a second payment would be seen
            db.execute(text("create table payments (invoice_id int, receipt text)"))

        with CeleryWorker("billing", children=2, python_path=Path(__file__).parent) as worker:
            twice = [bill.delay(*invoice) for invoice in INVOICES.items() for _ in "ab"]
            receipts = set(celery_answers(twice, worker, about=ABOUT))
            # the invoice is known, the amount is not
            (wrong,) = celery_answers([bill.delay(7, 5)], worker, about=ABOUT)
            refused = isinstance(wrong, FingerprintMismatchError)
            print("refused:" if refused else "answered:", wrong)

        with database.connect() as db:
            payments = Counter(db.execute(text("select invoice_id from payments")).scalars())
        charged, mailed = provider.book("charges"), provider.book("mails")

    print("\nreceipts: ", *sorted(receipts, key=str), sep="\n  ")
    print("charged:  ", dict(sorted(Counter(charged).items())), "mails:", len(mailed))
    print("payments:", dict(sorted(payments.items())))
    once = payments == Counter(INVOICES.keys()) and sorted(charged) == sorted(INVOICES.values())
    return 0 if once and refused else 1


if __name__ == "__main__":
    raise SystemExit(main())
