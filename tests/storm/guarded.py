"""The storm's tasks, guarded by taskguard: one line on each."""

from __future__ import annotations

import time
from typing import Any

from storm.app import DATABASE_URL, LOCKS_URL, app, write
from storm.journal import in_body, listen, reported
from storm.settings import TTL_S
from taskguard import Guard
from taskguard_celery import configure, guarded_task

configure(app, locks=LOCKS_URL, ledger=DATABASE_URL, listeners=(listen,))
# Work that the storm has killed often must not be given up.
OPTIONS: dict[str, Any] = {"ttl_s": TTL_S, "max_crashes": 1_000}


class BoomError(Exception):
    """A body that fails."""


def work(item: str, kind: str, pause_s: float, guard: Guard) -> None:
    """Do the work of each kind of body."""
    with in_body(item):
        if kind == "fails" and guard.attempt == 1:
            raise BoomError(item)
        if kind == "atomic":
            write(guard.db, item, guard.fence)
            time.sleep(pause_s)
            return
        if kind == "halves" and guard.progress is None:
            with guard.checkpoint("half") as db:
                write(db, f"{item} half", guard.fence)
        if kind != "long":
            time.sleep(pause_s)
        with guard.transaction() as db:
            write(db, item, guard.fence)
            if kind == "long":
                time.sleep(pause_s)


@app.task(autoretry_for=(BoomError,), default_retry_delay=0.2, max_retries=None)
@reported
@guarded_task(key="item:<item>", work="storm", **OPTIONS)
def taskguard(item: str, kind: str, pause_s: float, guard: Guard) -> None:
    """One line on a task."""
    work(item, kind, pause_s, guard)


@app.task
@reported
@guarded_task(key="item:<item>", work="storm", atomic=True, **OPTIONS)
def taskguard_atomic(item: str, kind: str, pause_s: float, guard: Guard) -> None:
    """The whole body in one transaction."""
    work(item, kind, pause_s, guard)
