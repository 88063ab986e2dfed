"""How a task of real workers is guarded in one deploy or another, as SHOP_GUARD says."""

from __future__ import annotations

import os
from typing import Any

from taskguard import Former

__all__ = ["DEPLOY", "guard_of"]

DEPLOY = os.environ.get("SHOP_GUARD", "former")


def guard_of(key: str) -> dict[str, Any]:
    """Options of the guard: of the former one, of the new one, and of the new one where nobody
    has said what it was."""
    deploys: dict[str, dict[str, Any]] = {
        "former": {"key": key},
        "new": {"key": f"shop:{key}", "formerly": Former(key=key)},
        "forgotten": {"key": f"shop:{key}"},
    }
    return deploys[DEPLOY]
