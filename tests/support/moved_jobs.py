"""One RQ job, made unique by RQ's `unique` and by a guard."""

from __future__ import annotations

import time

import sqlalchemy as sa
from rq import Queue
from rq.exceptions import DuplicateJobError

from support.invoices import TTL_S, engine, step
from taskguard import Guard
from taskguard.errors import AlreadyEnqueuedError
from taskguard_rq import enqueue, guarded_job

LIBRARIES = ("RQ", "taskguard")


def _begin(account: str, how: str) -> None:
    step(account, "began")
    while how == "waits" and not _may_go():
        time.sleep(0.05)
    if how == "fails":
        raise ValueError(account)


def _may_go() -> bool:
    with engine().connect() as db:
        return db.execute(sa.text("select 1 from steps where name = 'go'")).first() is not None


def _end(db: sa.Connection, account: str, words: str) -> None:
    db.execute(sa.text("insert into effects (item) values (:item)"), {"item": f"{account} {words}"})


def unique(account: str, words: str, how: str = "") -> None:
    """Be unique by the id of the job."""
    _begin(account, how)
    with engine().begin() as db:
        _end(db, account, words)


@guarded_job(key="account:<account>", once_per="run", ttl_s=TTL_S)
def run(account: str, words: str, how: str = "", *, guard: Guard) -> None:
    """Be unique from the first message to the end of its run."""
    _begin(account, how)
    with guard.transaction() as db:
        _end(db, account, words)


def is_sent(queue: Queue, library: str, words: str, how: str = "") -> bool:
    """Enqueue a job of the library's account. Return False if the library refuses it."""
    args = library, words, how
    try:
        if library == "RQ":
            queue.enqueue(unique, *args, job_id="account-RQ", unique=True)
        else:
            enqueue(queue, run, args, duplicate="raise")
    except (DuplicateJobError, AlreadyEnqueuedError):
        return False
    return True
