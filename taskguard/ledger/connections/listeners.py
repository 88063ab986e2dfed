"""Add listeners to Engines, each once."""

from __future__ import annotations

import weakref
from typing import Any

import sqlalchemy as sa

__all__ = ["listen_once", "same_listeners"]

_listening: weakref.WeakKeyDictionary[sa.Engine, set[Any]] = weakref.WeakKeyDictionary()


def listen_once(engine: sa.Engine, event: str, listener: Any) -> None:
    """Add a listener to an Engine, unless it is there already.

    `sqlalchemy.event.contains` compares addresses. So it may take a new Engine for a deleted one
    that had the same address in memory.
    """
    heard = _listening.setdefault(engine, set())
    if (event, listener) not in heard:
        heard.add((event, listener))
        sa.event.listen(engine, event, listener)


def same_listeners(copy: sa.Engine, of: sa.Engine) -> None:
    """Note that a copy of an Engine shares its listeners, including later ones."""
    _listening[copy] = _listening.setdefault(of, set())
