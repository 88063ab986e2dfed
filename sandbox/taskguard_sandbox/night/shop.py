"""The Celery app of the night. Its tasks sleep, fail, or kill their process, as they are told."""

from __future__ import annotations

import os
import signal
import time

from celery import Celery

from taskguard import Guard
from taskguard_celery import guarded_task, safe_defaults

# Its URLs come from CELERY_BROKER_URL, TASKGUARD_LOCKS_URL and TASKGUARD_LEDGER_URL.
app = Celery("shop")
safe_defaults(app)


@app.task(name="shop.ship")  # type: ignore[untyped-decorator]  # Celery ships no types
@guarded_task(key="order:<order_id>", ttl_s=6)
def ship(order_id: int, takes_s: float, guard: Guard) -> str:
    """Ship an order."""
    time.sleep(takes_s)
    with guard.transaction():
        return f"order {order_id} is shipped"


@app.task(name="shop.export")  # type: ignore[untyped-decorator]  # Celery ships no types
@guarded_task(key="export:<day>", ttl_s=600, recoverable=True)
def export(day: str) -> None:
    """Export a day. Its lease is long."""
    time.sleep(3_600)


@app.task(name="shop.rebalance")  # type: ignore[untyped-decorator]  # Celery ships no types
@guarded_task(key="account:<account_id>", once_per="message", busy="park", ttl_s=6)
def rebalance(account_id: int, takes_s: float) -> None:
    """Rebalance an account."""
    time.sleep(takes_s)


@app.task(name="shop.pay")  # type: ignore[untyped-decorator]  # Celery ships no types
@guarded_task(key="account:<account_id>", once_per="message", busy="park", ttl_s=6)
def pay(account_id: int) -> None:
    """Pay from an account."""


@app.task(name="shop.report")  # type: ignore[untyped-decorator]  # Celery ships no types
@guarded_task(key="report:<day>", ttl_s=2, max_crashes=2)
def report(day: str) -> None:
    """Use so much memory that the kernel kills the process."""
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="shop.mail")  # type: ignore[untyped-decorator]  # Celery ships no types
@guarded_task(key="mail:<order_id>", recoverable=True)
def mail(order_id: int) -> None:
    """Send a mail to a server that does not answer."""
    raise TimeoutError("mail.example.org does not answer")
