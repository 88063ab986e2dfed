"""Questions about workers, and about what operators changed."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.operations.cursors import after_of, cursor_of
from taskguard.ledger.operations.views import Asked, of_key
from taskguard.ledger.tables import ACTIONS, WORKERS
from taskguard.model.views import ActionView, Page, WorkerView

__all__ = ["MOST_ACTIONS", "actions", "workers"]

MOST_ACTIONS = 10_000
"""Actions of one key or work are looked for among this number of the last ones."""

_SHOWN = ("number", "kind", "name", "host", "pid", "queues", "version")


def workers(asked: Asked, *, limit: int) -> Page[WorkerView]:
    """Return workers, the last seen first."""
    rows = asked.rows(sa.select(WORKERS).order_by(WORKERS.c.seen.desc()).limit(limit + 1))
    found = tuple(
        WorkerView(
            **{name: getattr(row, name) for name in _SHOWN},
            started_s=row.started / 1e6,
            seen_s=row.seen / 1e6,
            age_s=(asked.now_us - row.seen) / 1e6,
        )
        for row in rows[:limit]
    )
    note = f"Only the last {limit:,} are listed." if len(rows) > limit else ""
    return Page(found, note=note)


def actions(
    asked: Asked,
    *,
    key: str | None,
    work: str | None,
    since_s: float | None,
    limit: int,
    after: str | None,
) -> Page[ActionView]:
    """Return what operators changed, the latest first."""
    select = sa.select(ACTIONS).order_by(ACTIONS.c.id.desc())
    if after is not None:
        [last] = after_of(after, int)
        select = select.where(ACTIONS.c.id < last)
    some = select.limit(MOST_ACTIONS).subquery()
    found = sa.select(some).order_by(some.c.id.desc()).limit(limit + 1)
    if key is not None:
        found = found.where(of_key(some.c.key, key))
    if work is not None:
        found = found.where(some.c.work == work)
    if since_s is not None:
        found = found.where(some.c.at >= int(since_s * 1e6))
    rows = asked.rows(found)
    more = cursor_of(rows[limit - 1].id) if len(rows) > limit else None
    return Page(
        tuple(
            ActionView(
                at_s=row.at / 1e6,
                action=row.action,
                actor=row.actor,
                reason=row.reason,
                key=row.key,
                task=row.task,
                work=row.work,
                detail=row.detail,
            )
            for row in rows[:limit]
        ),
        more,
    )
