"""Tasks of each kind for the plugin's own tests; nothing is configured for them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from celery import Celery

from taskguard import Guard
from taskguard_celery import guarded_task
from taskguard_rq import guarded_job

app = Celery("plugin")
ROWS = sa.Table("rows", sa.MetaData(), sa.Column("item", sa.Text))


class Flaky(Exception):  # noqa: N818
    """The error of a body that fails once."""


def _write(db: Any, item: object) -> None:
    db.execute(sa.insert(ROWS).values(item=str(item)))


@app.task(shared=False)
@guarded_task(key="item:<item>")
def celery_task(item: str, guard: Guard) -> str:
    with guard.transaction() as db:
        _write(db, item)
    return f"did {item}"


@app.task(shared=False, bind=True, autoretry_for=(Flaky,), default_retry_delay=0)
@guarded_task(key="item:<item>", atomic=True)
def retried(self: Any, item: str, guard: Guard) -> int:
    _write(guard.db, item)
    if self.request.retries == 0:
        raise Flaky
    return int(self.request.retries)


@app.task(shared=False)
@guarded_task(key="item:<item>", once_per="message")
def every_message(item: str, guard: Guard) -> None:
    with guard.transaction() as db:
        _write(db, item)


@app.task(shared=False)
@guarded_task(key="item:<item>")
def in_parts(item: str, guard: Guard) -> None:
    if guard.progress is None:
        with guard.checkpoint("half") as db:
            _write(db, f"{item} half")
    with guard.transaction() as db:
        _write(db, item)


@guarded_job(key="item:<item>")
def rq_job(item: str, guard: Guard) -> str:
    with guard.transaction() as db:
        _write(db, item)
    return f"did {item}"


@guarded_job(key="item:<item>", once_per="message")
def rq_every_message(item: str, guard: Guard) -> None:
    with guard.transaction() as db:
        _write(db, item)
