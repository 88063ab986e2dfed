"""A task of no app in particular, by `@shared_task`. Imported once, unlike `shop`."""

from __future__ import annotations

import sqlalchemy as sa
from celery import shared_task

from taskguard import current_guard
from taskguard_celery import guarded_task


@shared_task(name="shop.stamp")
@guarded_task(key="letter:<letter>", ttl_s=2)
def stamp(letter: int) -> str:
    """The body takes no guard; it asks for the current one."""
    guard = current_guard()
    with guard.transaction() as db:
        db.execute(
            sa.text("insert into effects values (:item, :fence)"),
            {"item": f"letter {letter}", "fence": guard.fence},
        )
        guard.result = guard.key
    return guard.key
