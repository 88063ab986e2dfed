"""The storm's job for RQ."""

from __future__ import annotations

from storm.app import DATABASE_URL, LOCKS_URL
from storm.guarded import OPTIONS, work
from storm.journal import listen, reported
from taskguard import Guard
from taskguard_rq import configure, guarded_job

configure(locks=LOCKS_URL, ledger=DATABASE_URL, listeners=(listen,))


@reported
@guarded_job(key="item:<item>", work="storm", **OPTIONS)
def job(item: str, kind: str, pause_s: float, guard: Guard) -> None:
    """The same work as by Celery."""
    work(item, kind, pause_s, guard)
