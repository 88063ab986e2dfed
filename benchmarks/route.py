"""How many of this project's files and functions a delivery leads through, once all is warm.

It is for readers of the code. It counts a task's first delivery with Celery, PostgreSQL and
Redis: with a transaction of the ledger's own, and with the body's own Session.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery
from celery.app.trace import build_tracer
from sqlalchemy.orm import Session

import taskguard
import taskguard_celery
from benchmarks.measure import CONSOLE
from taskguard import Guard, SqlLedger
from taskguard_celery import guarded_task
from taskguard_sandbox.servers import Postgres, Valkey

ROOTS = tuple(
    f"{Path(str(module.__file__)).parent}{os.sep}" for module in (taskguard, taskguard_celery)
)


def main(*, quick: bool) -> None:
    """Print the counts; without `quick` the files, too."""
    CONSOLE.print("[bold]A warm first delivery leads through[/bold]")
    for name, files in routes().items():
        functions = sum(map(len, files.values()))
        CONSOLE.print(f"  {name}: {len(files)} files, {functions} functions")
        for file in () if quick else sorted(files):
            CONSOLE.print(f"    {file}: {len(files[file])}")
    CONSOLE.print()


def routes() -> dict[str, dict[str, set[str]]]:
    """Return, for each kind of delivery, the files and the functions that were called in them."""
    with Valkey() as valkey, Postgres() as postgres:
        url = postgres.create_database("route")
        app = Celery("route", broker="memory://")
        app.conf.update(
            taskguard_locks_url=valkey.url, taskguard_ledger_url=url, task_acks_late=True
        )
        engine = sa.create_engine(url)
        ledger = SqlLedger(url)
        ledger.create_schema()
        ledger.close()

        @app.task(name="ship")
        @guarded_task(key="order:<order>")
        def ship(order: int, guard: Guard) -> None:
            with guard.transaction() as db:
                db.execute(sa.text("select 1"))

        @app.task(name="bill")
        @guarded_task(key="bill:<order>")
        def bill(order: int, guard: Guard) -> None:
            with Session(engine) as session, guard.transaction(session):
                session.execute(sa.text("select 1"))

        app.finalize()
        found = {
            "a transaction of the ledger's": _route(app, ship),
            "the body's own Session": _route(app, bill),
        }
        taskguard_celery.runtime_of(app).close()
        engine.dispose()
        return found


def _route(app: Celery, task: Any) -> dict[str, set[str]]:
    _deliver(app, task, 1)
    return _called(lambda: _deliver(app, task, 2))


def _deliver(app: Celery, task: Any, order: int) -> None:
    """Deliver a message as a worker does."""
    name = f"{task.name} {order}"
    request = {"id": name, "delivery_info": {}, "is_eager": False}
    build_tracer(task.name, task, app=app)(name, (order,), {}, request)


def _called(act: Callable[[], None]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)

    def note(frame: Any, event: str, _argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOTS):
            found[file.removeprefix(str(Path(ROOTS[0]).parent))].add(frame.f_code.co_qualname)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return dict(found)
