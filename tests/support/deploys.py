"""A task of real workers, guarded in one deploy or another as SHOP_GUARD says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from taskguard import Former, Guard

__all__ = ["guard_of", "work"]

_DEPLOY = os.environ.get("SHOP_GUARD", "former")


def guard_of(key: str) -> dict[str, Any]:
    """Return the guard's options: the former ones, the new ones, or the new ones without
    `formerly`."""
    deploys: dict[str, dict[str, Any]] = {
        "former": {"key": key},
        "new": {"key": f"shop:{key}", "formerly": Former(key=key)},
        "forgotten": {"key": f"shop:{key}"},
    }
    return deploys[_DEPLOY]


def work(
    step: Callable[..., Any],
    effect: Callable[..., Any],
    item: int,
    lingers: str,
    guard: Guard,
) -> str:
    """Write the effect. In the deploy `lingers` the body goes on after that.

    `step` and `effect` record events, as those of the shop or the office do.
    """
    step(item, "began")
    with guard.transaction() as db:
        effect(db, item, guard)
        guard.result = _DEPLOY
    step(item, "done")
    if lingers == _DEPLOY:
        time.sleep(600)
    return _DEPLOY
