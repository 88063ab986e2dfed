"""Cursors of pages: the position of the last row, as one text that a URL and a shell can carry."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from taskguard.errors import ConfigurationError

__all__ = ["after_of", "cursor_of"]


def cursor_of(*position: object) -> str:
    """Return the cursor of a position."""
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def after_of(cursor: str, *types: Callable[[Any], Any]) -> list[Any]:
    """Return the position of a cursor. Raises ConfigurationError if it is none."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        found = json.loads(base64.urlsafe_b64decode(padded.encode("ascii")))
        return [make(each) for make, each in zip(types, found, strict=True)]
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigurationError(
            f"after={cursor[:60]!r} is not the cursor of a page. Pass `Page.after` of the page "
            "before."
        ) from error
